"""The one place that says which value ranks before which.

Every value is read as the unsigned integer its bits spell, and mapped to an unsigned *key* of
the same width such that a larger key ranks earlier. Both backends select on keys alone, so the
order of floats, NaNs, signed zeros and integers cannot differ between them.
"""

from __future__ import annotations

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

DTYPES = (
    "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int8 int16 int32 "
    "uint8 uint16 uint32 float64 int64 uint64"
).split()


class Order(enum.Enum):
    """Which values count as equal, and where NaN goes."""

    TOTAL = "total"
    """jax.lax.top_k: +NaN > +inf > ... > +0 > -0 > ... > -inf > -NaN, payloads told apart."""

    TORCH = "torch"
    """torch.topk: every NaN equal and above +inf, +0 equal to -0."""


def bit_width(dtype: Any) -> int:
    """Width of `dtype` in bits."""
    return np.dtype(dtype).itemsize * 8


def bits_dtype(dtype: Any) -> np.dtype:
    """The unsigned integer type as wide as `dtype`."""
    return np.dtype(f"uint{bit_width(dtype)}")


def carrier_dtype(dtype: Any) -> np.dtype:
    """The unsigned type keys of `dtype` are computed in: uint32, or uint64 for 64-bit types."""
    return np.dtype(np.uint64 if bit_width(dtype) == 64 else np.uint32)


def to_bits(x: jax.Array) -> jax.Array:
    """`x` reinterpreted as unsigned integers of the same width."""
    return jax.lax.bitcast_convert_type(x, bits_dtype(x.dtype))


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `to_bits`."""
    return jax.lax.bitcast_convert_type(bits, dtype)


def _is_float(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


@functools.cache
def _largest_number_bits(dtype: np.dtype) -> int:
    """Bits of the largest non-NaN magnitude: infinity, or the maximum where there is none."""
    largest = np.array(np.inf, dtype)
    if not np.isinf(largest.astype(np.float64)):
        largest = np.array(ml_dtypes.finfo(dtype).max, dtype)
    return int(largest.view(bits_dtype(dtype)))


def key(bits: jax.Array, dtype: Any, *, largest: bool, order: Order) -> jax.Array:
    """Order-preserving keys: a larger key ranks earlier.

    Args:
      bits: values of `dtype` as unsigned integers, widened to `carrier_dtype(dtype)`.
      dtype: the type the bits belong to.
      largest: whether the largest or the smallest value ranks first.
      order: which values are equal and where NaN ranks.

    Returns:
      Keys below `2**bit_width(dtype)`, in the carrier type. Under `Order.TOTAL` distinct bits
      have distinct keys.
    """
    dtype = np.dtype(dtype)
    carrier = carrier_dtype(dtype)
    width = bit_width(dtype)
    # numpy scalars of the exact type: python integers would be read as int32 and overflow.
    sign = carrier.type(1 << (width - 1))
    ones = carrier.type((1 << width) - 1)
    assert bits.dtype == carrier, (bits.dtype, carrier)

    if _is_float(dtype):
        magnitude = bits & (ones ^ sign)
        if order is Order.TORCH:
            # -0 becomes +0, so that a tie between zeros is decided by the column.
            bits = jnp.where(magnitude == carrier.type(0), magnitude, bits)
        ranked = jnp.where((bits & sign) != carrier.type(0), bits ^ ones, bits | sign)
        if order is Order.TORCH:
            is_nan = magnitude > carrier.type(_largest_number_bits(dtype))
            ranked = jnp.where(is_nan, ones, ranked)
    elif jnp.issubdtype(dtype, jnp.signedinteger):
        ranked = bits ^ sign
    else:
        ranked = bits
    return ranked if largest else ranked ^ ones


def from_key(
    keys: jax.Array, dtype: Any, *, largest: bool, order: Order
) -> tuple[jax.Array, jax.Array | None]:
    """The inverse of `key`: bits, and whether they are the only ones with this key.

    None for the second where all are, which is under `Order.TOTAL` and for integers.
    """
    dtype = np.dtype(dtype)
    carrier = carrier_dtype(dtype)
    width = bit_width(dtype)
    sign = carrier.type(1 << (width - 1))
    ones = carrier.type((1 << width) - 1)
    ranked = keys if largest else keys ^ ones
    if not _is_float(dtype):
        return (ranked ^ sign if jnp.issubdtype(dtype, jnp.signedinteger) else ranked), None
    bits = jnp.where((ranked & sign) != carrier.type(0), ranked ^ sign, ranked ^ ones)
    if order is Order.TOTAL:
        return bits, None
    # All zeros have the key of +0, and all NaNs the last one.
    return bits, (ranked != sign) & (ranked != ones)


Range = tuple[jax.Array | np.unsignedinteger, jax.Array | np.unsignedinteger]
"""The first and the last of it, scalars."""


def kept(threshold: jax.Array, dtype: Any, *, largest: bool, order: Order) -> tuple[Range, Range]:
    """The bits of all values whose key is `threshold` or larger: two ranges, (first, last) each.

    Cheaper to ask than keys are to compute. `threshold` is one key, in uint32; for types of at
    most 32 bits. The ranges may overlap or be the same; where no value has such a key, both end
    before they begin.
    """
    dtype = np.dtype(dtype)
    width = bit_width(dtype)
    sign_bit = 1 << (width - 1)
    zero, sign, ones = (np.uint32(n) for n in (0, sign_bit, 2 * sign_bit - 1))
    below = np.uint32(sign_bit - 1)  # the last without the sign
    t = threshold
    rest = ones - t  # of ranks, where the smallest come first: up to this one
    if not _is_float(dtype):
        if not jnp.issubdtype(dtype, jnp.signedinteger):
            first, last = (t, ones) if largest else (zero, rest)
            return (first, last), (first, last)
        if largest:  # ranks t to ones; a rank is the number's bits with the sign flipped
            high = (jnp.where(t < sign, zero, t ^ sign), below)
            low = (jnp.where(t < sign, t ^ sign, high[0]), jnp.where(t < sign, ones, high[1]))
            return high, low
        low = (sign, jnp.where(rest < sign, rest ^ sign, ones))
        high = (jnp.where(rest < sign, low[0], zero), jnp.where(rest < sign, low[1], rest ^ sign))
        return low, high
    largest_number = _largest_number_bits(dtype)
    number, nan = np.uint32(largest_number), np.uint32(largest_number + 1)
    negative_number, negative_nan = sign | number, sign | nan
    torch = order is Order.TORCH
    if largest:
        # Positive numbers from the threshold on, or all and the negative ones down to it.
        first = t - sign
        if torch:
            first = jnp.minimum(first, nan)
        negative = t <= sign if torch else t < sign
        first = jnp.where(negative, zero, first)
        last = jnp.where(negative, jnp.maximum(rest, sign) if torch else rest, below)
        return (first, last), ((negative_nan, ones) if torch else (first, last))
    positive = rest >= sign
    if not torch:
        low = (jnp.maximum(t, sign), ones)
        return low, (jnp.where(positive, zero, low[0]), jnp.where(positive, rest - sign, ones))
    everything = rest == ones
    first = jnp.where(positive, sign, jnp.maximum(t, np.uint32(sign_bit + 1)))
    low = (jnp.where(everything, zero, first), jnp.where(everything, ones, negative_number))
    return low, (
        jnp.where(positive, zero, low[0]),
        jnp.where(positive, jnp.minimum(rest - sign, number), low[1]),
    )


LOWEST_FLOAT32_BITS = np.uint32(0xFFFFFFFF)
"""Of the float32 that comes last in jax.lax.top_k's total order."""


def float32_bits(
    bits: jax.Array, key: jax.Array, dtype: Any, *, largest: bool, order: Order
) -> jax.Array | None:
    """Bits of float32 numbers that jax.lax.top_k orders as `key` orders; None for 64-bit types.

    Args:
      bits: values of `dtype` as unsigned integers of its width.
      key: theirs.
    """
    dtype = np.dtype(dtype)
    if bit_width(dtype) == 64:
        return None
    if bit_width(dtype) < 32:
        # Exact below 2**24.
        return jax.lax.bitcast_convert_type(key.astype(jnp.float32), jnp.uint32)
    sign = np.uint32(1 << 31)
    if dtype == np.float32 and order is Order.TOTAL:
        # They are such numbers themselves, or their negatives are: nothing is computed.
        return bits if largest else bits ^ sign
    return key ^ jnp.where(key < sign, LOWEST_FLOAT32_BITS, sign)


def last_value(dtype: Any, *, largest: bool) -> np.ndarray:
    """The value that fills a row with fewer than k valid columns, as a 0-d array of `dtype`.

    -inf or the integer minimum; +inf or the maximum for smallest. A type without infinities
    (float8_e4m3fn) fills with its finite extreme.
    """
    dtype = np.dtype(dtype)
    if not _is_float(dtype):
        info = np.iinfo(dtype)
        return np.array(info.min if largest else info.max, dtype)
    bits = _largest_number_bits(dtype)
    if largest:
        bits |= 1 << (bit_width(dtype) - 1)
    return np.array(bits, bits_dtype(dtype)).view(dtype)
