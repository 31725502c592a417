"""Top-k over a mesh of 8 CPU devices against the oracle, and what the program communicates."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jtopk
import oracle
from cases import data_rows


def mesh(rows: int, columns: int) -> jax.sharding.Mesh:
    devices = np.array(jax.devices("cpu")[: rows * columns]).reshape(rows, columns)
    return jax.sharding.Mesh(devices, ("r", "c"))


def axes(rows: int, columns: int) -> dict:
    return {
        "mesh": mesh(rows, columns),
        "row_axis": "r" if rows > 1 else None,
        "column_axis": "c" if columns > 1 else None,
    }


def ties(*shape: int, dtype="float32") -> np.ndarray:
    return np.random.default_rng(0).integers(0, 5, shape).astype(dtype)


MESHES = [(1, 1), (8, 1), (1, 8), (2, 4), (4, 2)]


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("largest", [True, False])
def test_like_the_oracle(shape, largest):
    """Sizes the mesh divides and sizes it does not; ties everywhere; k beyond a shard's columns."""
    for rows, columns, k in ((8, 64, 5), (8, 64, 64), (5, 61, 7), (3, 9, 9), (1, 3, 2)):
        x = ties(rows, columns)
        got = jtopk.sharded_top_k(jnp.asarray(x), k, largest=largest, **axes(*shape))
        oracle.assert_same(got, oracle.top_k(x, k, largest=largest))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint16", "int32"])
def test_dtypes_and_every_kind_of_number(dtype):
    x = data_rows(dtype, 120, seed=3)
    got = jtopk.sharded_top_k(jnp.asarray(x), 50, **axes(2, 4))
    oracle.assert_same(got, oracle.top_k(x, 50))


def test_64_bit():
    with jax.enable_x64(True):
        for dtype in ("float64", "int64", "uint64"):
            x = data_rows(dtype, 40, seed=3)
            got = jtopk.sharded_top_k(jnp.asarray(x), 9, **axes(1, 8))
            oracle.assert_same(got, oracle.top_k(x, 9))


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("k", [3, 40, 80])
def test_lengths_and_starts_count_columns_of_whole_rows(shape, k):
    x = ties(8, 64)
    x[:, ::3] = -np.inf  # like what fills
    x[1, :] = np.frombuffer(np.uint32(0xFFC00000).tobytes(), np.float32)  # ranks below it
    lengths = np.array([0, 1, 9, 64, 200, 30, -4, 17], np.int32)
    starts = np.array([0, 5, 60, 0, -9, 31, 3, 63], np.int32)
    for options in ({"lengths": lengths}, {"lengths": lengths, "starts": starts}):
        got = jtopk.sharded_top_k(jnp.asarray(x), k, **options, **axes(*shape))
        oracle.assert_same(got, oracle.top_k(x, k, **options))


def test_ranks_and_unsorted():
    x = ties(4, 3, 64)
    got = jtopk.sharded_top_k(jnp.asarray(x), 6, **axes(2, 4))
    oracle.assert_same(got, oracle.top_k(x, 6))
    got = jtopk.sharded_top_k(jnp.asarray(x[0, 0]), 6, **axes(1, 8))
    oracle.assert_same(got, oracle.top_k(x[0, 0], 6))
    values, indices = jtopk.sharded_top_k(jnp.asarray(x), 6, sorted=False, **axes(2, 4))
    want = oracle.top_k(x, 6)
    np.testing.assert_array_equal(np.sort(indices), np.sort(want[1]))
    np.testing.assert_array_equal(np.take_along_axis(x, np.asarray(indices), -1), values)


def test_the_operand_stays_where_it_lies():
    options = axes(2, 4)
    x = jnp.asarray(ties(8, 64))
    placed = jax.device_put(x, NamedSharding(options["mesh"], PartitionSpec("r", "c")))
    got = jtopk.sharded_top_k(placed, 5, **options)
    oracle.assert_same(got, oracle.top_k(np.asarray(x), 5))
    assert got.values.sharding.spec == PartitionSpec("r") or got.values.sharding.spec[0] == "r"


COLLECTIVE = re.compile(
    r"= (\S+) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\("
)


def collectives(shape: tuple[int, int], rows=16, columns=4096, k=8, grad=False, **options):
    """Kinds and bytes of a device's collectives in the compiled program."""
    where = axes(*shape)
    spec = PartitionSpec(where["row_axis"], where["column_axis"])
    x = jax.ShapeDtypeStruct(
        (rows, columns), jnp.float32, sharding=NamedSharding(where["mesh"], spec)
    )
    call = functools.partial(jtopk.sharded_top_k, k=k, **where, **options)
    if grad:
        call = jax.grad(lambda x: jtopk.sharded_top_k(x, k, **where).values.sum())
    text = jax.jit(call).lower(x).compile().as_text()
    found = []
    for kind, name in COLLECTIVE.findall(text):
        numbers = re.match(r"\(?[a-z]+(\d+)\[([\d,]*)\]", kind)
        assert numbers, kind
        size = int(np.prod([int(n) for n in numbers[2].split(",") if n]))
        found.append((name, size * int(numbers[1]) // 8))
    return found


def test_rows_need_no_communication():
    assert collectives((8, 1)) == []


@pytest.mark.parametrize("shape", [(1, 8), (2, 4), (4, 2)], ids=str)
def test_columns_need_one_all_gather_of_k_a_shard(shape):
    """4 bytes a value and 4 a column, for k candidates of each shard, for the device's rows."""
    row_shards, column_shards = shape
    want = (16 // row_shards) * column_shards * 8 * (4 + 4)
    assert collectives(shape) == [("all-gather", want)]


def test_a_gradient_needs_no_more():
    """What is differentiated is a gather: its transpose scatters, each shard to its own."""
    names = [name for name, _ in collectives((1, 8), grad=True)]
    assert "all-to-all" not in names and "collective-permute" not in names


def test_gradients():
    x = jnp.asarray(ties(8, 61))
    weights = jnp.arange(1.0, 6)

    def loss(f):
        return lambda x: (f(x)[0] ** 2 * weights).sum()  # small integers: exact

    for shape in MESHES:
        sharded = loss(lambda x, s=shape: jtopk.sharded_top_k(x, 5, **axes(*s)))
        got, want = jax.grad(sharded)(x), jax.grad(loss(lambda x: jax.lax.top_k(x, 5)))(x)
        np.testing.assert_array_equal(got, want)


def test_by_hand_inside_shard_map():
    """`top_k` itself composes: rows stay where they are."""
    options = axes(8, 1)
    x = ties(16, 64)
    call = jax.shard_map(
        lambda x: tuple(jtopk.top_k(x, 5)), mesh=options["mesh"], in_specs=PartitionSpec("r"),
        out_specs=PartitionSpec("r"),
    )  # fmt: skip
    oracle.assert_same(jax.jit(call)(jnp.asarray(x)), oracle.top_k(x, 5))
    got = jax.grad(lambda x: call(x)[0].sum())(jnp.asarray(x))
    np.testing.assert_array_equal(got, jax.grad(lambda x: jax.lax.top_k(x, 5)[0].sum())(x))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"row_axis": "x"}, r"row_axis is 'x'; the mesh has axes \('r', 'c'\)"),
        ({"column_axis": ("c", "y")}, "column_axis is"),
        ({"row_axis": "c"}, "row_axis and column_axis are both 'c'"),
        ({"k": 65}, "k=65 is larger than the row, which has 64 columns"),
        ({"operand": jnp.ones(64)}, r"row_axis is 'r', but operand has shape \(64,\)"),
        ({"lengths": jnp.ones(3, jnp.int32)}, r"lengths has shape \(3,\)"),
    ],
)
def test_bad_arguments(change, words):
    arguments = {"operand": jnp.ones((8, 64)), "k": 5, **axes(2, 4), **change}
    with pytest.raises(ValueError, match=words):
        jtopk.sharded_top_k(**arguments)


def placed(x, shape: tuple[int, int], spec: PartitionSpec) -> jax.Array:
    return jax.device_put(jnp.asarray(x), NamedSharding(mesh(*shape), spec))


class TestByThePartitioner:
    """`top_k` itself, jitted, of arrays that lie over a mesh: nothing is said of the mesh."""

    @pytest.mark.parametrize(
        ("sizes", "shape", "spec"),
        [
            ((16, 64), (8, 1), PartitionSpec("r")),
            ((16, 64), (2, 4), PartitionSpec("r", "c")),
            ((16, 64), (2, 4), PartitionSpec(("r", "c"))),
            ((12, 64), (2, 2), PartitionSpec(None, "c")),
            ((4, 6, 64), (4, 2), PartitionSpec("r")),
            ((4, 6, 64), (4, 2), PartitionSpec("r", "c")),
            ((4, 6, 64), (2, 2), PartitionSpec(None, "r", "c")),
            ((64,), (8, 1), PartitionSpec("r")),
        ],
        ids=str,
    )
    def test_like_the_oracle(self, sizes, shape, spec):
        x = ties(*sizes)
        lengths = np.random.default_rng(1).integers(-3, 80, sizes[:-1]).astype(np.int32)
        got = jax.jit(lambda x: jtopk.top_k(x, 7))(placed(x, shape, spec))
        oracle.assert_same(got, oracle.top_k(x, 7))
        got = jax.jit(lambda x, n: jtopk.top_k(x, 7, lengths=n))(placed(x, shape, spec), lengths)
        oracle.assert_same(got, oracle.top_k(x, 7, lengths=lengths))

    def test_along_another_axis(self):
        x = ties(64, 16)
        got = jax.jit(lambda x: jtopk.top_k(x, 7, axis=0))(
            placed(x, (8, 1), PartitionSpec(None, "r"))
        )
        want = oracle.top_k(np.ascontiguousarray(x.T), 7)
        oracle.assert_same(tuple(np.asarray(a).T.copy() for a in got), want)

    def test_rows_stay_where_they_are(self):
        def bytes_moved(fn, sizes, spec):
            x = jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(mesh(4, 2), spec))
            return COLLECTIVE.findall(jax.jit(fn).lower(x).compile().as_text())

        def forward(x):
            return jtopk.top_k(x, 8)

        gradient = jax.grad(lambda x: (jtopk.top_k(x, 8).values ** 2).sum())
        rows = PartitionSpec("r")
        assert bytes_moved(lambda x: tuple(jax.lax.top_k(x, 8)), (16, 4096), rows)  # it gathers
        assert bytes_moved(forward, (16, 4096), rows) == []
        assert bytes_moved(forward, (16, 3, 4096), rows) == []
        assert bytes_moved(jax.vmap(forward), (16, 3, 4096), rows) == []
        assert bytes_moved(gradient, (16, 4096), rows) == []
        # Columns have to be brought together, for the device's own rows and no more.
        moved = bytes_moved(forward, (16, 4096), PartitionSpec("r", "c"))
        assert [kind for _, kind in moved] == ["all-gather"]
        assert moved[0][0].startswith("f32[4,4096]")


def test_explicit_shardings_stay_and_cost_nothing():
    where = jax.make_mesh((8,), ("r",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = ties(16, 64)
    lengths = np.random.default_rng(1).integers(-3, 80, 16).astype(np.int32)
    with jax.set_mesh(where):
        rows = jax.device_put(jnp.asarray(x), NamedSharding(where, PartitionSpec("r")))
        call = jax.jit(lambda x: jtopk.top_k(x, 7))
        got = call(rows)
        assert jax.typeof(got.values).sharding.spec[0] == "r"
        assert COLLECTIVE.findall(call.lower(rows).compile().as_text()) == []
        oracle.assert_same(got, oracle.top_k(x, 7))
        got = jtopk.top_k(rows, 7, lengths=jnp.asarray(lengths))
        oracle.assert_same(got, oracle.top_k(x, 7, lengths=lengths))
        got = jax.grad(lambda x: jtopk.top_k(x, 7).values.sum())(rows)
    np.testing.assert_array_equal(
        got, jax.grad(lambda x: jax.lax.top_k(x, 7)[0].sum())(jnp.asarray(x))
    )
