"""The compiled kernel by its address, to launch on any CUDA stream without JAX's runtime.

JAX lowers the kernel as it does under `jax.jit`; its GPU plugin compiles the module it finds there
and gives back a launch function. The kernel's operands reach it as bare addresses, so operands
of one element stand for arrays of any size, and numbers are passed as addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _compat, _record
from pallas_kernels._config import Keys, SelectConfig
from pallas_kernels._index import OPERANDS
from pallas_kernels._kernel import select_rows


def lower(
    config: SelectConfig,
    keys: Keys,
    *,
    dtype: Any,
    index_dtype: Any,
    words: Mapping[str, int],
) -> bytes:
    """The kernel as a Mosaic GPU module. Needs no GPU.

    Its operands are, in this order: the buffer, each of `_record.numbers` shifted up by
    `PARAMETER_SHIFT`, those of `OPERANDS` it has, and its outputs.

    Args:
      config, keys: as for `select_rows`.
      dtype: of the values.
      index_dtype: int32 or int64.
      words: the operands it has, each with 1 for int32 or 2 for int64.
    """
    number = jax.ShapeDtypeStruct((1,), jnp.int8)
    operands = {
        # A table is flat, the others have a row for each row.
        name: jax.ShapeDtypeStruct((1,) if name == "table" else (1, words[name]), jnp.int32)
        for name in OPERANDS
        if name in words
    }

    def call(x, numbers, *arrays):
        return select_rows(
            config, keys, x, numbers, rows=1, index_dtype=index_dtype,
            operands=dict(zip(operands, arrays, strict=True)),
        )  # fmt: skip

    numbers = [number] * _record.count(config.row_dims)
    return _compat.kernel_module(
        call, jax.ShapeDtypeStruct((1,), dtype), numbers, *operands.values()
    )


class Kernel:
    """A kernel loaded on one device.

    `launch(stream, addresses)` takes a CUDA stream's handle and the operands' addresses as native
    64-bit integers in `bytes`. It neither waits nor allocates, and a CUDA graph can capture it. One
    that the driver refuses ends the process: JAX has compiled the launch function so. `unload()`
    frees the code, which nothing may still be running or about to run.
    """

    def __init__(self, module: bytes, device: int):
        """Compiles `module` for the current CUDA device, which is `device`."""
        self.launch, self.unload = _compat.load_kernel(module, device)
