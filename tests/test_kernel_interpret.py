"""The GPU kernel, run by JAX's GPU interpreter on a CPU with race detection, against the oracle.

A run takes seconds, so this is a choice from the table: each branch of the kernel, each width of
element, one and several warpgroups.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtopk
import oracle
import pallas_kernels
from cases import CASES, Case
from faces import JaxFace

if reason := pallas_kernels.unavailable():
    pytest.skip(reason, allow_module_level=True)

from jtopk import _mosaic, _strides
from jtopk._order import Order
from pallas_kernels import Index

INTERPRETED = JaxFace("interpret", strided=True, backend="interpret")

NAMES = (
    "size-float32-1-k1-largest",
    "size-bfloat16-33-k33-smallest",
    "size-bfloat16-129-k7-largest",
    "dtype-float16-33-largest",
    "dtype-float8_e4m3fn-257-smallest",
    "dtype-int32-257-smallest",
    "dtype-uint16-33-largest",
    "stride-stride258-offset3-nan",
    "storage-expanded",
    "storage-transposed-padded",
    "storage-column-step-2",
    "storage-ends-with-buffer-int8",
    "axis-rank-1-length",
    "axis-axis-1-of-3",
    "axis-rank-3-two-paddings",
    "window-lengths-float32-k7-largest",
    "window-windows-float32-k134-smallest",
    "window-windows-int8-k40-largest",
    "unsorted-lengths",
)
CHOSEN = [case for case in CASES if case.name in NAMES]
# Rows of several chunks, which several warpgroups share; few rows, for they take a while.
LONG = [
    Case("two-warpgroups", "float32", (2, 4000), 100, strides=(4001, 1), offset=1, seed=1),
    Case("ties-across-warpgroups", "int8", (3, 9000), 300, strides=(9001, 1), offset=3),
    Case(
        "four-warpgroups-windows", "bfloat16", (3, 9000), 64, sorted=False,
        lengths=np.array([9000, 50, 5000]), starts=np.array([0, 8000, 2100]), strides=(9216, 1),
    ),
    Case("sorted-by-xla", "int8", (2, 4500), 4200, strides=(4501, 1)),
]  # fmt: skip


def test_the_choice_names_cases_of_the_table():
    assert sorted(case.name for case in CHOSEN) == sorted(NAMES)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in (*CHOSEN, *LONG)])
def test_like_the_oracle_and_without_races(case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    values, indices = INTERPRETED.run(case)
    expected = case.expected("total")
    if not case.sorted:
        order = np.argsort(indices, axis=-1, kind="stable")
        values, indices = (np.take_along_axis(a, order, -1) for a in (values, indices))
        order = np.argsort(expected[1], axis=-1, kind="stable")
        expected = tuple(np.take_along_axis(a, order, -1) for a in expected)
    oracle.assert_same((values, indices), expected)
    # jax 0.11.2 prints what 0.12 raises.
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_a_named_backend_refuses_64_bit_keys():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        jtopk.top_k(jnp.ones((2, 5), jnp.float64), 2, backend="interpret")


def row_operand(numbers: np.ndarray) -> jax.Array:
    """A number for each row as int32 words."""
    return jnp.asarray(numbers.reshape(-1, 1).view(np.int32))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_numbers_as_parameters_and_windows_of_both_widths(dtype):
    """The form in which a kernel is launched without JAX: twins find numbers in the operands."""
    rows, columns, stride, offset, k = 3, 700, 703, 5, 40
    flat = np.random.default_rng(8).standard_normal(offset + rows * stride).astype(np.float32)
    x = np.lib.stride_tricks.as_strided(flat[offset:], (rows, columns), (4 * stride, 4))
    big = np.iinfo(dtype).max
    starts = np.array([-big - 1, 100, 650], dtype)
    lengths = np.array([min(big, 2**31 + 5), 50, big], dtype)
    view = _strides.RowView((rows,), (stride,), columns, 1, 0)
    kernel = _mosaic.kernel_for(
        np.dtype(np.float32), view, k, largest=True, sorted=True, order=Order.TOTAL
    )
    numbers = pallas_kernels.move_numbers(kernel.numbers, offset)
    values, indices = pallas_kernels.select_rows(
        kernel.config,
        kernel.keys,
        jnp.asarray(flat),
        [jnp.asarray(pallas_kernels.pack_numbers([n])) for n in numbers],
        rows=rows,
        operands={"starts": row_operand(starts), "lengths": row_operand(lengths)},
        interpret=True,
    )
    expected = oracle.top_k(x, k, lengths=lengths, starts=starts)
    oracle.assert_same((np.asarray(values), np.asarray(indices)), expected)


PAGE_BITS = 3


def places(kind: Index, local: np.ndarray, row: int, operands: dict[str, np.ndarray]) -> np.ndarray:
    """What stands for local columns, -1 where there is none; page table lookups one by one."""
    if kind is Index.OFFSET:
        return np.where(local < 0, -1, local + operands["offsets"][row])
    if kind is Index.LOCAL:
        return local
    table, batch = operands["table"], operands["batches"][row]
    out = np.full_like(local, -1)
    for at, column in enumerate(local):
        page = operands["page_starts"][row] + column // 2**PAGE_BITS
        if column >= 0 and 0 <= batch < len(table) and 0 <= page < table.shape[1]:
            out[at] = table[batch, page] * 2**PAGE_BITS + column % 2**PAGE_BITS
    return out


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("kind", [Index.LOCAL, Index.OFFSET, Index.PAGE])
def test_what_is_written_for_a_column(kind, sorted):
    """No values; local columns beside; a page table with a stride, and with pages missing."""
    rows, columns, stride, k = 6, 300, 301, 40
    rng = np.random.default_rng(9)
    flat = rng.standard_normal(rows * stride).astype(np.float32)
    x = np.lib.stride_tricks.as_strided(flat, (rows, columns), (4 * stride, 4))
    starts = np.array([0, 10, 290, 0, 5, 100], np.int32)
    ends = np.array([300, 60, 400, 0, 300, 50], np.int32)
    table = rng.integers(0, 1000, (4, 50)).astype(np.int32)
    operands = {
        "starts": starts, "lengths": ends, "offsets": rng.integers(0, 10**6, rows, np.int32),
        "batches": np.array([0, 3, 1, 2, 4, 0], np.int32),
        "page_starts": np.array([0, 2, 7, 0, 0, 40], np.int32), "table": table[:, :45],
    }  # fmt: skip
    view = _strides.RowView((rows,), (stride,), columns, 1, 0)
    kernel = _mosaic.kernel_for(
        np.dtype(np.float32), view, k, largest=True, sorted=sorted, order=Order.TORCH
    )
    config = dataclasses.replace(
        kernel.config, values=False, index=kind, page_bits=PAGE_BITS, local=kind is Index.PAGE,
        lengths_are_ends=True,
    )  # fmt: skip
    numbers = pallas_kernels.row_numbers(
        columns=columns, column_stride=1, offset=0, row_shape=(rows,), row_strides=(stride,),
        table=(4, 45, 50),
    )  # fmt: skip
    arrays = {name: row_operand(n) for name, n in operands.items() if name != "table"}
    indices, *local = pallas_kernels.select_rows(
        config,
        kernel.keys,
        jnp.asarray(flat),
        jnp.asarray(pallas_kernels.pack_numbers(numbers)),
        rows=rows,
        operands={**arrays, "table": jnp.asarray(table.reshape(-1))},
        interpret=True,
    )
    lengths = np.clip(ends, starts, columns) - starts
    _, expected = oracle.top_k(x, k, order="torch", starts=starts, lengths=lengths)
    if not sorted:
        expected = np.sort(np.where(expected < 0, columns, expected), axis=1)
        expected = np.where(expected == columns, -1, expected)
    expected = np.where(expected < 0, -1, expected - starts[:, None])
    if local:
        np.testing.assert_array_equal(local[0], expected)
    want = np.stack([places(kind, expected[r], r, operands) for r in range(rows)])
    np.testing.assert_array_equal(indices, want)


def test_rows_that_share_a_length():
    """Three tokens a request: the last sees all of the request's length."""
    rows, columns, k = 6, 50, 50
    x = np.random.default_rng(10).standard_normal((rows, columns)).astype(np.float32)
    numbers = pallas_kernels.row_numbers(
        columns=columns, column_stride=1, offset=0, row_shape=(rows,), row_strides=(columns,),
        group=3,
    )  # fmt: skip
    view = _strides.RowView((rows,), (columns,), columns, 1, 0)
    kernel = _mosaic.kernel_for(
        np.dtype(np.float32), view, k, largest=True, sorted=True, order=Order.TORCH
    )
    got = pallas_kernels.select_rows(
        kernel.config,
        kernel.keys,
        jnp.asarray(x.reshape(-1)),
        jnp.asarray(pallas_kernels.pack_numbers(numbers)),
        rows=rows,
        operands={"lengths": row_operand(np.array([20, -(2**31)], np.int32))},
        interpret=True,
    )
    expected = oracle.top_k(x, k, order="torch", lengths=np.array([18, 19, 20, 0, 0, 0]))
    oracle.assert_same(tuple(map(np.asarray, got)), expected)
