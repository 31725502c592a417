"""Every private JAX name the kernels use, and whether this JAX has them.

Nothing outside this file imports from `jax._src`, `jaxlib.mlir` or the Mosaic GPU internals, so
a JAX upgrade is met here. `unavailable()` says why the kernels cannot be built; importing this
module never fails.
"""

# mypy: ignore-errors
from __future__ import annotations

import functools

import jax

MINIMUM_JAX = (0, 11, 2)


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot be built with this JAX, or None if they can."""
    if jax.__version_info__ < MINIMUM_JAX:
        needed = ".".join(map(str, MINIMUM_JAX))
        return f"jax {jax.__version__} is too old for the kernel; {needed} is needed"
    if _missing is not None:
        return f"jax {jax.__version__} lacks a name the kernel needs: {_missing}"
    return None


_missing: str | None = None
try:
    from jax.experimental import pallas as pl
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils as mgpu_utils
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, gpu, llvm, nvvm, scf, vector

    if jax.__version_info__ >= MINIMUM_JAX:
        WARPGROUP_SEMANTICS = mgpu.LoweringSemantics.Warpgroup
        InterpretGPUParams = plgpu.InterpretGPUParams
        Fragments = mgpu.FragmentedArray
        StridedLayout = mgpu.WGStridedFragLayout
        memref_ptr = mgpu_utils.memref_ptr
        inline_ptx = mgpu_utils.inline_ptx
        constant = mgpu_utils.c
        thread_idx = mgpu_utils.thread_idx
        warpgroup_barrier = mgpu.warpgroup_barrier
except (ImportError, AttributeError) as error:
    _missing = str(error)

__all__ = [
    "WARPGROUP_SEMANTICS",
    "Fragments",
    "InterpretGPUParams",
    "StridedLayout",
    "arith",
    "constant",
    "gpu",
    "inline_ptx",
    "ir",
    "llvm",
    "memref_ptr",
    "nvvm",
    "pl",
    "plgpu",
    "scf",
    "thread_idx",
    "unavailable",
    "vector",
    "warpgroup_barrier",
]
