"""The record of numbers through which a compiled kernel learns where rows are.

Row count, columns, strides and offset are data, not part of the compiled kernel: another batch,
width or stride needs another record and nothing else. 64-bit numbers take two int32, low first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROWS = 0
COLUMNS = 1
OFFSET = 2
COLUMN_STRIDE = 4
ROW_DIMS = 6
"""From here, three int32 for each dimension of rows: size, stride low, stride high."""


def pack(
    *,
    columns: int,
    column_stride: int,
    offset: int,
    row_shape: Sequence[int],
    row_strides: Sequence[int],
) -> np.ndarray:
    """The record as int32; strides and offset in elements."""
    words = [int(np.prod(row_shape, dtype=np.int64)), columns]
    words += [*_halves(offset), *_halves(column_stride)]
    for size, stride in zip(row_shape, row_strides, strict=True):
        words += [size, *_halves(stride)]
    return np.array(words, np.int64).astype(np.int32)


def _halves(number: int) -> tuple[int, int]:
    return number & 0xFFFFFFFF, number >> 32
