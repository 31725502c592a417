"""JAX pipelines called with torch tensors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge
import jtopk


def logits() -> torch.Tensor:
    return torch.arange(400.0).view(10, 40)[:, :33]


def test_strides_are_kept_and_trees_are_walked():
    seen = {}

    @bridge.jit
    def pipeline(batch, scale, *, bias):
        seen.update(batch=batch, bias=bias)
        top = jtopk.top_k(batch["logits"], 3)
        return {"top": top, "scaled": top.values * scale + bias}

    x = logits()
    got = pipeline({"logits": x, "unused": None}, 2.0, bias=torch.ones(3))
    assert isinstance(seen["batch"]["logits"], jtopk.StridedRows)
    assert seen["batch"]["logits"].strides == (40, 1)
    assert isinstance(seen["bias"], jax.Array) and seen["bias"].shape == (3,)
    want = torch.topk(x, 3)
    assert isinstance(got["top"], jtopk.TopK)
    assert (got["top"].values == want.values).all()
    assert (got["top"].indices == want.indices).all()
    assert (got["scaled"] == want.values * 2 + 1).all()


def test_one_compilation_for_shapes_and_strides():
    traced = []

    @bridge.jit
    def pipeline(x):
        traced.append(x.strides)
        return x.dense() * 2

    x = logits()
    for _ in range(3):
        assert (pipeline(x) == x * 2).all()
        assert (pipeline(x + 1) == x * 2 + 2).all() if not (x + 1).is_contiguous() else True
    pipeline(torch.arange(500.0).view(10, 50)[:, :33])
    assert traced == [(40, 1), (50, 1)]


def test_options_go_to_jax_jit():
    pipeline = bridge.jit(lambda x, k: jtopk.top_k(x, k).values, static_argnums=1)
    assert pipeline(logits(), 2).shape == (10, 2)


def test_a_strided_result_comes_back_strided():
    got = bridge.jit(lambda x: jtopk.StridedRows(x.buffer + 1, x.shape, x.strides, x.offset))(
        logits()
    )
    assert got.stride() == (40, 1) and (got == logits() + 1).all()


def test_dense_tensors_share_their_memory():
    x = torch.arange(64.0)
    got = bridge.jit(lambda x: x + 1)(x.view(8, 8))
    assert (got == x.view(8, 8) + 1).all()
    # A stride of 0 for one row, left as it is, would be taken for a column-major layout.
    array = bridge._dlpack.import_array(x.as_strided((1, 64), (0, 1)))
    assert isinstance(array, jax.Array) and array.unsafe_buffer_pointer() == x.data_ptr()
    assert array.format.layout.major_to_minor == (0, 1)
    with pytest.warns(bridge.CopyWarning, match=r"252 bytes were copied.*bridge\.to_jax\(tensor\)"):
        misaligned = bridge.jit(lambda x: x + 1)(x[1:])
    assert (misaligned == x[1:] + 1).all()
    # What the warning advises: no copy, and so no warning.
    assert (bridge.jit(lambda x: x.dense() + 1)(bridge.to_jax(x[1:])) == x[1:] + 1).all()


def test_a_gradient_is_not_lost_silently():
    with pytest.raises(ValueError, match=r"requires grad.*\.detach\(\)"):
        bridge.jit(jnp.sin)(torch.ones(4, requires_grad=True))


def test_64_bits_are_not_narrowed():
    with pytest.raises(TypeError, match="dtype int64"):
        bridge.jit(jnp.sin)(torch.ones(8, dtype=torch.int64))
    with pytest.raises(TypeError, match="dtype complex128"):
        bridge.jit(jnp.sin)(torch.ones(8, dtype=torch.complex128))


@pytest.mark.gpu
def test_on_a_gpu():
    x = logits().cuda()
    top = bridge.jit(lambda x: jtopk.top_k(x, 3, backend="mosaic_gpu"))(x)
    assert top.values.is_cuda
    np.testing.assert_array_equal(top.indices.cpu(), torch.topk(x, 3).indices.cpu())
