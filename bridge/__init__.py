"""jtopk for PyTorch, strides kept: a native launch on NVIDIA GPUs, DLPack and JAX elsewhere.

Importing it never initialises CUDA.
"""

from bridge._dlpack import CopyWarning, to_jax, to_torch
from bridge._jit import jit
from bridge._top_k import top_k
from jtopk import TopK

__all__ = ["CopyWarning", "TopK", "jit", "to_jax", "to_torch", "top_k"]
