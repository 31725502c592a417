"""The GPU kernel, run by JAX's GPU interpreter on a CPU with race detection, against the oracle.

A run takes seconds, so this is a choice from the table: each branch of the radix kernel, each width
of element, one and several warpgroups. For the one-pass kernel there are rows of its own, many a
run, for each way that a row can take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtopk
import oracle
import pallas_kernels
from cases import CASES, Case, data_rows
from faces import JaxFace

if reason := pallas_kernels.unavailable():
    pytest.skip(reason, allow_module_level=True)

from jtopk import _mosaic, _strides
from jtopk._order import Order
from pallas_kernels import Index, _record, _team

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
# Rows of several chunks, which several warpgroups share in the radix kernel; few rows, for they
# take a while.
LONG = [
    Case("two-warpgroups", "float32", (2, 4000), 100, strides=(8001, 2), offset=1, seed=1),
    Case("ties-across-warpgroups", "int8", (3, 9000), 300, strides=(18001, 2), offset=3),
    Case(
        "four-warpgroups-windows", "bfloat16", (3, 9000), 64, sorted=False,
        lengths=np.array([9000, 50, 5000]), starts=np.array([0, 8000, 2100]), strides=(18432, 2),
    ),
    Case("sorted-by-xla", "int8", (2, 4500), 4200, strides=(4501, 1)),
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """Every run is compiled for itself, which takes longer than to run it unoptimised."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def no_races(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """jax 0.11.2 prints what 0.12 raises."""
    yield
    assert "RACE DETECTED" not in capfd.readouterr().out


def test_the_choice_names_cases_of_the_table():
    assert sorted(case.name for case in CHOSEN) == sorted(NAMES)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in (*CHOSEN, *LONG)])
def test_like_the_oracle(case: Case) -> None:
    got, expected = INTERPRETED.run(case), case.expected("total")
    if not case.sorted:
        got, expected = (oracle.by_column(*a, axis=case.axis) for a in (got, expected))
    oracle.assert_same(got, expected)


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
        np.dtype(np.float32), view, k, largest=True, sorted=True, order=Order.TOTAL,
        interpret=True,
    )  # fmt: skip
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


KINDS = (Index.LOCAL, Index.OFFSET, Index.PAGE)


@pytest.mark.parametrize(
    ("kind", "step", "sorted"),
    [
        *(pytest.param(kind, 1, True, id=f"one-pass-{kind.value}") for kind in KINDS),
        *(pytest.param(kind, 2, False, id=f"radix-{kind.value}") for kind in KINDS),
        pytest.param(Index.PAGE, 2, True, id="radix-sorted-page"),
    ],
)
def test_what_is_written_for_a_column(kind, step, sorted):
    """No values; local columns beside; a page table with a stride, and with pages missing."""
    rows, columns, stride, k = 6, 300, 300 * step + 1, 40
    rng = np.random.default_rng(9)
    flat = rng.standard_normal(rows * stride).astype(np.float32)
    x = np.lib.stride_tricks.as_strided(flat, (rows, columns), (4 * stride, 4 * step))
    starts = np.array([0, 10, 290, 0, 5, 100], np.int32)
    ends = np.array([300, 60, 400, 0, 300, 50], np.int32)
    table = rng.integers(0, 1000, (4, 50)).astype(np.int32)
    operands = {
        "starts": starts, "lengths": ends, "offsets": rng.integers(0, 10**6, rows, np.int32),
        "batches": np.array([0, 3, 1, 2, 4, 0], np.int32),
        "page_starts": np.array([0, 2, 7, 0, 0, 40], np.int32), "table": table[:, :45],
    }  # fmt: skip
    view = _strides.RowView((rows,), (stride,), columns, step, 0)
    kernel = _mosaic.kernel_for(
        np.dtype(np.float32), view, k, largest=True, sorted=sorted, order=Order.TORCH,
        interpret=True,
    )  # fmt: skip
    config = dataclasses.replace(
        kernel.config, values=False, index=kind, page_bits=PAGE_BITS, local=kind is Index.PAGE,
        lengths_are_ends=True,
    )  # fmt: skip
    numbers = pallas_kernels.row_numbers(
        columns=columns, column_stride=step, offset=0, row_shape=(rows,), row_strides=(stride,),
        table=(4, 45, 50),
    )  # fmt: skip
    arrays = {name: row_operand(n) for name, n in operands.items() if name != "table"}
    got = pallas_kernels.select_rows(
        config,
        kernel.keys,
        jnp.asarray(flat),
        jnp.asarray(pallas_kernels.pack_numbers(numbers)),
        rows=rows,
        operands={**arrays, "table": jnp.asarray(table.reshape(-1))},
        interpret=True,
    )
    lengths = np.clip(ends, starts, columns) - starts
    _, selected = oracle.top_k(x, k, order="torch", starts=starts, lengths=lengths)
    local = np.where(selected < 0, -1, selected - starts[:, None])
    placed = np.stack([places(kind, local[r], r, operands) for r in range(rows)])
    expected = (placed, local) if kind is Index.PAGE else (placed,)
    if not sorted:
        got, expected = (oracle.by_column(*answer) for answer in (got, expected))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


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
        np.dtype(np.float32), view, k, largest=True, sorted=True, order=Order.TORCH,
        interpret=True,
    )  # fmt: skip
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


def check_one_pass(
    x: np.ndarray,
    k: int,
    *,
    largest: bool = True,
    order: str = "total",
    starts: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
    stride: int | None = None,
    **config: int,
) -> None:
    """Compares with the oracle. Rows begin at element 1; what lies between them would win."""
    rows, columns = x.shape
    stride = columns + 3 if stride is None else stride
    flat = np.full(1 + rows * stride, oracle.last_value(x.dtype, largest=not largest), x.dtype)
    for r in range(rows):
        flat[1 + r * stride :][:columns] = x[r]
    view = _strides.RowView((rows,), (stride,), columns, 1, 1)
    kernel = _mosaic.kernel_for(
        x.dtype, view, k, largest=largest, sorted=True, order=Order(order), interpret=True
    )
    assert kernel.config.teams
    windows = {"starts": starts, "lengths": lengths}
    got = pallas_kernels.select_rows(
        dataclasses.replace(kernel.config, **config),
        kernel.keys,
        jnp.asarray(flat),
        jnp.asarray(pallas_kernels.pack_numbers(kernel.numbers)),
        rows=rows,
        operands={
            name: row_operand(n.astype(np.int32)) for name, n in windows.items() if n is not None
        },
        interpret=True,
    )
    expected = oracle.top_k(x, k, largest=largest, order=order, starts=starts, lengths=lengths)
    oracle.assert_same(got, expected)


def hard_rows(dtype: str, columns: int) -> np.ndarray:
    """Rows of many kinds: those of the table, which has constant, sorted and two-valued ones, and
    those of which a sample says little.
    """
    table = data_rows(dtype, columns, seed=11)
    if table.dtype.kind in "iu":
        return table
    rng = np.random.default_rng(12)
    normal = rng.standard_normal(columns)
    outlier = normal / 1000
    outlier[columns // 3] = 1e4
    tied = np.where(rng.random(columns) < 0.01, normal, -7.0)  # fewer than k, and then ties
    late = np.where(np.arange(columns) < columns - 700, -abs(normal), 0.5)
    nans = normal.copy()
    few = rng.choice(columns, 90, replace=False)
    nans[few] = np.repeat([np.nan, np.inf, 0.0], 30)
    nans *= np.where(rng.random(columns) < 0.5, -1.0, 1.0)  # signs of NaNs and zeros
    more = [1 + rng.random(columns) / 1000, outlier, tied, late, nans]
    return np.concatenate([table, np.stack(more).astype(table.dtype)])


@pytest.mark.parametrize(("k", "largest", "order"), [(5, True, "total"), (1000, False, "torch")])
def test_rows_that_registers_hold(k, largest, order):
    check_one_pass(hard_rows("float32", 2000), k, largest=largest, order=order, blocks=2)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("order", ["total", "torch"])
def test_rows_cut_by_a_sample(order, largest):
    """Several rows a block, so that what one leaves behind would show in the next."""
    x = hard_rows("float32", 6000)
    check_one_pass(x, 100, largest=largest, order=order, capacity=512, blocks=2)


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("bfloat16", True), ("bfloat16", False), ("int8", True), ("int32", False)],
)
def test_rows_of_other_types_cut_by_a_sample(dtype, largest):
    x = hard_rows(dtype, 6000)
    check_one_pass(x, 100, largest=largest, order="torch", capacity=512, blocks=2)


def test_an_answer_that_fills_the_room_for_pairs():
    check_one_pass(hard_rows("float32", 3000)[1::3], 512, capacity=512, blocks=1)


@pytest.mark.parametrize("k", [100, 3000])
def test_long_rows(k):
    check_one_pass(hard_rows("float32", 30000)[::4], k, blocks=1)


@pytest.mark.parametrize("columns", [2000, 6000])
def test_rows_of_two_teams(columns):
    x = hard_rows("float32", 6000)[::3, :columns]
    check_one_pass(x, 100, capacity=1024, teams=2, warpgroups=2, blocks=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_windows_of_rows_cut_by_a_sample(dtype):
    """On either side of k, of the capacity, and of a chunk; infinity is outside of them."""
    columns, k, capacity = 9000, 100, 512
    stride, chunk = 9008, 2047  # each row begins one element behind a boundary of 16 bytes
    windows = [
        (0, 0), (0, 1), (5, 1), (columns, 9), (columns - 1, 1), (77, k - 1), (77, k), (77, k + 1),
        (3, capacity - 1), (3, capacity), (3, capacity + 1), (0, 2 * capacity), (-9, 5000),
        (chunk, 2048), (chunk, 4095), (chunk, 4096), (chunk, 4097), (chunk - 1, 4097),
        (chunk + 1, 4095), (chunk + 1, 4094), (chunk - 1, 2), (chunk - 300, 600),
        (2 * chunk, 2**31 - 1), (columns - 600, 600), (0, chunk), (0, chunk + 1), (0, columns),
    ]  # fmt: skip
    starts, lengths = (np.array(numbers) for numbers in zip(*windows, strict=True))
    x = np.resize(hard_rows(dtype, columns), (len(windows), columns))
    for row, (start, length) in zip(x, windows, strict=True):
        row[: max(start, 0)] = row[max(start, 0) + length :] = np.inf
    options = {"starts": starts, "lengths": lengths, "stride": stride, "capacity": capacity}
    check_one_pass(x, k, **options, blocks=2)


def test_windows_of_rows_that_registers_hold():
    columns, k = 2000, 300
    lengths = np.array([0, 1, 2, k - 1, k, k + 1, 1999, 2000, 3000, -1, 700, 5])
    starts = np.array([0, 1999, 3, 500, 1, 2, 1, 0, -4, 9, 1000, 2000])
    x = data_rows("float32", columns, seed=13)
    check_one_pass(x, k, starts=starts, lengths=lengths, order="torch", largest=False, blocks=1)


def sampled_columns(columns: int, start: int) -> np.ndarray:
    """The columns of float32 rows that begin at element `start` which the sample sees."""
    numbers = jnp.arange(start + columns, dtype=jnp.int32)
    lead, begin, end, warpgroup = (jnp.int32(n) for n in (start % 4, 0, columns, 0))
    seen = _team.load_sample(
        numbers, _record.Wide(jnp.int32(start), jnp.int32(0)), lead, begin, end, warpgroup,
        vectors=2, warpgroups=1, interpret=True,
    )  # fmt: skip
    return np.unique(np.asarray(seen).astype(np.int64) - start)


COLUMNS = 8192


@pytest.fixture(scope="module")
def seen() -> np.ndarray:
    seen = sampled_columns(COLUMNS, 1)
    assert len(seen) == 1024 and 0 <= seen[0] and seen[-1] < COLUMNS
    return seen


def below(rows: int) -> np.ndarray:
    """Rows of distinct numbers below -1."""
    return (-1 - np.random.default_rng(14).random((rows, COLUMNS))).astype(np.float32)


def check_misled(x: np.ndarray) -> None:
    check_one_pass(x, 100, capacity=512, stride=COLUMNS + 4, order="torch", blocks=1)


def test_a_sample_that_sees_too_little(seen):
    """What it misses goes beyond the room for pairs, fills it, or is a little more than asked."""
    missed = np.setdiff1d(np.arange(COLUMNS), seen)
    x = below(8)
    for r, (count, start) in enumerate(((3000, 0), (513, 50), (512, 9), (400, 3), (100, 0))):
        x[r, missed[start : start + 2 * count : 2]] = np.arange(count) + 1
    x[5, seen] = -np.inf
    x[6, seen] = -5.0
    x[7, missed] = 3.0
    check_misled(x)


def test_a_sample_that_sees_too_much(seen):
    """All of the top lies in it, so that the cut lets fewer than k pass."""
    x = below(5)
    x[0, seen[::17]] = np.arange(len(seen[::17]))
    x[1, seen[:99]] = np.arange(99)
    x[2, seen] = np.arange(len(seen))
    x[3, seen[500:540]] = np.inf
    x[4, seen[::40]] = np.float32(1) + np.arange(len(seen[::40])) * np.finfo(np.float32).eps
    check_misled(x)


def test_a_sample_that_sees_ties_where_there_are_few(seen):
    """It takes many elements to share a rank key that none but the sampled ones have."""
    x = below(7)
    x[0, seen[:60]] = 1.0
    x[1, seen[:99]] = np.nan
    x[2, seen[:100]] = 1.0
    x[3, seen[:101]] = np.inf
    x[4, seen] = 0.0
    missed = np.setdiff1d(np.arange(COLUMNS), seen)
    x[5, seen[:60]] = 1.0
    x[5, missed[:39]] = 2.0
    x[6, seen[:60]] = 1.0
    x[6, missed[5000:5041]] = 2.0
    check_misled(x)
