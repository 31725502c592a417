"""Every kind of kernel lowers for CUDA on a machine without a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels

if reason := pallas_kernels.unavailable():
    pytest.skip(reason, allow_module_level=True)

import jtopk
from jtopk import _backend, _mosaic, _plan, _strides
from jtopk._order import Order

DTYPES = "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 int8 int16 int32 uint8 uint16 uint32"


def lower(
    dtype, rows, columns, *, k, stride=None, offset=0, column_stride=1, sorted=True,
    order=Order.TOTAL, largest=True, windows=False,
):  # fmt: skip
    view = _strides.RowView(
        (rows,), (stride or columns * column_stride,), columns, column_stride, offset
    )
    numbers = jax.ShapeDtypeStruct((rows,), jnp.int32) if windows else None

    def call(buffer, starts, lengths):
        return _mosaic.top_k(
            buffer, view, k, largest=largest, sorted=sorted, order=order, starts=starts,
            lengths=lengths,
        )  # fmt: skip

    buffer = jax.ShapeDtypeStruct((view.span_end,), dtype)
    traced = jax.jit(call).trace(buffer, numbers, numbers)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("dtype", DTYPES.split())
def test_every_dtype(dtype):
    text = lower(jnp.dtype(dtype), 3, 300, k=17, stride=512, windows=True)
    assert "mosaic_gpu" in text


@pytest.mark.parametrize("columns", [1, 33, 257, 4096, 5000, 131072])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sizes_and_strides(dtype, columns):
    k = min(64, columns)
    assert "mosaic_gpu" in lower(dtype, 5, columns, k=k, stride=columns + 1, offset=3)


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("k", [1, 129, 4096, 4097])
def test_every_way_to_sort(k, sorted):
    text = lower(jnp.float32, 4, 9000, k=k, sorted=sorted, order=Order.TORCH, largest=False)
    assert "mosaic_gpu" in text
    # Past what shared memory holds, XLA sorts what the kernel selected.
    assert ("stablehlo.sort" in text) == (sorted and k > 4096)


def test_column_stride_and_no_windows():
    assert "mosaic_gpu" in lower(jnp.bfloat16, 4, 900, k=5, column_stride=2, stride=3)


def test_with_x64():
    """64-bit defaults must not change a kernel's types."""
    with jax.enable_x64(True):
        assert "mosaic_gpu" in lower(jnp.float32, 3, 5000, k=17, windows=True)


def test_the_operand_is_used_as_it_is():
    """A strided buffer goes to the kernel whole: not sliced, padded or copied before."""
    text = lower(jnp.float32, 16, 900000, k=2048, stride=900096)
    before = text.split("custom_call @mosaic_gpu")[0].split("func.func public @main")[1]
    for operation in ("slice", "pad", "gather", "copy", "transpose"):
        assert f"stablehlo.{operation}" not in before


@pytest.mark.parametrize("backend", ["mosaic_gpu", None])
def test_dense_rows_go_by_the_partitioner(backend, monkeypatch):
    monkeypatch.setattr(_backend, "gpu_problem", lambda: None)
    x = jax.ShapeDtypeStruct((4, 300), jnp.float32)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)

    @jax.jit
    def call(x, lengths):
        return jtopk.top_k(x, 3, lengths=lengths, backend=backend)

    text = call.trace(x, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_rows_without_columns_hold_nothing_to_read():
    numbers = pallas_kernels.row_numbers(
        columns=0, column_stride=1, offset=5, row_shape=(12,), row_strides=(1,)
    )
    assert pallas_kernels.span_of_numbers(numbers) == 0


def test_numbers_are_64_bit():
    numbers = pallas_kernels.row_numbers(
        columns=7, column_stride=1, offset=2**33 + 5, row_shape=(2, 3), row_strides=(2**31, 1)
    )
    end = 2**33 + 5 + 2**31 + 2 + 7
    assert numbers == [6, 7, 2**33 + 5, 1, end, 1, 0, 0, 0, 2, 2**31, 3, 1]
    halves = pallas_kernels.pack_numbers(numbers).view(np.uint32).tolist()
    assert halves[4:6] == [5, 2] and halves[20:22] == [2**31, 0]


def test_plan_sides():
    """The plan on either side of each of its bounds."""
    assert _plan.plan(1, 2048, 8, sorted=True).warpgroups == 1
    assert _plan.plan(1, 2049, 8, sorted=True).warpgroups == 2
    assert _plan.plan(1, 10**6, 8, sorted=True).warpgroups == 4
    assert _plan.plan(1, 10**6, 4096, sorted=True).sort == "kernel"
    assert _plan.plan(1, 10**6, 4097, sorted=True).sort == "xla"
    assert _plan.plan(1, 10**6, 4097, sorted=False).sort == "none"
    assert _plan.plan(1, 10**6, 1, sorted=True).sort == "none"
    assert [_plan.plan(rows, 8, 1, sorted=True).blocks for rows in (1, 7, 8, 9)] == [1, 8, 8, 16]
    assert _plan.plan(10**6, 8, 1, sorted=True, chip=_plan.Chip(10)).blocks == 40
    assert _plan.unsupported("float64") and _plan.unsupported("bfloat16") is None


def kernel_for(rows, columns, stride, offset, dtype=np.float32, k=16):
    view = _strides.RowView((rows,), (stride,), columns, 1, offset)
    return _mosaic.kernel_for(
        np.dtype(dtype), view, k, largest=True, sorted=True, order=Order.TORCH
    )


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_module_to_launch_by_address(dtype, index_dtype):
    """It takes its operands in the order the launch passes them, or `lower` raises."""
    kernel = kernel_for(9, 5000, 5120, 0, dtype)
    module = pallas_kernels.lower(
        kernel.config, kernel.keys, dtype=dtype, index_dtype=index_dtype,
        words={"starts": 1, "lengths": 2},
    )  # fmt: skip
    assert module.startswith(b"ML\xefR")  # MLIR bytecode


def test_what_compiles_anew():
    """Not another batch, width, stride or offset; but where a plan says so."""
    first = kernel_for(9, 5000, 5120, 0)
    again = kernel_for(16, 4200, 4201, 3)
    assert first.config == again.config and first.numbers != again.numbers
    assert kernel_for(17, 5000, 5120, 0).config != first.config  # more blocks
    assert kernel_for(9, 100000, 100352, 0).config != first.config  # more warpgroups


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("index", list(pallas_kernels.Index))
def test_every_kind_of_index(index, sorted):
    kernel = kernel_for(9, 5000, 5120, 0, jnp.bfloat16)
    config = dataclasses.replace(
        kernel.config, sort=sorted, values=False, index=index, page_bits=6, local=True,
        lengths_are_ends=True,
    )  # fmt: skip
    names = ("starts", "lengths", "offsets", "batches", "page_starts", "table")
    module = pallas_kernels.lower(
        config, kernel.keys, dtype=jnp.bfloat16, index_dtype=np.int32,
        words=dict.fromkeys(names, 1),
    )  # fmt: skip
    assert module.startswith(b"ML\xefR")
