"""Top-k on XLA: any device, any dtype, by JAX's own operations."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jtopk import _order
from jtopk._order import Order
from jtopk._strided_rows import StridedRows
from jtopk._strides import RowView


def top_k(
    buffer: jax.Array,
    view: RowView,
    k: int,
    *,
    largest: bool,
    order: Order,
    starts: jax.Array | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The top k of each row, sorted.

    Args:
      buffer: flat operand.
      view: how to read it as rows.
      k: may exceed the row's columns.
      starts: first valid column of each row, any integer; None for 0.
      lengths: valid columns of each row, likewise; None for all from its start.

    Returns:
      values and int32 indices of shape `(*view.row_shape, k)`.
    """
    dtype = np.dtype(buffer.dtype)
    n = view.columns
    begin, end = pallas_kernels.clamp_window(starts, lengths, n)
    ragged = starts is not None or lengths is not None
    length = (end - begin)[..., None] if ragged else None
    # Bits, not floats: a float operation could quieten a NaN or flush a denormal on its way.
    bits = StridedRows(
        _order.to_bits(buffer),
        (*view.row_shape, n),
        (*view.row_strides, view.column_stride),
        view.offset,
    ).dense()
    if starts is not None:
        # Valid columns first, so that among equal keys they come before the others.
        columns = (jnp.arange(n, dtype=jnp.int32) + begin[..., None]) % max(n, 1)
        bits = jnp.take_along_axis(bits, columns, axis=-1)
    key = _order.key(bits.astype(_order.carrier_dtype(dtype)), dtype, largest=largest, order=order)
    ranked = _order.float32_bits(bits, key, dtype, largest=largest, order=order)
    if ragged:
        # The lowest there is. A valid column may have it too, but lies further left.
        valid = jnp.arange(n, dtype=jnp.int32) < length
        key = jnp.where(valid, key, jnp.zeros((), key.dtype))
        if ranked is not None:
            ranked = jnp.where(valid, ranked, _order.LOWEST_FLOAT32_BITS)

    taken = min(k, n)
    indices = _select(key, ranked, taken)
    values = _order.from_bits(jnp.take_along_axis(bits, indices, axis=-1), dtype)
    if starts is not None:
        indices = (indices + begin[..., None]) % max(n, 1)
    if k > taken:
        indices = _widen(indices, k, jnp.int32(-1))
        values = _widen(values, k, jnp.zeros((), dtype))
    if ragged:
        filled = jnp.arange(k, dtype=jnp.int32) < length
        fill = jnp.asarray(_order.last_value(dtype, largest=largest))
        indices = jnp.where(filled, indices, jnp.int32(-1))
        # Selected as bits for the same reason as above.
        values = _order.from_bits(
            jnp.where(filled, _order.to_bits(values), _order.to_bits(fill)), dtype
        )
    return values, indices


def _widen(x: jax.Array, k: int, fill: jax.Array) -> jax.Array:
    padding = [(0, 0, 0)] * (x.ndim - 1) + [(0, k - x.shape[-1], 0)]
    return jax.lax.pad(x, fill, padding)


def _select(key: jax.Array, ranked: jax.Array | None, k: int) -> jax.Array:
    """Columns of the k largest keys, larger first, equal keys by column.

    jax.lax.top_k orders each carrier type used here totally and breaks ties by column, but
    only float32 on a CPU has a selection behind it (a row of 2**20 int32: 125 ms against 2.5);
    all else sorts, which is the faster once k is more than an eighth of the row (64 x 4096 on two
    cores: 9.8 and 9.3 ms at k = 512, 24.8 and 10.9 at 2048). On a GPU its float32 path misorders
    NaNs, so keys go as integers there.

    Args:
      key: from `_order.key`.
      ranked: from `_order.float32_bits`; None for 64-bit keys.
    """
    if 0 in key.shape or k == 0:
        return jnp.zeros((*key.shape[:-1], k), jnp.int32)

    def as_float(key: jax.Array, ranked: jax.Array) -> jax.Array:
        return jax.lax.top_k(jax.lax.bitcast_convert_type(ranked, jnp.float32), k)[1]

    def as_integer(key: jax.Array, ranked: jax.Array | None) -> jax.Array:
        sign = key.dtype.type(1 << (8 * key.dtype.itemsize - 1))
        signed = jax.lax.bitcast_convert_type(key ^ sign, f"int{8 * key.dtype.itemsize}")
        return jax.lax.top_k(signed, k)[1]

    if ranked is None or 8 * k > key.shape[-1]:
        return as_integer(key, ranked)
    return jax.lax.platform_dependent(key, ranked, cpu=as_float, default=as_integer)
