"""The compiled kernel by its address, to launch on any CUDA stream without JAX's runtime.

JAX lowers the kernel as it does under `jax.jit`; its GPU plugin compiles the module it finds there
and gives back a launch function. The kernel's operands reach it as bare addresses, so operands
of one element stand for arrays of any size, and numbers are passed as addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _record
from pallas_kernels._select import SelectConfig, select_rows

ADDRESS_ALIGNMENT = 1 << _record.PARAMETER_SHIFT
"""Bytes. The buffer's address must be a multiple of it."""


def lower(
    config: SelectConfig,
    to_key: Callable[[jax.Array], jax.Array],
    *,
    dtype: Any,
    index_dtype: Any,
    start_words: int = 0,
    length_words: int = 0,
) -> bytes:
    """The kernel as a Mosaic GPU module. Needs no GPU.

    Its operands are, in this order: the buffer, each of `_record.numbers` shifted up by
    `PARAMETER_SHIFT`, starts and lengths if it has them, values, indices.

    Args:
      config, to_key: as for `select_rows`.
      dtype: of the values.
      index_dtype: int32 or int64.
      start_words, length_words: 0 for a kernel without them, 1 for int32, 2 for int64.
    """

    def window(words: int) -> jax.ShapeDtypeStruct | None:
        return jax.ShapeDtypeStruct((1, words), jnp.int32) if words else None

    def call(x, numbers, starts, lengths):
        return select_rows(
            config, to_key, x, numbers, rows=1, index_dtype=index_dtype, starts=starts,
            lengths=lengths,
        )  # fmt: skip

    number = jax.ShapeDtypeStruct((1,), jnp.int8)
    return _compat.kernel_module(
        call,
        jax.ShapeDtypeStruct((1,), dtype),
        [number] * _record.count(config.row_dims),
        window(start_words),
        window(length_words),
    )


class Kernel:
    """A kernel loaded on one device, called as `kernel(stream, addresses)`.

    A launch neither waits nor allocates, and can be captured in a CUDA graph. A driver that
    refuses it ends the process: the launch function is compiled so by JAX.
    """

    def __init__(self, module: bytes, device: int):
        """Compiles `module` for the current CUDA device, which is `device`."""
        self._launch, self._unload = _compat.load_kernel(module, device)

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        self._launch(stream, (ctypes.c_void_p * len(addresses))(*addresses))

    def unload(self) -> None:
        """Frees the compiled code, which nothing may still be running or about to run."""
        self._unload()
