"""Which kernel, with which parameters, for a shape. Pure: decides from numbers alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from jtopk import _order

KERNEL_BITS = (8, 16, 32)
SORT_IN_KERNEL = 4096
WARPGROUPS = 4
CHUNK = 2048
"""Columns a warpgroup handles at a time."""

ONE_PASS_K = 4096
TEAM_WARPGROUPS = 8
"""Most warpgroups of a block of the one-pass design: 1024 threads, one block a multiprocessor."""
HISTOGRAM_BYTES = 8192
TEAM_BYTES = 229376
"""Of a block's 232448 bytes of shared memory, those for what teams keep of a row."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a plan needs to know of a GPU."""

    multiprocessors: int = 132


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call runs.

    Attributes:
      warpgroups: warpgroups of 128 threads a block.
      blocks: blocks of the grid, or clusters of them.
      sort: "none", "kernel" (in shared memory) or "xla" (afterwards, for a large k).
      teams: teams of a block, each with rows of its own; 0 for the radix design.
      cluster: blocks that share a row.
      capacity: elements a team can keep of a row.
      whole: whether a team's registers hold a row.
    """

    warpgroups: int
    blocks: int
    sort: str
    teams: int = 0
    cluster: int = 1
    capacity: int = 0
    whole: bool = False


def unsupported(dtype: Any) -> str | None:
    """Why the kernel cannot take this dtype, or None."""
    if _order.bit_width(dtype) not in KERNEL_BITS:
        return f"the kernel has no 64-bit keys, operand is {np.dtype(dtype).name}"
    return None


def plan(
    rows: int,
    columns: int,
    k: int,
    *,
    sorted: bool,
    unit_stride: bool = True,
    itemsize: int = 4,
    members: int = TEAM_WARPGROUPS,
    chip: Chip = Chip(),
) -> Plan:
    """The plan for `rows` rows of `columns` columns, neighbours in memory or not.

    `members` is how many warpgroups may share a row in the one-pass design.
    """
    if unit_stride and k <= ONE_PASS_K:
        return _one_pass(rows, columns, k, itemsize, members, chip)
    # A warpgroup for each chunk of 2048 columns, up to 4: past that a block has enough loads in
    # flight, and several rows share a multiprocessor.
    warpgroups = min(WARPGROUPS, max(1, -(-columns // CHUNK)))
    sort = "none"
    if sorted and k > 1:
        sort = "kernel" if k <= SORT_IN_KERNEL else "xla"
    # Blocks beyond what is resident take their rows later; 4 a multiprocessor cover it. A power
    # of two below that, so that few kernels serve all batch sizes: a block without rows ends.
    blocks = min(_power_of_two(rows), 4 * chip.multiprocessors)
    return Plan(warpgroups=warpgroups, blocks=blocks, sort=sort)


def _one_pass(
    rows: int, columns: int, k: int, itemsize: int, most_members: int, chip: Chip
) -> Plan:
    """Read once; a block fills a multiprocessor, and takes rows until there are none."""
    # A row may begin inside its first 16 bytes.
    chunks = -(-(columns + 16 // itemsize - 1) // CHUNK)
    whole = chunks <= most_members
    cluster = 1
    if whole:
        members = _power_of_two(chunks)
        # What shares the cut's last 22 bits comes along.
        capacity = -(-(k * 3 // 2 + 512) // 512) * 512
        # A team keeps 16 bytes an element, and two histograms.
        room = TEAM_BYTES // (16 * capacity + 2 * HISTOGRAM_BYTES)
        teams = min(TEAM_WARPGROUPS // members, 1 << (max(room, 1).bit_length() - 1))
        teams = min(teams, _power_of_two(-(-rows // chip.multiprocessors)))
    else:
        # Two teams hide each other's waits where rows are many and a sample of 4096 says enough.
        several = rows > chip.multiprocessors and columns <= 2**18 and k <= 2048
        teams, capacity = (2, 6016) if several else (1, 12288)
        members = min(TEAM_WARPGROUPS // teams, most_members)
        # The interpreter has no clusters, and teams of one warpgroup only.
        most = 1 if most_members == 1 else min(16 if rows < 8 else 8, chunks // 4)
        while cluster < most and rows * cluster * 2 <= chip.multiprocessors:
            cluster *= 2
    blocks = min(_power_of_two(-(-rows // teams)), chip.multiprocessors // cluster)
    return Plan(
        warpgroups=members * teams, blocks=blocks, sort="kernel", teams=teams, cluster=cluster,
        capacity=capacity, whole=whole,
    )  # fmt: skip


def _power_of_two(n: int) -> int:
    """The least one that is n or more."""
    return 1 << (max(n, 1) - 1).bit_length()
