"""Stride arithmetic, all of it: spans, checks and the view a kernel or backend reads.

Nothing here touches an array. Strides, offsets and spans count elements, not bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major array of `shape`."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def normalise(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """`strides` with those of length-1 and empty views made row-major.

    A dimension of length 1 is never stepped over, so producers put anything there (PyTorch has
    exported 1, the true stride and 0 at different times). Replacing it keeps it from being
    mistaken for a row stride.
    """
    dense = dense_strides(shape)
    if 0 in shape:
        return dense
    return tuple(
        own if size > 1 else row_major
        for size, own, row_major in zip(shape, strides, dense, strict=True)
    )


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one the view reads, both included; 0 if none."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the view is an ordinary row-major array."""
    return normalise(shape, strides) == dense_strides(shape)


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements may share a place. Views nested in no order count as overlapping."""
    reach = 1
    for step, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if step < reach:
                return True
            reach += (size - 1) * step
    return False


@dataclasses.dataclass(frozen=True)
class RowView:
    """A flat buffer read as rows: the form in which backends and kernels see an operand.

    Row `(i, j, ...)` starts at element `offset + i*row_strides[0] + j*row_strides[1] + ...` and
    its column `c` lies `c * column_stride` elements further on.
    """

    row_shape: tuple[int, ...]
    row_strides: tuple[int, ...]
    columns: int
    column_stride: int
    offset: int

    @property
    def rows(self) -> int:
        return math.prod(self.row_shape)

    @property
    def span_end(self) -> int:
        """One past the last element any row reads."""
        return self.offset + span(
            (*self.row_shape, self.columns), (*self.row_strides, self.column_stride)
        )


def row_view(shape: Sequence[int], strides: Sequence[int], offset: int, axis: int) -> RowView:
    """The rows along `axis` of a strided view."""
    strides = normalise(shape, strides)
    return RowView(
        row_shape=tuple(n for d, n in enumerate(shape) if d != axis),
        row_strides=tuple(s for d, s in enumerate(strides) if d != axis),
        columns=shape[axis],
        column_stride=strides[axis],
        offset=offset,
    )


def merge_rows(
    row_shape: Sequence[int], row_strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The fewest (sizes, strides) that enumerate the same rows in the same order.

    Neighbouring dimensions merge where stepping off the end of the inner one lands on the next
    outer index: a padded (batch, time) grid of rows is then one dimension with one row stride.
    """
    merged: list[tuple[int, int]] = []
    for size, step in zip(row_shape, row_strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == step * size:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    if not merged:
        merged = [(1, 0)]
    sizes, steps = zip(*merged, strict=True)
    return sizes, steps


def align_down(address: int, itemsize: int, alignment: int, room: int) -> int | None:
    """Elements to add in front of a span so that it begins at an aligned address.

    Args:
      address: byte address of the first element read.
      itemsize: bytes an element.
      alignment: bytes the start must be a multiple of.
      room: elements of the same allocation in front of `address`.

    Returns:
      The number of elements, or None where the aligned address splits an element or leaves
      the allocation.
    """
    lead, split = divmod(address % alignment, itemsize)
    return None if split or lead > room else lead
