"""The key map against the oracle's order, which is stated without it."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
from cases import DTYPES, FLOATS, from_bits, numpy_dtype
from jtopk import _order
from jtopk._order import Order

orders = pytest.mark.parametrize("order", list(Order), ids=lambda order: order.value)
directions = pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])


def keys(x: np.ndarray, *, largest: bool, order: Order) -> np.ndarray:
    wide = x.dtype.itemsize == 8
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        bits = jnp.asarray(oracle.bits(x).astype(_order.carrier_dtype(x.dtype)))
        key = np.asarray(_order.key(bits, x.dtype, largest=largest, order=order))
    assert key.dtype == _order.carrier_dtype(x.dtype)
    return key


def assert_ordered(x: np.ndarray, *, largest: bool, order: Order) -> None:
    """A stable sort by key is the oracle's; every value comes twice, so equal keys show too."""
    twice = np.concatenate([x, x[::-1]])
    key = keys(twice, largest=largest, order=order)
    assert int(key.max()) < 2 ** (8 * x.dtype.itemsize)
    by_key = np.argsort(np.invert(key), kind="stable")
    _, expected = oracle.top_k(twice, len(twice), largest=largest, order=order.value)
    np.testing.assert_array_equal(by_key, expected)


@orders
@directions
@pytest.mark.parametrize("name", [n for n in DTYPES if numpy_dtype(n).itemsize <= 2])
def test_every_pattern(name: str, largest: bool, order: Order) -> None:
    dtype = numpy_dtype(name)
    patterns = from_bits(np.arange(2 ** (8 * dtype.itemsize)), dtype)
    assert_ordered(patterns, largest=largest, order=order)


@orders
@directions
@pytest.mark.parametrize("name", [n for n in DTYPES if numpy_dtype(n).itemsize > 2])
def test_wide_patterns(name: str, largest: bool, order: Order) -> None:
    """Patterns at and beside every power of two, of both signs; infinities, NaNs and zeros."""
    dtype = numpy_dtype(name)
    width = 8 * dtype.itemsize
    near = {(1 << b) + step for b in range(width) for step in (-1, 0, 1)}
    special = oracle.bits(np.array([0, 1], dtype)).tolist()
    if name in FLOATS:
        special += oracle.bits(np.array([np.inf, np.nan], dtype)).tolist()
    near |= {pattern + step for pattern in special for step in (-1, 0, 1)}
    near |= {pattern ^ (1 << (width - 1)) for pattern in near}
    patterns = sorted(pattern % 2**width for pattern in near)
    random = np.random.default_rng(0).permutation(np.array(patterns, f"u{dtype.itemsize}"))
    assert_ordered(random.view(dtype), largest=largest, order=order)


@directions
@pytest.mark.parametrize("name", DTYPES)
def test_total_keys_tell_all_bits_apart(name: str, largest: bool) -> None:
    dtype = numpy_dtype(name)
    patterns = from_bits(np.arange(256), dtype)
    assert len(set(keys(patterns, largest=largest, order=Order.TOTAL).tolist())) == 256


@directions
@pytest.mark.parametrize("name", DTYPES)
def test_last_value(name: str, largest: bool) -> None:
    dtype = numpy_dtype(name)
    got = _order.last_value(dtype, largest=largest)
    assert got.dtype == dtype
    expected = oracle.last_value(dtype, largest=largest)
    assert oracle.bits(got.reshape(1)) == oracle.bits(expected.reshape(1))


@pytest.mark.parametrize("name", [n for n in DTYPES if not n.endswith("64")])
def test_bits_and_back(name: str) -> None:
    patterns = from_bits(np.arange(256), numpy_dtype(name))
    bits = _order.to_bits(jnp.asarray(patterns))
    assert bits.dtype == _order.bits_dtype(patterns.dtype)
    back = _order.from_bits(bits, patterns.dtype)
    np.testing.assert_array_equal(oracle.bits(np.asarray(back)), oracle.bits(patterns))


@orders
@directions
@pytest.mark.parametrize("name", [n for n in DTYPES if numpy_dtype(n).itemsize < 8])
def test_bits_kept_are_those_of_keys_from_the_threshold_on(name, largest, order):
    dtype = numpy_dtype(name)
    width = 8 * dtype.itemsize
    near = {(1 << b) + step for b in range(width) for step in (-2, -1, 0, 1, 2)}
    near |= (
        {int(_order._largest_number_bits(dtype)) + step for step in (-1, 0, 1, 2)}
        if (name in FLOATS)
        else set()
    )
    near |= {2**width - 1 - n for n in near} | {n ^ (1 << (width - 1)) for n in near}
    numbers = np.array(sorted({n % 2**width for n in near} | {0, 2**width - 1}), np.uint32)
    bits = np.arange(2**width, dtype=np.uint32) if width == 8 else numbers
    options = {"dtype": dtype, "largest": largest, "order": order}
    key = np.asarray(_order.key(jnp.asarray(bits), **options))
    thresholds = np.arange(256, dtype=np.uint32) if width == 8 else numbers
    ranges = jax.jit(jax.vmap(lambda t: _order.kept(t, **options)))(jnp.asarray(thresholds))
    kept = np.zeros((len(thresholds), len(bits)), bool)
    for first, last in ranges:
        first, last = (np.broadcast_to(np.asarray(x), thresholds.shape) for x in (first, last))
        kept |= (bits >= first[:, None]) & (bits <= last[:, None])
    np.testing.assert_array_equal(kept, key >= thresholds[:, None])


@orders
@directions
@pytest.mark.parametrize("name", [n for n in DTYPES if numpy_dtype(n).itemsize < 8])
def test_bits_come_back_from_keys(name, largest, order):
    dtype = numpy_dtype(name)
    width = 8 * dtype.itemsize
    bits = np.random.default_rng(0).integers(0, 2**width, 100_000).astype(np.uint32)
    bits = np.concatenate([bits, np.array([0, 1 << (width - 1), 2**width - 1], np.uint32)])
    options = {"dtype": dtype, "largest": largest, "order": order}
    key = np.asarray(_order.key(jnp.asarray(bits), **options))
    again, alone = _order.from_key(jnp.asarray(key), **options)
    alone = np.full(len(bits), True) if alone is None else np.asarray(alone)
    np.testing.assert_array_equal(np.asarray(again)[alone], bits[alone])
    # Where they are not alone, others have the same key: zeros or NaNs.
    values = bits.astype(f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        shared = np.isnan(values.astype(np.float64)) | (values == 0)
    expected = ~shared if name in FLOATS and order is Order.TORCH else np.full(len(bits), True)
    np.testing.assert_array_equal(alone, expected)
