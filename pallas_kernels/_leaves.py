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

from pallas_kernels._compat import (
    Fragments,
    StridedLayout,
    arith,
    constant,
    gpu,
    inline_ptx,
    ir,
    llvm,
    memref_ptr,
    nvvm,
    pl,
    plgpu,
    scf,
    thread_idx,
    vector,
)
from pallas_kernels._record import PARAMETER_SHIFT, Rows, Wide

CHUNK = 2048
"""Columns a warpgroup handles at a time: 16 a lane."""

LANES = 128
LOAD_BYTES = 16


def vector_width(dtype: Any) -> int:
    """Elements of a 16-byte load."""
    return LOAD_BYTES // np.dtype(dtype).itemsize


def layout(size: int, width: int) -> Any:
    """How a vector of `size` elements lies over the lanes, `width` neighbours a lane."""
    return plgpu.Layout.WG_STRIDED((size,), width)


# Lane-level helpers. Each emits code for one lane.


def _i32(value: int = 0) -> Any:
    return constant(value, ir.IntegerType.get_signless(32))


def _i64(value: int = 0) -> Any:
    return constant(value, ir.IntegerType.get_signless(64))


def _scalar(fragments: Any) -> Any:
    return fragments.registers.item()


def _wide(low: Any, high: Any) -> Any:
    """The 64-bit number of two halves, which are uniform vectors."""
    i64 = ir.IntegerType.get_signless(64)
    low, high = arith.extui(i64, _scalar(low)), arith.extui(i64, _scalar(high))
    return arith.ori(low, arith.shli(high, _i64(32)))


def _halves(number: Any) -> tuple[Any, Any]:
    """A 64-bit number as two uniform vectors."""
    i32 = ir.IntegerType.get_signless(32)
    low = arith.trunci(i32, number)
    high = arith.trunci(i32, arith.shrui(number, _i64(32)))
    return tuple(Fragments.splat(half, (), is_signed=True) for half in (low, high))


def _sign_extended(value: Any) -> Any:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def _compare(kind: str, a: Any, b: Any) -> Any:
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, b)


def _lane() -> Any:
    return arith.andi(thread_idx(), _i32(LANES - 1))


def _address(pointer: Any, index: Any, element: Any) -> Any:
    dynamic = -(2**31)  # MLIR's mark for an index given as an operand
    return llvm.getelementptr(
        pointer.type, pointer, [index], [dynamic], element, llvm.GEPNoWrapFlags.none
    )


def _bits_type(ref: Any) -> Any:
    element = ir.MemRefType(ref.type).element_type
    return ir.IntegerType.get_signless(element.width)


def _if(condition: Any, then: Any, otherwise: Any, kind: Any) -> Any:
    """`then()` where the lane's condition holds, else `otherwise()`; both give a `kind`."""
    branch = scf.IfOp(condition, [kind], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([then()])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([otherwise()])
    return branch.results[0]


def _when(condition: Any, then: Any) -> None:
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        then()
        scf.yield_([])


# Mosaic's own barrier is an asm statement that LLVM may copy into both arms of a branch, where
# lanes of one warp then wait at different copies: a hang, seen on an H200. The two below are
# intrinsics that it may not copy, and no code before them runs together with code after them. So
# every leaf in which lanes part ends with one.


def _warpgroup_barrier() -> None:
    """The warpgroup's lanes wait for each other; barrier 0 is the block's."""
    warpgroup = arith.shrui(thread_idx(), _i32(7))
    nvvm.barrier(barrier_id=arith.addi(warpgroup, _i32(1)), number_of_threads=_i32(LANES))


def _warp_barrier() -> None:
    nvvm.bar_warp_sync(_i32(0xFFFFFFFF))


def _elements(fragments: Any) -> list[list[Any]]:
    """A lane's elements, register by register."""
    width = fragments.layout.vec_size
    return [
        [vector.extract(register, [], [j]) for j in range(width)]
        for register in fragments.registers
    ]


def _fragments(registers: list[list[Any]], size: int) -> Any:
    """A vector of int32 from each lane's elements."""
    width = len(registers[0])
    kind = ir.VectorType.get((width,), ir.IntegerType.get_signless(32))
    packed = np.empty(len(registers), dtype=object)
    for r, elements in enumerate(registers):
        packed[r] = vector.from_elements(kind, elements)
    return Fragments(_registers=packed, _layout=StridedLayout((size,), width), _is_signed=True)


def _int32(shape: tuple[int, ...], where: Any) -> Any:
    return plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=where)


SCALAR = None if plgpu is None else plgpu.Layout.WG_SPLAT
REF = None if plgpu is None else plgpu.RefType()


# The leaves.


def parameter(ref: Any, *, interpret: bool) -> Wide:
    """The number passed as an operand's address; the twin finds it in the operand.

    The launch passes it shifted up by `PARAMETER_SHIFT`.
    """
    if interpret:
        return Wide(ref[0], ref[1])

    @plgpu.inline_mgpu(arg_types=(REF,), return_type=(_int32((), SCALAR), _int32((), SCALAR)))
    def read(ctx, ref):
        i64 = ir.IntegerType.get_signless(64)
        return _halves(arith.shrui(llvm.ptrtoint(i64, memref_ptr(ref)), _i64(PARAMETER_SHIFT)))

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
        arg_types=(SCALAR,) * (3 + 3 * dims), return_type=(_int32((), SCALAR), _int32((), SCALAR))
    )
    def locate(ctx, row, low, high, *dimensions):
        rest = _scalar(row)
        start = _wide(low, high)
        for d in reversed(range(dims)):
            size, stride_low, stride_high = dimensions[3 * d : 3 * d + 3]
            index = rest
            if d > 0:
                index, rest = arith.remui(rest, _scalar(size)), arith.divui(rest, _scalar(size))
            stride = _wide(stride_low, stride_high)
            start = arith.addi(start, arith.muli(_sign_extended(index), stride))
        return _halves(start)

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
        arg_types=(REF, *[SCALAR] * 11),
        return_type=plgpu.ShapeDtypeStruct((CHUNK,), jnp.uint32, layout=layout(CHUNK, width)),
    )
    def load(ctx, x, *scalars):
        i32 = ir.IntegerType.get_signless(32)
        element = _bits_type(x)
        base = memref_ptr(x)
        start, stride, lowest, limit = (_wide(*scalars[i : i + 2]) for i in (0, 2, 4, 6))
        first, begin, end = (_scalar(x) for x in scalars[8:])
        mine = arith.addi(first, arith.muli(_lane(), _i32(width)))

        def one(index):
            value = llvm.load(element, _address(base, index, element))
            return value if dtype.itemsize == 4 else arith.extui(i32, value)

        def narrow(column):
            """A vector's elements one by one, each only if it is valid."""
            index = _sign_extended(column)
            if not unit_stride:
                index = arith.muli(index, stride)
            index = arith.addi(start, index)
            valid = arith.andi(_compare("sge", column, begin), _compare("slt", column, end))
            return _if(valid, lambda: one(index), _i32, i32)

        registers = []
        for r in range(CHUNK // (LANES * width)):
            column = arith.addi(mine, _i32(r * LANES * width))
            columns = [arith.addi(column, _i32(j)) for j in range(width)]
            if not unit_stride:
                registers.append([narrow(c) for c in columns])
                continue
            packed = ir.VectorType.get((width,), element)
            wide = ir.VectorType.get((width,), i32)
            index = arith.addi(start, _sign_extended(column))
            touched = arith.andi(
                _compare("sgt", arith.addi(column, _i32(width)), begin),
                _compare("slt", column, end),
            )
            inside = arith.andi(
                _compare("sge", index, lowest),
                _compare("sle", arith.addi(index, _i64(width)), limit),
            )

            def whole(index=index, packed=packed, wide=wide):
                loaded = llvm.load(packed, _address(base, index, element), alignment=LOAD_BYTES)
                return loaded if dtype.itemsize == 4 else arith.extui(wide, loaded)

            def edge(columns=columns, touched=touched, wide=wide):
                def elements():
                    return vector.from_elements(wide, [narrow(c) for c in columns])

                def nothing():
                    return vector.broadcast(wide, _i32())

                return _if(touched, elements, nothing, wide)

            vectors = _if(arith.andi(touched, inside), whole, edge, wide)
            registers.append([vector.extract(vectors, [], [j]) for j in range(width)])
        _warp_barrier()
        result = _fragments(registers, CHUNK)
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
        arg_types=(REF, *[SCALAR] * 4, where),
        return_type=plgpu.ShapeDtypeStruct((size,), jnp.uint32, layout=where),
    )
    def gather(ctx, x, low, high, stride_low, stride_high, columns):
        i32 = ir.IntegerType.get_signless(32)
        element = _bits_type(x)
        base = memref_ptr(x)
        start, stride = _wide(low, high), _wide(stride_low, stride_high)

        def one(column):
            index = _sign_extended(column)
            if not unit_stride:
                index = arith.muli(index, stride)
            index = arith.addi(start, index)
            value = llvm.load(element, _address(base, index, element))
            return value if dtype.itemsize == 4 else arith.extui(i32, value)

        registers = [
            [_if(_compare("sge", c, _i32()), lambda c=c: one(c), _i32, i32) for c in elements]
            for elements in _elements(columns)
        ]
        _warp_barrier()
        result = _fragments(registers, size)
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

    @plgpu.inline_mgpu(arg_types=(REF, layout(size, width)))
    def add(ctx, hist, bins):
        i32 = ir.IntegerType.get_signless(32)
        base = memref_ptr(hist)
        for elements in _elements(bins):
            for b in elements:
                # Without a result (red) and with the scope of a block: llvm.atomicrmw gives
                # a returning atomic of system scope.
                inline_ptx(
                    "red.relaxed.cta.shared::cta.add.u32 [$0], $1;",
                    _address(base, b, i32),
                    _i32(1),
                    predicate=_compare("sge", b, _i32()),
                    has_side_effects=True,
                )
        _warpgroup_barrier()

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
        arg_types=(where, REF), return_type=(_int32((size,), where), _int32((), SCALAR))
    )
    def scan(ctx, x, scratch):
        i32 = ir.IntegerType.get_signless(32)
        registers = _elements(x)
        warps = LANES // 32
        lane = arith.andi(thread_idx(), _i32(31))
        warp = arith.andi(arith.shrui(thread_idx(), _i32(5)), _i32(warps - 1))
        base = memref_ptr(scratch)
        full, clamp = _i32(0xFFFFFFFF), _i32(0)

        before_lane = []
        for r, elements in enumerate(registers):
            own = elements[0]
            for e in elements[1:]:
                own = arith.addi(own, e)
            inclusive = own
            for step in (1, 2, 4, 8, 16):
                below = nvvm.shfl_sync(full, inclusive, _i32(step), clamp, nvvm.ShflKind.up)
                inclusive = arith.select(
                    _compare("sge", lane, _i32(step)), arith.addi(inclusive, below), inclusive
                )
            before_lane.append(arith.subi(inclusive, own))
            slot = arith.addi(warp, _i32(r * warps))
            _when(
                _compare("eq", lane, _i32(31)),
                lambda v=inclusive, s=slot: llvm.store(v, _address(base, s, i32)),
            )
        _warpgroup_barrier()
        running = _i32()
        result = []
        for r, elements in enumerate(registers):
            before = running
            for w in range(warps):
                total = llvm.load(i32, _address(base, _i32(r * warps + w), i32))
                counts = _compare("ult", _i32(w), warp)
                before = arith.addi(before, arith.select(counts, total, _i32()))
                running = arith.addi(running, total)
            before = arith.addi(before, before_lane[r])
            sums = []
            for e in elements:
                sums.append(before)
                before = arith.addi(before, e)
            result.append(sums)
        _warpgroup_barrier()  # the next scan may write the scratch
        return _fragments(result, size), Fragments.splat(running, (), is_signed=True)

    return scan(x, scratch_smem)


def reduce_sum(x: jax.Array, scratch_smem: Any, *, width: int, interpret: bool) -> jax.Array:
    """The sum of all elements (int32). Scratch as for `exclusive_scan`, 4 int32 are enough.

    `jnp.sum` lowers too, but all warpgroups of a block then share one scratch and overwrite
    each other's partial sums (jax 0.11.2 and 0.12, Warpgroup semantics).
    """
    if interpret:
        return jnp.sum(x, dtype=jnp.int32)

    @plgpu.inline_mgpu(arg_types=(layout(x.shape[0], width), REF), return_type=_int32((), SCALAR))
    def reduce(ctx, x, scratch):
        i32 = ir.IntegerType.get_signless(32)
        total = _i32()
        for elements in _elements(x):
            for e in elements:
                total = arith.addi(total, e)
        full, clamp = _i32(0xFFFFFFFF), _i32(31)
        for step in (16, 8, 4, 2, 1):
            other = nvvm.shfl_sync(full, total, _i32(step), clamp, nvvm.ShflKind.bfly)
            total = arith.addi(total, other)
        base = memref_ptr(scratch)
        warp = arith.andi(arith.shrui(thread_idx(), _i32(5)), _i32(LANES // 32 - 1))
        lane = arith.andi(thread_idx(), _i32(31))
        _when(
            _compare("eq", lane, _i32()),
            lambda: llvm.store(total, _address(base, warp, i32)),
        )
        _warpgroup_barrier()
        result = _i32()
        for w in range(LANES // 32):
            result = arith.addi(result, llvm.load(i32, _address(base, _i32(w), i32)))
        _warpgroup_barrier()  # the next sum may write the scratch
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

    @plgpu.inline_mgpu(arg_types=(REF, where, where))
    def store_lanes(ctx, target, positions, values):
        element = _bits_type(target)
        base = memref_ptr(target)
        for p_elements, v_elements in zip(_elements(positions), _elements(values), strict=True):
            for p, v in zip(p_elements, v_elements, strict=True):
                if element.width != 32:
                    v = (arith.extsi if element.width == 64 else arith.trunci)(element, v)
                _when(
                    _compare("ult", p, _i32(length)),  # unsigned: a negative one is too large
                    lambda p=p, v=v: llvm.store(v, _address(base, _sign_extended(p), element)),
                )
        _warpgroup_barrier()

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

    @plgpu.inline_mgpu(arg_types=(REF, REF, SCALAR, SCALAR))
    def step(ctx, keys, columns, log_block, log_distance):
        i32 = ir.IntegerType.get_signless(32)
        key_base, column_base = memref_ptr(keys), memref_ptr(columns)
        log_block, log_distance = _scalar(log_block), _scalar(log_distance)
        distance = arith.shli(_i32(1), log_distance)
        within = arith.subi(distance, _i32(1))
        threads = warpgroups * LANES

        def exchange(pair):
            above = arith.shrui(pair, log_distance)
            low = arith.ori(
                arith.shli(above, arith.addi(log_distance, _i32(1))), arith.andi(pair, within)
            )
            high = arith.ori(low, distance)
            ka, kb = (_address(key_base, i, i32) for i in (low, high))
            ca, cb = (_address(column_base, i, i32) for i in (low, high))
            key_a, key_b = llvm.load(i32, ka), llvm.load(i32, kb)
            column_a, column_b = llvm.load(i32, ca), llvm.load(i32, cb)
            a_first = arith.ori(
                _compare("ugt", key_a, key_b),
                arith.andi(_compare("eq", key_a, key_b), _compare("slt", column_a, column_b)),
            )
            forward = _compare("eq", arith.andi(arith.shrui(low, log_block), _i32(1)), _i32())

            def swap():
                llvm.store(key_b, ka)
                llvm.store(key_a, kb)
                llvm.store(column_b, ca)
                llvm.store(column_a, cb)

            _when(arith.xori(a_first, forward), swap)

        for i in range(0, size // 2, threads):
            pair = arith.addi(thread_idx(), _i32(i))
            _when(_compare("ult", pair, _i32(size // 2)), lambda pair=pair: exchange(pair))
        _warp_barrier()

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
