"""The GPU kernel, run by JAX's GPU interpreter on a CPU with race detection, against the oracle.

A run takes seconds, so this is a choice from the table: each branch of the kernel, each width of
element, one and several warpgroups.
"""

from __future__ import annotations

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


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_numbers_as_parameters_and_windows_of_both_widths(dtype):
    """The form in which a kernel is launched without JAX: twins find numbers in the operands."""
    rows, columns, stride, offset, k = 3, 700, 703, 5, 40
    flat = np.random.default_rng(8).standard_normal(offset + rows * stride).astype(np.float32)
    x = np.lib.stride_tricks.as_strided(flat[offset:], (rows, columns), (4 * stride, 4))
    big = np.iinfo(dtype).max
    starts = np.array([-big - 1, 100, 650], dtype)
    lengths = np.array([big, 50, big], dtype)
    view = _strides.RowView((rows,), (stride,), columns, 1, 0)
    kernel = _mosaic.kernel_for(
        np.dtype(np.float32), view, k, largest=True, sorted=True, order=Order.TOTAL
    )
    numbers = pallas_kernels.move_numbers(kernel.numbers, offset)
    values, indices = pallas_kernels.select_rows(
        kernel.config,
        kernel.to_key,
        jnp.asarray(flat),
        [jnp.asarray(pallas_kernels.pack_numbers([n])) for n in numbers],
        rows=rows,
        starts=jnp.asarray(starts.reshape(-1, 1).view(np.int32)),
        lengths=jnp.asarray(lengths.reshape(-1, 1).view(np.int32)),
        interpret=True,
    )
    expected = oracle.top_k(x, k, lengths=lengths, starts=starts)
    oracle.assert_same((np.asarray(values), np.asarray(indices)), expected)
