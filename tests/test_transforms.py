"""Transformations of JAX's around `jtopk.top_k`: the same as around `jax.lax.top_k`."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtopk
import oracle

K = 5
BACKENDS = [pytest.param("xla"), pytest.param("mosaic_gpu", marks=pytest.mark.gpu)]


def data(*shape: int, dtype=np.float32) -> jax.Array:
    """Few values, so that there are ties."""
    return jnp.asarray(np.random.default_rng(0).integers(0, 7, shape).astype(dtype))


def ours(x, k=K, **options):
    return jtopk.top_k(x, k, **options)


def theirs(x, k=K):
    return tuple(jax.lax.top_k(x, k))


def strided(x: jax.Array) -> jtopk.StridedRows:
    """The same numbers at an odd row stride, between infinities."""
    *rows, columns = x.shape
    count = int(np.prod(rows))
    wide = (
        jnp.full((count, columns + 4), jnp.inf, x.dtype).at[:, :columns].set(x.reshape(count, -1))
    )
    flat = jnp.concatenate([jnp.full(3, jnp.inf, x.dtype), wide.reshape(-1)])
    steps = [columns + 4]
    for size in reversed(rows[1:]):
        steps.append(steps[-1] * size)
    return jtopk.StridedRows(flat, x.shape, (*reversed(steps), 1), 3)


def same(got, want) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def launches(fn, *args) -> int:
    """How often the compiled program selects; under vmap too it must be once."""
    text = jax.jit(fn).lower(*args).as_text()
    return len(re.findall(r"custom_call @mosaic_gpu|chlo\.top_k|mhlo\.topk|stablehlo\.sort", text))


@pytest.mark.parametrize("backend", BACKENDS)
class TestVmap:
    def test_batches_are_rows_of_one_call(self, backend):
        x = data(2, 3, 4, 40)
        f = functools.partial(ours, backend=backend)
        nested = jax.vmap(jax.vmap(f))
        same(nested(x), theirs(x))
        same(jax.vmap(f, in_axes=2, out_axes=1)(x), jax.vmap(theirs, in_axes=2, out_axes=1)(x))
        assert launches(nested, x) == launches(f, x) == 1

    def test_of_a_strided_view(self, backend):
        """The batch is an axis of the buffer."""
        x = data(3, 4, 40)
        views = [strided(row) for row in x]
        view = jtopk.StridedRows(views[0].buffer, views[0].shape, views[0].strides, views[0].offset)
        view.buffer = jnp.stack([v.buffer for v in views])
        f = jax.vmap(functools.partial(ours, backend=backend))
        same(f(view), theirs(x))
        assert launches(f, view) == 1

    def test_lengths_with_and_without_a_batch(self, backend):
        x = data(3, 4, 40)
        lengths = jnp.arange(12, dtype=jnp.int32).reshape(3, 4)

        def f(x, n):
            return ours(x, lengths=n, backend=backend)

        want = oracle.top_k(np.asarray(x), K, lengths=np.asarray(lengths))
        same(jax.vmap(f)(x, lengths), want)
        for b in range(3):
            one = jax.vmap(f, in_axes=(0, None))(x, lengths[b])
            same(one, oracle.top_k(np.asarray(x), K, lengths=np.tile(lengths[b], (3, 1))))
        shared = jax.vmap(f, in_axes=(None, 0))(x[0], lengths)
        rows = np.broadcast_to(np.asarray(x[0]), x.shape)
        same(shared, oracle.top_k(rows, K, lengths=np.asarray(lengths)))

    def test_of_another_axis(self, backend):
        x = data(3, 40, 4)
        got = jax.vmap(functools.partial(ours, axis=0, backend=backend))(x)
        want = theirs(jnp.swapaxes(x, 1, 2))
        same(got, tuple(jnp.swapaxes(a, 1, 2) for a in want))


WEIGHTS = jnp.arange(1.0, K + 1)


def loss(f):
    return lambda x: (jnp.sin(f(x)[0]) * WEIGHTS).sum()


@pytest.mark.parametrize("backend", BACKENDS)
class TestDerivatives:
    """Equal to lax.top_k's to the bit, ties included."""

    def pair(self, backend):
        return functools.partial(ours, backend=backend), theirs

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
    def test_grad(self, backend, dtype):
        x = data(3, 4, 40).astype(dtype)
        f, g = self.pair(backend)
        same(jax.grad(loss(f))(x), jax.grad(loss(g))(x))
        same(jax.jit(jax.grad(loss(f)))(x), jax.jit(jax.grad(loss(g)))(x))
        same(jax.value_and_grad(loss(f))(x), jax.value_and_grad(loss(g))(x))

    def test_forward_and_higher(self, backend):
        x = data(20)
        f, g = self.pair(backend)
        tangent = jnp.asarray(np.random.default_rng(1).standard_normal(20), jnp.float32)
        (values, _), (d_values, d_indices) = jax.jvp(f, (x,), (tangent,))
        want, d_want = jax.jvp(g, (x,), (tangent,))
        same((values, d_values), (want[0], d_want[0]))
        assert d_indices.dtype == jax.dtypes.float0
        same(jax.jacfwd(lambda x: f(x)[0])(x), jax.jacfwd(lambda x: g(x)[0])(x))
        same(jax.jacrev(lambda x: f(x)[0])(x), jax.jacrev(lambda x: g(x)[0])(x))
        same(jax.hessian(loss(f))(x), jax.hessian(loss(g))(x))
        third = jax.grad(lambda x: jax.hessian(loss(f))(x).sum())
        same(third(x), jax.grad(lambda x: jax.hessian(loss(g))(x).sum())(x))

    def test_with_vmap(self, backend):
        x = data(3, 40)
        f, g = self.pair(backend)
        same(jax.vmap(jax.grad(loss(f)))(x), jax.vmap(jax.grad(loss(g)))(x))
        both = jax.grad(lambda x: jax.vmap(loss(f))(x).sum())
        same(both(x), jax.grad(lambda x: jax.vmap(loss(g))(x).sum())(x))

    def test_of_a_strided_buffer(self, backend):
        """To the elements of the buffer; padding gets none, what rows share gets the sum."""
        x = data(3, 40)
        f, g = self.pair(backend)
        view = strided(x)
        got = jax.grad(loss(f))(view)
        assert isinstance(got, jtopk.StridedRows)
        same(got.dense(), jax.grad(loss(g))(x))
        assert jnp.count_nonzero(got.buffer) == jnp.count_nonzero(got.dense())
        shared = jtopk.StridedRows(x[0], (3, 40), (0, 1))
        got = jax.grad(loss(f))(shared).buffer
        want = jax.grad(lambda r: loss(g)(jnp.broadcast_to(r, (3, 40))))(x[0])
        np.testing.assert_allclose(got, want, rtol=1e-6)

    def test_of_unfilled_places(self, backend):
        x = data(3, 40)
        lengths = jnp.array([0, 2, 99])

        def f(x):
            values, _ = ours(x, lengths=lengths, backend=backend)
            return (jnp.where(jnp.isinf(values), 0, values) * WEIGHTS).sum()

        got = np.asarray(jax.grad(f)(x))
        want = np.zeros((3, 40), np.float32)
        _, indices = oracle.top_k(np.asarray(x), K, lengths=np.asarray(lengths))
        for r, j in np.ndindex(3, K):
            if indices[r, j] >= 0:
                want[r, indices[r, j]] += WEIGHTS[j]
        np.testing.assert_array_equal(got, want)

    def test_of_integers_there_is_none(self, backend):
        x = data(3, 40, dtype=np.int32)
        same(ours(x, backend=backend), theirs(x))
        with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
            jax.grad(lambda x: ours(x, backend=backend)[0].sum())(x)

    def test_values_keep_their_bits(self, backend):
        """A derivative around the call must not send values through arithmetic."""
        bits = np.array([[0x7FC00001, 0xFF812345, 1, 0x80000000, 0x7F800000]], np.uint32)
        x = jnp.asarray(bits.view(np.float32))
        (values, _), _ = jax.jvp(lambda x: ours(x, backend=backend), (x,), (x,))
        oracle.assert_same((values, np.zeros((1, 5), np.int32)), (
            oracle.top_k(bits.view(np.float32), 5)[0], np.zeros((1, 5), np.int32)
        ))  # fmt: skip


def test_control_flow():
    x = data(6, 40)
    f = jax.jit(ours)

    def step(carry, row):
        values, indices = ours(row)
        return carry + values.sum(), indices

    total, indices = jax.lax.scan(step, 0.0, x)
    same((total, indices), (theirs(x)[0].sum(), theirs(x)[1]))
    same(
        jax.grad(lambda x: jax.lax.scan(step, 0.0, x)[0])(x),
        jax.grad(lambda x: theirs(x)[0].sum())(x),
    )
    branch = jax.jit(lambda p, x: jax.lax.cond(p, ours, lambda x: ours(-x), x))
    same(branch(True, x), theirs(x))
    same(branch(False, x), theirs(-x))
    remat = jax.checkpoint(loss(ours))
    same(jax.grad(remat)(x), jax.grad(loss(theirs))(x))
    same(f(x), theirs(x))


def test_inside_a_custom_vjp():
    @jax.custom_vjp
    def double(x):
        return ours(x)[0] * 2

    double.defvjp(lambda x: (double(x), x.shape), lambda s, g: (jnp.zeros(s).at[:, :K].set(g),))
    x = data(3, 40)
    got = jax.grad(lambda x: double(x).sum())(x)
    same(got, jnp.zeros((3, 40)).at[:, :K].set(1))


def test_abstract_evaluation_and_ahead_of_time():
    x = data(3, 40)
    shapes = jax.eval_shape(ours, x)
    assert shapes.values == jax.ShapeDtypeStruct((3, K), jnp.float32)
    assert shapes.indices == jax.ShapeDtypeStruct((3, K), jnp.int32)
    assert "custom_vmap_call" in str(jax.make_jaxpr(ours)(x))
    same(jax.jit(ours).lower(x).compile()(x), theirs(x))


def test_donation():
    x = data(3, 40)
    want = theirs(x)
    donating = jax.jit(lambda x: (ours(x), x + 1), donate_argnums=0)
    got, other = donating(x)
    same(got, want)
    assert x.is_deleted() and other.shape == (3, 40)


@pytest.mark.parametrize("platforms", [["cpu"], ["cuda"], ["cpu", "cuda"]])
def test_export(platforms):
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers")
    x = data(3, 40)
    exported = export.export(jax.jit(ours), platforms=platforms)(x)
    again = export.deserialize(exported.serialize())
    if "cpu" in platforms and jax.default_backend() == "cpu":
        got = again.call(x)
        assert isinstance(got, jtopk.TopK)
        same(got, theirs(x))


def test_export_of_a_strided_view():
    export = pytest.importorskip("jax.export")
    pytest.importorskip("flatbuffers")
    view = strided(data(3, 40))
    exported = export.export(jax.jit(lambda v: (v, ours(v))))(view)
    again, got = export.deserialize(exported.serialize()).call(view)
    assert (again.shape, again.strides, again.offset) == (view.shape, view.strides, view.offset)
    same(got, theirs(data(3, 40)))


def test_a_pipeline_stays_one_program():
    """A matmul into a padded buffer, top-k of a view of it, a gather by the indices."""
    a, b = data(4, 16), data(16, 64)
    table = data(40, 3)

    def pipeline(a, b, table):
        logits = (a @ b).reshape(-1)
        view = jtopk.StridedRows(logits, (4, 40), (64, 1))
        return table[ours(view).indices]

    compiled = jax.jit(pipeline).lower(a, b, table).compile()
    want = table[theirs((a @ b)[:, :40])[1]]
    same(compiled(a, b, table), want)
