"""A mixture-of-experts router, trained through its top-k.

Each token goes to its best experts, weighted by a softmax over their scores. The gradient reaches
the router's weights through the values that top-k returns.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jtopk

TOKENS, DIMENSION, EXPERTS, TOP_K = 256, 16, 8, 2


def forward(parameters: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Outputs of (tokens, dimension) and the experts taken, (tokens, k)."""
    scores, experts = jtopk.top_k(x @ parameters["router"], TOP_K)
    weights = jax.nn.softmax(scores, axis=-1)
    every = jnp.einsum("td,edf->tef", x, parameters["experts"])
    taken = jnp.take_along_axis(every, experts[..., None], axis=1)
    return jnp.einsum("tk,tkf->tf", weights, taken), experts


@jax.jit
def step(parameters, x, target):
    def loss(parameters):
        return jnp.mean((forward(parameters, x)[0] - target) ** 2)

    value, gradient = jax.value_and_grad(loss)(parameters)
    return jax.tree.map(lambda p, g: p - 0.5 * g, parameters, gradient), value, gradient


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (TOKENS, DIMENSION))
    target = jnp.where(x[:, :1] > 0, x, -x)  # two regimes, for experts to share out
    parameters = {
        "router": jax.random.normal(keys[1], (DIMENSION, EXPERTS)) * 0.1,
        "experts": jax.random.normal(keys[2], (EXPERTS, DIMENSION, DIMENSION)) * 0.1,
    }
    losses = []
    for _ in range(200):
        parameters, value, gradient = step(parameters, x, target)
        losses.append(float(value))
    assert losses[-1] < losses[0] / 2 and bool((gradient["router"] != 0).any())
    _, experts = forward(parameters, x)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; tokens per expert:", end=" ")
    print(jnp.bincount(experts.reshape(-1), length=EXPERTS).tolist())


if __name__ == "__main__":
    main()
