"""What a kernel writes for a column it selects: the column, or the place that it stands for."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _leaves as leaf
from pallas_kernels import _window
from pallas_kernels._record import Rows, Wide


class Index(enum.Enum):
    """A kind of index. All but COLUMN count from the row's first valid column."""

    COLUMN = "column"
    """Column of the whole row."""

    LOCAL = "local"
    """Columns from the row's start."""

    OFFSET = "offset"
    """LOCAL plus the row's number in `offsets`."""

    PAGE = "page"
    """LOCAL looked up in a table of pages: see `in_pages`."""


ROW_OPERANDS = ("starts", "lengths", "offsets", "batches", "page_starts")
"""Operands with a number for each row, int32 of shape (rows, 1) or int64 as (rows, 2) halves."""

OPERANDS = (*ROW_OPERANDS, "table")
"""All operands a kernel may have behind its numbers, in this order."""


def row_number(operands_gmem: Mapping[str, Any], name: str, row: jax.Array) -> Any:
    """A row's number as the nearest int32, or None where the call does not have the operand."""
    numbers = operands_gmem.get(name)
    if numbers is None:
        return None
    if numbers.shape[1] == 1:
        return numbers[row, 0]
    return _window.saturate(numbers[row, 0], numbers[row, 1])


def mapping(
    kind: Index,
    view: Rows,
    operands_gmem: Mapping[str, Any],
    row: jax.Array,
    begin: jax.Array,
    *,
    page_bits: int,
    interpret: bool,
) -> Callable[[jax.Array, int], jax.Array]:
    """From a vector of columns (int32), `width` a lane, to what is written; -1 stays -1."""
    if kind is Index.COLUMN:
        return lambda columns, width: columns
    if kind is Index.PAGE:
        lookup = in_pages(view, operands_gmem, row, page_bits=page_bits, interpret=interpret)
        return lambda columns, width: lookup(jnp.where(columns < 0, -1, columns - begin), width)
    shift = -begin
    if kind is Index.OFFSET:
        shift = shift + row_number(operands_gmem, "offsets", row)
    return lambda columns, width: jnp.where(columns < 0, -1, columns + shift)


def in_pages(
    view: Rows,
    operands_gmem: Mapping[str, Any],
    row: jax.Array,
    *,
    page_bits: int,
    interpret: bool,
) -> Callable[[jax.Array, int], jax.Array]:
    """The lookup of local columns in the row's line of a page table.

    With pages of `2**page_bits` columns, column c lies in page `table[b, p + (c >> page_bits)]`,
    where b is the row's number in `batches` or else the row, and p its number in `page_starts`
    or else 0. It becomes the page's number shifted up by `page_bits`, plus c's place in the
    page. What the table does not hold becomes -1.
    """
    batch = row_number(operands_gmem, "batches", row)
    batch = row if batch is None else batch
    first = row_number(operands_gmem, "page_starts", row)
    first = jnp.int32(0) if first is None else first
    known = (batch >= 0) & (batch < view.table_rows)
    zero = Wide(jnp.int32(0), jnp.int32(0))
    table = view._replace(offset=zero, sizes=(view.table_rows,), strides=(view.table_stride,))
    line = leaf.row_start(table, jnp.where(known, batch, 0), interpret=interpret)

    def lookup(columns: jax.Array, width: int) -> jax.Array:
        page = first + (columns >> page_bits)
        held = (columns >= 0) & (page >= 0) & (page < view.table_columns) & known
        number = leaf.gather_row(
            operands_gmem["table"], table, line, jnp.where(held, page, -1), unit_stride=True,
            width=width, interpret=interpret,
        ).astype(jnp.int32)  # fmt: skip
        place = (number << page_bits) + (columns & ((1 << page_bits) - 1))
        return jnp.where(held, place, -1)

    return lookup
