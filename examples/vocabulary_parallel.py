"""A language-model head whose vocabulary lies over a mesh.

Every device holds a part of the output matrix and makes its part of the logits. They are never
brought together: one all-gather of k candidates a device finds the k best of the whole vocabulary.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jtopk

BATCH, DIMENSION, K = 4, 32, 5


def main() -> None:
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(1, -1), ("batch", "vocabulary"))
    vocabulary = 1000 * devices.size
    matrix = jax.device_put(
        jax.random.normal(jax.random.key(0), (DIMENSION, vocabulary)),
        NamedSharding(mesh, PartitionSpec(None, "vocabulary")),
    )
    hidden = jax.random.normal(jax.random.key(1), (BATCH, DIMENSION))

    @jax.jit
    def head(hidden, matrix):
        return jtopk.sharded_top_k(hidden @ matrix, K, mesh=mesh, column_axis="vocabulary")

    values, tokens = head(hidden, matrix)
    want = jax.lax.top_k(hidden @ matrix, K)
    assert (tokens == want[1]).all() and (values == want[0]).all()
    communicated = BATCH * devices.size * K * 8
    print(f"{vocabulary} tokens over {devices.size} devices, {communicated} bytes gathered")
    print("best tokens:", tokens[:, 0].tolist())


if __name__ == "__main__":
    main()
