"""Leaves of the one-pass kernel, each with a plain-JAX twin; see `_leaves` for what that is.

A team is one or more warpgroups that share a row, and shared memory of their own. What a row's
elements are kept as there is a *pair*: rank key and column, in the two halves of a 64-bit number,
so that pairs compare as elements rank. A rank key is smaller where a value ranks earlier. The
twins' additions are not atomic: interpreted teams have one warpgroup.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _lanes as lanes
from pallas_kernels._compat import (
    arith,
    inline_ptx,
    ir,
    llvm,
    math,
    memref_ptr,
    nvvm,
    plgpu,
    scf,
    thread_idx,
    vector,
)
from pallas_kernels._lanes import LANES, WARP
from pallas_kernels._leaves import CHUNK, LOAD_BYTES, _as_uint32, layout, vector_width
from pallas_kernels._record import Wide

BINS = 2048
STEP = 512
"""Pairs a warpgroup handles at a time, 4 a lane."""

PAIRS = layout(STEP, 1) if plgpu is not None else None
"""How a vector of them lies over the lanes: neighbours in neighbouring lanes."""


def _uint32(fragments: Any) -> Any:
    return type(fragments)(
        _registers=fragments.registers, _layout=fragments.layout, _is_signed=False
    )


def _uint32_vector(size: int, where: Any) -> Any:
    return plgpu.ShapeDtypeStruct((size,), jnp.uint32, layout=where)


def _atomic_add(pointer: Any, value: Any) -> Any:
    """Adds to shared memory; what was there before."""
    i32 = ir.IntegerType.get_signless(32)
    return inline_ptx(
        "atom.relaxed.cta.shared::cta.add.u32 $0, [$1], $2;", pointer, value,
        result_types=i32, has_side_effects=True,
    )  # fmt: skip


def _pair(rank_key: Any, column: Any) -> Any:
    i64 = ir.IntegerType.get_signless(64)
    high = arith.shli(arith.extui(i64, rank_key), lanes.c64(32))
    return arith.ori(high, arith.extui(i64, column))


def _store_pair(base: Any, place: Any, rank_key: Any, column: Any) -> None:
    i64 = ir.IntegerType.get_signless(64)
    llvm.store(_pair(rank_key, column), lanes.address(base, place, i64), alignment=8)


def barrier(team: jax.Array, *, warpgroups: int, teams: int, interpret: bool) -> None:
    """All warpgroups of the team wait for each other; memory written before is seen after."""
    if interpret:
        assert warpgroups == 1
        return

    @plgpu.inline_mgpu(arg_types=(lanes.SCALAR,))
    def wait(ctx, team):
        # Behind barrier 0, the block's, and Mosaic's own for each warpgroup.
        first = lanes.c32(1 + warpgroups * teams)
        nvvm.barrier(
            barrier_id=arith.addi(first, lanes.scalar(team)),
            number_of_threads=lanes.c32(warpgroups * LANES),
        )

    wait(team)


def load_chunk(x_gmem: Any, start: Wide, first: jax.Array, *, interpret: bool) -> jax.Array:
    """Bits of columns `first .. first + CHUNK` of a row, as uint32; all of them must exist.

    `start + first` must lie on a 16-byte boundary.
    """
    width = vector_width(x_gmem.dtype)
    if interpret:
        index = start.low + first + jnp.arange(CHUNK, dtype=jnp.int32)
        return _as_uint32(x_gmem[...])[index]

    @plgpu.inline_mgpu(
        arg_types=(lanes.INPUT, *[lanes.SCALAR] * 3),
        return_type=_uint32_vector(CHUNK, layout(CHUNK, width)),
    )
    def load(ctx, x, low, high, first):
        element = lanes.bits_type(x)
        packed = ir.VectorType.get((width,), element)
        wide = ir.VectorType.get((width,), ir.IntegerType.get_signless(32))
        mine = arith.addi(lanes.scalar(first), arith.muli(lanes.lane(), lanes.c32(width)))
        index = arith.addi(lanes.wide(low, high), lanes.sign_extended(mine))
        base = lanes.address(memref_ptr(x), index, element)
        registers = []
        for r in range(CHUNK // (LANES * width)):
            at = lanes.address(base, lanes.c64(r * LANES * width), element)
            loaded = llvm.load(packed, at, alignment=LOAD_BYTES)
            if element.width < 32:
                loaded = arith.extui(wide, loaded)
            registers.append([vector.extract(loaded, [], [j]) for j in range(width)])
        return _uint32(lanes.fragments_of(registers, CHUNK))

    return load(x_gmem, *start, first)


def load_sample(
    x_gmem: Any,
    start: Wide,
    lead: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    warpgroup: jax.Array,
    *,
    vectors: int,
    warpgroups: int,
    interpret: bool,
) -> jax.Array:
    """Bits of elements spread evenly over a row, as uint32: a warpgroup's part of the sample.

    The sample is `warpgroups * 128 * vectors` loads of 16 bytes, two and two side by side, all
    within columns `[begin, end)`, which hold at least two. A power of two in all.
    """
    width = vector_width(x_gmem.dtype)
    size = LANES * vectors * width
    pairs = warpgroups * LANES * vectors // 2
    if interpret:
        first = (begin + lead + width - 1) // width
        count = (end + lead) // width - first
        r = jnp.arange(size, dtype=jnp.int32) // width
        v = warpgroup * LANES * vectors + r
        at = first + ((v >> 1) * (count - 1)) // pairs + (v & 1)
        index = start.low - lead + at * width + jnp.arange(size, dtype=jnp.int32) % width
        return _as_uint32(x_gmem[...])[index]

    where = layout(size, width)

    @plgpu.inline_mgpu(
        arg_types=(lanes.INPUT, *[lanes.SCALAR] * 6), return_type=_uint32_vector(size, where)
    )
    def load(ctx, x, low, high, lead, begin, end, warpgroup):
        i32 = ir.IntegerType.get_signless(32)
        element = lanes.bits_type(x)
        lead, begin, end, warpgroup = map(lanes.scalar, (lead, begin, end, warpgroup))
        origin = arith.subi(lanes.wide(low, high), lanes.sign_extended(lead))
        round_up = arith.addi(arith.addi(begin, lead), lanes.c32(width - 1))
        first = arith.divui(round_up, lanes.c32(width))
        stop = arith.divui(arith.addi(end, lead), lanes.c32(width))
        steps = lanes.sign_extended(arith.subi(arith.subi(stop, first), lanes.c32(1)))
        packed = ir.VectorType.get((width,), element)
        wide = ir.VectorType.get((width,), i32)
        base = memref_ptr(x)
        registers = []
        for r in range(vectors):
            v = arith.addi(
                arith.muli(warpgroup, lanes.c32(LANES * vectors)),
                arith.addi(lanes.lane(), lanes.c32(r * LANES)),
            )
            pair = lanes.sign_extended(arith.shrui(v, lanes.c32(1)))
            at = arith.shrui(arith.muli(pair, steps), lanes.c64(pairs.bit_length() - 1))
            at = arith.addi(at, lanes.sign_extended(arith.andi(v, lanes.c32(1))))
            at = arith.addi(at, lanes.sign_extended(first))
            index = arith.addi(origin, arith.muli(at, lanes.c64(width)))
            loaded = llvm.load(packed, lanes.address(base, index, element), alignment=LOAD_BYTES)
            if element.width < 32:
                loaded = arith.extui(wide, loaded)
            registers.append([vector.extract(loaded, [], [j]) for j in range(width)])
        return _uint32(lanes.fragments_of(registers, size))

    return load(x_gmem, *start, lead, begin, end, warpgroup)


def find_bin(
    hist_smem: Any, rank: jax.Array, found_smem: Any, scratch_smem: Any, *, interpret: bool
) -> None:
    """Finds the bin that holds the `rank`-th of what is counted, from 1 and from bin 0 up.

    One warpgroup of a team does. Writes to `found_smem`: the bin, what is counted before it, what
    is counted in it, and the first bin that is not empty. If fewer are counted, the bin is BINS
    and what is counted before it is all. `scratch_smem` holds 16 int32.
    """
    if interpret:
        counts = hist_smem[...]
        upto = jnp.cumsum(counts, dtype=jnp.int32)
        found = jnp.sum(upto < rank, dtype=jnp.int32)
        at = jnp.minimum(found, BINS - 1)
        inside = jnp.where(found < BINS, counts[at], 0)
        found_smem[0] = found
        found_smem[1] = upto[at] - inside
        found_smem[2] = inside
        found_smem[3] = jnp.sum(upto == 0, dtype=jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(lanes.REF, lanes.SCALAR, lanes.REF, lanes.REF))
    def find(ctx, hist, rank, found, scratch):
        i32 = ir.IntegerType.get_signless(32)
        four = ir.VectorType.get((4,), i32)
        base, out, sums = memref_ptr(hist), memref_ptr(found), memref_ptr(scratch)
        rank = lanes.scalar(rank)
        warp = arith.andi(arith.shrui(thread_idx(), lanes.c32(5)), lanes.c32(3))
        last = lanes.compare("eq", lanes.lane_of_warp(), lanes.c32(WARP - 1))
        groups = BINS // (4 * LANES)
        counts, totals, inclusive = [], [], []
        for g in range(groups):
            # Neighbours in neighbouring lanes, so that no two want one bank.
            at = arith.addi(arith.muli(lanes.lane(), lanes.c32(4)), lanes.c32(g * 4 * LANES))
            loaded = llvm.load(four, lanes.address(base, at, i32), alignment=16)
            counts.append([vector.extract(loaded, [], [i]) for i in range(4)])
            total = counts[g][0]
            for c in counts[g][1:]:
                total = arith.addi(total, c)
            totals.append(total)
            inclusive.append(lanes.warp_inclusive_sum(total))
            place = arith.addi(warp, lanes.c32(4 * g))
            lanes.when(
                last,
                lambda g=g, p=place: llvm.store(inclusive[g], lanes.address(sums, p, i32)),
            )

        def store(place, value):
            llvm.store(value, lanes.address(out, lanes.c32(place), i32))

        first_lane = lanes.compare("eq", lanes.lane(), lanes.c32())

        def none_yet():
            store(0, lanes.c32(BINS))
            store(2, lanes.c32())
            store(3, lanes.c32(BINS))

        lanes.when(first_lane, none_yet)
        lanes.warpgroup_barrier()
        running = lanes.c32()
        for g in range(groups):
            before = running
            for w in range(4):
                part = llvm.load(i32, lanes.address(sums, lanes.c32(4 * g + w), i32))
                earlier = lanes.compare("ult", lanes.c32(w), warp)
                before = arith.addi(before, arith.select(earlier, part, lanes.c32()))
                running = arith.addi(running, part)
            before = arith.addi(before, arith.subi(inclusive[g], totals[g]))
            upto = before
            for i, c in enumerate(counts[g]):
                ahead, upto = upto, arith.addi(upto, c)
                bin = arith.addi(
                    arith.muli(lanes.lane(), lanes.c32(4)), lanes.c32(g * 4 * LANES + i)
                )

                def store_it(bin=bin, c=c, ahead=ahead):
                    store(0, bin)
                    store(1, ahead)
                    store(2, c)

                here = arith.andi(
                    lanes.compare("slt", ahead, rank), lanes.compare("sge", upto, rank)
                )
                lanes.when(here, store_it)
                leads = arith.andi(
                    lanes.compare("eq", ahead, lanes.c32()), lanes.compare("sgt", c, lanes.c32())
                )
                lanes.when(leads, lambda bin=bin: store(3, bin))
        few = arith.andi(first_lane, lanes.compare("slt", running, rank))
        lanes.when(few, lambda: store(1, running))
        lanes.warpgroup_barrier()

    find(hist_smem, rank, found_smem, scratch_smem)


class Ranges(NamedTuple):
    """Which bits (uint32) are kept: `[first, first + span]`, and `[first2, first2 + span2]`."""

    first: Any
    span: Any
    first2: Any
    span2: Any


class Columns(NamedTuple):
    """Where a chunk lies in its row, and which columns are valid."""

    at: jax.Array
    begin: jax.Array
    end: jax.Array


def append(
    pairs_smem: Any, counter_smem: Any, bits: jax.Array, ranges: Ranges, columns: Columns, *,
    width: int, inside: bool, interpret: bool,
) -> None:  # fmt: skip
    """Appends pairs of bits and column, of a chunk's elements that are kept; counts them.

    In any order, and those beyond the end of `pairs_smem` are counted only. `inside` promises that
    all columns are valid.
    """
    capacity = pairs_smem.shape[0] // 2
    if interpret:
        at = columns.at + jnp.arange(CHUNK, dtype=jnp.int32)
        kept = (bits - ranges.first <= ranges.span) | (bits - ranges.first2 <= ranges.span2)
        if not inside:
            kept &= (at >= columns.begin) & (at < columns.end)
        first = counter_smem[0]
        kept_before = jnp.cumsum(kept, dtype=jnp.int32) - kept
        _put(pairs_smem, jnp.where(kept, first + kept_before, -1), bits, at)
        counter_smem[0] = first + jnp.sum(kept, dtype=jnp.int32)
        return

    where = layout(CHUNK, width)

    @plgpu.inline_mgpu(arg_types=(lanes.REF, lanes.REF, where, *[lanes.SCALAR] * 7))
    def add(ctx, pairs, counter, bits, *scalars):
        i32 = ir.IntegerType.get_signless(32)
        base, count = memref_ptr(pairs), memref_ptr(counter)
        first, span, first2, span2, at, begin, end = map(lanes.scalar, scalars)
        mine = arith.addi(at, arith.muli(lanes.lane(), lanes.c32(width)))
        registers = lanes.elements_of(bits)

        def column(r, e):
            return arith.addi(mine, lanes.c32(r * LANES * width + e))

        def in_ranges(element):
            return arith.ori(
                lanes.compare("ule", arith.subi(element, first), span),
                lanes.compare("ule", arith.subi(element, first2), span2),
            )

        def kept(r, e):
            is_kept = in_ranges(registers[r][e])
            if not inside:
                c = column(r, e)
                valid = arith.andi(lanes.compare("sge", c, begin), lanes.compare("slt", c, end))
                is_kept = arith.andi(is_kept, valid)
            return is_kept

        def any_kept(r):
            result = kept(r, 0)
            for e in range(1, width):
                result = arith.ori(result, kept(r, e))
            return result

        def store_kept(r):
            """One load's elements, of all lanes of a warp."""
            below = arith.subi(arith.shli(lanes.c32(1), lanes.lane_of_warp()), lanes.c32(1))
            flags = [kept(r, e) for e in range(width)]
            ballots = [lanes.ballot(flag) for flag in flags]
            sizes = [math.ctpop(ballot) for ballot in ballots]
            total = sizes[0]
            for size in sizes[1:]:
                total = arith.addi(total, size)
            leader = lanes.compare("eq", lanes.lane_of_warp(), lanes.c32())
            place = lanes.if_(leader, lambda: _atomic_add(count, total), lanes.c32, i32)
            place = lanes.from_lane(place, 0)
            for e, (flag, ballot, size) in enumerate(zip(flags, ballots, sizes, strict=True)):
                own = arith.addi(place, math.ctpop(arith.andi(ballot, below)))
                fits = arith.andi(flag, lanes.compare("ult", own, lanes.c32(capacity)))
                lanes.when(
                    fits,
                    lambda p=own, e=e: _store_pair(base, p, registers[r][e], column(r, e)),
                )
                place = arith.addi(place, size)

        def store_all():
            for r in range(len(registers)):
                lanes.when(lanes.any_of_warp(any_kept(r)), lambda r=r: store_kept(r))

        anyone = any_kept(0)
        for r in range(1, len(registers)):
            anyone = arith.ori(anyone, any_kept(r))
        lanes.when(lanes.any_of_warp(anyone), store_all)
        lanes.warp_barrier()

    add(pairs_smem, counter_smem, bits, *ranges, *columns)


def load_pairs(
    pairs_smem: Any, first: jax.Array, count: jax.Array, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Both halves of pairs `first .. first + STEP`, the key's first; (0, -1) from `count` on."""
    if interpret:
        at = first + jnp.arange(STEP, dtype=jnp.int32)
        inside = at < count
        at = jnp.where(inside, at, 0)
        both = pairs_smem[...]
        keys = jnp.where(inside, both[2 * at + 1], 0)
        return (
            jax.lax.bitcast_convert_type(keys, jnp.uint32), jnp.where(inside, both[2 * at], -1),
        )  # fmt: skip

    @plgpu.inline_mgpu(
        arg_types=(lanes.REF, lanes.SCALAR, lanes.SCALAR),
        return_type=(_uint32_vector(STEP, PAIRS), lanes.int32_vector((STEP,), PAIRS)),
    )
    def load(ctx, pairs, first, count):
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        base = memref_ptr(pairs)
        first, count = lanes.scalar(first), lanes.scalar(count)
        keys, columns = [], []
        for r in range(STEP // LANES):
            at = arith.addi(first, arith.addi(lanes.lane(), lanes.c32(r * LANES)))
            pair = lanes.if_(
                lanes.compare("slt", at, count),
                lambda at=at: llvm.load(i64, lanes.address(base, at, i64), alignment=8),
                lambda: lanes.c64(2**32 - 1),
                i64,
            )
            keys.append([arith.trunci(i32, arith.shrui(pair, lanes.c64(32)))])
            columns.append([arith.trunci(i32, pair)])
        lanes.warp_barrier()
        return _uint32(lanes.fragments_of(keys, STEP)), lanes.fragments_of(columns, STEP)

    return load(pairs_smem, first, count)


def take_slots(cursor_smem: Any, bins: jax.Array, *, interpret: bool) -> jax.Array:
    """A slot for each bin of a vector (int32): what its cursor says, which moves on by one.

    -1 for a bin of -1. Which of several lanes with one bin comes first is left open.
    """
    if interpret:
        same = (bins[:, None] == bins[None, :]) & (bins >= 0)[None, :]
        earlier = jnp.sum(jnp.tril(same, -1), axis=1, dtype=jnp.int32)
        cursors = cursor_smem[...]
        slots = jnp.where(bins < 0, -1, cursors[jnp.maximum(bins, 0)] + earlier)
        padded = jnp.concatenate([cursors, jnp.zeros(1, jnp.int32)])
        moved = padded.at[jnp.where(bins < 0, BINS, bins)].add(1)
        cursor_smem[...] = moved[:-1]
        return slots

    @plgpu.inline_mgpu(arg_types=(lanes.REF, PAIRS), return_type=lanes.int32_vector((STEP,), PAIRS))
    def take(ctx, cursor, bins):
        i32 = ir.IntegerType.get_signless(32)
        base = memref_ptr(cursor)
        slots = [
            [
                lanes.if_(
                    lanes.compare("sge", b, lanes.c32()),
                    lambda b=b: _atomic_add(lanes.address(base, b, i32), lanes.c32(1)),
                    lambda: lanes.c32(-1),
                    i32,
                )
                for b in elements
            ]
            for elements in lanes.elements_of(bins)
        ]
        lanes.warp_barrier()
        return lanes.fragments_of(slots, STEP)

    return take(cursor_smem, bins)


def store_pairs(
    pairs_smem: Any, places: jax.Array, rank_keys: jax.Array, columns: jax.Array, *, width: int,
    interpret: bool,
) -> None:  # fmt: skip
    """Writes pairs to their places (int32); those out of range are skipped."""
    size = places.shape[0]
    capacity = pairs_smem.shape[0] // 2
    if interpret:
        _put(pairs_smem, places, rank_keys, columns)
        return

    where = layout(size, width)

    @plgpu.inline_mgpu(arg_types=(lanes.REF, where, where, where))
    def store(ctx, pairs, places, rank_keys, columns):
        base = memref_ptr(pairs)
        vectors = (lanes.elements_of(v) for v in (places, rank_keys, columns))
        for elements in zip(*vectors, strict=True):
            for p, k, c in zip(*elements, strict=True):
                lanes.when(
                    lanes.compare("ult", p, lanes.c32(capacity)),
                    lambda p=p, k=k, c=c: _store_pair(base, p, k, c),
                )
        lanes.warp_barrier()

    store(pairs_smem, places, rank_keys, columns)


def rank_among(
    pairs_smem: Any, first: jax.Array, stop: jax.Array, rank_keys: jax.Array, columns: jax.Array,
    *, interpret: bool,
) -> jax.Array:  # fmt: skip
    """How many of the pairs `first .. stop` (int32 vectors) rank before each of a vector."""
    if interpret:
        both = pairs_smem[...].reshape(-1, 2)
        keys = jax.lax.bitcast_convert_type(both[:, 1], jnp.uint32)[None, :]
        at = jnp.arange(both.shape[0], dtype=jnp.int32)[None, :]
        mates = (at >= first[:, None]) & (at < stop[:, None])
        equal = (keys == rank_keys[:, None]) & (both[:, 0][None, :] < columns[:, None])
        earlier = (keys < rank_keys[:, None]) | equal
        return jnp.sum(mates & earlier, axis=1, dtype=jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(lanes.REF, PAIRS, PAIRS, PAIRS, PAIRS),
        return_type=lanes.int32_vector((STEP,), PAIRS),
    )
    def rank(ctx, pairs, first, stop, rank_keys, columns):
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        base = memref_ptr(pairs)
        first, stop, rank_keys, columns = (
            [element for (element,) in lanes.elements_of(v)]
            for v in (first, stop, rank_keys, columns)
        )
        own = [_pair(key, column) for key, column in zip(rank_keys, columns, strict=True)]
        sizes = [arith.subi(end, begin) for begin, end in zip(first, stop, strict=True)]
        most = sizes[0]
        for size in sizes[1:]:
            most = arith.maxsi(most, size)
        # Side by side, so that their loads wait together.
        loop = scf.ForOp(lanes.c32(), most, lanes.c32(1), [lanes.c32() for _ in own])
        with ir.InsertionPoint(loop.body):
            step = loop.induction_variable
            counts = []
            for begin, size, pair, count in zip(
                first, sizes, own, loop.inner_iter_args, strict=True
            ):
                within = lanes.compare("slt", step, size)
                at = arith.select(within, arith.addi(begin, step), begin)
                mate = llvm.load(i64, lanes.address(base, at, i64), alignment=8)
                earlier = arith.andi(within, lanes.compare("ult", mate, pair))
                counts.append(arith.addi(count, arith.extui(i32, earlier)))
            scf.yield_(counts)
        lanes.warp_barrier()
        return lanes.fragments_of([[result] for result in loop.results], STEP)

    return rank(pairs_smem, first, stop, rank_keys, columns)


def lower_to(number_smem: Any, numbers: jax.Array, *, interpret: bool) -> None:
    """Makes `number_smem[0]` (int32, read as unsigned) at most each of a vector (uint32)."""
    if interpret:
        was = jax.lax.bitcast_convert_type(number_smem[0], jnp.uint32)
        least = jnp.minimum(was, jnp.min(numbers))
        number_smem[0] = jax.lax.bitcast_convert_type(least, jnp.int32)
        return

    @plgpu.inline_mgpu(arg_types=(lanes.REF, PAIRS))
    def lower(ctx, number, numbers):
        i32 = ir.IntegerType.get_signless(32)
        least, *others = (element for (element,) in lanes.elements_of(numbers))
        for other in others:
            least = arith.minui(least, other)
        least = inline_ptx(
            "redux.sync.min.u32 $0, $1, 0xffffffff;", least, result_types=i32,
            has_side_effects=True, convergent=True,
        )  # fmt: skip
        inline_ptx(
            "red.relaxed.cta.shared::cta.min.u32 [$0], $1;", memref_ptr(number), least,
            predicate=lanes.compare("eq", lanes.lane_of_warp(), lanes.c32()),
            has_side_effects=True,
        )  # fmt: skip

    lower(number_smem, numbers)


def look_up(numbers_smem: Any, places: jax.Array, *, interpret: bool) -> jax.Array:
    """`numbers_smem[p]` for each place of a vector (int32), 0 where it is negative."""
    if interpret:
        return jnp.where(places < 0, 0, numbers_smem[...][jnp.maximum(places, 0)])

    @plgpu.inline_mgpu(arg_types=(lanes.REF, PAIRS), return_type=lanes.int32_vector((STEP,), PAIRS))
    def look(ctx, numbers, places):
        i32 = ir.IntegerType.get_signless(32)
        base = memref_ptr(numbers)
        found = [
            [
                lanes.if_(
                    lanes.compare("sge", p, lanes.c32()),
                    lambda p=p: llvm.load(i32, lanes.address(base, p, i32)),
                    lanes.c32,
                    i32,
                )
                for p in elements
            ]
            for elements in lanes.elements_of(places)
        ]
        lanes.warp_barrier()
        return lanes.fragments_of(found, STEP)

    return look(numbers_smem, places)


def shift_to_bins(reach: jax.Array, *, interpret: bool) -> jax.Array:
    """The least shift after which a number (uint32) is a bin."""
    bits = BINS.bit_length() - 1
    if interpret:
        return jnp.maximum(32 - bits - jax.lax.clz(reach).astype(jnp.int32), 0)

    @plgpu.inline_mgpu(arg_types=(lanes.SCALAR,), return_type=lanes.int32_vector((), lanes.SCALAR))
    def shift(ctx, reach):
        zeros = lanes.leading_zeros(lanes.scalar(reach))
        least = arith.subi(lanes.c32(32 - bits), zeros)
        return lanes.splat(arith.maxsi(least, lanes.c32()))

    return shift(reach)


# Clusters: several blocks share a row, and reach each other's shared memory.


def cluster_barrier(*, interpret: bool) -> None:
    """All blocks of the cluster wait for each other; memory written before is seen after."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def wait(ctx):
        nvvm.cluster_arrive(aligned=True)
        nvvm.cluster_wait(aligned=True)

    wait()


def _of_peer(pointer: Any, peer: Any) -> Any:
    """The address of the same place in another block's shared memory."""
    i32 = ir.IntegerType.get_signless(32)
    own = llvm.ptrtoint(i32, pointer)
    return inline_ptx("mapa.shared::cluster.u32 $0, $1, $2;", own, peer, result_types=i32)


def cluster_total(counter_smem: Any, *, blocks: int, interpret: bool) -> jax.Array:
    """The sum of the blocks' counters."""
    if interpret:
        return counter_smem[0]

    @plgpu.inline_mgpu(arg_types=(lanes.REF,), return_type=lanes.int32_vector((), lanes.SCALAR))
    def add(ctx, counter):
        i32 = ir.IntegerType.get_signless(32)
        peer = arith.andi(lanes.lane_of_warp(), lanes.c32(blocks - 1))
        at = _of_peer(memref_ptr(counter), peer)
        count = inline_ptx(
            "ld.shared::cluster.u32 $0, [$1];", at, result_types=i32, has_side_effects=True
        )
        inclusive = lanes.warp_inclusive_sum(count)
        return lanes.splat(lanes.from_lane(inclusive, blocks - 1))

    return add(counter_smem)


def pull(pairs_smem: Any, counter_smem: Any, *, blocks: int, threads: int, interpret: bool) -> None:
    """Block 0 appends the pairs of the other blocks to its own; all its threads take part."""
    if interpret:
        return

    @plgpu.inline_mgpu(arg_types=(lanes.REF, lanes.REF))
    def copy(ctx, pairs, counter):
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        base, count = memref_ptr(pairs), memref_ptr(counter)
        ends = []
        running = lanes.c32()
        for b in range(blocks):
            part = inline_ptx(
                "ld.shared::cluster.u32 $0, [$1];", _of_peer(count, lanes.c32(b)),
                result_types=i32, has_side_effects=True,
            )  # fmt: skip
            running = arith.addi(running, part)
            ends.append(running)
        first = arith.addi(ends[0], thread_idx())
        loop = scf.ForOp(first, ends[-1], lanes.c32(threads), [])
        with ir.InsertionPoint(loop.body):
            at = loop.induction_variable
            peer, begin = lanes.c32(), lanes.c32()
            for end in ends[:-1]:
                past = lanes.compare("sge", at, end)
                peer = arith.addi(peer, arith.extui(i32, past))
                begin = arith.select(past, end, begin)
            source = arith.addi(
                _of_peer(base, peer), arith.muli(arith.subi(at, begin), lanes.c32(8))
            )
            pair = inline_ptx(
                "ld.shared::cluster.u64 $0, [$1];", source, result_types=i64,
                has_side_effects=True,
            )  # fmt: skip
            llvm.store(pair, lanes.address(base, at, i64), alignment=8)
            scf.yield_([])
        lanes.warp_barrier()

    copy(pairs_smem, counter_smem)


def _put(pairs_smem: Any, places: Any, rank_keys: Any, columns: Any) -> None:
    """Twin of stores of pairs; places out of range are skipped."""
    capacity = pairs_smem.shape[0] // 2
    places = jnp.where((places < 0) | (places >= capacity), capacity, places)
    both = pairs_smem[...]
    keys = jax.lax.bitcast_convert_type(rank_keys.astype(jnp.uint32), jnp.int32)
    both = both.at[2 * places].set(columns, mode="drop")
    pairs_smem[...] = both.at[2 * places + 1].set(keys, mode="drop")
