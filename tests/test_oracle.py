"""Small answers written by hand, which pin the oracle that every other test trusts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import oracle

INF, NAN = np.inf, np.nan
MIXED = np.array([1, NAN, -0.0, 0, INF, -NAN, -INF, 1], np.float32)


def columns(x: np.ndarray, k: int, **options) -> list[int]:
    return oracle.top_k(x, k, **options)[1].tolist()


def test_total_order() -> None:
    values, indices = oracle.top_k(MIXED, 8)
    assert indices.tolist() == [1, 4, 0, 7, 3, 2, 6, 5]
    np.testing.assert_array_equal(values, np.array([NAN, INF, 1, 1, 0, -0.0, -INF, -NAN]))
    assert np.signbit(values).tolist() == [False] * 5 + [True] * 3


def test_total_order_smallest() -> None:
    assert columns(MIXED, 8, largest=False) == [5, 6, 2, 3, 0, 7, 4, 1]


def test_torch_order() -> None:
    assert columns(MIXED, 8, order="torch") == [1, 5, 4, 0, 7, 2, 3, 6]
    assert columns(MIXED, 8, order="torch", largest=False) == [6, 2, 3, 0, 7, 4, 1, 5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_nan_payloads(dtype: type) -> None:
    width = 8 * np.dtype(dtype).itemsize
    unsigned = np.dtype(f"u{width // 8}")
    nan = int(oracle.bits(np.array([NAN], dtype))[0]) & ~(1 << (width - 1))
    sign = 1 << (width - 1)
    x = np.array([nan + 1, nan + 2, sign | (nan + 1), sign | (nan + 2)], unsigned).view(dtype)
    assert columns(x, 4) == [1, 0, 2, 3]
    assert columns(x, 4, order="torch") == [0, 1, 2, 3]


def test_nan_above_the_largest_number_without_infinities() -> None:
    x = np.array([448, NAN, -NAN, -448], ml_dtypes.float8_e4m3fn)
    assert columns(x, 4) == [1, 0, 3, 2]


def test_denormals_are_not_zero() -> None:
    tiny = np.float32(1e-45)
    x = np.array([0, tiny, -tiny, 2 * tiny], np.float32)
    assert columns(x, 4) == [3, 1, 0, 2]


def test_ties_by_column_both_ways() -> None:
    x = np.array([2, 1, 2, 1, 2], np.int32)
    assert columns(x, 5) == [0, 2, 4, 1, 3]
    assert columns(x, 5, largest=False) == [1, 3, 0, 2, 4]


def test_integer_extremes() -> None:
    x = np.array([0, -(2**63), 2**63 - 1, -1], np.int64)
    assert columns(x, 4) == [2, 0, 3, 1]
    x = np.array([0, 2**64 - 1, 2**63, 1], np.uint64)
    assert columns(x, 4) == [1, 2, 3, 0]


def test_neighbours_that_differ_in_the_last_bit() -> None:
    assert columns(np.array([2**53, 2**53 + 1], np.int64), 2) == [1, 0]
    assert columns(np.array([1.0, np.nextafter(1.0, 2.0)]), 2) == [1, 0]


def test_windows_and_filling() -> None:
    x = np.array([[5, 9, 7, 8], [5, 9, 7, 8], [5, 9, 7, 8]], np.float32)
    values, indices = oracle.top_k(x, 3, lengths=np.array([2, 0, 9]), starts=np.array([2, 0, -3]))
    assert indices.tolist() == [[3, 2, -1], [-1, -1, -1], [1, 3, 2]]
    assert values.tolist() == [[8, 7, -INF], [-INF, -INF, -INF], [9, 8, 7]]
    values, indices = oracle.top_k(x[0], 2, largest=False, lengths=np.array(1))
    assert (values.tolist(), indices.tolist()) == ([5, INF], [0, -1])


def test_out_of_range_windows() -> None:
    x = np.arange(4, dtype=np.int8)
    assert columns(x, 2, lengths=np.array(2**33)) == [3, 2]
    assert columns(x, 2, lengths=np.array(-(2**31))) == [-1, -1]
    assert columns(x, 2, starts=np.array(2**33)) == [-1, -1]
    assert columns(x, 2, starts=np.array(3), lengths=np.array(2**31 - 1)) == [3, -1]


def test_last_values() -> None:
    assert oracle.last_value(np.dtype(np.int8), largest=True) == -128
    assert oracle.last_value(np.dtype(np.uint16), largest=True) == 0
    assert oracle.last_value(np.dtype(np.uint16), largest=False) == 65535
    assert oracle.last_value(np.dtype(ml_dtypes.float8_e4m3fn), largest=False) == 448
    assert oracle.last_value(np.dtype(ml_dtypes.float8_e5m2), largest=True) == -INF


def test_assert_same_compares_bits() -> None:
    index = np.zeros(1, np.int32)
    zero = np.zeros(1, np.float32)
    oracle.assert_same((zero, index), (zero, index))
    for other in ((-zero, index), (zero, index + 1), (zero.astype(np.float64), index)):
        with pytest.raises(AssertionError):
            oracle.assert_same(other, (zero, index))
    quiet = np.array([0x7FC00000], np.uint32).view(np.float32)
    payload = np.array([0x7FC00001], np.uint32).view(np.float32)
    with pytest.raises(AssertionError):
        oracle.assert_same((payload, index), (quiet, index))


def test_an_order_by_column() -> None:
    values, indices = np.array([[7, 9, 0, 0]]), np.array([[5, 3, -1, -1]])
    ordered = oracle.by_column(values, indices)
    assert [a.tolist() for a in ordered] == [[[9, 7, 0, 0]], [[3, 5, -1, -1]]]
    ordered = oracle.by_column(values.T, indices.T, axis=0)
    assert [a.T.tolist() for a in ordered] == [[[9, 7, 0, 0]], [[3, 5, -1, -1]]]
    with pytest.raises(AssertionError, match="not last"):
        oracle.by_column(np.array([[5, -1, 3]]))
