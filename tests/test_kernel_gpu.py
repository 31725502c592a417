"""What only a GPU can show: alignment, addresses past 32 bits, repeatability, XLA's GPU order."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import jtopk
import oracle
from cases import data_rows, numpy_dtype

pytestmark = pytest.mark.gpu


def strided(x: np.ndarray, stride: int, offset: int, padding: np.ndarray) -> jtopk.StridedRows:
    """`x` on the device at a row stride, ending with its buffer."""
    rows, columns = x.shape
    flat = np.full(offset + (rows - 1) * stride + columns, padding, x.dtype)
    for r in range(rows):
        flat[offset + r * stride :][:columns] = x[r]
    return jtopk.StridedRows(jnp.asarray(flat), x.shape, (stride, 1), offset)


@pytest.mark.parametrize("columns", [1, 31, 257, 5000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_rows_start_at_every_residue_of_16_bytes(dtype, columns):
    width = 16 // numpy_dtype(dtype).itemsize
    x = np.tile(data_rows(dtype, columns, seed=1), (3, 1))[: 2 * width]
    stride = columns + 1 + columns % 2  # odd: row r starts r * stride elements further on
    assert {(1 + r * stride) % width for r in range(len(x))} == set(range(width))
    best = oracle.last_value(x.dtype, largest=False)
    view = strided(x, stride, 1, best)
    k = min(64, columns)
    oracle.assert_same(jtopk.top_k(view, k, backend="mosaic_gpu"), oracle.top_k(x, k))


@pytest.mark.parametrize(
    ("k", "sorted"), [(4096, True), (4096, False), (5000, True), (5000, False), (20000, True)]
)
def test_large_k(k, sorted):
    """On either side of what the one-pass kernel takes."""
    x = data_rows("float32", 20000, seed=2)
    got = jtopk.top_k(strided(x, 20001, 3, np.inf), k, sorted=sorted, backend="mosaic_gpu")
    expected = oracle.top_k(x, k)
    if not sorted:
        got, expected = (oracle.by_column(*answer) for answer in (got, expected))
    oracle.assert_same(got, expected)


@pytest.mark.parametrize("sorted", [True, False])
def test_fifty_runs_are_the_same_bits(sorted):
    x = np.random.default_rng(3).integers(0, 40, (64, 30000)).astype(np.float32)  # ties everywhere
    view = strided(x, 30208, 0, np.inf)
    first = [np.asarray(a) for a in jtopk.top_k(view, 2048, sorted=sorted)]
    for _ in range(50):
        again = jtopk.top_k(view, 2048, sorted=sorted)
        for a, b in zip(first, again, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


@pytest.mark.parametrize("batch", [1, 3, 600])
def test_a_row_does_not_depend_on_its_batch(batch):
    """More rows than blocks too: a block's next row must not see the last one's state."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal((batch, 6000)).astype(np.float32)
    x[batch // 2] = data_rows("float32", 6000, seed=5)[1]
    lengths = np.where(np.arange(batch) % 2, 100, 6000).astype(np.int32)
    got = jtopk.top_k(strided(x, 6001, 1, np.inf), 512, lengths=lengths, backend="mosaic_gpu")
    oracle.assert_same(got, oracle.top_k(x, 512, lengths=lengths))


@pytest.mark.parametrize("k", [8, 16, 17])
def test_the_xla_backend_does_not_inherit_the_gpu_nan_order(k):
    """jax.lax.top_k returns a wrong order here on a GPU (openxla/xla 48119)."""
    x = data_rows("float32", 2700, seed=6)
    got = jtopk.top_k(strided(x, 2701, 0, np.inf), k, backend="xla")
    oracle.assert_same(got, oracle.top_k(x, k))


def test_rows_past_2_to_the_32_elements():
    torch = pytest.importorskip("torch")
    import bridge

    stride, columns, k = 2**31 + 9, 5000, 100
    x = np.random.default_rng(7).integers(-128, 128, (3, columns)).astype(np.int8)
    storage = torch.zeros(2 * stride + columns + 5, dtype=torch.int8, device="cuda")
    rows = storage.as_strided(x.shape, (stride, 1), 5)
    rows.copy_(torch.from_numpy(x))
    got = bridge.top_k(rows, k)
    oracle.assert_same([t.cpu().numpy() for t in got], oracle.top_k(x, k))
