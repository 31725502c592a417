"""What the torch face does beyond the table of cases: out, gradients, devices."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jax

import bridge
import oracle

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def padded(device: str = "cpu") -> torch.Tensor:
    """Six padded rows, ties everywhere."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 9, (6, 40), generator=generator).float().to(device)[:, :33]


def expected(x: torch.Tensor, k: int, **options):
    return oracle.top_k(x.detach().cpu().numpy(), k, order="torch", **options)


def assert_right(got, x, k, **options):
    oracle.assert_same([t.detach().cpu().numpy() for t in got], expected(x, k, **options))


@pytest.mark.parametrize("device", DEVICES)
def test_index_dtype(device):
    x = padded(device)
    for dtype in (torch.int64, torch.int32):
        got = bridge.top_k(x, 5, index_dtype=dtype)
        assert got.indices.dtype == dtype and got.indices.device == x.device
        assert_right(got, x, 5)


@pytest.mark.parametrize("device", DEVICES)
def test_out_is_written_through_its_strides(device):
    x = padded(device)
    values = torch.full((6, 20), -7.0, device=device)
    indices = torch.full((6, 20), -7, device=device)
    out = values[:, ::4], indices[:, ::4]
    got = bridge.top_k(x, 5, out=out)
    assert got.values is out[0] and got.indices is out[1]
    assert_right(out, x, 5)
    for whole in (values, indices):
        rest = torch.ones(20, dtype=torch.bool)
        rest[::4] = False
        assert (whole[:, rest.to(device)] == -7).all()


def out_pair():
    return torch.full((6, 5), -7.0), torch.full((6, 5), -7)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v, i, x: (v[:, :4], i), r"out values has shape \(6, 4\); expected \(6, 5\)"),
        (lambda v, i, x: (v, i[:5]), r"out indices has shape \(5, 5\); expected \(6, 5\)"),
        (lambda v, i, x: (v.double(), i), r"out values has dtype torch.float64; expected"),
        (lambda v, i, x: (v, i.int()), r"out indices has dtype torch.int32; expected torch.int64"),
        (lambda v, i, x: (x[:, :5], i), r"out values overlaps the input"),
        (lambda v, i, x: (v[:1].expand(6, 5), i), r"out values has strides .* overlaps itself"),
        (lambda v, i, x: (v, v), r"out indices has dtype"),
        (lambda v, i, x: (v,), r"out must be a pair"),
        (lambda v, i, x: (v.numpy(), i), r"out values is a ndarray"),
        (lambda v, i, x: (v.requires_grad_(), i), r"out values requires grad"),
        (lambda v, i, x: (v.to_sparse(), i), r"out values is sparse"),
    ],
)
def test_bad_out_is_refused_before_anything_is_written(change, words):
    x = padded()
    before = x.clone()
    values, indices = out_pair()
    with pytest.raises(ValueError, match=words):
        bridge.top_k(x, 5, out=change(values, indices, x))
    assert (values == -7).all() and (indices == -7).all() and (x == before).all()


def test_out_values_and_indices_must_not_overlap():
    x = padded().to(torch.int32)
    memory = torch.zeros(60, dtype=torch.int32)
    out = memory[:30].view(6, 5), memory[20:50].view(6, 5)
    with pytest.raises(ValueError, match="overlap each other"):
        bridge.top_k(x, 5, out=out, index_dtype=torch.int32)


@pytest.mark.parametrize("device", DEVICES)
def test_gradient_goes_to_the_columns_taken(device):
    x = padded(device).requires_grad_()
    lengths = torch.tensor([0, 1, 4, 5, 33, 40], device=device)
    got = bridge.top_k(x, 5, lengths=lengths)
    assert got.values.requires_grad and not got.indices.requires_grad
    weights = torch.arange(1.0, 31.0, device=device).view(6, 5)
    (got.values.nan_to_num(neginf=0.0) * weights).sum().backward()
    want = torch.zeros(6, 33)
    for r, c in np.ndindex(6, 5):
        column = int(got.indices[r, c])
        if column >= 0:
            want[r, column] += weights[r, c].cpu()
    assert (x.grad.cpu() == want).all()
    assert_right(got, x, 5, lengths=lengths.cpu().numpy())


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_first_and_second_derivatives(dim):
    with jax.enable_x64(True):
        # Far apart, so that gradcheck's steps change no order.
        x = (torch.randperm(42).double() / 3).view(6, 7).requires_grad_()

        def values(x):
            return bridge.top_k(x, 3, dim).values

        assert torch.autograd.gradcheck(values, (x,))
        assert torch.autograd.gradgradcheck(lambda x: values(x).sin(), (x,))


def test_no_gradient_where_none_is_wanted():
    x = padded().requires_grad_()
    with torch.no_grad():
        assert not bridge.top_k(x, 5).values.requires_grad
    with torch.inference_mode():
        assert_right(bridge.top_k(x, 5), x, 5)
    with pytest.raises(ValueError, match="out cannot be given for an input that requires grad"):
        bridge.top_k(x, 5, out=out_pair())


@pytest.mark.parametrize("device", DEVICES)
def test_lengths_of_any_layout(device):
    """Strided and unaligned lengths; int64 beyond int32, which must not wrap."""
    x = padded(device)
    numbers = np.array([2**32 + 3, -(2**40), 4, 0, 33, 2**62])
    wide = torch.zeros(6, 3, dtype=torch.int64, device=device)
    wide[:, 1] = torch.from_numpy(numbers).to(device)
    for lengths in (
        wide[:, 1],
        wide[:, 1].clamp(-5, 99).int(),
        torch.cat([wide[:1, 1], wide[:, 1]])[1:],
    ):
        assert_right(bridge.top_k(x, 5, lengths=lengths), x, 5, lengths=numbers)


@pytest.mark.parametrize("name", ["lengths", "starts"])
def test_lengths_that_are_no_plain_tensor(name, nothing_launched):
    with pytest.raises(ValueError, match=rf"{name} is \[1, 2\], a list; expected a torch.Tensor"):
        bridge.top_k(padded(), 5, **{name: [1, 2]})
    with pytest.raises(ValueError, match=f"{name} is sparse"):
        bridge.top_k(padded(), 5, **{name: torch.ones(6, dtype=torch.int32).to_sparse()})


def test_input_is_read_in_place(monkeypatch):
    seen = []
    original = bridge._execute._api.top_k_ordered

    def record(operand, *args, **kwargs):
        seen.append(operand.buffer.unsafe_buffer_pointer())
        return original(operand, *args, **kwargs)

    monkeypatch.setattr(bridge._execute._api, "top_k_ordered", record)
    x = padded()
    bridge.top_k(x, 5)
    assert seen == [x.data_ptr()]


@pytest.mark.gpu
def test_numbers_and_out_on_the_wrong_device():
    x = padded("cuda")
    with pytest.raises(ValueError, match="lengths is on cpu; expected input's device cuda:0"):
        bridge.top_k(x, 5, lengths=torch.ones(6, dtype=torch.int32))
    with pytest.raises(ValueError, match="out values is on cpu; expected cuda:0"):
        bridge.top_k(x, 5, out=out_pair())


@pytest.mark.gpu
def test_capture_of_what_goes_by_jax_is_refused_with_words():
    x = padded("cuda")
    wide = torch.arange(6000.0, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Of this thread only: JAX's own may still be busy, and a global capture forbids them CUDA.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x + 1
        with pytest.raises(RuntimeError, match="CUDA graph cannot capture"):
            bridge.top_k(wide, 5000)  # more than the kernel sorts
        with pytest.raises(RuntimeError, match="CUDA graph cannot capture"):
            bridge.jit(lambda x: x.dense())(x)
    graph.replay()
    assert (y == x + 1).all()


@pytest.mark.gpu
def test_right_on_a_side_stream_and_after_the_input_is_freed():
    stream = torch.cuda.Stream()
    for i in range(50):
        with torch.cuda.stream(stream):
            x = torch.randn(64, 5000, device="cuda")[:, :4999]
            torch.cuda._sleep(200_000)
            x += i
            kept = x.clone()
            got = bridge.top_k(x, 20)
            del x
            torch.full((64, 5000), torch.inf, device="cuda")  # takes the freed memory
            want = torch.topk(kept, 20)
            assert (got.values == want.values).all()
