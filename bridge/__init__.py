"""jtopk for PyTorch: tensors in and out by DLPack, strides kept. Never initialises CUDA."""

from bridge._dlpack import CopyWarning, to_jax, to_torch
from bridge._jit import jit
from bridge._top_k import top_k
from jtopk import TopK

__all__ = ["CopyWarning", "TopK", "jit", "to_jax", "to_torch", "top_k"]
