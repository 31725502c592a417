"""What only a GPU can show of the launch: streams, graphs, threads, and that nothing waits."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge
import oracle
from bridge import _dlpack, _launch

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails what goes by DLPack where the launch is meant."""

    def imported(*args, **kwargs):
        pytest.fail("the call went by DLPack")

    monkeypatch.setattr(_dlpack, "to_jax", imported)


def check(got, x, k, **options) -> None:
    """Against the oracle; `x` as it was when the kernel ran."""
    values, indices = (t.cpu().numpy() for t in got)
    oracle.assert_same((values, indices), oracle.top_k(x, k, order="torch", **options))


def rows(batch: int, columns: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, columns)).astype(np.float32)


def padded(x: np.ndarray) -> torch.Tensor:
    """On the GPU at an odd row stride and offset, padding full of +inf."""
    batch, columns = x.shape
    storage = torch.full((batch * (columns + 7) + 3,), torch.inf, device="cuda")
    view = storage.as_strided(x.shape, (columns + 7, 1), 3)
    view.copy_(torch.from_numpy(x))
    return view


def capture(graph: torch.cuda.CUDAGraph):
    """Of this thread only: JAX's threads may still be busy with an earlier test's arrays."""
    return torch.cuda.graph(graph, capture_error_mode="thread_local")


@contextlib.contextmanager
def nothing_waits():
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_it_neither_waits_nor_copies():
    x = rows(8, 5000)
    view = padded(x)
    lengths = torch.full((8,), 4000, device="cuda")
    bridge.top_k(view, 64, lengths=lengths)
    before = torch.cuda.memory_allocated()
    with nothing_waits():
        got = bridge.top_k(view, 64, lengths=lengths)
    # Values and indices, each rounded up to the allocator's 512 bytes, and nothing more.
    assert torch.cuda.memory_allocated() - before == 8 * 64 * 4 + 8 * 64 * 8
    check(got, x, 64, lengths=np.full(8, 4000))


def test_on_side_streams_without_synchronisation():
    columns = 20_000
    side = [torch.cuda.Stream() for _ in range(4)]
    base = torch.from_numpy(rows(16, columns)).cuda()
    torch.cuda.synchronize()
    results = []
    for i in range(40):
        with torch.cuda.stream(side[i % 4]):
            torch.cuda._sleep(200_000)
            x = base + i
            results.append((i, bridge.top_k(x, 32)))
            del x  # its memory is free for the stream's next tensor
    torch.cuda.synchronize()
    for i, got in results:
        check(got, (base + i).cpu().numpy(), 32)


def test_a_graph_replays_with_other_contents_and_lengths():
    batch, columns, k = 8, 9000, 128
    view = padded(rows(batch, columns))
    lengths = torch.full((batch,), columns, dtype=torch.int32, device="cuda")
    bridge.top_k(view, k, lengths=lengths)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        got = bridge.top_k(view, k, lengths=lengths)
    for seed in range(1, 6):
        x = rows(batch, columns, seed)
        new = np.random.default_rng(seed).integers(0, columns, batch).astype(np.int32)
        view.copy_(torch.from_numpy(x))
        lengths.copy_(torch.from_numpy(new))
        graph.replay()
        check(got, x, k, lengths=new)


def test_a_first_call_inside_a_capture_compiles_there():
    x = rows(4, 3000)
    view = padded(x)
    k = 119  # no other test's
    kinds = len(_launch._kernels._loaded)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        got = bridge.top_k(view, k)
    assert len(_launch._kernels._loaded) == kinds + 1
    graph.replay()
    check(got, x, k)


def test_a_process_whose_first_call_is_captured():
    """JAX's client starts in the middle of the capture."""
    code = """
import torch, bridge
x = torch.randn(4, 5000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    got = bridge.top_k(x, 8)
graph.replay()
assert (got.values == torch.topk(x, 8).values).all()
print("right")
"""
    assert _run(code).strip() == "right"


def test_many_graphs_alive_on_two_streams():
    batch, columns, k = 4, 6000, 32
    inputs = [padded(rows(batch, columns, seed)) for seed in range(12)]
    graphs, outputs = [], []
    for view in inputs:
        graph = torch.cuda.CUDAGraph()
        with capture(graph):
            outputs.append(bridge.top_k(view, k))
        graphs.append(graph)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(20):
        for i, graph in enumerate(graphs):
            with torch.cuda.stream(streams[i % 2]):
                graph.replay()
    torch.cuda.synchronize()
    for seed, got in enumerate(outputs):
        check(got, rows(batch, columns, seed), k)


def test_threads_on_streams_of_their_own():
    x = [rows(8, 4000 + 100 * i, i) for i in range(6)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                view = padded(x[i])
                for _ in range(50):
                    got = bridge.top_k(view, 16 + i)
                check(got, x[i], 16 + i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_other_shapes_and_strides_compile_nothing():
    k = 24
    bridge.top_k(padded(rows(9, 5000)), k)
    kinds = len(_launch._kernels._loaded)
    for batch, columns in ((9, 4999), (15, 6000), (12, 4100)):
        x = rows(batch, columns)
        check(bridge.top_k(padded(x), k), x, k)
    assert len(_launch._kernels._loaded) == kinds


def test_memory_held_by_jax_is_left_alone():
    """The launch needs no client of JAX's, which would take most of the GPU's memory."""
    code = """
import torch, bridge
x = torch.randn(4, 5000, device="cuda")
assert (bridge.top_k(x, 8).values == torch.topk(x, 8).values).all()
free, total = torch.cuda.mem_get_info()
print((total - free) / 2**30)
"""
    held = float(_run(code, XLA_PYTHON_CLIENT_PREALLOCATE=""))
    assert held < 40  # JAX would take three quarters; other tests may hold some at the same time


@pytest.mark.parametrize("keep", ["graph", "call"])
def test_a_process_ends_quietly(keep):
    code = f"""
import torch, bridge
x = torch.randn(4, 5000, device="cuda")
bridge.top_k(x, 8)
if {keep!r} == "graph":
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = bridge.top_k(x, 8)
for _ in range(100):
    graph.replay() if {keep!r} == "graph" else bridge.top_k(x, 8)
print("done")
"""
    assert _run(code).strip() == "done"


def _run(code: str, **environment: str) -> str:
    import os

    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
