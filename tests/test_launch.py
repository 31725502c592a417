"""The launch without JAX's runtime.

On a CPU a stand-in takes the kernel's place (`stand_in.py`), which proves the arithmetic of the
launch; `test_launch_gpu.py` proves the launch itself.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge
import oracle
import pallas_kernels
from cases import CASES, Case
from faces import kernel_dtypes, to_numpy, to_torch

if reason := pallas_kernels.unavailable():
    pytest.skip(reason, allow_module_level=True)

from stand_in import STREAM, StandIns, install, launch_everything

from bridge import _launch, _private
from bridge._checks import Arguments


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return install(monkeypatch)


def launch(x, k, dim=-1, largest=True, sorted=True, lengths=None, starts=None, dtype=torch.int64):
    call = _launch.find(Arguments(x, k, dim % x.ndim, largest, sorted, lengths, starts, dtype))
    return None if call is None else call(x, starts, lengths)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name) for c in CASES if kernel_dtypes(c) and c.k <= 4096]
)
def test_every_case_reaches_the_kernel_as_it_is(case: Case, stand_ins: StandIns) -> None:
    storage = to_torch(case.storage())
    x = storage.as_strided(case.shape, case.step, case.offset)
    windows = [
        None if w is None else torch.from_numpy(np.array(w)) for w in (case.lengths, case.starts)
    ]
    tensors = launch(x, case.k, case.axis, case.largest, case.sorted, *windows)
    assert all(t.is_contiguous() for t in tensors)
    got = tuple(to_numpy(t) for t in tensors)
    expected = case.expected("torch")
    if not case.sorted:
        got, expected = (oracle.by_column(*a, axis=case.axis) for a in (got, expected))
    oracle.assert_same(got, expected)


def test_shapes_and_strides_of_a_kind_share_a_kernel(stand_ins: StandIns) -> None:
    storage = torch.randn(100_000)
    for rows, columns, stride, offset in [(9, 1000, 1024, 0), (16, 900, 901, 3), (12, 7, 7, 64)]:
        x = storage.as_strided((rows, columns), (stride, 1), offset)
        values, indices = launch(x, 5)
        oracle.assert_same(
            (values.numpy(), indices.numpy()), oracle.top_k(x.numpy(), 5, order="torch")
        )
    assert len(stand_ins.compiled) == 1
    assert len(_launch.calls) == 3


def test_a_call_is_remembered_by_all_but_addresses(stand_ins: StandIns) -> None:
    storage = torch.randn(4096)
    for offset in (0, 1, 17, 64, 0):
        x = storage[offset:].as_strided((3, 50), (60, 1))
        values, _ = launch(x, 4)
        np.testing.assert_array_equal(values.numpy(), torch.topk(x, 4).values.numpy())
    assert len(_launch.calls) == 1


def test_remembered_calls_are_bounded(stand_ins: StandIns, monkeypatch) -> None:
    monkeypatch.setattr(_launch, "CALLS", 3)
    for n in range(10, 20):
        launch(torch.randn(2, n), 4)
        assert len(_launch.calls) <= 3


def test_windows_that_are_strided_or_misaligned_are_read_right(stand_ins: StandIns) -> None:
    x = torch.randn(4, 100)
    numbers = torch.tensor([7, 50, 7, 60, 7, 70, 7, 80, 7])
    for lengths in (numbers[1::2], numbers[1:5].to(torch.int32)):
        got = [t.numpy() for t in launch(x, 90, lengths=lengths)]
        want = oracle.top_k(x.numpy(), 90, order="torch", lengths=lengths.numpy())
        oracle.assert_same(tuple(got), want)


def test_nothing_is_launched_for_empty_results(stand_ins: StandIns) -> None:
    for x, k in ((torch.randn(3, 9), 0), (torch.randn(0, 9), 4)):
        values, indices = launch(x, k)
        assert values.shape == indices.shape == (len(x), k)
    assert not stand_ins.compiled


@pytest.mark.parametrize(
    ("x", "k", "sorted"),
    [(torch.randn(2, 50, dtype=torch.float64), 4, True), (torch.randn(1, 5000), 4097, True)],
    ids=["64-bit", "sorts-too-many"],
)
def test_what_goes_by_jax(x, k, sorted, stand_ins: StandIns) -> None:
    assert launch(x, k, sorted=sorted) is None
    assert not stand_ins.compiled


def test_another_device_is_made_current_for_the_call(stand_ins, monkeypatch) -> None:
    current = [3]

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(_private, "current_device", lambda: current[0])
    monkeypatch.setattr(_private, "current_stream", lambda index: STREAM if current == [-1] else 0)
    monkeypatch.setattr(torch.cuda, "device", device)
    launch(torch.randn(2, 9), 4)
    assert current == [3]


def test_threads_compile_a_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Slow:
        def __init__(self, module, device):
            threading.Event().wait(0.05)
            made.append(module)

        def unload(self): ...

    monkeypatch.setattr(pallas_kernels, "Kernel", Slow)
    monkeypatch.setattr(_launch, "_module", lambda *kind: b"")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_launch, "_capture_allowing_loads", contextlib.nullcontext)
    monkeypatch.setattr(atexit, "register", lambda function: None)
    kernels = _launch._Kernels()
    got: list[Any] = []
    threads = [
        threading.Thread(target=lambda: got.append(kernels.get(-1, "config", "x", True, "i", ())))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and len(got) == 8 and len(set(map(id, got))) == 1


def test_an_unknown_jaxlib_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from pallas_kernels import _compat

    monkeypatch.setattr(_compat, "JAXLIB", (99, 0, 0))
    _launch._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"may call kernels in another way.*by DLPack"):
        assert _launch.unavailable(0) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _launch.unavailable(0) is not None


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Tensors of the CPU are launched by `bridge.top_k`, on stand-ins."""
    return launch_everything(monkeypatch)


def test_the_function_remembers_calls(native: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second call of a kind skips the checks; an argument that would fail them never does."""
    x = torch.randn(6, 40)[:, :33]
    lengths = torch.tensor([0, 3, 33, 40, 5, 6])
    first = bridge.top_k(x, 40, -1, lengths=lengths)
    want = oracle.top_k(x.numpy(), 40, order="torch", lengths=lengths.numpy())
    oracle.assert_same(tuple(t.numpy() for t in first), want)

    def checked(*args):
        raise AssertionError("checked again")

    with monkeypatch.context() as patch:
        patch.setattr(bridge._top_k, "_checked", checked)
        for dim in (-1, 1):
            again = bridge.top_k(x, 40, dim, lengths=lengths)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        for other in (
            {"k": 41}, {"dim": 0}, {"largest": False}, {"sorted": False}, {"lengths": None},
            {"lengths": lengths.int()}, {"lengths": lengths[:5]}, {"starts": lengths},
            {"index_dtype": torch.int32}, {"k": 40.0}, {"dim": 1.0}, {"lengths": [1] * 6},
            {"input": x.double()}, {"input": x[:5]}, {"input": x.clone()},
            {"input": x.to_sparse()}, {"input": torch.nn.Parameter(x)}, {"input": x.numpy()},
            {"out": first}, {"lengths": lengths.to_sparse()}, {"index_dtype": []},
        ):  # fmt: skip
            arguments = {"input": x, "k": 40, "dim": 1, "lengths": lengths, **other}
            with pytest.raises(AssertionError, match="checked again"):
                bridge.top_k(**arguments)


def test_out_is_written_directly(native: StandIns) -> None:
    x = torch.randn(6, 40)[:, :33]
    want = oracle.top_k(x.numpy(), 5, order="torch")
    memory = torch.zeros(200), torch.zeros(200, dtype=torch.int64)
    for first in (0, 1, 64):
        for _ in range(2):
            out = tuple(m[first : first + 30].view(6, 5) for m in memory)
            for tensor in out:
                tensor.zero_()
            got = bridge.top_k(x, 5, out=out)
            assert got.values is out[0] and got.indices is out[1]
            oracle.assert_same(tuple(t.numpy() for t in out), want)


def test_out_with_strides_is_written_through_them(native: StandIns) -> None:
    x = torch.randn(6, 40)[:, :33]
    out = torch.zeros(6, 10)[:, ::2], torch.zeros(5, 6, dtype=torch.int64).t()
    for _ in range(2):
        bridge.top_k(x, 5, out=out)
        oracle.assert_same(tuple(t.numpy() for t in out), oracle.top_k(x.numpy(), 5, order="torch"))


def test_out_over_the_input_is_refused_every_time(native: StandIns) -> None:
    """The same shapes and strides as a remembered call, at another address."""
    memory = torch.randn(400)
    x = memory[:200].view(4, 50)
    indices = torch.zeros(4, 5, dtype=torch.int64)
    bridge.top_k(x, 5, out=(memory[200:220].view(4, 5), indices))
    with pytest.raises(ValueError, match="out values overlaps the input"):
        bridge.top_k(x, 5, out=(memory[190:210].view(4, 5), indices))


def test_out_that_may_not_be_written_is_refused_every_time(native: StandIns) -> None:
    """What shape and strides do not say of a tensor."""
    x = torch.randn(4, 50)
    indices = torch.zeros(4, 5, dtype=torch.int64)
    bridge.top_k(x, 5, out=(torch.zeros(4, 5), indices))
    with pytest.raises(ValueError, match="out values requires grad"):
        bridge.top_k(x, 5, out=(torch.zeros(4, 5, requires_grad=True), indices))
    bridge.top_k(x, 5, out=(torch.zeros(4, 10)[:, ::2], indices))
    negative = torch.zeros(4, 5, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    with pytest.raises(ValueError, match="out values is a negative view"):
        bridge.top_k(x, 5, out=(negative, indices))
