"""Checks of tensors as arguments; what a tensor does not add is in `jtopk._check`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import torch

from jtopk import _check, _strides


class Arguments(NamedTuple):
    """What `bridge.top_k` takes, but `out`, in the operator's order and with its defaults."""

    input: Any
    k: Any
    dim: Any = -1
    largest: Any = True
    sorted: Any = True
    lengths: Any = None
    starts: Any = None
    index_dtype: Any = torch.int64


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name, the same in torch, NumPy and JAX."""
    return str(dtype).removeprefix("torch.")


def tensor(name: str, x: Any) -> None:
    """Raises unless `x` is a tensor of plain memory."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; expected a torch.Tensor")
    plain(name, x)


def plain(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the tensor is plain memory of a CPU or an NVIDIA GPU."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is sparse (layout {tensor.layout}); expected a strided tensor")
    if tensor.is_quantized:
        raise ValueError(f"{name} is quantised ({tensor.dtype}); call .dequantize() first")
    if tensor.is_conj():
        raise ValueError(f"{name} is a conjugate view; call .resolve_conj() first")
    if tensor.is_neg():
        raise ValueError(f"{name} is a negative view; call .resolve_neg() first")
    device = tensor.device
    if device.type == "meta":
        raise ValueError(f"{name} is a meta tensor, which has no memory; expected real values")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{name} is on {device}, which JAX does not see; expected cpu or cuda")


def call(arguments: Arguments) -> Arguments:
    """Checks the arguments of a call; k and dim as numbers, dim from 0.

    It looks at shapes, dtypes and devices alone, so that fake tensors pass through it too. A
    symbolic k stays symbolic, and is then compared with nothing.
    """
    input, k, dim, largest, sorted, lengths, starts, index_dtype = arguments
    _check.dtype(dtype_name(input.dtype), argument="input", x64=jax.config.jax_enable_x64)
    shape = tuple(input.shape)
    dim = _check.axis(dim, shape, argument="dim", of="input")
    columns = shape[dim]
    _check.columns(columns, of="input")
    if not isinstance(k, torch.SymInt):
        k = _check.k(k, columns, has_lengths=lengths is not None)
    if index_dtype not in (torch.int64, torch.int32):
        raise ValueError(f"index_dtype is {index_dtype}; expected torch.int64 or torch.int32")
    row_shape = shape[:dim] + shape[dim + 1 :]
    for name, numbers in (("lengths", lengths), ("starts", starts)):
        if numbers is not None:
            row_numbers(name, numbers, input, row_shape)
    return Arguments(input, k, dim, bool(largest), bool(sorted), lengths, starts, index_dtype)


def row_numbers(
    name: str, numbers: Any, input: torch.Tensor, shape: tuple[int, ...], *, each: str = "row"
) -> None:
    """Raises ValueError unless there is an int32 or int64 for `each` row on input's device."""
    if not isinstance(numbers, torch.Tensor):
        raise ValueError(
            f"{name} is {numbers!r}, a {type(numbers).__name__}; expected a torch.Tensor of "
            f"int32 or int64 on {input.device}"
        )
    if numbers.layout is not torch.strided:
        raise ValueError(f"{name} is sparse (layout {numbers.layout}); expected a strided tensor")
    _check.row_numbers(name, tuple(numbers.shape), dtype_name(numbers.dtype), shape, each=each)
    if numbers.device != input.device:
        raise ValueError(f"{name} is on {numbers.device}; expected input's device {input.device}")


def out(out: Any, input: torch.Tensor, shape: tuple[int, ...], index_dtype: torch.dtype) -> None:
    """Raises ValueError unless `out` is a pair of tensors that results may be written to."""
    try:
        values, indices = out
    except (TypeError, ValueError):
        raise ValueError("out must be a pair of tensors (values, indices)") from None
    one_out("out values", values, input, shape, input.dtype)
    one_out("out indices", indices, input, shape, index_dtype)
    if overlap(values, indices):
        raise ValueError("out values and out indices overlap each other")


def one_out(
    name: str, tensor: Any, input: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The same of one tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{name} is a {type(tensor).__name__}; expected a torch.Tensor")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.dtype != dtype:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
    if tensor.device != input.device:
        raise ValueError(f"{name} is on {tensor.device}; expected {input.device}")
    plain(name, tensor)
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad; expected a tensor that does not")
    if _strides.overlaps_itself(shape, tensor.stride()):
        raise ValueError(f"{name} has strides {tensor.stride()} and overlaps itself")
    if overlap(tensor, input):
        raise ValueError(f"{name} overlaps the input's memory")


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the spans of memory meet; interleaved views count, as telling them apart is hard."""
    if a.device != b.device:
        return False
    (a_first, a_end), (b_first, b_end) = (
        (t.data_ptr(), t.data_ptr() + _strides.span(t.shape, t.stride()) * t.itemsize)
        for t in (a, b)
    )
    return max(a_first, b_first) < min(a_end, b_end)
