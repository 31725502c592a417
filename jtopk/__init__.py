"""Exact, reproducible top-k on row-strided buffers, for JAX (and, through `bridge`, PyTorch)."""

from jtopk._api import TopK, top_k
from jtopk._sharded import sharded_top_k
from jtopk._strided_rows import StridedRows

__all__ = ["StridedRows", "TopK", "sharded_top_k", "top_k"]
__version__ = "0.1.0"
