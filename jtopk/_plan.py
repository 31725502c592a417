"""Which kernel, with which parameters, for a shape. Pure: decides from numbers alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jtopk import _order

KERNEL_BITS = (8, 16, 32)
SORT_IN_KERNEL = 4096
WARPGROUPS = 4


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a plan needs to know of a GPU."""

    multiprocessors: int = 132


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call runs.

    Attributes:
      warpgroups: warpgroups of 128 threads a block.
      blocks: blocks of the grid.
      sort: "none", "kernel" (in shared memory) or "xla" (afterwards, for a large k).
    """

    warpgroups: int
    blocks: int
    sort: str


def unsupported(dtype: Any) -> str | None:
    """Why the kernel cannot take this dtype, or None."""
    if _order.bit_width(dtype) not in KERNEL_BITS:
        return f"the kernel has no 64-bit keys, operand is {np.dtype(dtype).name}"
    return None


def plan(rows: int, columns: int, k: int, *, sorted: bool, chip: Chip = Chip()) -> Plan:
    """The plan for `rows` rows of `columns` columns."""
    # A warpgroup for each chunk of 2048 columns, up to 4: past that a block has enough loads in
    # flight, and several rows share a multiprocessor.
    warpgroups = min(WARPGROUPS, max(1, -(-columns // 2048)))
    sort = "none"
    if sorted and k > 1:
        sort = "kernel" if k <= SORT_IN_KERNEL else "xla"
    # Blocks beyond what is resident take their rows later; 4 a multiprocessor cover it. A power
    # of two below that, so that few kernels serve all batch sizes: a block without rows ends.
    blocks = min(1 << (max(rows, 1) - 1).bit_length(), 4 * chip.multiprocessors)
    return Plan(warpgroups=warpgroups, blocks=blocks, sort=sort)
