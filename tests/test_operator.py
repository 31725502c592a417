"""`torch.ops.jtopk.top_k` under everything of torch's that transforms calls."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jax

import bridge
import oracle

# torch says so on Python 3.13.0.
pytestmark = pytest.mark.filterwarnings("ignore:Guards may run slower on Python")

OP = torch.ops.jtopk.top_k
DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


def numbers(*shape: int, device: str = "cpu") -> torch.Tensor:
    """Few values, so that there are ties."""
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(0)).float().to(device)


def samples(device: str) -> dict[str, tuple[tuple, dict]]:
    x = numbers(4, 33, device=device)
    padded = numbers(4, 64, device=device)
    lengths = torch.tensor([0, 3, 33, 99], device=device)
    return {
        "contiguous": ((x, 5), {}),
        "padded": ((padded[:, :33], 5), {}),
        "offset": ((padded[1:, 3:40], 5), {}),
        "expanded": ((x[:1].expand(4, 33), 5), {}),
        "transposed": ((numbers(33, 4, device=device).t(), 5), {}),
        "permuted": ((numbers(2, 33, 3, device=device).permute(2, 0, 1), 5), {}),
        "requires-grad": ((x.clone().requires_grad_(), 5), {}),
        "padded-requires-grad": ((padded[:, :33].detach().requires_grad_(), 5, 1, False), {}),
        "lengths": ((x, 5), {"lengths": lengths, "starts": lengths.int()}),
        "dim-0": ((x, 2, 0), {}),
        "unsorted-int32": ((x, 5, 1, True, False), {"index_dtype": torch.int32}),
        "k-0": ((x, 0), {}),
        "no-rows": ((x[:0], 5), {}),
        "bfloat16": ((x.bfloat16(), 5), {}),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck's own
@pytest.mark.parametrize("name", samples("cpu"))
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device, name):
    args, kwargs = samples(device)[name]
    torch.library.opcheck(OP.default, args, kwargs)


@pytest.mark.parametrize("name", samples("cpu"))
def test_the_operator_and_the_function_agree(name):
    args, kwargs = samples("cpu")[name]
    ours = OP(*args, **kwargs)
    theirs = bridge.top_k(*args, **kwargs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.is_contiguous() and b.is_contiguous() and torch.equal(a, b)
        assert a.dtype == b.dtype and a.requires_grad == b.requires_grad


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "words"),
    [
        ((numbers(4, 9), 10), {}, ValueError, "k=10 is larger than the row, which has 9 columns"),
        ((numbers(4, 9), -1), {}, ValueError, "k must not be negative, got -1"),
        ((numbers(4, 9), 2, 2), {}, ValueError, "dim=2 is out of range"),
        ((numbers(4, 9) > 1, 2), {}, TypeError, "input has dtype bool"),
        ((torch.tensor(1.0), 1), {}, TypeError, r"input has shape \(\)"),
        ((numbers(4, 9), 2), {"lengths": torch.ones(3).int()}, ValueError, r"lengths has shape"),
        ((numbers(4, 9), 2), {"starts": torch.ones(4)}, ValueError, "starts has dtype float32"),
        ((numbers(4, 9), 2), {"index_dtype": torch.int16}, ValueError, "index_dtype is"),
    ],
)
def test_errors_in_the_same_words(args, kwargs, error, words):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with pytest.raises(error, match=words):
        OP(*args, **kwargs)
    with pytest.raises(error, match=words):
        bridge.top_k(*args, **kwargs)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        options = {
            n: mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for n, a in kwargs.items()
        }
        with pytest.raises(error, match=words):
            OP(*fake, **options)


def test_fake_tensors_pass_through_the_function():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        got = bridge.top_k(mode.from_tensor(numbers(4, 64))[:, :33], 5, index_dtype=torch.int32)
    assert got.values.shape == (4, 5) and got.indices.dtype == torch.int32
    assert got.values.stride() == (5, 1)


def double(x, k, dim):
    got = bridge.top_k(x * 2, k, dim)
    return got.values + 1, got.indices


def backends(device: str) -> list[str]:
    return ["aot_eager"] if device == "cpu" else ["aot_eager", "inductor"]


@pytest.mark.filterwarnings("default")  # torch's compiler warns of torch
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_compile(device, dynamic):
    for backend in backends(device):
        torch._dynamo.reset()
        compiled = torch.compile(double, fullgraph=True, backend=backend, dynamic=dynamic)
        for rows in (4, 6, 3):
            x = numbers(rows, 64, device=device)[:, :33].requires_grad_()
            got, want = compiled(x, 5, 1), double(x, 5, 1)
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)
            (gradient,) = torch.autograd.grad(got[0].sin().sum(), x)
            assert torch.equal(gradient, torch.autograd.grad(want[0].sin().sum(), x)[0])


def test_compile_with_marked_dimensions_and_a_symbolic_k():
    torch._dynamo.reset()

    def call(x):
        return bridge.top_k(x, x.shape[1] // 3)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for columns in (33, 60, 99):
        x = numbers(4, columns)
        torch._dynamo.mark_dynamic(x, 1)
        for a, b in zip(compiled(x), call(x), strict=True):
            assert torch.equal(a, b)


def test_out_is_not_traced():
    x = numbers(4, 33)
    out = torch.empty(4, 5), torch.empty(4, 5, dtype=torch.int64)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="out is not traced"):
        torch.compile(lambda x: bridge.top_k(x, 5, out=out), fullgraph=True, backend="eager")(x)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    class Module(torch.nn.Module):
        def forward(self, x):
            return tuple(bridge.top_k(x, 5))

    batch = torch.export.Dim("batch")
    program = torch.export.export(
        Module(), (numbers(4, 33),), dynamic_shapes=({0: batch},), strict=strict
    )
    x = numbers(7, 33)
    for a, b in zip(program.module()(x), bridge.top_k(x, 5), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_vmap(device):
    x = numbers(3, 4, 5, 33, device=device)
    lengths = torch.arange(60, device=device).view(3, 4, 5)
    want = bridge.top_k(x, 40, lengths=lengths)
    once = torch.func.vmap(lambda x, n: bridge.top_k(x, 40, lengths=n))(x, lengths)
    twice = torch.func.vmap(torch.func.vmap(lambda x, n: bridge.top_k(x, 40, lengths=n)))
    other = torch.func.vmap(lambda x, n: bridge.top_k(x, 40, lengths=n), in_dims=(2, 2), out_dims=2)
    for got in (once, twice(x, lengths), other(x, lengths)):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)


def test_vmap_with_one_side_unbatched():
    x, batch = numbers(4, 33), numbers(3, 4, 33)
    lengths = torch.arange(12).view(3, 4)
    got = torch.func.vmap(lambda n: bridge.top_k(x, 40, -1, lengths=n))(lengths)
    for b in range(3):
        for a, w in zip(got, bridge.top_k(x, 40, lengths=lengths[b]), strict=True):
            assert torch.equal(a[b], w)
    got = torch.func.vmap(lambda x: bridge.top_k(x, 2, 0, False, lengths=lengths.new_ones(33)))(
        batch
    )
    for b in range(3):
        want = bridge.top_k(batch[b], 2, 0, False, lengths=lengths.new_ones(33))
        assert torch.equal(got.indices[b], want.indices)


def test_vmap_of_scalars_says_so():
    with pytest.raises(TypeError, match=r"input has shape \(\)"):
        torch.func.vmap(lambda x: OP(x, 1))(numbers(4))


def test_functional_gradients():
    x = numbers(3, 33) + torch.arange(33) / 64  # no ties
    weights = torch.randn(3, 5)

    def loss(x):
        return (bridge.top_k(x, 5).values * weights).sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert torch.equal(torch.func.grad(loss)(x), leaf.grad)
    assert torch.equal(
        torch.func.vmap(torch.func.grad(lambda x: bridge.top_k(x, 5).values.sum()))(x),
        torch.func.grad(lambda x: bridge.top_k(x, 5).values.sum())(x),
    )
    jacobian = torch.func.jacrev(lambda x: bridge.top_k(x, 2).values)(x[0])
    want = torch.zeros(2, 33).scatter(1, bridge.top_k(x[0], 2).indices[:, None], 1.0)
    assert torch.equal(jacobian, want)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own
def test_forward_gradients():
    import torch.autograd.forward_ad as forward_ad

    x, tangent = numbers(3, 33), torch.randn(3, 33)
    lengths = torch.tensor([2, 33, 0])

    def values(x):
        return bridge.top_k(x, 5, lengths=lengths).values

    indices = bridge.top_k(x, 5, lengths=lengths).indices
    want = torch.where(indices < 0, 0, tangent.gather(1, indices.clamp(min=0)))
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(values(forward_ad.make_dual(x, tangent)))
        assert torch.equal(got.tangent, want)
        got = forward_ad.unpack_dual(OP(forward_ad.make_dual(x, tangent), 2)[0])
        assert got.tangent is not None
    assert torch.equal(torch.func.jvp(values, (x,), (tangent,))[1], want)


def test_gradients_of_lengths_that_fill():
    with jax.enable_x64(True):
        x = (torch.randperm(42).double() / 3).view(6, 7).requires_grad_()
        lengths = torch.tensor([0, 1, 2, 3, 7, 9])

        def values(x):
            return OP(x, 3, 1, True, True, lengths)[0].clamp(-100, 100)

        assert torch.autograd.gradcheck(values, (x,))
        assert torch.autograd.gradgradcheck(lambda x: values(x).sin(), (x,))


@pytest.mark.parametrize("device", DEVICES)
def test_modes(device):
    x = numbers(4, 33, device=device)
    with torch.inference_mode():
        got = bridge.top_k(x, 5)
        assert torch.equal(OP(x, 5)[0], got.values)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert bridge.top_k(x, 5).values.dtype == OP(x, 5)[0].dtype == torch.float32
    oracle.assert_same(
        [t.cpu().numpy() for t in got], oracle.top_k(x.cpu().numpy(), 5, order="torch")
    )


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return bridge.top_k(numbers(3, 33) + i, 5).values


WORKERS = """
import torch
from test_operator import Rows
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context={how!r})
    want = [Rows()[i] for i in range(4)] if {how!r} == "spawn" else None
    got = [batch[0] for batch in loader]
    want = want or [Rows()[i] for i in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    print("same")
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_a_data_loader(how, tmp_path):
    """In a forked worker JAX starts anew, if the parent has not started it before."""
    from pathlib import Path

    script = tmp_path / "loader.py"
    script.write_text(WORKERS.format(how=how))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same"


def test_importing_starts_neither_cuda_nor_jax():
    code = """
import bridge, torch
from jax._src import xla_bridge
assert not torch.cuda.is_initialized() and not xla_bridge._backends
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_warnings_as_errors_hold_here():
    """Else the tests above would not see torch's complaints about an operator."""
    with pytest.raises(UserWarning):
        warnings.warn("an error in these tests", UserWarning, stacklevel=1)


def test_values_are_bits():
    """A NaN's payload survives the operator."""
    bits = np.array([0x7FC00001, 0x7F800000, 0xFFC12345], np.uint32)
    got = OP(torch.from_numpy(bits.view(np.float32)).clone(), 3)[0].numpy().view(np.uint32)
    np.testing.assert_array_equal(np.sort(got), np.sort(bits))
