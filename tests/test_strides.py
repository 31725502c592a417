"""Stride arithmetic against enumeration, and views against NumPy's `as_strided`."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jtopk
from jtopk import _strides

# Compilation makes the first example slow, whatever it is.
settings.register_profile("jtopk", deadline=None, derandomize=True)
settings.load_profile("jtopk")


@st.composite
def views(draw: st.DrawFn, max_rank: int = 4, max_size: int = 5):
    """A shape and strides; strides often those of a padded row-major array."""
    shape = draw(st.lists(st.integers(0, max_size), min_size=1, max_size=max_rank))
    strides = []
    step = 1
    for size in reversed(shape):
        step += draw(st.sampled_from([0, 0, 1, 3]))
        strides.append(draw(st.sampled_from([step, step, step, 0, 1, 7])))
        step = max(step, strides[-1]) * max(size, 1)
    return tuple(shape), tuple(reversed(strides))


def addresses(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    """Elements a view reads, in its own order."""
    return [
        sum(i * s for i, s in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]


@given(views())
def test_merged_rows_are_the_same_rows(view) -> None:
    shape, strides = view
    merged = _strides.merge_rows(shape, strides)
    assert addresses(*merged) == addresses(shape, strides)


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((3, 4), (1024, 256), ((12,), (256,))),  # a padded grid of rows is one dimension
        ((3, 4), (2000, 256), ((3, 4), (2000, 256))),
        ((3, 1, 4), (1024, 7, 256), ((12,), (256,))),
        ((3, 4), (0, 0), ((12,), (0,))),
        ((2, 3, 4), (5000, 1024, 256), ((2, 12), (5000, 256))),
        ((1, 1), (7, 9), ((1,), (0,))),
        ((), (), ((1,), (0,))),
    ],
)
def test_merges_as_far_as_possible(shape, strides, expected) -> None:
    assert _strides.merge_rows(shape, strides) == expected


@given(views())
def test_span_ends_at_the_last_element(view) -> None:
    assert _strides.span(*view) == 1 + max(addresses(*view), default=-1)


@given(views())
def test_normalising_changes_no_address(view) -> None:
    shape, strides = view
    normal = _strides.normalise(shape, strides)
    assert addresses(shape, normal) == addresses(shape, strides)
    assert _strides.normalise(shape, normal) == normal
    dense = _strides.dense_strides(shape)
    for size, step, row_major in zip(shape, normal, dense, strict=True):
        assert size > 1 or step == row_major


@given(views())
def test_dense_where_numpy_says_contiguous(view) -> None:
    shape, strides = view
    array = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape, strides)
    assert _strides.is_dense(shape, strides) == array.flags.c_contiguous
    assert _strides.dense_strides(shape) == np.zeros([max(n, 1) for n in shape], np.uint8).strides


@given(views(), st.integers(0, 9), st.data())
def test_row_view_reads_the_same_elements(view, offset: int, data: st.DataObject) -> None:
    shape, strides = view
    axis = data.draw(st.integers(0, len(shape) - 1))
    rows = _strides.row_view(shape, strides, offset, axis)
    got = addresses((*rows.row_shape, rows.columns), (*rows.row_strides, rows.column_stride))
    grid = np.reshape(np.array(addresses(shape, strides), int), shape)
    assert got == np.moveaxis(grid, axis, -1).ravel().tolist()
    assert (rows.offset, rows.rows * rows.columns) == (offset, grid.size)
    assert rows.span_end == offset + 1 + max(got, default=-1)


@given(
    address=st.integers(0, 2**48),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    alignment=st.sampled_from([1, 16, 64, 256]),
    room=st.integers(0, 300),
)
def test_align_down_stays_inside(address: int, itemsize: int, alignment: int, room: int) -> None:
    lead = _strides.align_down(address, itemsize, alignment, room)
    possible = [n for n in range(room + 1) if (address - n * itemsize) % alignment == 0]
    assert lead == (possible[0] if possible else None)


@jax.jit
def dense(view: jtopk.StridedRows) -> jax.Array:
    return view.dense()


@settings(max_examples=60)
@given(views(max_rank=3), st.integers(0, 5), st.integers(0, 3))
def test_dense_is_as_strided(view, offset: int, tail: int) -> None:
    shape, strides = view
    flat = np.arange(offset + _strides.span(shape, strides) + tail, dtype=np.int32)
    expected = np.lib.stride_tricks.as_strided(flat[offset:], shape, [4 * s for s in strides])
    rows = jtopk.StridedRows(jnp.asarray(flat), shape, strides, offset)
    got = dense(rows)
    assert (got.shape, got.dtype) == (rows.shape, rows.dtype)
    np.testing.assert_array_equal(got, expected)


def test_strided_rows_is_a_pytree() -> None:
    rows = jtopk.StridedRows(jnp.arange(20.0), (3, 4), (6, 1), 2)
    leaves, tree = jax.tree.flatten(rows)
    assert len(leaves) == 1
    assert leaves[0] is rows.buffer
    again = jax.tree.unflatten(tree, leaves)
    assert (again.shape, again.strides, again.offset) == ((3, 4), (6, 1), 2)
    assert (rows.ndim, rows.dtype) == (2, np.float32)
    assert repr(rows).startswith("StridedRows(float32[3, 4], strides=(6, 1), ")


@pytest.mark.parametrize("rows", [1, 3])
def test_past_int32_elements(rows: int) -> None:
    """Overlapping rows whose elements' numbers do not fit int32."""
    columns, stride, size = 9, 5, 2**31 + 4096
    flat = np.zeros(size + 64, np.uint8)
    flat = flat[-flat.ctypes.data % 64 :][:size]  # aligned, so that device_put need not copy it
    offset = size - 5 - ((rows - 1) * stride + columns)
    flat[-64:] = np.arange(64)
    view = np.lib.stride_tricks.as_strided(flat[offset:], (rows, columns), (stride, 1))
    operand = jtopk.StridedRows(jax.device_put(flat), (rows, columns), (stride, 1), offset)
    got = jtopk.top_k(operand, 2)
    np.testing.assert_array_equal(got.values[-1], view[-1, ::-1][:2])
    np.testing.assert_array_equal(got.indices[-1], [8, 7])
    np.testing.assert_array_equal(np.asarray(got.values), np.sort(view, -1)[:, ::-1][:, :2])
