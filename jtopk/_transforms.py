"""How a call behaves under JAX's transformations.

Batching: `vmap` adds one more dimension of rows, so any nesting of it is one call of a backend and
no loop. Derivatives: those of the values are a gather of the operand's at the columns taken, whose
transpose scatters; indices have none. The backend itself is never differentiated.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jtopk._strides import RowView

Backend = Callable[..., tuple[jax.Array, jax.Array]]
"""`backend(view, buffer, starts, lengths)`: values and indices of shape (*view.row_shape, k)."""


def top_k(
    backend: Backend,
    view: RowView,
    buffer: jax.Array,
    starts: jax.Array | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """What the backend returns, transformable."""
    values, indices = _batched(backend, view)(jax.lax.stop_gradient(buffer), starts, lengths)
    if jnp.issubdtype(buffer.dtype, jnp.inexact):
        values = _differentiable(view)(buffer, indices, values)
    return values, indices


def _batched(backend: Backend, view: RowView) -> Callable[..., tuple[jax.Array, jax.Array]]:
    @jax.custom_batching.custom_vmap
    def call(buffer, starts, lengths):
        return backend(view, buffer, starts, lengths)

    @call.def_vmap
    def rule(size, batched, buffer, starts, lengths):
        buffer_batched, *_ = batched
        step = 0  # every batch reads the same buffer
        if buffer_batched:
            step = buffer.shape[1]
            buffer = buffer.reshape(-1)
        wider = dataclasses.replace(
            view,
            row_shape=(size, *view.row_shape),
            row_strides=(step, *view.row_strides),
        )

        def rows(numbers, has_batch):
            if numbers is None or has_batch:
                return numbers
            return jnp.broadcast_to(numbers, (size, *numbers.shape))

        numbers = (rows(n, b) for n, b in zip((starts, lengths), batched[1:], strict=True))
        return _batched(backend, wider)(buffer, *numbers), (True, True)

    return call


def _differentiable(view: RowView) -> Callable[..., jax.Array]:
    @jax.custom_jvp
    def attach(buffer, indices, values):
        return values

    @attach.defjvp
    def rule(primals, tangents):
        buffer, indices, values = primals
        # Attached again: in a derivative of this derivative they depend on the buffer too.
        return attach(buffer, indices, values), _take(view, tangents[0], indices)

    return attach


def _take(view: RowView, buffer: jax.Array, indices: jax.Array) -> jax.Array:
    """Elements of each row at `indices`, 0 at unfilled places."""
    wide = view.span_end > np.iinfo(np.int32).max
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        kind = jnp.int64 if wide else jnp.int32
        place = indices.astype(kind) * view.column_stride + view.offset
        for d, stride in enumerate(view.row_strides):
            place += stride * jax.lax.broadcasted_iota(kind, place.shape, d)
        filled = indices >= 0
        taken = buffer.at[jnp.where(filled, place, 0)].get(mode="promise_in_bounds")
        return jnp.where(filled, taken, jnp.zeros((), buffer.dtype))
