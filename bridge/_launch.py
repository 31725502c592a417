"""The kernel launched on torch's current stream, with nothing of JAX's runtime in the way.

The kernel is the one the JAX face runs. It is compiled once for a configuration and device; where
rows lie is passed with each launch, so that another batch, width or stride compiles nothing. A
launch reads the tensor in place, allocates its outputs from torch and waits for nothing, so it
can be captured in a CUDA graph.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import struct
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import pallas_kernels
from bridge import _checks, _private
from bridge._checks import Arguments
from jtopk import _mosaic, _plan, _strides
from jtopk._order import Order

CALLS = 4096
"""Most shapes of call remembered; past it all are forgotten, which costs a slower call each."""

_WORDS = {torch.int32: 1, torch.int64: 2}


def takes(input: torch.Tensor) -> bool:
    """Whether a tensor is of the kind that is launched natively."""
    return input.is_cuda


def unavailable(device: int) -> str | None:
    """Why tensors on this CUDA device go by DLPack to JAX instead, or None."""
    reason = pallas_kernels.unavailable()
    if reason is None and (reason := pallas_kernels.launch_unavailable()):
        _warn_once(reason)
    if reason is None and (capability := torch.cuda.get_device_capability(device)) < (9, 0):
        reason = f"cuda:{device} has compute capability {capability}; (9, 0) is needed"
    return reason


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"{reason}; CUDA tensors go by DLPack to JAX's runtime: the same answers, but slower, and "
        "not in CUDA graphs",
        RuntimeWarning,
        stacklevel=2,
    )


def find(arguments: Arguments) -> Call | None:
    """How checked arguments are launched; None where they have to go by JAX."""
    key = call_key(arguments)
    call = calls.get(key)
    if call is None:
        operands = {"starts": arguments.starts, "lengths": arguments.lengths}
        call = prepare(arguments, operands)
        if call is not None:
            remember(key, call)
    return call


def run_into(out: Sequence[torch.Tensor], arguments: Arguments) -> bool:
    """Launches checked arguments into `out`; False where they have to go by JAX."""
    call = find(arguments)
    if call is None:
        return False
    key = (*call_key(arguments), *map(tensor_key, out))
    return write(call, key, out, arguments.input, arguments.starts, arguments.lengths)


def write(
    call: Call,
    key: tuple[Any, ...],
    outputs: Sequence[torch.Tensor],
    input: torch.Tensor,
    *operands: torch.Tensor | None,
) -> bool:
    """Writes a call's answer to checked outputs, and keeps how for others of the same key."""
    into = Into(call, outputs)
    remember(key, into)
    return into(outputs, input, *operands)


def call_key(arguments: Arguments) -> tuple[Any, ...]:
    """All that a call's checks and its launch depend on, but addresses."""
    input, k, dim, largest, sorted, lengths, starts, index_dtype = arguments
    return (
        input.dtype, input.shape, input.stride(), input.get_device(), k,
        dim if dim >= 0 else dim + input.ndim, largest, sorted, index_dtype, tensor_key(lengths),
        tensor_key(starts),
    )  # fmt: skip


def tensor_key(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """The same of an operand."""
    if tensor is None:
        return None
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.get_device()


def remembered(arguments: Arguments, out: Any = None) -> Any:
    """A `Call`, or `Into` for `out`: its arguments passed the checks, addresses aside."""
    try:
        if arguments.input.is_neg():
            return None
        key = call_key(arguments)
        if out is not None:
            values, indices = out
            key = (*key, tensor_key(values), tensor_key(indices))
        return calls.get(key)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None  # an argument is no plain tensor: the checks find words for it


def remember(key: tuple[Any, ...], call: Call | Into) -> None:
    """Keeps a call, whose arguments passed every check, for tensors of the same key."""
    if len(calls) >= CALLS:
        calls.clear()
    calls[key] = call


def prepare(
    arguments: Arguments,
    operands: Mapping[str, torch.Tensor | None],
    *,
    group: int = 1,
    **config: Any,
) -> Call | None:
    """A call for tensors like these, its kernel compiled if it is the first of its kind.

    Args:
      arguments: checked; lengths and starts are taken from `operands`.
      operands: of `pallas_kernels.OPERANDS`; a table has two dimensions and strides of (n, 1).
      group: rows that share a length.
      **config: for `pallas_kernels.SelectConfig`.

    Returns:
      None where the call has to go by JAX: where `unavailable` says so, for 64-bit dtypes, and
      for sorted outputs of a k beyond what the kernel sorts.
    """
    input, k, largest = arguments.input, arguments.k, arguments.largest
    device, dtype = input.get_device(), _numpy_dtype(input.dtype)
    if _plan.unsupported(dtype) is not None or unavailable(device) is not None:
        return None
    given = {name: operand for name, operand in operands.items() if operand is not None}
    view = _strides.row_view(tuple(input.shape), tuple(input.stride()), 0, arguments.dim)
    if k == 0 or view.rows == 0:
        return Call(None, [], arguments, config, len(given))
    table = given.get("table")
    needed = _mosaic.kernel_for(
        dtype, view, k, largest=largest, sorted=arguments.sorted, order=Order.TORCH, group=group,
        table=(0, 0, 0) if table is None else (*table.shape, table.stride(0)), **config,
    )  # fmt: skip
    if needed.sort_afterwards:
        return None
    words = tuple(
        (name, _WORDS[given[name].dtype]) for name in pallas_kernels.OPERANDS if name in given
    )
    kernel = _kernels.get(
        device, needed.config, dtype.name, largest, _numpy_dtype(arguments.index_dtype).name, words
    )
    return Call(kernel, needed.numbers, arguments, config, len(given))


class Call:
    """A kernel with the numbers of one shape of call: all that remains are addresses."""

    def __init__(
        self, kernel: pallas_kernels.Kernel | None, numbers: list[int], arguments: Arguments,
        config: Mapping[str, Any], operands: int,
    ):  # fmt: skip
        input, k, dim, *_, index_dtype = arguments
        self.kernel = kernel
        self.device = input.get_device()
        self.itemsize = input.itemsize
        # Rows lie along the last dimension of what the kernel writes.
        self.shape = (*input.shape[:dim], *input.shape[dim + 1 :], k)
        self.strides = _strides.dense_strides(self.shape)
        self.moved_to = None if dim == input.ndim - 1 else dim
        self.dtypes = (
            *([input.dtype] if config.get("values", True) else []),
            index_dtype,
            *([index_dtype] if config.get("local", False) else []),
        )
        self._numbers = numbers
        self._shifted: dict[int, tuple[int, ...]] = {}
        self._pack = struct.Struct(f"{1 + len(numbers) + operands + len(self.dtypes)}Q").pack

    def __call__(
        self, input: torch.Tensor, *operands: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        """What the kernel writes, fresh and contiguous. Operands in the kernel's order."""
        if _private.current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(input, *operands)
        shape, strides = self.shape, self.strides
        outputs = [_private.empty(shape, strides, dtype) for dtype in self.dtypes]
        self.launch(input.data_ptr(), operands, [output.data_ptr() for output in outputs])
        if self.moved_to is None:
            return outputs
        return [output.movedim(-1, self.moved_to).contiguous() for output in outputs]

    def launch(
        self, address: int, operands: Sequence[torch.Tensor | None], outputs: list[int]
    ) -> None:
        """Launches on the current device, which is the call's.

        `address` is the input's, `outputs` are those of dense tensors.
        """
        if self.kernel is None:
            return
        lead = address % pallas_kernels.ADDRESS_ALIGNMENT
        numbers = self._shifted.get(lead) or self._shift(lead)
        # A name keeps what was copied alive until it is launched.
        dense = [_dense(operand) for operand in operands if operand is not None]
        pointers = [operand.data_ptr() for operand in dense]
        self.kernel.launch(
            _private.current_stream(self.device),
            self._pack(address - lead, *numbers, *pointers, *outputs),
        )

    def span(self) -> int:
        """Bytes from the first to the last element of the input that a row holds."""
        return pallas_kernels.span_of_numbers(self._numbers) * self.itemsize if self._numbers else 0

    def _shift(self, lead: int) -> tuple[int, ...]:
        """The numbers as parameters, for a view that begins `lead` bytes into its buffer."""
        moved = pallas_kernels.move_numbers(self._numbers, lead // self.itemsize)
        shifted = tuple(n << pallas_kernels.PARAMETER_SHIFT for n in moved)
        self._shifted[lead] = shifted
        return shifted


class Into:
    """A call that writes to given tensors of certain shapes, dtypes and strides."""

    def __init__(self, call: Call, outputs: Sequence[torch.Tensor]):
        self._call = call
        self._direct = call.moved_to is None and all(t.is_contiguous() for t in outputs)
        self._reach = [_strides.span(t.shape, t.stride()) * t.itemsize for t in outputs]
        self._span = call.span()

    def __call__(
        self,
        outputs: Sequence[torch.Tensor],
        input: torch.Tensor,
        *operands: torch.Tensor | None,
    ) -> bool:
        """Writes to `outputs`; False, and nothing written, if they overlap or cannot be written."""
        address = input.data_ptr()
        end = address + self._span
        pointers = [output.data_ptr() for output in outputs]
        for first, reach in zip(pointers, self._reach, strict=True):
            if first < end and address < first + reach:
                return False
        if len(pointers) == 2:
            first, second = pointers
            if first < second + self._reach[1] and second < first + self._reach[0]:
                return False
        # Shapes and dtypes are as they were; these two need not be.
        for output in outputs:
            if output.requires_grad or output.is_neg():
                return False
        if self._direct and _private.current_device() == self._call.device:
            self._call.launch(address, operands, pointers)
        else:
            for output, written in zip(outputs, self._call(input, *operands), strict=True):
                output.copy_(written)
        return True


calls: dict[tuple[Any, ...], Any] = {}
"""`Call` by `call_key`, `Into` by that and its outputs'. Only what passed every check is here."""


class _Kernels:
    """Compiled kernels of this process, by device and configuration."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[Any, ...], pallas_kernels.Kernel] = {}
        self._process: int | None = None

    def get(
        self, device: int, config: pallas_kernels.SelectConfig, dtype: str, largest: bool,
        index_dtype: str, words: tuple[tuple[str, int], ...],
    ) -> pallas_kernels.Kernel:  # fmt: skip
        key = (device, config, dtype, largest, index_dtype, words)
        with self._lock:
            if key not in self._loaded:
                # Lowering too: it may be what starts JAX's CUDA client.
                with torch.cuda.device(device), _capture_allowing_loads():
                    module = _module(config, dtype, largest, index_dtype, words)
                    torch.cuda.current_stream()  # makes the device's context, if none is yet
                    self._loaded[key] = pallas_kernels.Kernel(module, device)
                if self._process is None:
                    self._process = os.getpid()
                    atexit.register(self._unload)
            return self._loaded[key]

    def _unload(self) -> None:
        # A forked child has the parent's handles, which are not its own to free.
        if os.getpid() != self._process:
            return
        calls.clear()
        try:
            for device in {key[0] for key in self._loaded}:
                torch.cuda.synchronize(device)
        except RuntimeError:  # the context is broken; its code goes with the process
            return
        for kernel in self._loaded.values():
            kernel.unload()
        self._loaded.clear()


_kernels = _Kernels()


@functools.cache
def _module(
    config: pallas_kernels.SelectConfig, dtype: str, largest: bool, index_dtype: str,
    words: tuple[tuple[str, int], ...],
) -> bytes:  # fmt: skip
    keys = _mosaic.keys(np.dtype(dtype), largest, Order.TORCH)
    return pallas_kernels.lower(
        config, keys, dtype=np.dtype(dtype), index_dtype=np.dtype(index_dtype),
        words=dict(words),
    )  # fmt: skip


@contextlib.contextmanager
def _capture_allowing_loads() -> Iterator[None]:
    """Lets this thread load code while a stream is captured, which CUDA otherwise forbids."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    driver = ctypes.CDLL("libcuda.so.1")
    mode = ctypes.c_int(2)  # CU_STREAM_CAPTURE_MODE_RELAXED
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _dense(operand: torch.Tensor) -> torch.Tensor:
    """The operand as a kernel reads it: numbers side by side, a table by its row stride."""
    if operand.is_contiguous() or (operand.ndim == 2 and operand.stride(1) == 1):
        return operand
    return operand.contiguous()


def _numpy_dtype(dtype: torch.dtype) -> np.dtype:
    return np.dtype(_checks.dtype_name(dtype))
