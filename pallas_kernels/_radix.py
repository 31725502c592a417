"""Exact top-k of rows by radix selection: the kernel.

A block takes one row at a time. Its warpgroups share the row's chunks, each a contiguous part:

1. Digit by digit from the top, histogram the keys that agree with the digits found so far, and
   find the bin in which the k-th largest key lies. After the last digit that key, the *cut*, is
   known exactly, and so is how many keys equal to it are still wanted.
2. Read the row once more and keep what lies above the cut, and of what equals it the leftmost.
   Every element's place in the output follows from counts of those before it, not from the
   order in which lanes arrive, so the result is the same in every run.
3. If asked, sort what was kept by key and column.

A key is a uint32 that is larger where a value ranks earlier; the map is the caller's.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _leaves as leaf
from pallas_kernels._compat import pl, plgpu
from pallas_kernels._config import SelectConfig
from pallas_kernels._rows import RowKernel

BINS = 2048
DIGIT_BITS = 11
BIN_WIDTH = 4
LAST_COLUMN = 2**31 - 1


def scratch(config: SelectConfig, *, interpret: bool) -> dict[str, Any]:
    """Shared memory of a block."""
    smem = {
        "histogram_smem": plgpu.SMEM((config.warpgroups, BINS), jnp.int32),
        "scan_smem": plgpu.SMEM((config.warpgroups, leaf.CHUNK // leaf.LANES * 4), jnp.int32),
    }
    if config.sort:
        smem["keys_smem"] = plgpu.SMEM((config.sort_size,), jnp.uint32)
        smem["columns_smem"] = plgpu.SMEM((config.sort_size,), jnp.int32)
    if interpret:
        smem["barrier"] = plgpu.Barrier(num_arrivals=config.warpgroups)
    return smem


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a warpgroup knows when it writes its part of a row."""

    cut: jax.Array
    above: jax.Array
    """Keys above the cut in the parts left of this one."""
    equal: jax.Array
    """Keys equal to the cut in those parts."""
    wanted: jax.Array
    """Keys equal to the cut that belong to the answer, in the whole row."""
    everything: jax.Array
    """Whether all valid columns belong to the answer, whatever their keys."""


class Radix(RowKernel):
    """The kernel's body for one row."""

    def prepare(self) -> None:
        """Nothing is expected of shared memory."""

    def row(self, row: jax.Array) -> None:
        config = self.config
        begin, end = self.window(row)
        start = leaf.row_start(self.view, row, interpret=self.interpret)
        # Chunks begin on 16-byte boundaries of the buffer, so a row starts inside its first.
        lead = start.low & (self.width - 1) if config.unit_stride else jnp.int32(0)
        first = (begin + lead) // leaf.CHUNK
        chunks = (end + lead + leaf.CHUNK - 1) // leaf.CHUNK - first
        share = (chunks + config.warpgroups - 1) // config.warpgroups
        own = first + self.wg * share
        stop = jnp.minimum(own + share, first + chunks)
        taken = jnp.minimum(end - begin, config.k)

        def chunk(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Columns, bits and validity of a chunk."""
            at = i * leaf.CHUNK - lead
            bits = leaf.load_row(
                self.x_gmem, self.view, start, at, begin, end, unit_stride=config.unit_stride,
                interpret=self.interpret,
            )  # fmt: skip
            columns = at + self.iota(leaf.CHUNK, self.width)
            return columns, bits, (columns >= begin) & (columns < end)

        def select() -> tuple[jax.Array, ...]:
            return self.find_cut(chunk, own, stop, taken)

        def keep_all() -> tuple[jax.Array, ...]:
            left = jnp.clip(own * leaf.CHUNK - lead, begin, end) - begin
            return jnp.uint32(0), left, jnp.int32(0), jnp.int32(0)

        everything = end - begin <= config.k
        cut, above, equal, wanted = jax.lax.cond(everything, keep_all, select)
        part = _Part(cut, above, equal, wanted, everything)
        if config.sort:
            self.clear_sorted()
            self.barrier()
            self.keep(chunk, own, stop, part, self.store_to_sort)
            self.barrier()
            self.sort()
            self.write_sorted(row, start, taken, begin)
        else:
            write = self.writer(row, begin)
            self.keep(chunk, own, stop, part, write)
            self.write_fill(write, taken)
        self.barrier()  # shared memory is about to be used for the next row

    # Step 1.

    def find_cut(self, chunk, own, stop, taken) -> tuple[jax.Array, ...]:
        """The key of the last element taken, counts to this part's left, equals wanted."""
        key_bits = self.config.key_bits
        histogram = self.smem["histogram_smem"].at[self.wg]

        def digit_pass(i, carry):
            # `cut` is known in the bits of `known`; this pass finds the next DIGIT_BITS.
            cut, known, above, _, wanted = carry
            top = key_bits - DIGIT_BITS * i
            shift = jnp.maximum(top - DIGIT_BITS, 0)
            mask = (jnp.uint32(1) << (top - shift).astype(jnp.uint32)) - jnp.uint32(1)
            shift = shift.astype(jnp.uint32)
            histogram[...] = self.splat(BINS, BIN_WIDTH, 0)

            def count(j, _):
                _, bits, valid = chunk(j)
                key = self.keys.to_key(bits)
                digit = ((key >> shift) & mask).astype(jnp.int32)
                counts = valid & ((key & known) == cut)
                leaf.histogram_add(
                    histogram, jnp.where(counts, digit, -1), width=self.width,
                    interpret=self.interpret,
                )  # fmt: skip

            jax.lax.fori_loop(own, stop, count, None)
            self.barrier()
            digit, wanted = self.find_bin(wanted)
            bins = self.iota(BINS, BIN_WIDTH)
            equal = jnp.int32(0)
            for w in range(self.config.warpgroups - 1):
                part = self.load_bins(w)
                over = self.sum(jnp.where(bins > digit, part, 0), BIN_WIDTH)
                same = self.sum(jnp.where(bins == digit, part, 0), BIN_WIDTH)
                left = w < self.wg
                above = above + jnp.where(left, over, 0)
                equal = equal + jnp.where(left, same, 0)
            self.barrier()
            return (
                cut | (digit.astype(jnp.uint32) << shift), known | (mask << shift),
                above, equal, wanted,
            )  # fmt: skip

        none = jnp.int32(0)
        cut, _, above, equal, wanted = jax.lax.fori_loop(
            0, pl.cdiv(key_bits, DIGIT_BITS), digit_pass,
            (jnp.uint32(0), jnp.uint32(0), none, none, taken),
        )  # fmt: skip
        return cut, above, equal, wanted

    def find_bin(self, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The bin that holds the `wanted`-th largest key, and its rank within the bin."""
        counts = self.load_bins(0)
        for w in range(1, self.config.warpgroups):
            counts = counts + self.load_bins(w)
        below, total = self.scan(counts, BIN_WIDTH)
        above = total - below - counts
        here = (above < wanted) & (wanted <= above + counts)
        # Just one bin is the one, so that sums pick it out.
        digit = self.sum(jnp.where(here, self.iota(BINS, BIN_WIDTH), 0), BIN_WIDTH)
        return digit, wanted - self.sum(jnp.where(here, above, 0), BIN_WIDTH)

    # Step 2.

    def keep(self, chunk, own, stop, part: _Part, write) -> None:
        """Hands what belongs to the answer, by ascending column, to `write`.

        `write(place, columns, bits, width)` skips what has place -1. Bits are keys if they are
        to be sorted.
        """

        def one(i, counts):
            above, equal = counts
            columns, bits, valid = chunk(i)
            key = self.keys.to_key(bits)
            over = valid & ((key > part.cut) | part.everything)
            ties = valid & (key == part.cut) & ~part.everything
            # Two counts in one scan: a chunk has fewer than 2**16 columns.
            both = jnp.where(over, 1, 0) + jnp.where(ties, 1 << 16, 0)
            before, total = self.scan(both, self.width)
            over_before = above + (before & 0xFFFF)
            ties_before = equal + (before >> 16)
            kept = over | (ties & (ties_before < part.wanted))
            place = over_before + jnp.minimum(ties_before, part.wanted)
            place = jnp.where(kept, place, -1)
            write(place, columns, key if self.config.sort else bits, self.width)
            return above + (total & 0xFFFF), equal + (total >> 16)

        jax.lax.fori_loop(own, stop, one, (part.above, part.equal))

    # Step 3.

    def store_to_sort(self, place, columns, keys, width: int) -> None:
        for name, what in (("columns_smem", columns), ("keys_smem", keys)):
            leaf.store_run(self.smem[name], place, what, width=width, interpret=self.interpret)

    def clear_sorted(self) -> None:
        """Fills the arrays to sort with what sorts last."""

        @pl.when(self.wg == 0)
        def clear():
            size = self.config.sort_size
            width = min(4, size // leaf.LANES)
            self.smem["keys_smem"][...] = self.splat(size, width, 0, jnp.uint32)
            self.smem["columns_smem"][...] = self.splat(size, width, LAST_COLUMN)

    def sort(self) -> None:
        """Bitonic sort (Batcher 1968) of the kept keys and columns."""
        steps = self.config.sort_size.bit_length() - 1

        def merge(log_block, _):
            def step(i, _):
                leaf.compare_exchange(
                    self.smem["keys_smem"], self.smem["columns_smem"],
                    log_block, log_block - 1 - i, warpgroup=self.wg,
                    warpgroups=self.config.warpgroups, interpret=self.interpret,
                )  # fmt: skip
                self.barrier()

            jax.lax.fori_loop(0, log_block, step, None)

        jax.lax.fori_loop(1, steps + 1, merge, None)

    def write_sorted(self, row, start, taken, begin) -> None:
        step = min(self.config.sort_size, 4 * leaf.LANES)
        width = step // leaf.LANES
        write = self.writer(row, begin)

        def some(i, _):
            at = i * step
            place = at + self.iota(step, width)
            columns = self.smem["columns_smem"][pl.ds(at, step)]
            columns = plgpu.layout_cast(columns, leaf.layout(step, width))
            columns = jnp.where(place < taken, columns, -1)
            bits = None
            if self.config.values:
                bits = leaf.gather_row(
                    self.x_gmem, self.view, start, columns, unit_stride=self.config.unit_stride,
                    width=width, interpret=self.interpret,
                )  # fmt: skip
                bits = jnp.where(place < taken, bits, self.fill)
            write(place, columns, bits, width)

        self.each_own(0, self.config.k, step, some)

    # Shared memory.

    def load_bins(self, warpgroup: int) -> jax.Array:
        bins = self.smem["histogram_smem"][warpgroup]
        return plgpu.layout_cast(bins, leaf.layout(BINS, BIN_WIDTH))

    def scan(self, x: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        scratch = self.smem["scan_smem"].at[self.wg]
        return leaf.exclusive_scan(x, scratch, width=width, interpret=self.interpret)

    def sum(self, x: jax.Array, width: int) -> jax.Array:
        scratch = self.smem["scan_smem"].at[self.wg]
        return leaf.reduce_sum(x, scratch, width=width, interpret=self.interpret)

    def barrier(self) -> None:
        leaf.block_barrier(self.smem.get("barrier"), interpret=self.interpret)
