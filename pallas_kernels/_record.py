"""The numbers through which a compiled kernel learns where rows are.

Row count, columns, strides and offset are data, not part of the compiled kernel: another batch,
width or stride needs other numbers and nothing else. All are 64-bit and count elements. They
reach a kernel in one of two ways: as an int32 array in device memory, or as parameters of the
launch, in place of addresses of operands nobody dereferences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

(
    ROWS, COLUMNS, OFFSET, COLUMN_STRIDE, END, GROUP, TABLE_ROWS, TABLE_COLUMNS, TABLE_STRIDE,
    ROW_DIMS,
) = range(10)  # fmt: skip
"""Places of the numbers. From ROW_DIMS on, size and stride of each dimension of rows."""

PARAMETER_SHIFT = 8
"""How far a number is shifted up to stand for an address."""

ADDRESS_ALIGNMENT = 1 << PARAMETER_SHIFT
"""Bytes. The buffer's address must be a multiple of it.

The compiler takes every operand to be so aligned. Of the others the kernel reads and writes single
elements, at places known only when it runs, so that for them the assumption decides nothing.
"""


class Wide(NamedTuple):
    """A 64-bit number as int32 halves: JAX has no 64-bit scalars without x64."""

    low: Any
    high: Any


class Rows(NamedTuple):
    """The numbers inside a kernel.

    `offset` and `end` bound what may be read of the buffer. `group` rows share a length, and the
    `table_` numbers say how a page table lies, where a call has them.
    """

    rows: Any
    columns: Any
    offset: Wide
    column_stride: Wide
    end: Wide
    group: Any
    table_rows: Any
    table_columns: Any
    table_stride: Wide
    sizes: tuple[Any, ...]
    strides: tuple[Wide, ...]


def numbers(
    *,
    columns: int,
    column_stride: int,
    offset: int,
    row_shape: Sequence[int],
    row_strides: Sequence[int],
    group: int = 1,
    table: tuple[int, int, int] = (0, 0, 0),
) -> list[int]:
    """The numbers of a row view; `table` is a page table's rows, columns and row stride."""
    rows = int(np.prod(row_shape, dtype=np.int64))
    moves = zip((*row_shape, columns), (*row_strides, column_stride), strict=True)
    end = offset  # rows without columns hold nothing that may be read
    if rows * columns > 0:
        end += 1 + sum((size - 1) * stride for size, stride in moves)
    words = [rows, columns, offset, column_stride, end, group, *table]
    for size, stride in zip(row_shape, row_strides, strict=True):
        words += [size, stride]
    return words


def move(words: Sequence[int], by: int) -> list[int]:
    """The numbers of the same view in a buffer that begins `by` elements earlier."""
    moved = list(words)
    moved[OFFSET] += by
    moved[END] += by
    return moved


def span(words: Sequence[int]) -> int:
    """Elements from the first to the last that a row holds."""
    return words[END] - words[OFFSET]


def count(row_dims: int) -> int:
    """How many numbers there are."""
    return ROW_DIMS + 2 * row_dims


def pack(words: Sequence[int]) -> np.ndarray:
    """The numbers as one int32 array, each low half first."""
    return np.array(words, np.int64).view(np.int32)


def unpack(read: Callable[[int], Wide], row_dims: int) -> Rows:
    """The numbers in a kernel, where `read(i)` gives the i-th."""
    at = [ROW_DIMS + 2 * d for d in range(row_dims)]
    return Rows(
        rows=read(ROWS).low,
        columns=read(COLUMNS).low,
        offset=read(OFFSET),
        column_stride=read(COLUMN_STRIDE),
        end=read(END),
        group=read(GROUP).low,
        table_rows=read(TABLE_ROWS).low,
        table_columns=read(TABLE_COLUMNS).low,
        table_stride=read(TABLE_STRIDE),
        sizes=tuple(read(i).low for i in at),
        strides=tuple(read(i + 1) for i in at),
    )
