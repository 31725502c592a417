"""The right answer, in NumPy, by a stable sort of each row.

It states the order of values in its own words (comparisons of numbers, then of signs and NaN
payloads) and shares nothing with the product's key map.
"""

from __future__ import annotations

import math

import numpy as np


def _is_float(dtype: np.dtype) -> bool:
    return dtype.kind in "f" or dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def _ascending_keys(row: np.ndarray, order: str) -> list[np.ndarray]:
    """Sort keys of a row, most significant first; each larger where the value ranks higher."""
    if not _is_float(row.dtype):
        return [np.unique(row, return_inverse=True)[1]]
    with np.errstate(invalid="ignore"):  # a signalling NaN is no mistake here
        number = row.astype(np.float64)
    nan = np.isnan(number)
    if order == "torch":
        return [nan.astype(int), np.unique(np.where(nan, 0.0, number), return_inverse=True)[1]]
    bits = row.view(f"u{row.dtype.itemsize}")
    width = 8 * row.dtype.itemsize
    negative = (bits >> (width - 1)).astype(bool)
    payload = (bits & bits.dtype.type((1 << (width - 1)) - 1)).astype(np.int64)
    kind = np.where(nan, np.where(negative, -1, 1), 0)
    value = np.unique(np.where(nan, 0.0, number), return_inverse=True)[1]
    zero_sign = np.where(~nan & (number == 0) & negative, -1, 0)
    nan_rank = np.where(nan, np.where(negative, -payload, payload), 0)
    return [kind, value, zero_sign, nan_rank]


def last_value(dtype: np.dtype, largest: bool) -> np.ndarray:
    """What fills a row that has fewer than k valid columns."""
    dtype = np.dtype(dtype)
    if dtype.name == "float8_e4m3fn":  # no infinities
        return np.array(-448.0 if largest else 448.0, dtype)
    if _is_float(dtype):
        return np.array(-np.inf if largest else np.inf, dtype)
    info = np.iinfo(dtype)
    return np.array(info.min if largest else info.max, dtype)


def top_k(
    x: np.ndarray,
    k: int,
    *,
    largest: bool = True,
    order: str = "total",
    lengths: np.ndarray | None = None,
    starts: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Values and int32 columns of the top k along the last axis, sorted, ties by column."""
    n = x.shape[-1]
    count = math.prod(x.shape[:-1])
    rows = x.reshape(count, n)
    begin = np.zeros(count, np.int64) if starts is None else np.ravel(starts).astype(np.int64)
    length = np.full(count, n) if lengths is None else np.ravel(lengths).astype(np.int64)
    values = np.full((count, k), last_value(x.dtype, largest), x.dtype)
    indices = np.full((count, k), -1, np.int32)
    for r in range(count):
        first = min(max(int(begin[r]), 0), n)
        last = first + min(max(int(length[r]), 0), n - first)
        window = rows[r, first:last]
        keys = _ascending_keys(window, order)
        direction = -1 if largest else 1
        columns = np.lexsort([np.arange(len(window)), *(direction * key for key in keys[::-1])])
        columns = columns[:k]
        values[r, : len(columns)] = window[columns]
        indices[r, : len(columns)] = columns + first
    return values.reshape(*x.shape[:-1], k), indices.reshape(*x.shape[:-1], k)


def bits(x: np.ndarray) -> np.ndarray:
    """Values as unsigned integers, so that comparing them compares bits."""
    x = np.ascontiguousarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def by_column(*arrays: np.ndarray, axis: int = -1) -> tuple[np.ndarray, ...]:
    """An answer whose order is unspecified, with each row by ascending column.

    The last array holds the columns. Raises AssertionError unless unfilled places, of column -1,
    came last in each row, as they do in any order.
    """
    arrays = tuple(np.asarray(a) for a in arrays)
    columns = arrays[-1].astype(np.int64)
    unfilled = columns == -1
    assert (unfilled == np.sort(unfilled, axis=axis)).all(), "an unfilled place is not last"
    order = np.argsort(np.where(unfilled, 2**32, columns), axis=axis, kind="stable")
    return tuple(np.take_along_axis(a, order, axis) for a in arrays)


def assert_same(
    got: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray]
) -> None:
    """Equal columns and equal value bits, no tolerance."""
    values, indices = (np.asarray(a) for a in got)
    assert values.dtype == expected[0].dtype
    assert values.shape == expected[0].shape
    assert indices.shape == expected[1].shape
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_array_equal(bits(values), bits(expected[0]))
