"""Lengths and starts, brought into the row; for whole arrays and for a kernel's scalars."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def clamp(
    start: jax.Array | None,
    length: jax.Array | None,
    columns: jax.Array | int,
    *,
    is_end: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The valid columns `[begin, end)`: start in [0, columns], length in [0, columns - start].

    None stands for a start of 0 and for a length up to the end of the row. `is_end` says that
    `length` is the column behind the last valid one instead.
    """
    end = jnp.int32(columns)
    begin = jnp.int32(0) if start is None else jnp.clip(start, 0, end).astype(jnp.int32)
    room = end - begin
    if length is None:
        return begin, end
    if is_end:
        return begin, jnp.clip(length, begin, end).astype(jnp.int32)
    return begin, begin + jnp.clip(length, 0, room).astype(jnp.int32)


def of_group(length: jax.Array, row: jax.Array, group: jax.Array) -> jax.Array:
    """A row's length where `group` rows share one: the last has all, each before it one less.

    So it is with several tokens a request, each of which sees itself and what came before.
    """
    # Far enough from the end of int32 for what is subtracted.
    return jnp.maximum(length, jnp.int32(-(2**30))) - (group - 1 - row % group)


def saturate(low: jax.Array, high: jax.Array) -> jax.Array:
    """The int32 nearest to a 64-bit number, given as int32 halves."""
    fits = high == (low >> 31)
    return jnp.where(fits, low, jnp.where(high < 0, jnp.int32(-(2**31)), jnp.int32(2**31 - 1)))
