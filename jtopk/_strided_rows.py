"""A strided view of a flat JAX buffer."""

from __future__ import annotations

import contextlib
import json
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jtopk import _strides


@jax.tree_util.register_pytree_node_class
class StridedRows:
    """An array whose elements lie in a flat buffer at arbitrary strides.

    JAX arrays have no strides, so a padded or sliced matrix from elsewhere is carried as the
    flat memory it lives in and the numbers that say where its rows are. `jtopk.top_k` reads it
    in place; `dense()` makes an ordinary array of it for anything else.

    A pytree: `buffer` is the leaf, `shape`, `strides` and `offset` are static.

    Args:
      buffer: 1-D array.
      shape: sizes, any rank.
      strides: elements (not bytes) between neighbours along each dimension, 0 or more. Strides
        of length-1 dimensions mean nothing and are replaced by row-major ones.
      offset: element of `buffer` where the view begins.

    Raises:
      TypeError: `buffer` is not a 1-D array, or a number is not an integer.
      ValueError: negative numbers, a rank mismatch, or a view that leaves its buffer.
    """

    buffer: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def __init__(self, buffer: Any, shape: Sequence[int], strides: Sequence[int], offset: int = 0):
        if getattr(buffer, "ndim", None) != 1:
            raise TypeError(
                "buffer must be a 1-D array, got "
                + (f"shape {buffer.shape}" if hasattr(buffer, "shape") else type(buffer).__name__)
            )
        shape, strides = _integers("shape", shape), _integers("strides", strides)
        (offset,) = _integers("offset", (offset,))
        if len(shape) != len(strides):
            raise ValueError(
                f"strides must have one number per dimension of shape {shape}, got {strides}"
            )
        strides = _strides.normalise(shape, strides)
        end = offset + _strides.span(shape, strides)
        if end > buffer.shape[0]:
            raise ValueError(
                f"shape {shape}, strides {strides} and offset {offset} reach element {end - 1} "
                f"of a buffer of {buffer.shape[0]} elements; the view must stay inside it"
            )
        self.buffer, self.shape, self.strides, self.offset = buffer, shape, strides, offset

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.buffer.dtype)

    def dense(self) -> jax.Array:
        """The elements as an ordinary array of `shape` (a copy, unless XLA can fuse it)."""
        if _strides.span(self.shape, self.strides) == 0:
            return jnp.zeros(self.shape, self.buffer.dtype)
        return _gather(self.buffer, self.shape, self.strides, self.offset)

    def __repr__(self) -> str:
        dtype = getattr(self.buffer, "dtype", type(self.buffer).__name__)
        size = getattr(self.buffer, "shape", ("?",))[0]
        return (
            f"StridedRows({dtype}{list(self.shape)}, strides={self.strides}, "
            f"offset={self.offset}, buffer of {size})"
        )

    def tree_flatten(self) -> tuple[tuple[Any], tuple[Any, ...]]:
        return (self.buffer,), (self.shape, self.strides, self.offset)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: tuple[Any]) -> StridedRows:
        # Transformations rebuild pytrees around placeholders, so nothing is checked here.
        self = object.__new__(cls)
        (self.buffer,) = leaves
        self.shape, self.strides, self.offset = static
        return self


export.register_pytree_node_serialization(
    StridedRows,
    serialized_name="jtopk.StridedRows",
    serialize_auxdata=lambda static: json.dumps(static).encode(),
    deserialize_auxdata=lambda text: _static(*json.loads(text)),
)


def _static(
    shape: list[int], strides: list[int], offset: int
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(shape), tuple(strides), offset


def _integers(name: str, numbers: Sequence[int]) -> tuple[int, ...]:
    try:
        result = tuple(operator.index(n) for n in numbers)
    except TypeError:
        raise TypeError(f"{name} must hold integers, got {numbers!r}") from None
    if any(n < 0 for n in result):
        raise ValueError(f"{name} must not be negative, got {result}")
    return result


def _gather(
    flat: jax.Array, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> jax.Array:
    """Reads a strided view by slices and reshapes, which XLA fuses, wherever it is nested.

    The outermost dimension is the one with the largest stride. If its stride covers all that
    lies inside, the buffer is cut into that many pieces; otherwise (overlapping rows) each
    piece is sliced out by itself.
    """
    if not shape:
        return flat[offset]
    outer = max(range(len(shape)), key=lambda d: (shape[d] > 1, strides[d]))
    size, step = shape[outer], strides[outer]
    inner_shape = shape[:outer] + shape[outer + 1 :]
    inner_strides = strides[:outer] + strides[outer + 1 :]
    inner_span = _strides.span(inner_shape, inner_strides)

    def inner(piece: jax.Array, start: int = 0) -> jax.Array:
        return _gather(piece, inner_shape, inner_strides, start)

    if size == 1:
        return jnp.expand_dims(inner(flat, offset), outer)
    if step == 0:
        return jnp.broadcast_to(jnp.expand_dims(inner(flat, offset), outer), shape)
    if step >= inner_span:
        whole = jax.lax.slice(flat, (offset,), (min(offset + size * step, flat.shape[0]),))
        if whole.shape[0] < size * step:  # the last piece may end with the buffer
            whole = jax.lax.pad(
                whole, jnp.zeros((), flat.dtype), [(0, size * step - len(whole), 0)]
            )
        pieces = whole.reshape(size, step)[:, :inner_span]
        return jax.vmap(inner, out_axes=outer)(pieces)
    # Overlapping pieces are sliced out one by one. Starts past 2**31 - 1 need 64-bit indices,
    # whatever the caller's setting.
    starts = offset + step * np.arange(size, dtype=np.int64)
    wide = starts[-1] > np.iinfo(np.int32).max
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        pieces = jax.vmap(lambda start: jax.lax.dynamic_slice(flat, (start,), (inner_span,)))(
            jnp.asarray(starts if wide else starts.astype(np.int32))
        )
    return jax.vmap(inner, out_axes=outer)(pieces)
