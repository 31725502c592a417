"""Every private JAX name the kernels use, and whether this JAX has them.

Nothing outside this file imports from `jax._src`, `jaxlib.mlir` or the Mosaic GPU internals, so
a JAX upgrade is met here. `unavailable()` says why the kernels cannot be built; importing this
module never fails.
"""

# mypy: ignore-errors
from __future__ import annotations

import ctypes
import functools
import importlib
from collections.abc import Callable

import jax
import jaxlib.version

MINIMUM_JAX = (0, 11, 2)

LAUNCH_ABI = {(0, 11, 2): 1, (0, 12, 0): 2}
"""How a compiled kernel's launch function is called, by jaxlib version.

1: (function, stream, addresses). 2: (kernel, function, stream, addresses, device).
"""

JAXLIB = tuple(int(part) for part in jaxlib.version.__version__.split(".")[:3])


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot be built with this JAX, or None if they can."""
    if jax.__version_info__ < MINIMUM_JAX:
        needed = ".".join(map(str, MINIMUM_JAX))
        return f"jax {jax.__version__} is too old for the kernel; {needed} is needed"
    if _missing is not None:
        return f"jax {jax.__version__} lacks a name the kernel needs: {_missing}"
    return None


def launch_unavailable() -> str | None:
    """Why kernels cannot be launched without JAX's runtime with this jaxlib, or None."""
    if unavailable() is not None:
        return unavailable()
    if JAXLIB not in LAUNCH_ABI:
        known = ", ".join(".".join(map(str, version)) for version in LAUNCH_ABI)
        return (
            f"jaxlib {jaxlib.version.__version__} may call kernels in another way than the "
            f"versions this package knows ({known})"
        )
    if _plugin() is None:
        return "JAX's CUDA plugin is not installed"
    return None


@functools.cache
def _plugin() -> ctypes.CDLL | None:
    """JAX's CUDA plugin, which holds the compiler of kernels."""
    for name in ("xla_cuda13", "xla_cuda12"):
        try:
            plugin = importlib.import_module(f"jax_plugins.{name}")
        except ImportError:
            continue
        return ctypes.CDLL(plugin._get_library_path())
    return None


def kernel_module(call: Callable, *structs) -> bytes:
    """The one Mosaic GPU kernel that `call` launches, whose operands are all of `structs`."""
    lowered = jax.jit(call).trace(*structs).lower(lowering_platforms=("cuda",))
    found = []

    def visit(operation):
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target == "mosaic_gpu_v2":
                found.append(operation)
        return ir.WalkResult.ADVANCE

    module = lowered.compiler_ir()
    module.operation.walk(visit)
    (call_op,) = found
    order = [ir.BlockArgument(operand).arg_number for operand in call_op.operands]
    if order != list(range(len(jax.tree.leaves(structs)))):
        raise AssertionError(f"the kernel takes its operands in the order {order}")
    config = ir.DictAttr(call_op.attributes["mhlo.backend_config"])
    return ir.StringAttr(config["module"]).value_bytes


def load_kernel(module: bytes, device: int) -> tuple[Callable, Callable]:
    """Compiles a kernel for the current CUDA device; functions that launch and unload it.

    The first is called as `launch(stream, addresses)`, addresses packed into bytes.
    """
    plugin = _plugin()
    compile_module = plugin.MosaicGpuCompile
    compile_module.argtypes = [ctypes.c_char_p, ctypes.c_int]
    compile_module.restype = ctypes.POINTER(ctypes.c_void_p)
    unload = plugin.MosaicGpuUnload
    unload.argtypes = [compile_module.restype]
    unload.restype = None
    compiled = compile_module(module, len(module))
    if not compiled:
        raise RuntimeError(f"JAX's CUDA plugin could not compile a kernel for cuda:{device}")
    function, address = compiled[0], compiled[1]
    pointer = ctypes.c_void_p
    if LAUNCH_ABI[JAXLIB] == 1:
        call = ctypes.CFUNCTYPE(None, pointer, pointer, pointer)(address)
        launch = functools.partial(call, pointer(function))
    else:
        call = ctypes.CFUNCTYPE(None, pointer, pointer, pointer, pointer, ctypes.c_int)(address)
        kernel = compiled[2]

        def launch(stream, addresses):
            call(pointer(kernel), pointer(function), stream, addresses, device)

    return launch, functools.partial(unload, compiled)


_missing: str | None = None
try:
    from jax.experimental import pallas as pl
    from jax.experimental.mosaic import gpu as mgpu
    from jax.experimental.mosaic.gpu import utils as mgpu_utils
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, gpu, llvm, math, nvvm, scf, vector

    if jax.__version_info__ >= MINIMUM_JAX:
        WARPGROUP_SEMANTICS = mgpu.LoweringSemantics.Warpgroup
        InterpretGPUParams = plgpu.InterpretGPUParams
        Fragments = mgpu.FragmentedArray
        StridedLayout = mgpu.WGStridedFragLayout
        memref_ptr = mgpu_utils.memref_ptr
        inline_ptx = mgpu_utils.inline_ptx
        constant = mgpu_utils.c
        thread_idx = mgpu_utils.thread_idx
        # From jax 0.12.1 on a leaf that says it writes to a ref makes an input of it one that the
        # kernel writes to, which is refused. Before, every leaf was taken to write.
        RefType = plgpu.RefType
        READ_REF = RefType(write=False) if hasattr(RefType, "write") else RefType()
except (ImportError, AttributeError) as error:
    _missing = str(error)

__all__ = [
    "READ_REF",
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
    "math",
    "memref_ptr",
    "nvvm",
    "pl",
    "plgpu",
    "scf",
    "thread_idx",
    "unavailable",
    "vector",
]
