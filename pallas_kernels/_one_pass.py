"""Exact top-k of rows that are read once: the kernel for most calls.

A team of warpgroups takes a row; a block has one or more teams, and for few long rows a cluster of
blocks shares each. Elements are compared by rank key, smaller where a value ranks earlier.

1. A sample spread evenly over the row says, by two or three histograms of 11 bits, below which
   rank key a little more than k elements lie: the *cut*. Every block of a cluster finds the same
   one for itself, from the same sample.
2. The row streams by, and what is not behind the cut goes to shared memory as pairs of bits and
   column, in any order. Whether an element does is asked of its bits: keys are computed later. How
   many there are is counted. Of a key that very many elements share, the leftmost are then looked
   for by column. If they are too few or too many, the cut is found again from the whole row,
   exactly.
3. Pairs are brought to bins, by one histogram over what they span, and each counts those in its bin
   that rank before it. That is its place in the output: the same in every run, whatever the order
   in which lanes came, since no two pairs are equal.

The idea of a cut from a sample is that of Floyd and Rivest's SELECT (1975).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _leaves as leaf
from pallas_kernels import _team as team
from pallas_kernels._compat import pl, plgpu
from pallas_kernels._config import SelectConfig
from pallas_kernels._rows import RowKernel
from pallas_kernels._team import BINS, STEP

DIGIT_BITS = 11

SIGMAS = 4.0
"""By how many standard deviations the cut lies behind where k elements are expected.

One row in 30,000 then has fewer, and is read again.
"""

SPARE = 4
"""Elements more than expected that are let in where a rank is estimated from few."""

FULL = 0.75
"""Part of the room for pairs that may be expected to be filled; more, and the cut is refined."""


def scratch(config: SelectConfig) -> dict[str, Any]:
    """Shared memory of a block."""
    teams = config.teams
    return {
        "pairs_smem": plgpu.SMEM((teams, 2 * config.capacity), jnp.int32),
        "target_smem": plgpu.SMEM((teams, 2 * config.capacity), jnp.int32),
        "histogram_smem": plgpu.SMEM((teams, BINS), jnp.int32),
        "cursor_smem": plgpu.SMEM((teams, BINS), jnp.int32),
        # Few numbers share one array, for each takes up 1 KiB at least.
        "numbers_smem": plgpu.SMEM((teams, 32), jnp.int32),
        "scan_smem": plgpu.SMEM((config.warpgroups, leaf.CHUNK // leaf.LANES * 4), jnp.int32),
    }


class _Row(NamedTuple):
    """Where a row lies, and its valid columns."""

    start: Any
    lead: jax.Array
    begin: jax.Array
    end: jax.Array
    first: jax.Array
    """The first chunk, of `CHUNK` columns from a 16-byte boundary on, that has a valid one."""
    chunks: jax.Array


class _Cut(NamedTuple):
    """What to keep of a row: rank keys up to `limit`, if `some`.

    Where `tied`, too many share the next rank key for all of them to be kept: of these, those are
    still wanted that lie leftmost.
    """

    limit: jax.Array
    some: jax.Array
    tied: jax.Array


class OnePass(RowKernel):
    """The kernel's body for one row."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        config = self.config
        self.members = config.warpgroups // config.teams
        self.team = self.wg // self.members
        self.member = self.wg % self.members
        self.block = jax.lax.axis_index("cluster") if config.cluster > 1 else jnp.int32(0)
        self.pairs = self.smem["pairs_smem"].at[self.team]
        self.target = self.smem["target_smem"].at[self.team]
        self.histogram = self.smem["histogram_smem"].at[self.team]
        self.cursor = self.smem["cursor_smem"].at[self.team]
        numbers = self.smem["numbers_smem"]
        self.found = numbers.at[self.team, pl.ds(0, 4)]
        self.counter = numbers.at[self.team, pl.ds(4, 1)]
        self.lowest = numbers.at[self.team, pl.ds(5, 1)]
        self.ties = numbers.at[self.team, pl.ds(8, 8)]
        self.sums = numbers.at[self.team, pl.ds(16, 16)]
        self.ones = (1 << config.key_bits) - 1
        self.room = np.float32(FULL * config.capacity)

    def prepare(self) -> None:
        self.clear(self.histogram)
        self.clear(self.cursor)
        self.clear_counter()
        self.barrier()

    def first_row(self) -> jax.Array:
        return super().first_row() * self.config.teams + self.team

    def row(self, row: jax.Array) -> None:
        begin, end = self.window(row)
        start = leaf.row_start(self.view, row, interpret=self.interpret)
        lead = start.low & (self.width - 1)
        first = (begin + lead) // leaf.CHUNK
        chunks = jnp.where(end > begin, (end + lead + leaf.CHUNK - 1) // leaf.CHUNK - first, 0)
        place = _Row(start, lead, begin, end, first, chunks)
        taken = jnp.minimum(end - begin, self.config.k)
        if self.config.whole:
            cut, count = self.keep_of_whole(place, taken)
        else:
            cut, count = self.keep(place, taken)
        if self.config.cluster == 1:
            self.finish(row, place, taken, cut, count)
        else:

            @pl.when(self.block == 0)
            def gather():
                team.pull(
                    self.pairs, self.counter, blocks=self.config.cluster,
                    threads=self.members * leaf.LANES, interpret=self.interpret,
                )  # fmt: skip
                self.barrier()

            self.cluster_barrier()  # others may now go on to their next row

            @pl.when(self.block == 0)
            def finish():
                self.finish(row, place, taken, cut, count)

            @pl.when(self.block != 0)
            def reset():
                self.clear_counter()

            self.barrier()

    # Steps 1 and 2.

    def keep(self, place: _Row, taken: jax.Array) -> tuple[_Cut, jax.Array]:
        """Brings to shared memory what can belong to the answer; the cut, and how many they are."""
        capacity = self.config.capacity

        def attempt(state):
            _, sampled, _, _ = state
            cut = jax.lax.cond(
                sampled,
                lambda: self.cut_of_sample(place, taken),
                lambda: self.cut_of_row(place, taken),
            )
            self.stream(place, cut)
            self.barrier()
            self.cluster_barrier()
            count = self.with_ties(place, cut, self.count(), taken)
            again = sampled & ((count < taken) | (count > capacity))

            @pl.when(again)
            def reset():
                self.cluster_barrier()  # the others have read this block's counter
                self.barrier()
                self.clear_counter()
                self.barrier()

            return again, jnp.bool_(False), count, cut

        sampled = place.end - place.begin > capacity
        nothing = _Cut(jnp.uint32(0), jnp.bool_(False), jnp.bool_(False))
        _, _, count, cut = jax.lax.while_loop(
            lambda state: state[0], attempt, (jnp.bool_(True), sampled, jnp.int32(0), nothing)
        )
        return cut, count

    def ranges(self, cut: _Cut) -> tuple[team.Ranges, jax.Array]:
        """The bits to be kept, and whether there are any."""
        (first, last), (first2, last2) = self.keys.kept(jnp.uint32(self.ones) - cut.limit)
        ranges = team.Ranges(first, last - first, first2, last2 - first2)
        return team.Ranges(*(jnp.uint32(n) for n in ranges)), cut.some & (first <= last)

    def stream(self, place: _Row, cut: _Cut) -> None:
        """Appends what is to be kept of the block's part of the row."""
        ranges, some = self.ranges(cut)

        def append(i, bits, *, inside):
            columns = team.Columns(i * leaf.CHUNK - place.lead, place.begin, place.end)
            team.append(
                self.pairs, self.counter, bits, ranges, columns, width=self.width, inside=inside,
                interpret=self.interpret,
            )  # fmt: skip

        first, chunks = self.part(place)
        stop = jnp.where(some, first + chunks, first)
        last = place.first + place.chunks - 1
        starts_inside = place.begin + place.lead <= place.first * leaf.CHUNK
        ends_inside = place.end + place.lead >= (last + 1) * leaf.CHUNK

        def edge(e, _):
            i = jnp.where(e == 0, place.first, last)
            at_edge = jnp.where(
                e == 0, ~starts_inside, ~ends_inside & ((last > place.first) | starts_inside)
            )
            mine = self.member == jnp.where(e == 0, 0, self.members - 1)

            @pl.when(at_edge & mine & (i >= first) & (i < stop))
            def guarded():
                append(i, self.chunk(place, i)[0], inside=False)

        jax.lax.fori_loop(0, 2, edge, None)
        begin = jnp.maximum(first, place.first + jnp.where(starts_inside, 0, 1))
        stop = jnp.minimum(stop, last + jnp.where(ends_inside, 1, 0))
        mine = (stop - begin - self.member + self.members - 1) // self.members

        def index(j):
            return begin + self.member + jnp.minimum(j, mine - 1) * self.members

        def load(j):
            return team.load_chunk(
                self.x_gmem, place.start, index(j) * leaf.CHUNK - place.lead,
                interpret=self.interpret,
            )  # fmt: skip

        @pl.when(mine > 0)
        def most():
            def one(j, bits):
                # The next chunk is on its way while this one is looked at.
                following = load(j + 1)
                append(index(j), bits, inside=True)
                return following

            jax.lax.fori_loop(0, mine, one, load(0))

    def keep_of_whole(self, place: _Row, taken: jax.Array) -> tuple[_Cut, jax.Array]:
        """The same of a row that the team's registers hold: it is its own sample."""
        bits, valid, _ = self.chunk(place, place.first + self.member)
        rank_keys = self.rank_keys(bits)

        def add(histogram, digits):
            self.add_digits(histogram, digits(rank_keys), valid)

        cut = self.find_cut_soon(add, taken, jnp.float32(1))
        ranges, some = self.ranges(cut)

        @pl.when(some)
        def append():
            at = (place.first + self.member) * leaf.CHUNK - place.lead
            team.append(
                self.pairs, self.counter, bits, ranges,
                team.Columns(at, place.begin, place.end), width=self.width, inside=False,
                interpret=self.interpret,
            )  # fmt: skip

        self.barrier()
        return cut, self.with_ties(place, cut, self.count(), taken)

    def cut_of_sample(self, place: _Row, taken: jax.Array) -> _Cut:
        vectors = max(2, 8 // self.width)
        bits = team.load_sample(
            self.x_gmem, place.start, place.lead, place.begin, place.end, self.member,
            vectors=vectors, warpgroups=self.members, interpret=self.interpret,
        )  # fmt: skip
        rank_keys = self.rank_keys(bits)
        size = vectors * self.width * leaf.LANES * self.members

        def add(histogram, digits):
            self.add_digits(histogram, digits(rank_keys), None)

        # The rank r of the k-th element within the sample is about r +- sqrt(r). The rank cut at
        # is the s of which s - SIGMAS * sqrt(s) is still r.
        scale = (place.end - place.begin).astype(jnp.float32) / size
        rank = taken.astype(jnp.float32) / scale
        root = (SIGMAS + jnp.sqrt(SIGMAS**2 + 4 * rank)) / 2
        rank = jnp.minimum((root * root).astype(jnp.int32) + 1, size)
        return self.find_cut_soon(add, rank, scale)

    def cut_of_row(self, place: _Row, taken: jax.Array) -> _Cut:
        def add(histogram, digits):
            def one(j, _):
                bits, valid, _ = self.chunk(place, place.first + self.member + j * self.members)
                self.add_digits(histogram, digits(self.rank_keys(bits)), valid)

            mine = (place.chunks - self.member + self.members - 1) // self.members
            jax.lax.fori_loop(0, mine, one, None)

        return self.find_cut(add, taken, jnp.float32(1))

    def find_cut_soon(self, add, rank: jax.Array, scale: jax.Array) -> _Cut:
        """As `find_cut`, of elements that are at hand, and with less counting.

        Few elements have the rank keys looked for, but most share a few leading digits, and lanes
        that count in one bin wait for each other. So only every eighth is counted by its leading
        digit, to learn between which rank keys the cut must lie, and then those between.
        """
        bits = self.config.key_bits
        shift = max(bits - DIGIT_BITS, 0)
        part = (rank // 8).astype(jnp.float32)
        part = (part + SIGMAS * jnp.sqrt(part)).astype(jnp.int32) + SPARE

        def every_eighth(d):
            chosen = self.iota(d.shape[0], self.width) % 8 == 0
            return jnp.where(chosen, (d >> shift).astype(jnp.int32), -1)

        add(self.histogram, every_eighth)
        bin, _, _, first = self.find_bin(self.histogram, part)
        self.clear(self.histogram)
        lowest = first.astype(jnp.uint32) << shift
        last = jnp.minimum(bin, BINS - 1).astype(jnp.uint32)
        highest = (
            jnp.uint32(self.ones) if shift == 0 else (last << shift) | jnp.uint32((1 << shift) - 1)
        )
        highest = jnp.where(bin < BINS, highest, jnp.uint32(self.ones))
        fine = team.shift_to_bins(highest - lowest, interpret=self.interpret).astype(jnp.uint32)

        def between(d):
            over = jnp.where(d > lowest, d - lowest, jnp.uint32(0))
            return jnp.where(d <= highest, (over >> fine).astype(jnp.int32), -1)

        add(self.cursor, between)
        bin, before, inside, _ = self.find_bin(self.cursor, rank)
        self.clear(self.cursor)
        good = (bin < BINS) & ((before + inside).astype(jnp.float32) * scale <= self.room)
        ends = (((bin + 1).astype(jnp.uint32)) << fine) - jnp.uint32(1)
        limit = jnp.minimum(lowest + ends, highest)

        def again():
            self.barrier()
            return self.find_cut(add, rank, scale)

        return jax.lax.cond(
            good,
            lambda: _Cut(limit, jnp.bool_(True), jnp.bool_(False)),
            again,
        )

    def find_cut(self, add, rank: jax.Array, scale: jax.Array) -> _Cut:
        """The cut at a rank of a sample, each element of which stands for `scale` of the row.

        `add(histogram, digits)` counts `digits` of the sample's rank keys. Histogram and cursors
        are empty before and afterwards.
        """
        rank = jnp.maximum(rank, 1)

        def expected(count):
            return count.astype(jnp.float32) * scale

        def found(key, before, inside):
            """The cut, where all bits of the key are known."""
            tied = expected(before + inside) > self.room
            limit = jnp.where(tied, key - jnp.where(key > 0, 1, 0).astype(jnp.uint32), key)
            return _Cut(limit, ~tied | (key > 0), tied)

        bits = self.config.key_bits
        shift = max(bits - DIGIT_BITS, 0)
        add(self.histogram, lambda d: (d >> shift).astype(jnp.int32))
        key, before, inside, _ = self.find_bin(self.histogram, rank)
        self.clear(self.histogram)
        key = key.astype(jnp.uint32)
        if shift == 0:
            return found(key, before, inside)

        step = min(shift, DIGIT_BITS)
        shift -= step
        add(self.cursor, self.digits_behind(key, shift, step))
        digit, ahead, inside, _ = self.find_bin(self.cursor, rank - before)
        self.clear(self.cursor)
        before = before + ahead
        key = (key << step) | digit.astype(jnp.uint32)
        if shift == 0:
            return found(key, before, inside)

        def coarse():
            limit = (key << shift) | jnp.uint32((1 << shift) - 1)
            return _Cut(limit, jnp.bool_(True), jnp.bool_(False))

        def fine():
            add(self.histogram, self.digits_behind(key, 0, shift))
            digit, ahead, inside, _ = self.find_bin(self.histogram, rank - before)
            self.clear(self.histogram)
            return found((key << shift) | digit.astype(jnp.uint32), before + ahead, inside)

        return jax.lax.cond(expected(before + inside) > self.room, fine, coarse)

    def digits_behind(self, prefix: jax.Array, shift: int, bits: int):
        """Of keys that begin with `prefix`, the next `bits`, which end at `shift`; of others -1."""
        mask = jnp.uint32((1 << bits) - 1)

        def digits(d):
            digit = ((d >> shift) & mask).astype(jnp.int32)
            return jnp.where((d >> (shift + bits)) == prefix, digit, -1)

        return digits

    def add_digits(self, histogram, digits: jax.Array, valid: jax.Array | None) -> None:
        if valid is not None:
            digits = jnp.where(valid, digits, -1)
        leaf.histogram_add(histogram, digits, width=self.width, interpret=self.interpret)

    def chunk(self, place: _Row, i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Bits, validity and columns of a chunk."""
        at = i * leaf.CHUNK - place.lead
        bits = leaf.load_row(
            self.x_gmem, self.view, place.start, at, place.begin, place.end, unit_stride=True,
            interpret=self.interpret,
        )  # fmt: skip
        columns = at + self.iota(leaf.CHUNK, self.width)
        valid = (columns >= place.begin) & (columns < place.end)
        return bits, valid, columns

    def part(self, place: _Row) -> tuple[jax.Array, jax.Array]:
        """The block's first chunk of the row, and how many it has."""
        if self.config.cluster == 1:
            return place.first, place.chunks
        share = (place.chunks + self.config.cluster - 1) // self.config.cluster
        before = jnp.minimum(self.block * share, place.chunks)
        return place.first + before, jnp.minimum(share, place.chunks - before)

    def with_ties(self, place: _Row, cut: _Cut, count: jax.Array, taken: jax.Array) -> jax.Array:
        """Where ties are wanted, appends the leftmost of them; how many pairs there then are.

        All blocks of a cluster look for them, so that all know; the first keeps them.
        """

        def add():
            keeps = self.block == 0
            first = self.counter[0]
            self.cluster_barrier()  # the others have read this block's counter
            self.barrier()
            found = self.add_ties(place, self.tied_key(cut), taken - count, first, keeps)

            @pl.when((self.member == 0) & keeps)
            def add_found():
                self.counter[0] = first + found

            self.barrier()
            return count + found

        return jax.lax.cond(cut.tied & (count < taken), add, lambda: count)

    def tied_key(self, cut: _Cut) -> jax.Array:
        """The rank key behind the cut."""
        return jnp.where(cut.some, cut.limit + jnp.uint32(1), jnp.uint32(0))

    def add_ties(self, place: _Row, key, most: jax.Array, first: jax.Array, keeps) -> jax.Array:
        """Finds the `most` leftmost elements of a rank key, if there are so many.

        Where it `keeps` them they become pairs `first` and on. How many were found.
        """

        def one(state):
            step, found = state
            bits, valid, columns = self.chunk(
                place, place.first + step * self.members + self.member
            )
            same = jnp.where(valid & (self.rank_keys(bits) == key), 1, 0)
            before, total = leaf.exclusive_scan(
                same, self.smem["scan_smem"].at[self.wg], width=self.width,
                interpret=self.interpret,
            )  # fmt: skip
            self.ties[self.member] = total
            self.barrier()
            before = found + before
            for m in range(self.members):
                part = self.ties[m]
                before = before + jnp.where(m < self.member, part, 0)
                found = found + part
            self.barrier()
            slots = jnp.where((same == 1) & (before < most) & keeps, first + before, -1)
            team.store_pairs(
                self.pairs, slots, bits, columns, width=self.width, interpret=self.interpret
            )
            return step + 1, found

        steps = (place.chunks + self.members - 1) // self.members
        _, found = jax.lax.while_loop(
            lambda state: (state[0] < steps) & (state[1] < most), one, (jnp.int32(0), jnp.int32(0))
        )
        return jnp.minimum(found, most)

    # Step 3.

    def finish(self, row, place: _Row, taken: jax.Array, cut: _Cut, count: jax.Array) -> None:
        """Orders the pairs and writes the row's output. Leaves shared memory as it was before."""

        def each(pairs, body, to_rank_keys=lambda rank_keys: rank_keys):
            def one(at):
                keys, columns = team.load_pairs(pairs, at, count, interpret=self.interpret)
                body(to_rank_keys(keys), columns)

            self.each_step(count, one)

        def lower(rank_keys, columns):
            rank_keys = jnp.where(columns < 0, jnp.uint32(2**32 - 1), rank_keys)
            team.lower_to(self.lowest, rank_keys, interpret=self.interpret)

        each(self.pairs, lower, self.rank_keys)
        self.barrier()
        lowest = self.lowest[0].astype(jnp.uint32)
        highest = jnp.where(cut.tied, self.tied_key(cut), cut.limit)
        reach = jnp.where(highest > lowest, highest - lowest, jnp.uint32(0))
        shift = team.shift_to_bins(reach, interpret=self.interpret).astype(jnp.uint32)

        def bins_of(rank_keys, columns):
            bins = jnp.minimum((rank_keys - lowest) >> shift, jnp.uint32(BINS - 1))
            return jnp.where(columns < 0, -1, bins.astype(jnp.int32))

        def count_bins(rank_keys, columns):
            bins = bins_of(rank_keys, columns)
            leaf.histogram_add(self.histogram, bins, width=1, interpret=self.interpret)

        each(self.pairs, count_bins, self.rank_keys)
        self.barrier()
        self.place_bins()
        self.barrier()
        self.clear(self.histogram)
        self.clear_counter()

        def to_bins(rank_keys, columns):
            bins = bins_of(rank_keys, columns)
            slots = team.take_slots(self.cursor, bins, interpret=self.interpret)
            team.store_pairs(
                self.target, slots, rank_keys, columns, width=1, interpret=self.interpret
            )

        each(self.pairs, to_bins, self.rank_keys)
        self.barrier()

        def rank(rank_keys, columns):
            bins = bins_of(rank_keys, columns)
            # By now a bin's cursor is where it ends, and the next one's pairs begin.
            first = team.look_up(self.cursor, bins - 1, interpret=self.interpret)
            needed = (columns >= 0) & (first < taken)
            stop = team.look_up(self.cursor, jnp.where(needed, bins, -1), interpret=self.interpret)
            place = first + team.rank_among(
                self.target, first, stop, rank_keys, columns, interpret=self.interpret
            )
            place = jnp.where(needed & (place < taken), place, -1)
            team.store_pairs(
                self.pairs, place, rank_keys, columns, width=1, interpret=self.interpret
            )

        each(self.target, rank)
        self.barrier()
        self.clear(self.cursor)
        self.write(row, place, taken)
        self.barrier()

    def place_bins(self) -> None:
        """Sets the cursors to where each bin's pairs begin."""

        @pl.when(self.member == 0)
        def scan():
            counts = plgpu.layout_cast(self.histogram[...], leaf.layout(BINS, 4))
            before, _ = leaf.exclusive_scan(
                counts, self.smem["scan_smem"].at[self.wg], width=4, interpret=self.interpret
            )
            self.cursor[...] = before

    def write(self, row, place: _Row, taken: jax.Array) -> None:
        write = self.writer(row, place.begin)

        def some(at):
            rank_keys, columns = team.load_pairs(self.pairs, at, taken, interpret=self.interpret)
            bits = None
            if self.config.values:
                bits, alone = self.keys.from_key(jnp.uint32(self.ones) - rank_keys)
                if alone is not None:
                    there = leaf.gather_row(
                        self.x_gmem, self.view, place.start, jnp.where(alone, -1, columns),
                        unit_stride=True, width=1, interpret=self.interpret,
                    )  # fmt: skip
                    bits = jnp.where(alone, bits, there)
                bits = jnp.where(columns < 0, self.fill, bits)
            write(at + self.iota(STEP, 1), columns, bits, 1)

        self.each_step(jnp.int32(self.config.k), some)

    # Vectors and shared memory.

    def rank_keys(self, bits: jax.Array) -> jax.Array:
        return jnp.uint32(self.ones) - self.keys.to_key(bits)

    def each_step(self, count: jax.Array, body) -> None:
        """Runs `body(at)` for this warpgroup's share of the steps of pairs up to `count`."""
        steps = (count + STEP - 1) // STEP
        mine = (steps - self.member + self.members - 1) // self.members

        def one(j, _):
            body((self.member + j * self.members) * STEP)

        jax.lax.fori_loop(0, mine, one, None)

    def find_bin(self, histogram, rank: jax.Array) -> list[jax.Array]:
        """What `_team.find_bin` finds, once all have counted. The histogram may then be cleared."""
        self.barrier()

        @pl.when(self.member == 0)
        def find():
            team.find_bin(histogram, rank, self.found, self.sums, interpret=self.interpret)

        self.barrier()
        return [self.found[i] for i in range(4)]

    def count(self) -> jax.Array:
        if self.config.cluster > 1:
            return team.cluster_total(
                self.counter, blocks=self.config.cluster, interpret=self.interpret
            )
        return self.counter[0]

    def clear(self, bins) -> None:
        """Zeroes a histogram; each warpgroup its part."""
        part = BINS // self.members
        bins[pl.ds(self.member * part, part)] = self.splat(part, min(4, part // leaf.LANES), 0)

    def clear_counter(self) -> None:
        @pl.when(self.member == 0)
        def zero():
            self.counter[0] = jnp.int32(0)
            self.lowest[0] = jnp.int32(-1)  # the largest, read as unsigned

    def barrier(self) -> None:
        team.barrier(
            self.team, warpgroups=self.members, teams=self.config.teams,
            interpret=self.interpret,
        )  # fmt: skip

    def cluster_barrier(self) -> None:
        if self.config.cluster > 1:
            team.cluster_barrier(interpret=self.interpret)
