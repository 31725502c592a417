"""Memory across frameworks by DLPack, without copying it and without losing its strides.

JAX arrays have no strides and JAX's importer refuses padded ones. So what is imported is the
flat span of memory a view lies in, and the view's shape, strides and offset travel beside it as
a `jtopk.StridedRows`. Strides are read from the tensor itself, never from its capsule: for
dimensions of length 1 producers have exported several things.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from bridge import _checks
from bridge._checks import dtype_name
from jtopk import StridedRows, _check, _strides

CPU_ALIGNMENT = 64
"""Bytes. XLA on a CPU copies what does not begin on this boundary."""

GPU_ALIGNMENT = 256
"""Bytes. What a compiled kernel may assume of a buffer's address."""


class CopyWarning(UserWarning):
    """Memory had to be copied on its way to JAX."""


def to_jax(tensor: Any, *, copy: bool | None = None) -> StridedRows:
    """Imports a tensor with its strides, sharing its memory.

    The buffer begins at or before the first element, on a boundary of 64 bytes on a CPU and 256
    on a GPU but inside the tensor's storage; `offset` says where the view starts in it.
    Writing to the tensor while JAX computes on it is a race, as with any sharing.

    Args:
      tensor: `torch.Tensor`, NumPy or CuPy array, `jax.Array`, or another DLPack producer.
      copy: as in DLPack. False never copies; None copies only where the memory cannot be
        aligned, and then warns with `CopyWarning`; True always copies.

    Returns:
      `StridedRows` of the tensor's shape, strides and dtype. Its buffer keeps the memory alive.

    Raises:
      TypeError: not a DLPack producer; a dtype JAX lacks, or would narrow while x64 is off.
      ValueError: a tensor without plain memory (sparse, quantised, conjugated, meta), on a
        device JAX does not see, or that requires grad; strides that are negative or no multiple
        of the itemsize; `copy=False` where the memory cannot be aligned.
      RuntimeError: a CUDA graph is being captured.
    """
    if isinstance(tensor, jax.Array):
        flat = jnp.array(tensor, copy=True) if copy else tensor
        return StridedRows(flat.reshape(-1), flat.shape, _strides.dense_strides(flat.shape))
    if isinstance(tensor, np.ndarray | np.generic):
        memory = _numpy_memory(np.asarray(tensor))
    elif isinstance(tensor, torch.Tensor):
        check_tensor("tensor", tensor)
        _refuse_grad("tensor", tensor)
        memory = _torch_memory(tensor)
    elif hasattr(tensor, "__cuda_array_interface__") and hasattr(tensor.data, "mem"):
        memory = _cupy_memory(tensor)
    elif hasattr(tensor, "__dlpack__"):
        tensor = torch.from_dlpack(tensor)
        check_tensor("tensor", tensor)
        memory = _torch_memory(tensor)
    else:
        raise TypeError(
            f"tensor is a {type(tensor).__name__}; expected a torch.Tensor, a NumPy or CuPy "
            "array, or another DLPack producer"
        )
    _check_width(memory.dtype_name)
    return memory.view(copy)


def to_torch(array: Any) -> torch.Tensor:
    """Hands a `jax.Array` or `StridedRows` to torch, sharing its memory.

    The tensor keeps the JAX buffer alive. JAX takes arrays to be immutable: do not write to it.

    Raises:
      TypeError: neither a `jax.Array` nor a `StridedRows`.
      ValueError: the array was deleted or donated.
    """
    if isinstance(array, StridedRows):
        return to_torch(array.buffer).as_strided(array.shape, array.strides, array.offset)
    if not isinstance(array, jax.Array):
        raise TypeError(
            f"array is a {type(array).__name__}; expected a jax.Array or a jtopk.StridedRows"
        )
    if array.is_deleted():
        raise ValueError("array was deleted or donated; its memory is gone")
    return torch.from_dlpack(array)


def import_array(tensor: torch.Tensor) -> jax.Array | StridedRows:
    """A dense tensor as a `jax.Array`, a strided one as `StridedRows`; both share its memory.

    An array cannot carry an offset, so a dense tensor on no boundary is copied, with a warning.
    """
    check_tensor("tensor", tensor)
    _refuse_grad("tensor", tensor)
    if not _strides.is_dense(tensor.shape, tensor.stride()):
        return to_jax(tensor)
    _check_width(dtype_name(tensor.dtype))
    if tensor.data_ptr() % alignment(tensor):
        _warn_of_copy(
            tensor.nbytes,
            f"address {tensor.data_ptr():#x} is no multiple of {alignment(tensor)} bytes and a "
            "jax.Array carries no offset",
            "pass bridge.to_jax(tensor) in its place to share the memory",
        )
        tensor = tensor.clone()
    # Strides of length-1 dimensions would be taken for a layout.
    return _from_dlpack(tensor.as_strided(tensor.shape, _strides.dense_strides(tensor.shape)))


def alignment(tensor: torch.Tensor) -> int:
    """The boundary, in bytes, on which JAX needs a buffer to begin."""
    return CPU_ALIGNMENT if tensor.device.type == "cpu" else GPU_ALIGNMENT


def check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError unless the tensor is plain memory on a device JAX sees.

    And RuntimeError under CUDA graph capture, which JAX's runtime cannot join.
    """
    _checks.plain(name, tensor)
    check_visible(name, tensor)


def check_visible(name: str, tensor: torch.Tensor) -> None:
    """The part of `check_tensor` that asks JAX's runtime."""
    device = tensor.device
    if device.type == "cpu":
        return
    if device.index not in _cuda_devices():
        seen = ", ".join(f"cuda:{i}" for i in sorted(_cuda_devices())) or "no CUDA device"
        raise ValueError(f"{name} is on {device}, which JAX does not see (it sees {seen})")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} goes by DLPack to JAX's runtime, which a CUDA graph cannot capture; "
            "call outside torch.cuda.graph"
        )


def _cuda_devices() -> set[int]:
    try:
        return {device.local_hardware_id for device in jax.local_devices(backend="cuda")}
    except RuntimeError:
        return set()


def _refuse_grad(name: str, tensor: torch.Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"{name} requires grad, which JAX would not carry on; call .detach() first "
            "(bridge.top_k takes it as it is)"
        )


def _check_width(name: str) -> None:
    _check.width(name, argument="tensor", x64=jax.config.jax_enable_x64)


@dataclasses.dataclass(frozen=True)
class _Memory:
    """A strided view and how to get at the flat memory under it.

    Strides count elements. `share(lead)` makes a buffer of the span and `lead` elements in
    front of it, `copied()` one of the span alone in memory of its own.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype_name: str
    itemsize: int
    address: int
    room: int
    alignment: int
    share: Any
    copied: Any

    def view(self, copy: bool | None) -> StridedRows:
        span = _strides.span(self.shape, self.strides)
        lead: int | None = 0  # where nothing is read, nothing need be aligned
        if span:
            lead = _strides.align_down(self.address, self.itemsize, self.alignment, self.room)
        if lead is None and copy is not True:
            reason = (
                f"address {self.address:#x} is no multiple of {self.alignment} bytes and the "
                "boundary below it lies outside the tensor's storage"
            )
            if copy is False:
                raise ValueError(f"copy=False, but {reason}")
            _warn_of_copy(
                span * self.itemsize, reason,
                f"allocate it on a boundary of {self.alignment} bytes to share the memory",
            )  # fmt: skip
        if lead is None or copy:
            return StridedRows(self.copied(), self.shape, self.strides, 0)
        return StridedRows(self.share(lead), self.shape, self.strides, lead)


def _warn_of_copy(nbytes: int, reason: str, remedy: str) -> None:
    warnings.warn(
        f"{nbytes} bytes were copied on the way to JAX: {reason}; {remedy}",
        CopyWarning,
        stacklevel=4,
    )


def _torch_memory(tensor: torch.Tensor) -> _Memory:
    shape = tuple(tensor.shape)
    strides = _strides.normalise(shape, tensor.stride())
    span = _strides.span(shape, strides)

    def flat(lead: int) -> torch.Tensor:
        return tensor.as_strided((span + lead,), (1,), tensor.storage_offset() - lead)

    return _Memory(
        shape, strides, dtype_name(tensor.dtype), tensor.itemsize, tensor.data_ptr(),
        int(tensor.storage_offset()), alignment(tensor),
        share=lambda lead: _from_dlpack(flat(lead)), copied=lambda: _from_dlpack(flat(0).clone()),
    )  # fmt: skip


def _from_dlpack(tensor: torch.Tensor) -> jax.Array:
    if tensor.device.type == "cpu":
        return jax.dlpack.from_dlpack(tensor)
    with torch.cuda.device(tensor.device):  # torch exports only from the current device
        return jax.dlpack.from_dlpack(tensor)


class _Region:
    """Bytes at an address, which NumPy makes an array of; keeps their owner alive."""

    def __init__(self, address: int, nbytes: int, owner: np.ndarray):
        self.owner = owner
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, True)
        }  # fmt: skip


def _element_strides(x: Any) -> tuple[int, ...]:
    """Strides of a NumPy or CuPy array, which counts bytes."""
    moving = [s for n, s in zip(x.shape, x.strides, strict=True) if n > 1]
    if x.size and any(s < 0 for s in moving):
        raise ValueError(f"tensor has negative strides {x.strides}; expected 0 or more")
    if x.size and any(s % x.itemsize for s in moving):
        raise ValueError(
            f"tensor has strides of {x.strides} bytes; expected multiples of its itemsize "
            f"{x.itemsize}"
        )
    return _strides.normalise(x.shape, [s // x.itemsize for s in x.strides])


def _numpy_memory(x: np.ndarray) -> _Memory:
    number = jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_
    if not (number and x.dtype.isnative):
        raise TypeError(
            f"tensor has dtype {x.dtype}; expected numbers or bools in the machine's byte order"
        )
    strides = _element_strides(x)
    span = _strides.span(x.shape, strides)
    address = x.ctypes.data
    first, base = address, x.base
    while base is not None:  # as_strided puts objects that are no arrays between arrays
        if isinstance(base, np.ndarray) and 0 <= address - base.ctypes.data < base.nbytes:
            first = base.ctypes.data
        base = getattr(base, "base", None)
    (cpu,) = jax.local_devices(backend="cpu")[:1]

    def flat(lead: int) -> np.ndarray:
        region = _Region(address - lead * x.itemsize, (span + lead) * x.itemsize, x)
        return np.asarray(region).view(x.dtype)

    return _Memory(
        x.shape, strides, x.dtype.name, x.itemsize, address,
        (address - first) // x.itemsize, CPU_ALIGNMENT,
        share=lambda lead: jax.device_put(flat(lead), cpu, may_alias=True),
        copied=lambda: jax.device_put(flat(0).copy(), cpu),
    )  # fmt: skip


def _cupy_memory(x: Any) -> _Memory:
    strides = _element_strides(x)
    span = _strides.span(x.shape, strides)

    def flat(lead: int) -> Any:
        return type(x)((span + lead,), dtype=x.dtype, memptr=x.data + -lead * x.itemsize)

    return _Memory(
        x.shape, strides, np.dtype(x.dtype).name, x.itemsize, x.data.ptr,
        (x.data.ptr - x.data.mem.ptr) // x.itemsize, GPU_ALIGNMENT,
        share=lambda lead: jax.dlpack.from_dlpack(flat(lead)),
        copied=lambda: jax.dlpack.from_dlpack(flat(0).copy()),
    )  # fmt: skip
