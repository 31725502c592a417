"""How a checked call runs: launched natively where that is possible, else by DLPack and JAX."""

from __future__ import annotations

from typing import Any

import jax
import torch

from bridge import _dlpack, _launch
from jtopk import _api
from jtopk._order import Order


def run(
    input: torch.Tensor,
    k: int,
    dim: int,
    largest: bool,
    sorted: bool,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    index_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and indices of a call whose arguments are checked; `dim` counts from 0."""
    if _launch.takes(input):
        launched = _launch.run(input, k, dim, largest, sorted, lengths, starts, index_dtype)
        if launched is not None:
            return launched
    input = input.detach()
    _dlpack.check_visible("input", input)
    columns = input.shape[dim]
    values, indices = _api.top_k_ordered(
        _dlpack.to_jax(input), k, axis=dim, largest=largest, sorted=sorted,
        lengths=_import_numbers(lengths, columns), starts=_import_numbers(starts, columns),
        backend=None, order=Order.TORCH,
    )  # fmt: skip
    return _dlpack.to_torch(values), _dlpack.to_torch(indices).to(index_dtype)


def run_into(
    out: tuple[torch.Tensor, torch.Tensor], input: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, written to checked tensors."""
    if not (_launch.takes(input) and _launch.run_into(out, input, *arguments)):
        for target, result in zip(out, run(input, *arguments), strict=True):
            target.copy_(result)
    return out


def _import_numbers(numbers: torch.Tensor | None, columns: int) -> jax.Array | None:
    """`lengths` or `starts` as an int32 array; by torch operations only, on its device."""
    if numbers is None:
        return None
    numbers = numbers.detach()
    if numbers.dtype == torch.int64:
        numbers = numbers.clamp(0, columns).to(torch.int32)
    if not numbers.is_contiguous() or numbers.data_ptr() % _dlpack.alignment(numbers):
        numbers = numbers.clone(memory_format=torch.contiguous_format)
    imported = _dlpack.import_array(numbers)
    assert isinstance(imported, jax.Array)
    return imported
