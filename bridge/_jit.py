"""JAX pipelines called with torch tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch

from bridge import _dlpack
from jtopk import StridedRows


def jit(fn: Callable[..., Any], **jit_options: Any) -> Callable[..., Any]:
    """`jax.jit(fn)`, called with torch tensors, which keep their strides.

    In any pytree of arguments a dense tensor reaches `fn` as a `jax.Array` and a strided one as
    a `jtopk.StridedRows`, both sharing its memory; everything else is passed on. Arrays that
    `fn` returns come back as tensors that share theirs. One compilation for each combination
    of shapes, strides and dtypes.

    Args:
      fn: a function that `jax.jit` takes.
      **jit_options: for `jax.jit`, such as `static_argnums`.

    Returns:
      The function. It raises ValueError for a tensor that requires grad (a gradient would be
      lost) and for tensors that cannot be imported, and warns with `CopyWarning` where a dense
      tensor is not aligned and has to be copied.
    """
    compiled = jax.jit(fn, **jit_options)

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(_import, (args, kwargs))
        result = compiled(*args, **kwargs)
        return jax.tree.map(_dlpack.to_torch, result, is_leaf=lambda x: isinstance(x, StridedRows))

    return call


def _import(leaf: Any) -> Any:
    return _dlpack.import_array(leaf) if isinstance(leaf, torch.Tensor) else leaf
