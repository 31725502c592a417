"""Each leaf of the kernels, on a GPU, and its twin, interpreted, against the same NumPy answer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels

if reason := pallas_kernels.unavailable():
    pytest.skip(reason, allow_module_level=True)

from pallas_kernels import _leaves as leaf
from pallas_kernels import _record, row_numbers
from pallas_kernels._compat import WARPGROUP_SEMANTICS, InterpretGPUParams, pl, plgpu

RNG = np.random.default_rng(0)
CHUNK = leaf.CHUNK

pytestmark = pytest.mark.parametrize(
    "interpret",
    [pytest.param(True, id="twin"), pytest.param(False, id="lanes", marks=pytest.mark.gpu)],
)


def launch(body, out_type, *inputs, interpret, scratch=None, warpgroups=1):
    """Runs `body(*inputs, *outputs, **scratch)` as one block and returns NumPy arrays."""
    run = plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch or {},
        grid=(1,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=WARPGROUP_SEMANTICS),
        interpret=InterpretGPUParams(detect_races=True) if interpret else None,
    )
    return jax.tree.map(np.asarray, jax.jit(run)(*inputs))


def int32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def unpacked(numbers_gmem, row_dims):
    """Numbers that lie in memory, as a kernel sees them."""
    return _record.unpack(
        lambda i: _record.Wide(numbers_gmem[2 * i], numbers_gmem[2 * i + 1]), row_dims
    )


def load(ref, size, width):
    return plgpu.layout_cast(ref[pl.ds(0, size)], leaf.layout(size, width))


@pytest.mark.parametrize("width", [4, 8, 16])
def test_histogram_add_counts_what_is_in_range(interpret, width):
    bins = RNG.integers(-3, 70, CHUNK).astype(np.int32)
    bins[:500] = 5  # many lanes on one counter

    def body(bins_gmem, out_gmem, hist_smem):
        hist_smem[...] = jnp.zeros((128,), jnp.int32)
        leaf.histogram_add(
            hist_smem, load(bins_gmem, CHUNK, width), width=width, interpret=interpret
        )
        out_gmem[...] = hist_smem[...]

    counts = launch(
        body, int32(128), bins, interpret=interpret,
        scratch={"hist_smem": plgpu.SMEM((128,), jnp.int32)},
    )  # fmt: skip
    np.testing.assert_array_equal(counts, np.bincount(bins[bins >= 0], minlength=128))


@pytest.mark.parametrize("warpgroups", [1, 3])
@pytest.mark.parametrize(("size", "width"), [(CHUNK, 4), (CHUNK, 8), (CHUNK, 16), (256, 2)])
def test_scan_and_sum(interpret, size, width, warpgroups):
    """Every warpgroup scans its own numbers at the same time."""
    numbers = RNG.integers(-1000, 1000, (warpgroups, size)).astype(np.int32)

    def body(x_gmem, scan_gmem, sums_gmem, scratch_smem):
        wg = jax.lax.axis_index("warpgroup")
        x = plgpu.layout_cast(x_gmem[wg], leaf.layout(size, width))
        scratch = scratch_smem.at[wg]
        before, total = leaf.exclusive_scan(x, scratch, width=width, interpret=interpret)
        scan_gmem[wg] = before
        sums_gmem[wg, 0] = total
        sums_gmem[wg, 1] = leaf.reduce_sum(x, scratch, width=width, interpret=interpret)

    scan, sums = launch(
        body, (int32(warpgroups, size), int32(warpgroups, 2)), numbers, interpret=interpret,
        scratch={"scratch_smem": plgpu.SMEM((warpgroups, 64), jnp.int32)}, warpgroups=warpgroups,
    )  # fmt: skip
    inclusive = np.cumsum(numbers, axis=1)
    np.testing.assert_array_equal(scan, inclusive - numbers)
    np.testing.assert_array_equal(sums, np.stack([inclusive[:, -1]] * 2, axis=1))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e5m2])
def test_store_run_keeps_to_its_target(interpret, dtype):
    """Positions out of range are skipped; bits arrive as they are, cut to the type's width."""
    length = 100
    positions = np.full(512, -1, np.int32)
    positions[np.sort(RNG.permutation(512)[:150])] = np.arange(-20, 130)
    bits = RNG.integers(0, 2**32, 512, np.uint32)

    def body(positions_gmem, bits_gmem, out_gmem):
        # Rows 0 and 2 stand guard: zeroed first, they must stay so.
        everywhere = plgpu.layout_cast(
            jax.lax.broadcasted_iota(jnp.int32, (512,), 0), leaf.layout(512, 4)
        )
        zeros = plgpu.layout_cast(jnp.full((512,), 0, jnp.uint32), leaf.layout(512, 4))
        for guard in (0, 2):
            leaf.store_run(out_gmem.at[guard], everywhere, zeros, width=4, interpret=interpret)
        place = load(positions_gmem, 512, 4)
        values = load(bits_gmem, 512, 4)
        leaf.store_run(out_gmem.at[1], place, values, width=4, interpret=interpret)

    out = launch(
        body, jax.ShapeDtypeStruct((3, length), dtype), positions, bits, interpret=interpret
    )
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    inside = (positions >= 0) & (positions < length)
    expected = np.zeros((3, length), unsigned)
    expected[1, positions[inside]] = bits[inside].astype(unsigned)
    np.testing.assert_array_equal(out.view(unsigned), expected)


@pytest.mark.parametrize("unit_stride", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.uint8])
def test_load_row_and_gather(interpret, dtype, unit_stride):
    """A row that ends with its buffer, from every residue of its start modulo 16 bytes."""
    dtype = np.dtype(dtype)
    width = leaf.vector_width(dtype)
    stride, columns = (1, 1000) if unit_stride else (3, 300)
    offset = 64 + RNG.integers(0, width)
    size = int(offset + stride * (columns - 1) + 1)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    x = RNG.integers(0, np.iinfo(unsigned).max, size, unsigned)
    numbers = row_numbers(
        columns=columns, column_stride=stride, offset=int(offset), row_shape=(1,), row_strides=(0,)
    )
    begin, end = 17, columns - 1
    wanted = RNG.integers(-1, columns, 256).astype(np.int32)

    def body(x_gmem, numbers_gmem, wanted_gmem, row_gmem, picked_gmem):
        options = {"unit_stride": unit_stride, "interpret": interpret}
        rows = unpacked(numbers_gmem, row_dims=1)
        start = leaf.row_start(rows, jnp.int32(0), interpret=interpret)
        lead = start.low & (width - 1) if unit_stride else jnp.int32(0)
        row_gmem[...] = leaf.load_row(
            x_gmem, rows, start, -lead, jnp.int32(begin), jnp.int32(end), **options
        )
        wanted = load(wanted_gmem, 256, 2)
        picked_gmem[...] = leaf.gather_row(x_gmem, rows, start, wanted, width=2, **options)

    uint32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.uint32)
    row, picked = launch(
        body, (uint32((CHUNK,)), uint32((256,))), jnp.asarray(x).view(dtype),
        pallas_kernels.pack_numbers(numbers), wanted, interpret=interpret,
    )  # fmt: skip
    lead = offset % width if unit_stride else 0
    values = x[offset::stride][:columns].astype(np.uint32)
    np.testing.assert_array_equal(row[lead + begin : lead + end], values[begin:end])
    np.testing.assert_array_equal(picked, np.where(wanted < 0, 0, values[wanted]))


def test_row_start_is_a_64_bit_number(interpret):
    """Three dimensions of rows; on a GPU past 2**32 elements, where the twin has 32 bits."""
    far = 0 if interpret else 2**33
    shape, strides, offset = (3, 4, 5), (far + 1000, 0, 7), far + 11
    numbers = row_numbers(
        columns=1, column_stride=1, offset=offset, row_shape=shape, row_strides=strides
    )

    def body(numbers_gmem, out_gmem):
        def one(row, _):
            rows = unpacked(numbers_gmem, row_dims=3)
            start = leaf.row_start(rows, row, interpret=interpret)
            out_gmem[row, 0] = start.low
            out_gmem[row, 1] = start.high

        jax.lax.fori_loop(0, 60, one, None)

    packed = pallas_kernels.pack_numbers(numbers)
    halves = launch(body, int32(60, 2), packed, interpret=interpret)
    starts = halves[:, 1].astype(np.int64) << 32 | halves[:, 0].view(np.uint32)
    index = np.stack(np.unravel_index(np.arange(60), shape), axis=1)
    np.testing.assert_array_equal(starts, offset + index @ np.array(strides))


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_compare_exchange_sorts(interpret, warpgroups):
    size = 512
    keys = RNG.integers(0, 50, size).astype(np.uint32) * np.uint32(2**26)
    columns = RNG.permutation(size).astype(np.int32)

    def body(keys_gmem, columns_gmem, keys_out, columns_out, keys_smem, columns_smem, **barrier):
        wg = jax.lax.axis_index("warpgroup")

        def wait():
            leaf.block_barrier(barrier.get("barrier"), interpret=interpret)

        @pl.when(wg == 0)
        def fill():
            keys_smem[...] = keys_gmem[...]
            columns_smem[...] = columns_gmem[...]

        wait()

        def merge(log_block, _):
            def step(i, _):
                leaf.compare_exchange(
                    keys_smem, columns_smem, log_block, log_block - 1 - i, warpgroup=wg,
                    warpgroups=warpgroups, interpret=interpret,
                )  # fmt: skip
                wait()

            jax.lax.fori_loop(0, log_block, step, None)

        jax.lax.fori_loop(1, size.bit_length(), merge, None)

        @pl.when(wg == 0)
        def store():
            keys_out[...] = keys_smem[...]
            columns_out[...] = columns_smem[...]

    scratch = {
        "keys_smem": plgpu.SMEM((size,), jnp.uint32), "columns_smem": plgpu.SMEM((size,), jnp.int32)
    }  # fmt: skip
    if interpret:
        scratch["barrier"] = plgpu.Barrier(num_arrivals=warpgroups)
    got_keys, got_columns = launch(
        body, (jax.ShapeDtypeStruct((size,), jnp.uint32), int32(size)), keys, columns,
        interpret=interpret, scratch=scratch, warpgroups=warpgroups,
    )  # fmt: skip
    order = np.lexsort([columns, -keys.astype(np.int64)])
    np.testing.assert_array_equal(got_keys, keys[order])
    np.testing.assert_array_equal(got_columns, columns[order])
