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


def plans(field, **call):
    """A field of the plans for each number of the one argument that is a tuple."""
    (varied,) = (name for name, value in call.items() if isinstance(value, tuple))
    call = {"rows": 1, "columns": 10**6, "k": 8, "sorted": True, **call}
    return [getattr(_plan.plan(**{**call, varied: n}), field) for n in call[varied]]


def test_which_design_takes_a_call():
    assert plans("teams", k=(1, 4096, 4097)) == [1, 1, 0]
    assert plans("teams", k=(1, 4096, 4097), unit_stride=False) == [0, 0, 0]
    assert _plan.unsupported("float64") and _plan.unsupported("bfloat16") is None


def test_plan_sides_of_radix():
    radix = {"unit_stride": False}
    columns = (2048, 2049, 6144, 6145, 10**6)
    assert plans("warpgroups", columns=columns, **radix) == [1, 2, 3, 4, 4]
    assert plans("blocks", rows=(1, 7, 8, 9, 512, 513), **radix) == [1, 8, 8, 16, 512, 528]
    assert plans("blocks", rows=(10**6,), chip=_plan.Chip(10), **radix) == [40]
    ks = (1, 2, 4096, 4097)
    assert plans("sort", k=ks, **radix) == ["none", "kernel", "kernel", "xla"]
    assert plans("sort", k=ks, sorted=False, **radix) == ["none"] * 4
    assert plans("sort", k=(4097,)) == ["xla"]


def test_plan_sides_of_one_pass():
    """The lead of a row takes up to 16 bytes less an element of its chunks' columns."""
    assert plans("sort", k=(1, 4096), sorted=False) == ["kernel"] * 2
    for itemsize, last in ((4, 16381), (2, 16377), (1, 16369)):
        columns = (last, last + 1)
        assert plans("whole", columns=columns, itemsize=itemsize) == [True, False]
    columns = (1, 2045, 2046, 4093, 4094, 8189, 8190, 16381, 16382)
    assert plans("warpgroups", columns=columns) == [1, 1, 2, 2, 4, 4, 8, 8, 8]


def test_plan_sides_of_whole_rows():
    """Teams: for rows there are, warpgroups that are left, and pairs there is room for."""
    rows = (132, 133, 264, 265, 528, 529)
    assert plans("teams", rows=rows, columns=2045) == [1, 2, 2, 4, 4, 4]
    assert plans("teams", rows=(10, 11), columns=2045, chip=_plan.Chip(10)) == [1, 2]
    columns = (2045, 2046, 4093, 4094, 8189, 8190)
    assert plans("teams", rows=1000, columns=columns) == [4, 4, 4, 2, 2, 1]
    assert plans("warpgroups", rows=1000, columns=columns) == [4, 8, 8, 8, 8, 8]
    ks = (341, 342, 1365, 1366, 3755, 3756, 4096)
    assert plans("teams", rows=1000, columns=2045, k=ks) == [4, 4, 4, 2, 2, 1, 1]
    capacity = [1024, 1536, 2560, 3072, 6144, 6656, 6656]
    assert plans("capacity", columns=2045, k=ks) == capacity
    assert plans("blocks", rows=(1, 7, 8, 9, 128, 129), columns=2045) == [1, 8, 8, 16, 128, 132]
    assert plans("blocks", rows=(256, 257, 528), columns=8189) == [128, 132, 132]
    assert plans("cluster", rows=(1, 1000), columns=16381) == [1, 1]


def test_plan_sides_of_streamed_rows():
    """Two teams for many rows; a cluster for few."""
    many = {"rows": 133, "columns": 2**18, "k": 2048}
    for name, both, one in (
        ("rows", 133, 132), ("columns", 2**18, 2**18 + 1), ("k", 2048, 2049),
    ):  # fmt: skip
        call = {**many, name: (both, one)}
        assert plans("teams", **call) == [2, 1]
        assert plans("capacity", **call) == [6016, 12288]
        assert plans("warpgroups", **call) == [8, 8]
        assert plans("cluster", **call) == [1, 1]
    assert plans("blocks", **{**many, "rows": (133, 256, 257)}) == [128, 128, 132]

    rows = (1, 7, 8, 16, 17, 33, 34, 66, 67)
    assert plans("cluster", rows=rows) == [16, 16, 8, 8, 4, 4, 2, 2, 1]
    assert plans("blocks", rows=rows) == [1, 8, 8, 16, 32, 33, 64, 66, 128]
    assert plans("cluster", rows=(5, 6), chip=_plan.Chip(80)) == [16, 8]
    # A block has a few chunks at least.
    columns = tuple(2048 * chunks - 3 for chunks in (9, 11, 12, 19, 20, 35, 36))
    assert plans("cluster", columns=columns) == [2, 2, 4, 4, 8, 8, 16]


def test_plan_sides_of_the_interpreter():
    """Teams of one warpgroup, and no clusters."""
    one = {"members": 1}
    assert plans("whole", columns=(2045, 2046), **one) == [True, False]
    assert plans("cluster", rows=(1, 133), **one) == [1, 1]
    assert plans("warpgroups", rows=(132, 133), columns=20000, **one) == [1, 2]
    assert plans("warpgroups", rows=(132, 133), columns=2045, **one) == [1, 2]


def kernel_for(rows, columns, stride, offset, dtype=np.float32, k=16, column_stride=1):
    view = _strides.RowView((rows,), (stride,), columns, column_stride, offset)
    return _mosaic.kernel_for(
        np.dtype(dtype), view, k, largest=True, sorted=True, order=Order.TORCH
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns", "k", "column_stride", "plan"),
    [
        # As large a k as goes with so many teams.
        (132, 16000, 4096, 1, {"whole": True, "teams": 1, "warpgroups": 8}),
        (264, 8000, 3755, 1, {"whole": True, "teams": 2, "warpgroups": 8}),
        (528, 4000, 1365, 1, {"whole": True, "teams": 4, "warpgroups": 8}),
        (132, 20000, 4096, 1, {"whole": False, "teams": 1, "cluster": 1}),
        (200, 20000, 2048, 1, {"whole": False, "teams": 2, "cluster": 1}),
        (66, 900000, 4096, 1, {"whole": False, "teams": 1, "cluster": 2}),
        (33, 900000, 4096, 1, {"whole": False, "teams": 1, "cluster": 4}),
        (16, 900000, 4096, 1, {"whole": False, "teams": 1, "cluster": 8}),
        (7, 900000, 4096, 1, {"whole": False, "teams": 1, "cluster": 16}),
        (7, 900000, 4096, 2, {"teams": 0, "sort": True}),
        (7, 900000, 5000, 1, {"teams": 0, "sort": False}),
    ],
)
def test_every_plan(rows, columns, k, column_stride, plan, dtype):
    stride = column_stride * columns + 1
    config = kernel_for(rows, columns, stride, 3, dtype, k, column_stride).config
    assert {name: getattr(config, name) for name in plan} == plan
    text = lower(
        dtype, rows, columns, k=k, stride=stride, offset=3, column_stride=column_stride,
        windows=True,
    )  # fmt: skip
    assert "mosaic_gpu" in text


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


@pytest.mark.parametrize(
    ("first", "again", "others"),
    [
        pytest.param(
            (9, 5000, 5120, 0), (16, 4200, 4201, 3),
            [(17, 5000, 5120, 0), (9, 8190, 8192, 0), (9, 20000, 20224, 0)],
            id="whole",  # more blocks, more warpgroups, streamed
        ),
        pytest.param(
            (150, 20000, 20224, 0), (256, 2**18, 2**18 + 1, 3),
            [(132, 20000, 20224, 0), (150, 2**18 + 1, 2**18 + 1, 0)],
            id="two-teams",  # one team
        ),
        pytest.param(
            (5, 900000, 900096, 0), (7, 80000, 80001, 3),
            [(4, 900000, 900096, 0), (8, 900000, 900096, 0)],
            id="clusters",  # fewer blocks, smaller clusters
        ),
    ],
)  # fmt: skip
def test_what_compiles_anew(first, again, others):
    """Not another batch, width, stride or offset; but where a plan says so."""
    kernel, same = kernel_for(*first), kernel_for(*again)
    assert kernel.config == same.config and kernel.numbers != same.numbers
    for other in others:
        assert kernel_for(*other).config != kernel.config


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
