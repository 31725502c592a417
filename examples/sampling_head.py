"""A sampling head: the next token is drawn from the k most likely, at a temperature.

The vocabulary has 50257 tokens, so rows of logits begin at odd addresses if they are packed and
behind padding if they are not. Either is read where it lies.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

import jtopk

VOCABULARY = 50257


@functools.partial(jax.jit, static_argnames="k")
def sample(
    key: jax.Array, logits: jax.Array | jtopk.StridedRows, temperature: jax.Array, *, k: int
) -> jax.Array:
    """Tokens, (batch,).

    Args:
      key: of jax.random.
      logits: (batch, vocabulary).
      temperature: (batch,); 0 takes the most likely token.
      k: how many tokens to choose from.
    """
    values, tokens = jtopk.top_k(logits, k)
    scaled = values / jnp.maximum(temperature, 1e-6)[:, None]
    choice = jax.random.categorical(key, scaled, axis=-1)
    choice = jnp.where(temperature == 0, 0, choice)
    return jnp.take_along_axis(tokens, choice[:, None], axis=-1)[:, 0]


def main() -> None:
    batch = 3
    stride = -(-VOCABULARY // 256) * 256
    buffer = jax.random.normal(jax.random.key(0), (batch * stride,), jnp.bfloat16)
    logits = jtopk.StridedRows(buffer, (batch, VOCABULARY), (stride, 1))
    best = jnp.argmax(logits.dense(), axis=-1)
    greedy = sample(jax.random.key(1), logits, jnp.zeros(batch), k=50)
    assert (greedy == best).all()
    drawn = sample(jax.random.key(2), logits, jnp.full(batch, 0.8), k=50)
    print("most likely:", greedy.tolist(), "drawn at 0.8:", drawn.tolist())


if __name__ == "__main__":
    main()
