"""One decode step of sparse attention: an indexer scores the cache, top-k picks what to attend to.

The scores come from a matrix multiplication into a buffer whose rows are padded to a multiple of
256, and each request has a cache of its own length. Nothing is sliced, masked or copied before
the top-k.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtopk

REQUESTS, CACHE, DIMENSION, HEADS, TOP_K = 4, 900, 32, 2, 64
STRIDE = -(-CACHE // 256) * 256


def index(query: jax.Array, keys: jax.Array, lengths: jax.Array) -> jax.Array:
    """The cache positions to attend to: (requests, k), -1 where a cache holds fewer.

    Args:
      query: (requests, dimension).
      keys: (requests, cache padded to STRIDE, dimension).
      lengths: (requests,), int32.
    """
    scores = jnp.einsum("rd,rcd->rc", query, keys).reshape(-1)
    rows = jtopk.StridedRows(scores, (REQUESTS, CACHE), (STRIDE, 1))
    return jtopk.top_k(rows, TOP_K, lengths=lengths, sorted=False).indices


def attend(query: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """Attention of (heads, dimension) queries to the positions picked, for every request."""

    def one(query, keys, values, positions):
        taken = jnp.maximum(positions, 0)
        logits = jnp.einsum("hd,kd->hk", query, keys[taken]) / DIMENSION**0.5
        weights = jax.nn.softmax(jnp.where(positions < 0, -jnp.inf, logits), axis=-1)
        return weights @ values[taken]

    return jax.vmap(one)(query, keys, values, positions)


@jax.jit
def decode(index_query, query, keys, values, lengths):
    positions = index(index_query, keys, lengths)
    return attend(query, keys, values, positions), positions


def main() -> None:
    random = iter(jax.random.split(jax.random.key(0), 4))
    keys, values = (
        jax.random.normal(next(random), (REQUESTS, STRIDE, DIMENSION)) for _ in range(2)
    )
    keys = keys.at[:, CACHE:].set(jnp.nan)  # padding: never read as an answer
    lengths = jnp.array([900, 64, 7, 512], jnp.int32)
    out, positions = decode(
        jax.random.normal(next(random), (REQUESTS, DIMENSION)),
        jax.random.normal(next(random), (REQUESTS, HEADS, DIMENSION)),
        keys,
        values,
        lengths,
    )
    assert out.shape == (REQUESTS, HEADS, DIMENSION) and bool(jnp.isfinite(out).all())
    for row, length in zip(positions, lengths, strict=True):
        print(f"cache of {length}: attends to {int((row >= 0).sum())}, highest {int(row.max())}")


if __name__ == "__main__":
    main()
