"""How a checked call runs: launched natively where that is possible, else by DLPack and JAX."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import torch

from bridge import _dlpack, _launch
from bridge._checks import Arguments
from jtopk import _api
from jtopk._order import Order


def run(arguments: Arguments) -> Sequence[torch.Tensor]:
    """Values and indices of a call whose arguments are checked."""
    if _launch.takes(arguments.input) and (call := _launch.find(arguments)) is not None:
        return call(arguments.input, arguments.starts, arguments.lengths)
    input = arguments.input.detach()
    _dlpack.check_visible("input", input)
    columns = input.shape[arguments.dim]
    values, indices = _api.top_k_ordered(
        _dlpack.to_jax(input), arguments.k, axis=arguments.dim, largest=arguments.largest,
        sorted=arguments.sorted, lengths=_import_numbers(arguments.lengths, columns),
        starts=_import_numbers(arguments.starts, columns), backend=None, order=Order.TORCH,
    )  # fmt: skip
    return _dlpack.to_torch(values), _dlpack.to_torch(indices).to(arguments.index_dtype)


def run_into(out: Sequence[torch.Tensor], arguments: Arguments) -> None:
    """The same, written to checked tensors."""
    if not (_launch.takes(arguments.input) and _launch.run_into(out, arguments)):
        for target, result in zip(out, run(arguments), strict=True):
            target.copy_(result)


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
