"""What a compiled kernel depends on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from pallas_kernels import _leaves as leaf
from pallas_kernels._index import Index

SORT_LIMIT = 4096
"""Largest k sorted in shared memory, 8 bytes an element."""


Range = tuple[jax.Array | np.unsignedinteger, jax.Array | np.unsignedinteger]
"""The first and the last of it, scalars."""


class Keys(NamedTuple):
    """The order of values, as a map between their bits and keys. Vectors of uint32, both.

    Attributes:
      to_key: bits to keys, which are larger where a value ranks earlier.
      from_key: keys to bits, and whether those are the only ones with this key; None if all are.
      kept: of a key (a scalar), the bits that have it or a larger one: two ranges (first, last).
    """

    to_key: Callable[[jax.Array], jax.Array]
    from_key: Callable[[jax.Array], tuple[jax.Array, jax.Array | None]]
    kept: Callable[[jax.Array], tuple[Range, Range]]


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """What a compiled kernel depends on. Everything else is in the numbers of `_record`.

    Attributes:
      k: outputs a row.
      sort: sort the outputs in shared memory; `k` is then at most `SORT_LIMIT`. Without, the
        radix design writes them by ascending column; the one-pass design's come in order anyway.
      key_bits: keys lie below `2**key_bits`.
      fill_bits: bits of the value that fills a row with fewer than k valid columns.
      row_dims: dimensions of rows.
      unit_stride: whether columns are neighbours in memory.
      warpgroups: warpgroups of 128 threads a block.
      blocks: blocks of the grid, or clusters; each takes every blocks-th row, or its teams do.
      values: whether values are written too.
      index: what is written for a column.
      page_bits: for `Index.PAGE`, columns a page as a power of two.
      local: whether a second index is written, `Index.LOCAL` of the same columns.
      teams: for the one-pass design, teams of warpgroups a block, each with rows of its own; 0 for
        the radix design, in which a block takes a row.
      cluster: blocks that share a row, with one team each.
      capacity: pairs a team has room for.
      whole: whether a row's chunks are no more than a team's warpgroups, which then hold it.
      lengths_are_ends: whether `lengths` holds the column behind each row's last valid one.
    """

    k: int
    sort: bool
    key_bits: int
    fill_bits: int
    row_dims: int
    unit_stride: bool
    warpgroups: int
    blocks: int
    values: bool = True
    index: Index = Index.COLUMN
    page_bits: int = 0
    local: bool = False
    lengths_are_ends: bool = False
    teams: int = 0
    cluster: int = 1
    capacity: int = 0
    whole: bool = False

    @property
    def sort_size(self) -> int:
        return max(leaf.LANES, 1 << (self.k - 1).bit_length())
