"""The steps Pallas has no words for, each with a plain-JAX twin.

A leaf is a few lines of per-lane code (`inline_mgpu`) for what vectors of a warpgroup cannot
say: bounds-checked loads, shared-memory atomics, prefix sums, indexed stores. Beside each stands
its twin in ordinary JAX, which the GPU interpreter runs; kernels are written against the leaf
and never know which. Vectors hold `CHUNK` elements (or any multiple of 128 lanes) as 32-bit
integers in `WG_STRIDED` layout, so element i of a vector is column i of a chunk.

Addresses are 64-bit inside a leaf; between leaves they travel as `Wide`, two int32 halves.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _lanes as lanes
from pallas_kernels._compat import (
    Fragments,
    arith,
    gpu,
    inline_ptx,
    ir,
    llvm,
    memref_ptr,
    nvvm,
    pl,
    plgpu,
    thread_idx,
    vector,
)
from pallas_kernels._lanes import LANES
from pallas_kernels._record import PARAMETER_SHIFT, Rows, Wide

CHUNK = 2048
"""Columns a warpgroup handles at a time: 16 a lane."""

LOAD_BYTES = 16


def vector_width(dtype: Any) -> int:
    """Elements of a 16-byte load."""
    return LOAD_BYTES // np.dtype(dtype).itemsize


def layout(size: int, width: int) -> Any:
    """How a vector of `size` elements lies over the lanes, `width` neighbours a lane."""
    return plgpu.Layout.WG_STRIDED((size,), width)


# The leaves.


def parameter(ref: Any, *, interpret: bool) -> Wide:
    """The number passed as an operand's address; the twin finds it in the operand.

    The launch passes it shifted up by `PARAMETER_SHIFT`.
    """
    if interpret:
        return Wide(ref[0], ref[1])

    @plgpu.inline_mgpu(
        arg_types=(lanes.INPUT,),
        return_type=(lanes.int32_vector((), lanes.SCALAR), lanes.int32_vector((), lanes.SCALAR)),
    )
    def read(ctx, ref):
        i64 = ir.IntegerType.get_signless(64)
        return lanes.halves(
            arith.shrui(llvm.ptrtoint(i64, memref_ptr(ref)), lanes.c64(PARAMETER_SHIFT))
        )

    return Wide(*read(ref))


def row_start(rows: Rows, row: jax.Array, *, interpret: bool) -> Wide:
    """The buffer's element at which a row begins: the offset plus index times stride."""
    if interpret:
        start = rows.offset.low
        for size, stride in zip(reversed(rows.sizes), reversed(rows.strides), strict=True):
            start += (row % size) * stride.low
            row = row // size
        return Wide(start, jnp.int32(0))

    dims = len(rows.sizes)

    @plgpu.inline_mgpu(
        arg_types=(lanes.SCALAR,) * (3 + 3 * dims),
        return_type=(lanes.int32_vector((), lanes.SCALAR), lanes.int32_vector((), lanes.SCALAR)),
    )
    def locate(ctx, row, low, high, *dimensions):
        rest = lanes.scalar(row)
        start = lanes.wide(low, high)
        for d in reversed(range(dims)):
            size, stride_low, stride_high = dimensions[3 * d : 3 * d + 3]
            index = rest
            if d > 0:
                index, rest = (
                    arith.remui(rest, lanes.scalar(size)),
                    arith.divui(rest, lanes.scalar(size)),
                )
            stride = lanes.wide(stride_low, stride_high)
            start = arith.addi(start, arith.muli(lanes.sign_extended(index), stride))
        return lanes.halves(start)

    dimensions = zip(rows.sizes, rows.strides, strict=True)
    return Wide(*locate(row, *rows.offset, *(x for size, w in dimensions for x in (size, *w))))


def load_row(
    x_gmem: Any,
    rows: Rows,
    start: Wide,
    first: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    *,
    unit_stride: bool,
    interpret: bool,
) -> jax.Array:
    """Bits of columns `first .. first + CHUNK` of a row, as uint32.

    Only columns in `[begin, end)` mean anything; the others come back as anything. With a unit
    column stride, `start + first` must lie on a 16-byte boundary: the load of a vector that
    holds a valid column then rounds out to that boundary, but not past the first or last
    element that any row holds.
    """
    dtype = np.dtype(x_gmem.dtype)
    width = vector_width(dtype)
    if interpret:
        size = x_gmem.shape[0]
        stride = jnp.int32(1) if unit_stride else rows.column_stride.low
        columns = first + jnp.arange(CHUNK, dtype=jnp.int32)
        bits = _as_uint32(x_gmem[...])
        valid = (columns >= begin) & (columns < end)
        index = jnp.clip(start.low + columns * stride, 0, size - 1)
        return jnp.where(valid, bits[index], jnp.uint32(0xA5A5A5A5))

    @plgpu.inline_mgpu(
        arg_types=(lanes.INPUT, *[lanes.SCALAR] * 11),
        return_type=plgpu.ShapeDtypeStruct((CHUNK,), jnp.uint32, layout=layout(CHUNK, width)),
    )
    def load(ctx, x, *scalars):
        i32 = ir.IntegerType.get_signless(32)
        element = lanes.bits_type(x)
        base = memref_ptr(x)
        start, stride, lowest, limit = (lanes.wide(*scalars[i : i + 2]) for i in (0, 2, 4, 6))
        first, begin, end = (lanes.scalar(x) for x in scalars[8:])
        mine = arith.addi(first, arith.muli(lanes.lane(), lanes.c32(width)))

        def one(index):
            value = llvm.load(element, lanes.address(base, index, element))
            return value if dtype.itemsize == 4 else arith.extui(i32, value)

        def narrow(column):
            """A vector's elements one by one, each only if it is valid."""
            index = lanes.sign_extended(column)
            if not unit_stride:
                index = arith.muli(index, stride)
            index = arith.addi(start, index)
            valid = arith.andi(
                lanes.compare("sge", column, begin), lanes.compare("slt", column, end)
            )
            return lanes.if_(valid, lambda: one(index), lanes.c32, i32)

        registers = []
        for r in range(CHUNK // (LANES * width)):
            column = arith.addi(mine, lanes.c32(r * LANES * width))
            columns = [arith.addi(column, lanes.c32(j)) for j in range(width)]
            if not unit_stride:
                registers.append([narrow(c) for c in columns])
                continue
            packed = ir.VectorType.get((width,), element)
            wide = ir.VectorType.get((width,), i32)
            index = arith.addi(start, lanes.sign_extended(column))
            touched = arith.andi(
                lanes.compare("sgt", arith.addi(column, lanes.c32(width)), begin),
                lanes.compare("slt", column, end),
            )
            inside = arith.andi(
                lanes.compare("sge", index, lowest),
                lanes.compare("sle", arith.addi(index, lanes.c64(width)), limit),
            )

            def whole(index=index, packed=packed, wide=wide):
                loaded = llvm.load(
                    packed, lanes.address(base, index, element), alignment=LOAD_BYTES
                )
                return loaded if dtype.itemsize == 4 else arith.extui(wide, loaded)

            def edge(columns=columns, touched=touched, wide=wide):
                def elements():
                    return vector.from_elements(wide, [narrow(c) for c in columns])

                def nothing():
                    return vector.broadcast(wide, lanes.c32())

                return lanes.if_(touched, elements, nothing, wide)

            vectors = lanes.if_(arith.andi(touched, inside), whole, edge, wide)
            registers.append([vector.extract(vectors, [], [j]) for j in range(width)])
        lanes.warp_barrier()
        result = lanes.fragments_of(registers, CHUNK)
        return Fragments(_registers=result.registers, _layout=result.layout, _is_signed=False)

    return load(
        x_gmem, *start, *rows.column_stride, *rows.offset, *rows.end, first, begin, end
    )  # fmt: skip


def gather_row(
    x_gmem: Any,
    rows: Rows,
    start: Wide,
    columns: jax.Array,
    *,
    unit_stride: bool,
    width: int,
    interpret: bool,
) -> jax.Array:
    """Bits of the row's elements at `columns` (int32), as uint32; 0 where the column is < 0."""
    dtype = np.dtype(x_gmem.dtype)
    size = columns.shape[0]
    if interpret:
        stride = jnp.int32(1) if unit_stride else rows.column_stride.low
        index = jnp.clip(start.low + columns * stride, 0, x_gmem.shape[0] - 1)
        return jnp.where(columns >= 0, _as_uint32(x_gmem[...])[index], jnp.uint32(0))

    where = layout(size, width)

    @plgpu.inline_mgpu(
        arg_types=(lanes.INPUT, *[lanes.SCALAR] * 4, where),
        return_type=plgpu.ShapeDtypeStruct((size,), jnp.uint32, layout=where),
    )
    def gather(ctx, x, low, high, stride_low, stride_high, columns):
        i32 = ir.IntegerType.get_signless(32)
        element = lanes.bits_type(x)
        base = memref_ptr(x)
        start, stride = lanes.wide(low, high), lanes.wide(stride_low, stride_high)

        def one(column):
            index = lanes.sign_extended(column)
            if not unit_stride:
                index = arith.muli(index, stride)
            index = arith.addi(start, index)
            value = llvm.load(element, lanes.address(base, index, element))
            return value if dtype.itemsize == 4 else arith.extui(i32, value)

        registers = [
            [
                lanes.if_(lanes.compare("sge", c, lanes.c32()), lambda c=c: one(c), lanes.c32, i32)
                for c in elements
            ]
            for elements in lanes.elements_of(columns)
        ]
        lanes.warp_barrier()
        result = lanes.fragments_of(registers, size)
        return Fragments(_registers=result.registers, _layout=result.layout, _is_signed=False)

    return gather(x_gmem, *start, *rows.column_stride, columns)


def histogram_add(hist_smem: Any, bins: jax.Array, *, width: int, interpret: bool) -> None:
    """Adds 1 to `hist_smem[b]` for every b of `bins` (int32) that is 0 or more.

    The histogram belongs to one warpgroup: its lanes' additions are atomic, the twin's are not.
    """
    size = bins.shape[0]
    if interpret:
        counted = jnp.zeros((hist_smem.shape[0] + 1,), jnp.int32)
        counted = counted.at[jnp.where(bins < 0, hist_smem.shape[0], bins)].add(1)
        hist_smem[...] = hist_smem[...] + counted[:-1]
        return

    @plgpu.inline_mgpu(arg_types=(lanes.REF, layout(size, width)))
    def add(ctx, hist, bins):
        i32 = ir.IntegerType.get_signless(32)
        base = memref_ptr(hist)
        for elements in lanes.elements_of(bins):
            for b in elements:
                # Without a result (red) and with the scope of a block: llvm.atomicrmw gives
                # a returning atomic of system scope.
                inline_ptx(
                    "red.relaxed.cta.shared::cta.add.u32 [$0], $1;",
                    lanes.address(base, b, i32),
                    lanes.c32(1),
                    predicate=lanes.compare("sge", b, lanes.c32()),
                    has_side_effects=True,
                )
        lanes.warpgroup_barrier()

    add(hist_smem, bins)


def exclusive_scan(
    x: jax.Array, scratch_smem: Any, *, width: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Sums of all elements before each one, and the sum of all (int32).

    `scratch_smem` holds 4 int32 for every 128 * `width` elements and belongs to one warpgroup.
    """
    size = x.shape[0]
    if interpret:
        inclusive = jnp.cumsum(x, dtype=jnp.int32)
        return inclusive - x, inclusive[-1]

    where = layout(size, width)

    @plgpu.inline_mgpu(
        arg_types=(where, lanes.REF),
        return_type=(lanes.int32_vector((size,), where), lanes.int32_vector((), lanes.SCALAR)),
    )
    def scan(ctx, x, scratch):
        i32 = ir.IntegerType.get_signless(32)
        registers = lanes.elements_of(x)
        warps = LANES // 32
        lane = arith.andi(thread_idx(), lanes.c32(31))
        warp = arith.andi(arith.shrui(thread_idx(), lanes.c32(5)), lanes.c32(warps - 1))
        base = memref_ptr(scratch)
        full, clamp = lanes.c32(0xFFFFFFFF), lanes.c32(0)

        before_lane = []
        for r, elements in enumerate(registers):
            own = elements[0]
            for e in elements[1:]:
                own = arith.addi(own, e)
            inclusive = own
            for step in (1, 2, 4, 8, 16):
                below = nvvm.shfl_sync(full, inclusive, lanes.c32(step), clamp, nvvm.ShflKind.up)
                inclusive = arith.select(
                    lanes.compare("sge", lane, lanes.c32(step)),
                    arith.addi(inclusive, below),
                    inclusive,
                )
            before_lane.append(arith.subi(inclusive, own))
            slot = arith.addi(warp, lanes.c32(r * warps))
            lanes.when(
                lanes.compare("eq", lane, lanes.c32(31)),
                lambda v=inclusive, s=slot: llvm.store(v, lanes.address(base, s, i32)),
            )
        lanes.warpgroup_barrier()
        running = lanes.c32()
        result = []
        for r, elements in enumerate(registers):
            before = running
            for w in range(warps):
                total = llvm.load(i32, lanes.address(base, lanes.c32(r * warps + w), i32))
                counts = lanes.compare("ult", lanes.c32(w), warp)
                before = arith.addi(before, arith.select(counts, total, lanes.c32()))
                running = arith.addi(running, total)
            before = arith.addi(before, before_lane[r])
            sums = []
            for e in elements:
                sums.append(before)
                before = arith.addi(before, e)
            result.append(sums)
        lanes.warpgroup_barrier()  # the next scan may write the scratch
        return lanes.fragments_of(result, size), Fragments.splat(running, (), is_signed=True)

    return scan(x, scratch_smem)


def reduce_sum(x: jax.Array, scratch_smem: Any, *, width: int, interpret: bool) -> jax.Array:
    """The sum of all elements (int32). Scratch as for `exclusive_scan`, 4 int32 are enough.

    `jnp.sum` lowers too, but all warpgroups of a block then share one scratch and overwrite
    each other's partial sums (jax 0.11.2 and 0.12, Warpgroup semantics).
    """
    if interpret:
        return jnp.sum(x, dtype=jnp.int32)

    @plgpu.inline_mgpu(
        arg_types=(layout(x.shape[0], width), lanes.REF),
        return_type=lanes.int32_vector((), lanes.SCALAR),
    )
    def reduce(ctx, x, scratch):
        i32 = ir.IntegerType.get_signless(32)
        total = lanes.c32()
        for elements in lanes.elements_of(x):
            for e in elements:
                total = arith.addi(total, e)
        full, clamp = lanes.c32(0xFFFFFFFF), lanes.c32(31)
        for step in (16, 8, 4, 2, 1):
            other = nvvm.shfl_sync(full, total, lanes.c32(step), clamp, nvvm.ShflKind.bfly)
            total = arith.addi(total, other)
        base = memref_ptr(scratch)
        warp = arith.andi(arith.shrui(thread_idx(), lanes.c32(5)), lanes.c32(LANES // 32 - 1))
        lane = arith.andi(thread_idx(), lanes.c32(31))
        lanes.when(
            lanes.compare("eq", lane, lanes.c32()),
            lambda: llvm.store(total, lanes.address(base, warp, i32)),
        )
        lanes.warpgroup_barrier()
        result = lanes.c32()
        for w in range(LANES // 32):
            result = arith.addi(result, llvm.load(i32, lanes.address(base, lanes.c32(w), i32)))
        lanes.warpgroup_barrier()  # the next sum may write the scratch
        return Fragments.splat(result, (), is_signed=True)

    return reduce(x, scratch_smem)


def store_run(
    target: Any, positions: jax.Array, values: jax.Array, *, width: int, interpret: bool
) -> None:
    """`target[p] = v` for every position in range; the others are skipped.

    The positions in range (int32) rise by one from each to the next. Values are uint32 or int32
    and are cut to the target's width, or sign-extended to an int64; a float target takes them as
    bits.
    """
    size = positions.shape[0]
    length = target.shape[0]
    if interpret:
        kept = (positions >= 0) & (positions < length)
        order = jnp.argsort(~kept, stable=True)
        bits = values.astype(jnp.uint32)[order]
        first = positions[order][0]
        count = jnp.sum(kept, dtype=jnp.int32)
        done = jnp.int32(0)
        # Slices have static sizes: one store for each binary digit of the count.
        for digit in range(min(size, length).bit_length()):
            part = 1 << digit

            @pl.when((count & part) != 0)
            def store(done=done, part=part):
                # Floats only now: moving them about may change a NaN's bits on a CPU.
                run = jax.lax.dynamic_slice(bits, (done,), (part,))
                target[pl.ds(first + done, part)] = _from_uint32(run, target.dtype)

            done = done + (count & part)
        return

    where = layout(size, width)

    @plgpu.inline_mgpu(arg_types=(lanes.REF, where, where))
    def store_lanes(ctx, target, positions, values):
        element = lanes.bits_type(target)
        base = memref_ptr(target)
        for p_elements, v_elements in zip(
            lanes.elements_of(positions), lanes.elements_of(values), strict=True
        ):
            for p, v in zip(p_elements, v_elements, strict=True):
                if element.width != 32:
                    v = (arith.extsi if element.width == 64 else arith.trunci)(element, v)
                lanes.when(
                    lanes.compare(
                        "ult", p, lanes.c32(length)
                    ),  # unsigned: a negative one is too large
                    lambda p=p, v=v: llvm.store(
                        v, lanes.address(base, lanes.sign_extended(p), element)
                    ),
                )
        lanes.warpgroup_barrier()

    store_lanes(target, positions, values)


def compare_exchange(
    keys_smem: Any,
    columns_smem: Any,
    log_block: jax.Array,
    log_distance: jax.Array,
    *,
    warpgroup: jax.Array,
    warpgroups: int,
    interpret: bool,
) -> None:
    """One step of a bitonic sort of (key, column) pairs, by all warpgroups together.

    Pairs `2**log_distance` apart are put in order, in alternating directions from one block of
    `2**log_block` to the next; in order means larger key (uint32) first, then lower column.
    """
    size = keys_smem.shape[0]
    if interpret:

        @pl.when(warpgroup == 0)
        def whole_step():
            at = jnp.arange(size, dtype=jnp.int32)
            other = at ^ (1 << log_distance)
            keys, columns = keys_smem[...], columns_smem[...]
            their_keys, their_columns = keys[other], columns[other]
            mine_first = (keys > their_keys) | ((keys == their_keys) & (columns < their_columns))
            forward = ((at >> log_block) & 1) == 0
            keep = mine_first == (forward == (at < other))
            # Of two equal pairs either may stay.
            keep |= (keys == their_keys) & (columns == their_columns)
            keys_smem[...] = jnp.where(keep, keys, their_keys)
            columns_smem[...] = jnp.where(keep, columns, their_columns)

        return

    @plgpu.inline_mgpu(arg_types=(lanes.REF, lanes.REF, lanes.SCALAR, lanes.SCALAR))
    def step(ctx, keys, columns, log_block, log_distance):
        i32 = ir.IntegerType.get_signless(32)
        key_base, column_base = memref_ptr(keys), memref_ptr(columns)
        log_block, log_distance = lanes.scalar(log_block), lanes.scalar(log_distance)
        distance = arith.shli(lanes.c32(1), log_distance)
        within = arith.subi(distance, lanes.c32(1))
        threads = warpgroups * LANES

        def exchange(pair):
            above = arith.shrui(pair, log_distance)
            low = arith.ori(
                arith.shli(above, arith.addi(log_distance, lanes.c32(1))), arith.andi(pair, within)
            )
            high = arith.ori(low, distance)
            ka, kb = (lanes.address(key_base, i, i32) for i in (low, high))
            ca, cb = (lanes.address(column_base, i, i32) for i in (low, high))
            key_a, key_b = llvm.load(i32, ka), llvm.load(i32, kb)
            column_a, column_b = llvm.load(i32, ca), llvm.load(i32, cb)
            a_first = arith.ori(
                lanes.compare("ugt", key_a, key_b),
                arith.andi(
                    lanes.compare("eq", key_a, key_b), lanes.compare("slt", column_a, column_b)
                ),
            )
            forward = lanes.compare(
                "eq", arith.andi(arith.shrui(low, log_block), lanes.c32(1)), lanes.c32()
            )

            def swap():
                llvm.store(key_b, ka)
                llvm.store(key_a, kb)
                llvm.store(column_b, ca)
                llvm.store(column_a, cb)

            lanes.when(arith.xori(a_first, forward), swap)

        for i in range(0, size // 2, threads):
            pair = arith.addi(thread_idx(), lanes.c32(i))
            lanes.when(
                lanes.compare("ult", pair, lanes.c32(size // 2)), lambda pair=pair: exchange(pair)
            )
        lanes.warp_barrier()

    step(keys_smem, columns_smem, log_block, log_distance)


def block_barrier(barrier: Any, *, interpret: bool) -> None:
    """All warpgroups of the block wait for each other; memory written before is seen after."""
    if interpret:
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        return

    @plgpu.inline_mgpu()
    def wait(ctx):
        gpu.barrier()

    wait()


def _as_uint32(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, np.dtype(f"uint{np.dtype(x.dtype).itemsize * 8}"))
    return bits.astype(jnp.uint32)


def _from_uint32(bits: jax.Array, dtype: Any) -> jax.Array:
    unsigned = np.dtype(f"uint{np.dtype(dtype).itemsize * 8}")
    return jax.lax.bitcast_convert_type(bits.astype(unsigned), dtype)
