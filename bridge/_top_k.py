"""Top-k of torch tensors: torch's order of values, JAX's kernel, no copy of the input."""

from __future__ import annotations

from typing import Any

import jax
import torch

from bridge import _dlpack
from jtopk import TopK, _api, _check, _strides
from jtopk._order import Order


def top_k(
    input: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TopK:
    """The k largest (or smallest) elements of every row, read in place at any strides.

    Exact and reproducible, equal values by ascending column. The order is torch.topk's: NaN of
    either sign above +inf, +0 equal to -0. Differentiable in `input`.

    Args:
      input: dense tensor of any rank from 1 and any strides; every dimension but `dim` is a
        dimension of rows. dtypes as for `jtopk.top_k`.
      k: how many, 0 or more; at most the row's columns, unless `lengths` is given.
      dim: the dimension along which columns lie.
      largest: largest first, or smallest first.
      sorted: return values in order. Without, the same elements in an order that is
        unspecified but always the same.
      lengths: valid columns of each row, int32 or int64 on input's device, of input's shape
        without `dim`. Row r is columns `[starts[r], starts[r] + lengths[r])`; numbers outside
        the row are clamped into it, on the device.
      starts: first valid column of each row, likewise; 0 if not given.
      index_dtype: torch.int64 or torch.int32.
      out: values and indices to write to, through whatever strides they have.

    Returns:
      TopK(values, indices) on input's device: input's shape with k in place of `dim`. A row
      with fewer than k valid columns ends with index -1 and the value that ranks last.

    Raises:
      TypeError: unsupported dtype, a 0-d tensor, k or dim no integer.
      ValueError: as for `jtopk.top_k`; a tensor that is sparse, quantised, conjugated, meta or
        on a device JAX does not see; lengths, starts or out of the wrong shape, dtype or
        device; out that overlaps the input or itself.
      RuntimeError: the call is being captured in a CUDA graph, which JAX's runtime cannot join.
    """
    if not isinstance(input, torch.Tensor):
        raise TypeError(f"input is a {type(input).__name__}; expected a torch.Tensor")
    _dlpack.check_tensor("input", input)
    _check.dtype(_dlpack.dtype_name(input), argument="input", x64=jax.config.jax_enable_x64)
    shape = tuple(input.shape)
    dim = _check.axis(dim, shape, argument="dim", of="input")
    columns = shape[dim]
    _check.columns(columns, of="input")
    k = _check.k(k, columns, has_lengths=lengths is not None)
    if index_dtype not in (torch.int64, torch.int32):
        raise ValueError(f"index_dtype is {index_dtype}; expected torch.int64 or torch.int32")
    row_shape = shape[:dim] + shape[dim + 1 :]
    _check_numbers("lengths", lengths, input, row_shape)
    _check_numbers("starts", starts, input, row_shape)
    differentiate = torch.is_grad_enabled() and input.requires_grad
    if out is not None:
        if differentiate:
            raise ValueError("out cannot be given for an input that requires grad")
        _check_out(out, input, (*shape[:dim], k, *shape[dim + 1 :]), index_dtype)

    options = (k, dim, bool(largest), bool(sorted), lengths, starts, index_dtype)
    if differentiate:
        return TopK(*_Differentiable.apply(input, *options))
    values, indices = _run(input.detach(), *options)
    if out is None:
        return TopK(values, indices)
    out[0].copy_(values)
    out[1].copy_(indices)
    return TopK(*out)


def _run(
    input: torch.Tensor,
    k: int,
    dim: int,
    largest: bool,
    sorted: bool,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    index_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = input.shape[dim]
    values, indices = _api.top_k_ordered(
        _dlpack.to_jax(input), k, axis=dim, largest=largest, sorted=sorted,
        lengths=_import_numbers(lengths, columns), starts=_import_numbers(starts, columns),
        backend=None, order=Order.TORCH,
    )  # fmt: skip
    return _dlpack.to_torch(values), _dlpack.to_torch(indices).to(index_dtype)


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


class _Differentiable(torch.autograd.Function):
    """The gradient of values scatters to the columns they came from; indices have none."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = _run(input.detach(), *options)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.shape, ctx.dim = input.shape, options[1]
        return values, indices

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        dim, columns = ctx.dim, ctx.shape[ctx.dim]
        # Unfilled places (index -1) go to a column of their own, which is then cut off.
        column = torch.where(indices < 0, columns, indices.long())
        wide = list(ctx.shape)
        wide[dim] = columns + 1
        scattered = gradients[0].new_zeros(wide).scatter(dim, column, gradients[0])
        return (scattered.narrow(dim, 0, columns), *[None] * 7)


def _check_numbers(
    name: str, numbers: Any, input: torch.Tensor, row_shape: tuple[int, ...]
) -> None:
    if numbers is None:
        return
    if not isinstance(numbers, torch.Tensor):
        raise ValueError(
            f"{name} is {numbers!r}, a {type(numbers).__name__}; expected a torch.Tensor of "
            f"int32 or int64 on {input.device}"
        )
    _dlpack.check_tensor(name, numbers)
    _check.row_numbers(name, tuple(numbers.shape), _dlpack.dtype_name(numbers), row_shape)
    if numbers.device != input.device:
        raise ValueError(f"{name} is on {numbers.device}; expected input's device {input.device}")


def _check_out(out: Any, input: torch.Tensor, shape: tuple[int, ...], index_dtype: Any) -> None:
    try:
        values, indices = out
    except (TypeError, ValueError):
        raise ValueError("out must be a pair of tensors (values, indices)") from None
    for name, tensor, dtype in (
        ("values", values, input.dtype),
        ("indices", indices, index_dtype),
    ):
        name = f"out {name}"
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
        if tensor.dtype != dtype:
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
        if tensor.device != input.device:
            raise ValueError(f"{name} is on {tensor.device}; expected {input.device}")
        _dlpack.check_tensor(name, tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad; expected a tensor that does not")
        if _strides.overlaps_itself(shape, tensor.stride()):
            raise ValueError(f"{name} has strides {tensor.stride()} and overlaps itself")
        if _overlap(tensor, input):
            raise ValueError(f"{name} overlaps the input's memory")
    if _overlap(values, indices):
        raise ValueError("out values and out indices overlap each other")


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the spans of memory meet; interleaved views count, as telling them apart is hard."""
    if a.device != b.device:
        return False
    (a_first, a_end), (b_first, b_end) = (
        (t.data_ptr(), t.data_ptr() + _strides.span(t.shape, t.stride()) * t.itemsize)
        for t in (a, b)
    )
    return max(a_first, b_first) < min(a_end, b_end)
