"""Code of one lane: what leaves are made of. Everything here emits MLIR where it is called."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels._compat import (
    READ_REF,
    Fragments,
    StridedLayout,
    arith,
    constant,
    ir,
    llvm,
    math,
    nvvm,
    plgpu,
    scf,
    thread_idx,
    vector,
)

LANES = 128
"""Lanes of a warpgroup."""

WARP = 32


def c32(value: int = 0) -> Any:
    return constant(value, ir.IntegerType.get_signless(32))


def c64(value: int = 0) -> Any:
    return constant(value, ir.IntegerType.get_signless(64))


def scalar(fragments: Any) -> Any:
    return fragments.registers.item()


def wide(low: Any, high: Any) -> Any:
    """The 64-bit number of two halves, which are uniform vectors."""
    i64 = ir.IntegerType.get_signless(64)
    low, high = arith.extui(i64, scalar(low)), arith.extui(i64, scalar(high))
    return arith.ori(low, arith.shli(high, c64(32)))


def halves(number: Any) -> tuple[Any, Any]:
    """A 64-bit number as two uniform vectors."""
    i32 = ir.IntegerType.get_signless(32)
    low = arith.trunci(i32, number)
    high = arith.trunci(i32, arith.shrui(number, c64(32)))
    return tuple(Fragments.splat(half, (), is_signed=True) for half in (low, high))


def sign_extended(value: Any) -> Any:
    return arith.extsi(ir.IntegerType.get_signless(64), value)


def compare(kind: str, a: Any, b: Any) -> Any:
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, b)


def lane() -> Any:
    return arith.andi(thread_idx(), c32(LANES - 1))


def address(pointer: Any, index: Any, element: Any) -> Any:
    dynamic = -(2**31)  # MLIR's mark for an index given as an operand
    return llvm.getelementptr(
        pointer.type, pointer, [index], [dynamic], element, llvm.GEPNoWrapFlags.none
    )


def bits_type(ref: Any) -> Any:
    element = ir.MemRefType(ref.type).element_type
    return ir.IntegerType.get_signless(element.width)


def if_(condition: Any, then: Any, otherwise: Any, kind: Any) -> Any:
    """`then()` where the lane's condition holds, else `otherwise()`; both give a `kind`."""
    branch = scf.IfOp(condition, [kind], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([then()])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([otherwise()])
    return branch.results[0]


def when(condition: Any, then: Any) -> None:
    branch = scf.IfOp(condition)
    with ir.InsertionPoint(branch.then_block):
        then()
        scf.yield_([])


# Mosaic's own barrier is an asm statement that LLVM may copy into both arms of a branch, where
# lanes of one warp then wait at different copies: a hang, seen on an H200. The two below are
# intrinsics that it may not copy, and no code before them runs together with code after them. So
# every leaf in which lanes part ends with one.


def warpgroup_barrier() -> None:
    """The warpgroup's lanes wait for each other; barrier 0 is the block's."""
    warpgroup = arith.shrui(thread_idx(), c32(7))
    nvvm.barrier(barrier_id=arith.addi(warpgroup, c32(1)), number_of_threads=c32(LANES))


def warp_barrier() -> None:
    nvvm.bar_warp_sync(c32(0xFFFFFFFF))


def lane_of_warp() -> Any:
    return arith.andi(thread_idx(), c32(WARP - 1))


def from_lane(value: Any, lane: int) -> Any:
    """What one lane of the warp has."""
    return nvvm.shfl_sync(c32(0xFFFFFFFF), value, c32(lane), c32(WARP - 1), nvvm.ShflKind.idx)


def warp_inclusive_sum(value: Any) -> Any:
    """The sum over the warp's lanes up to this one."""
    for step in (1, 2, 4, 8, 16):
        below = nvvm.shfl_sync(c32(0xFFFFFFFF), value, c32(step), c32(), nvvm.ShflKind.up)
        value = arith.select(
            compare("sge", lane_of_warp(), c32(step)), arith.addi(value, below), value
        )
    return value


def any_of_warp(condition: Any) -> Any:
    return nvvm.vote_sync(c32(0xFFFFFFFF), condition, nvvm.VoteSyncKind.any)


def ballot(condition: Any) -> Any:
    """A bit for each lane of the warp."""
    return nvvm.vote_sync(c32(0xFFFFFFFF), condition, nvvm.VoteSyncKind.ballot)


def leading_zeros(value: Any) -> Any:
    return math.ctlz(value)


def splat(value: Any) -> Any:
    """A scalar of the kernel from one that all lanes have."""
    return Fragments.splat(value, (), is_signed=True)


def elements_of(fragments: Any) -> list[list[Any]]:
    """A lane's elements, register by register."""
    width = fragments.layout.vec_size
    return [
        [vector.extract(register, [], [j]) for j in range(width)]
        for register in fragments.registers
    ]


def fragments_of(registers: list[list[Any]], size: int) -> Any:
    """A vector of int32 from each lane's elements."""
    width = len(registers[0])
    kind = ir.VectorType.get((width,), ir.IntegerType.get_signless(32))
    packed = np.empty(len(registers), dtype=object)
    for r, elements in enumerate(registers):
        packed[r] = vector.from_elements(kind, elements)
    return Fragments(_registers=packed, _layout=StridedLayout((size,), width), _is_signed=True)


def int32_vector(shape: tuple[int, ...], where: Any) -> Any:
    return plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=where)


SCALAR = None if plgpu is None else plgpu.Layout.WG_SPLAT
REF = None if plgpu is None else plgpu.RefType()
INPUT = READ_REF
"""A ref that is read alone, as an operand of the kernel must be."""
