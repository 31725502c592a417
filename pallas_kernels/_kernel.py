"""The launch of a kernel, whichever design it is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _leaves as leaf
from pallas_kernels import _one_pass, _radix, _record
from pallas_kernels._compat import WARPGROUP_SEMANTICS, InterpretGPUParams, plgpu
from pallas_kernels._config import Keys, SelectConfig
from pallas_kernels._index import OPERANDS


def select_rows(
    config: SelectConfig,
    keys: Keys,
    x: jax.Array,
    numbers: jax.Array | Sequence[jax.Array],
    *,
    rows: int,
    index_dtype: Any = jnp.int32,
    operands: Mapping[str, jax.Array] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Launches the kernel.

    Args:
      config: the compiled kernel's parameters.
      keys: the order of values.
      x: flat buffer of values, any type of 32 bits or fewer.
      numbers: where rows are: an int32 array from `_record.pack`, or one operand for each of
        `_record.numbers`, whose address is the number shifted up by `PARAMETER_SHIFT`.
      rows: rows of the outputs. A kernel that is launched by its address, and not by JAX, takes
        the row count from the numbers alone.
      index_dtype: int32 or int64.
      operands: those of `OPERANDS` that the call has. Any number in them is safe. With rows in
        groups, `lengths` has one number a group.
      interpret: run on the CPU in JAX's GPU interpreter, with race detection.

    Returns:
      Of shape (rows, k): values of x's dtype if the configuration has them, indices, and local
      indices if it has those.
    """
    operands = {} if operands is None else operands
    indices = jax.ShapeDtypeStruct((rows, config.k), index_dtype)
    outputs = {
        "values": jax.ShapeDtypeStruct((rows, config.k), x.dtype) if config.values else None,
        "indices": indices,
        "local": indices if config.local else None,
    }
    outputs = {name: output for name, output in outputs.items() if output is not None}
    numbers = (numbers,) if isinstance(numbers, jax.Array) else tuple(numbers)
    one_pass = config.teams > 0
    scratch = _one_pass.scratch(config) if one_pass else _radix.scratch(config, interpret=interpret)
    named = [name for name in OPERANDS if name in operands]

    def body(x_gmem, *refs, **smem):
        numbers_gmem, refs = refs[: len(numbers)], refs[len(numbers) :]
        operands_gmem = dict(zip(named, refs, strict=False))
        outputs_gmem = dict(zip(outputs, refs[len(named) :], strict=True))
        view = _record.unpack(_reader(numbers_gmem, interpret), config.row_dims)
        design = _one_pass.OnePass if one_pass else _radix.Radix
        kernel = design(config, keys, x_gmem, view, operands_gmem, outputs_gmem, smem, interpret)
        kernel.prepare()
        first, step = kernel.first_row(), config.blocks * max(config.teams, 1)
        mine = (view.rows - first + step - 1) // step
        jax.lax.fori_loop(0, mine, lambda i, _: kernel.row(first + i * step), None)

    clustered = {}
    if config.cluster > 1:
        clustered = {"cluster": (config.cluster,), "cluster_names": ("cluster",)}
    run = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=WARPGROUP_SEMANTICS, reduction_scratch_bytes=0
        ),
        interpret=InterpretGPUParams(detect_races=True) if interpret else None,
        **clustered,
    )
    # Traced with 32-bit defaults: under x64 every literal in the kernel would be an int64.
    with jax.enable_x64(False):
        return run(x, *numbers, *(operands[name] for name in named))


def _reader(numbers_gmem: Sequence[Any], interpret: bool) -> Callable[[int], _record.Wide]:
    """How the kernel reads the i-th number: from memory, or from the launch's parameters."""
    if len(numbers_gmem) == 1:
        (packed,) = numbers_gmem
        return lambda i: _record.Wide(packed[2 * i], packed[2 * i + 1])
    return lambda i: leaf.parameter(numbers_gmem[i], interpret=interpret)
