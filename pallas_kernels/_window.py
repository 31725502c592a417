"""Lengths and starts, brought into the row; for whole arrays and for a kernel's scalars."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def clamp(
    start: jax.Array | None, length: jax.Array | None, columns: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """The valid columns `[begin, end)`: start in [0, columns], length in [0, columns - start].

    None stands for a start of 0 and for a length up to the end of the row.
    """
    end = jnp.int32(columns)
    begin = jnp.int32(0) if start is None else jnp.clip(start, 0, end).astype(jnp.int32)
    room = end - begin
    if length is None:
        return begin, end
    return begin, begin + jnp.clip(length, 0, room).astype(jnp.int32)


def saturate(low: jax.Array, high: jax.Array) -> jax.Array:
    """The int32 nearest to a 64-bit number, given as int32 halves."""
    fits = high == (low >> 31)
    return jnp.where(fits, low, jnp.where(high < 0, jnp.int32(-(2**31)), jnp.int32(2**31 - 1)))
