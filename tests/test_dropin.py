"""The drop-ins: shapes, dtypes, padding and errors of each signature, against loops in NumPy.

Each test runs by torch operations on a CPU, launched on a stand-in for the kernel, and on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oracle
import pallas_kernels
from bridge.dropin import flashinfer, pytorch, vllm
from faces import to_numpy, to_torch


@pytest.fixture(params=["cpu", "stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch) -> str:
    if request.param != "stand-in":
        return request.param
    if reason := pallas_kernels.unavailable():
        pytest.skip(reason)
    import stand_in

    stand_in.launch_everything(monkeypatch)
    return "cpu"


def padded(x: np.ndarray, device: str, *, stride: int | None = None, offset: int = 3):
    """A view whose padding is full of what ranks first."""
    rows, columns = x.shape
    stride = columns + 5 if stride is None else stride
    first = oracle.last_value(x.dtype, largest=False)
    flat = np.full(offset + rows * stride, first, x.dtype)
    storage = to_torch(flat).to(device)
    view = storage.as_strided((rows, columns), (stride, 1), offset)
    view.copy_(to_torch(x).to(device))
    return view


def scores(rows: int, columns: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """With ties, NaNs and infinities."""
    import ml_dtypes  # noqa: F401  registers bfloat16

    rng = np.random.default_rng(seed)
    x = np.round(rng.standard_normal((rows, columns)) * 8).astype(np.dtype(dtype))
    x[rng.random(x.shape) < 0.02] = np.nan
    x[rng.random(x.shape) < 0.02] = -np.inf
    return x


def local_columns(x: np.ndarray, k: int, windows: list[tuple[int, int]]) -> np.ndarray:
    """Columns of the top k of `[begin, end)`, clamped, counted from begin, in order, then -1."""
    out = np.full((len(x), k), -1, np.int64)
    for r, (begin, end) in enumerate(windows):
        begin = min(max(begin, 0), x.shape[1])
        end = min(max(end, begin), x.shape[1])
        _, columns = oracle.top_k(x[r : r + 1, begin:end], min(k, end - begin), order="torch")
        out[r, : columns.size] = columns[0]
    return out


def tensor(numbers: Any, device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(numbers, dtype=dtype, device=device)


def out_of(rows: int, k: int, device: str) -> torch.Tensor:
    return torch.full((rows, k), 77, dtype=torch.int32, device=device)


def same(got: torch.Tensor | tuple[torch.Tensor, ...], *want: np.ndarray) -> None:
    """The same places, in any order but -1 last. Of several tensors the last says which those are,
    and the others go with it.
    """
    tensors = (got,) if isinstance(got, torch.Tensor) else got
    assert all(t.dtype == torch.int32 for t in tensors)
    ours = oracle.by_column(*(t.cpu().numpy() for t in tensors))
    for a, b in zip(ours, oracle.by_column(*want), strict=True):
        np.testing.assert_array_equal(a, b)


LENGTHS = [0, 1, 7, 40, 200, 63, -1, 500]
BEGIN_AT_0 = [(0, n) for n in LENGTHS]


class TestVllm:
    @pytest.mark.parametrize("function", [vllm.persistent_topk, vllm.cooperative_topk])
    @pytest.mark.parametrize("k", [1, 40, 300])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_topk(self, device, function, k, dtype):
        x = scores(8, 200, dtype)
        out = out_of(8, k, device)
        result = function(padded(x, device), tensor(LENGTHS, device), out, None, k, 200)
        assert result is None
        same(out, local_columns(x, k, BEGIN_AT_0))

    def test_lengths_of_two_dimensions(self, device):
        x = scores(8, 200)
        for shape in ((8, 1), (4, 2)):
            for dtype in (torch.int32, torch.int64):
                out = out_of(8, 40, device)
                lengths = tensor(LENGTHS, device, dtype).view(shape)
                vllm.persistent_topk(padded(x, device), lengths, out, None, 40, 200)
                same(out, local_columns(x, 40, BEGIN_AT_0))

    @pytest.mark.parametrize("next_n", [1, 2, 4])
    def test_decode(self, device, next_n):
        x = scores(8, 200)
        seq_lens = LENGTHS[2 : 2 + 8 // next_n] if next_n > 1 else LENGTHS
        ends = [seq_lens[r // next_n] - next_n + r % next_n + 1 for r in range(8)]
        view, out = padded(x, device), out_of(8, 40, device)
        numbers = tensor(seq_lens, device)
        vllm.top_k_per_row_decode(view, next_n, numbers, out, 8, *view.stride(), 40)
        same(out, local_columns(x, 40, [(0, e) for e in ends]))

    @pytest.mark.parametrize("next_n", [1, 4])
    def test_decode_with_each_rows_own_length(self, device, next_n):
        x = scores(8, 200)
        view, out = padded(x, device), out_of(8, 40, device)
        numbers = tensor(LENGTHS, device).view(8 // next_n, next_n)
        vllm.top_k_per_row_decode(view, next_n, numbers, out, 8, *view.stride(), 40)
        same(out, local_columns(x, 40, BEGIN_AT_0))

    def test_decode_of_lengths_below_next_n(self, device):
        x = scores(4, 50)
        view, out = padded(x, device), out_of(4, 3, device)
        vllm.top_k_per_row_decode(view, 4, tensor([2], device), out, 4, *view.stride(), 3)
        same(out, local_columns(x, 3, [(0, 0), (0, 0), (0, 1), (0, 2)]))

    def test_prefill(self, device):
        x = scores(8, 200)
        windows = [(0, 0), (5, 6), (10, 200), (0, 500), (-3, 60), (150, 140), (199, 200), (500, 9)]
        starts, ends = zip(*windows, strict=True)
        for dtype in (torch.int32, torch.int64):
            view, out = padded(x, device), out_of(8, 40, device)
            vllm.top_k_per_row_prefill(
                view, tensor(starts, device, dtype), tensor(ends, device, dtype), out, 8,
                *view.stride(), 40,
            )  # fmt: skip
            same(out, local_columns(x, 40, windows))

    def test_the_first_rows_only(self, device):
        x = scores(8, 200)
        view, out = padded(x, device), out_of(8, 40, device)
        ends = tensor(LENGTHS[2:5], device)
        vllm.top_k_per_row_prefill(view, ends * 0, ends, out, 3, *view.stride(), 40)
        same(out[:3], local_columns(x[:3], 40, [(0, n) for n in LENGTHS[2:5]]))
        same(out[3:], np.full((5, 40), 77))
        out.fill_(77)
        vllm.top_k_per_row_decode(view, 1, ends, out, 3, *view.stride(), 40)
        same(out[:3], local_columns(x[:3], 40, [(0, n) for n in LENGTHS[2:5]]))

    def test_transposed_logits_and_output_in_a_wider_buffer(self, device):
        x = scores(8, 200)
        view = to_torch(np.ascontiguousarray(x.T)).to(device).t()
        assert view.stride() == (1, 8)
        buffer = out_of(8, 64, device)
        vllm.persistent_topk(view, tensor(LENGTHS, device), buffer[:, :40], None, 40, 200)
        same(buffer[:, :40], local_columns(x, 40, BEGIN_AT_0))
        same(buffer[:, 40:], np.full((8, 24), 77))

    def test_strides_that_contradict_the_tensor(self, device):
        """What started this project: a row stride taken from the number of columns."""
        view = padded(scores(8, 200), device)
        out, numbers = out_of(8, 5, device), tensor(LENGTHS, device)
        with pytest.raises(ValueError, match=r"stride0 is 200, but logits has strides \(205, 1\)"):
            vllm.top_k_per_row_decode(view, 1, numbers, out, 8, view.size(1), 1, 5)
        with pytest.raises(ValueError, match=r"stride1 is 2, but logits has strides \(205, 1\)"):
            vllm.top_k_per_row_prefill(view, numbers, numbers, out, 8, 205, 2, 5)
        same(out, np.full((8, 5), 77))

    def test_a_single_row_has_no_stride(self, device):
        x = scores(1, 200)
        out = out_of(1, 5, device)
        vllm.top_k_per_row_decode(padded(x, device), 1, tensor([9], device), out, 1, 0, 1, 5)
        same(out, local_columns(x, 5, [(0, 9)]))

    @pytest.mark.parametrize(
        ("change", "error", "words"),
        [
            ({"logits": [1]}, TypeError, "logits is a list"),
            ({"logits": torch.ones(8)}, ValueError, r"logits has shape \(8,\); expected two"),
            ({"logits": torch.ones(8, 9) > 0}, TypeError, "logits has dtype bool"),
            ({"logits": torch.ones(8, 9).to_sparse()}, ValueError, "logits is sparse"),
            ({"lengths": torch.ones(7).int()}, ValueError, r"lengths has shape \(7,\); expected"),
            (
                {"lengths": torch.ones(8)},
                ValueError,
                "lengths has dtype float32; expected int32 or int64",
            ),
            ({"lengths": torch.ones(2, 3).int()}, ValueError, r"lengths has shape \(6,\)"),
            ({"lengths": None}, ValueError, "lengths is None, a NoneType"),
            ({"output": torch.ones(8, 4).int()}, ValueError, r"output has shape \(8, 4\)"),
            ({"output": torch.ones(8, 5)}, ValueError, "output has dtype torch.float32"),
            ({"k": -1}, ValueError, "k must not be negative"),
            ({"k": 2.0}, TypeError, "k must be a static integer"),
        ],
    )
    def test_bad_arguments(self, change, error, words):
        arguments = {
            "logits": torch.ones(8, 9), "lengths": torch.ones(8).int(),
            "output": torch.ones(8, 5).int(), "workspace": None, "k": 5, "max_seq_len": 9,
        }  # fmt: skip
        with pytest.raises(error, match=words):
            vllm.persistent_topk(**{**arguments, **change})

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"numRows": 9}, "numRows is 9; logits has 8 rows"),
            ({"numRows": -1}, "numRows is -1"),
            ({"next_n": 3}, "next_n is 3; expected a divisor of numRows, which is 8"),
            ({"next_n": 0}, "next_n is 0"),
            (
                {"seq_lens": torch.ones(8).int()},
                r"seq_lens has shape \(8,\).*each request, .* \(4,\)",
            ),
            ({"indices": torch.ones(7, 5).int()}, r"indices has shape \(7, 5\); expected \(8, 5\)"),
        ],
    )
    def test_bad_arguments_of_decode(self, change, words):
        arguments = {
            "logits": torch.ones(8, 9), "next_n": 2, "seq_lens": torch.ones(4).int(),
            "indices": torch.ones(8, 5).int(), "numRows": 8, "stride0": 9, "stride1": 1, "topK": 5,
        }  # fmt: skip
        with pytest.raises(ValueError, match=words):
            vllm.top_k_per_row_decode(**{**arguments, **change})


class TestFlashinfer:
    @pytest.mark.parametrize("sorted", [False, True])
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_top_k(self, device, dtype, sorted):
        x = scores(6, 200, dtype)
        values, indices = flashinfer.top_k(padded(x, device), 40, sorted, tie_break=1)
        assert indices.dtype == torch.int64 and values.dtype == getattr(torch, dtype)
        got = to_numpy(values), indices.cpu().numpy()
        want = oracle.top_k(x, 40, order="torch")
        if not sorted:
            got, want = (oracle.by_column(*answer) for answer in (got, want))
        oracle.assert_same(got, want)

    @pytest.mark.parametrize("k", [1, 40, 300])
    def test_ragged(self, device, k):
        x = scores(8, 200)
        starts = [0, 3, 190, 0, 5, 199, 7, 250]
        offsets = [0, 10**6, -1000, 3, 2, 1, 0, 9]
        windows = [(s, s + n) for s, n in zip(starts, LENGTHS, strict=True)]
        got = flashinfer.top_k_ragged_transform(
            padded(x, device), tensor(offsets, device), tensor(LENGTHS, device), k,
            row_starts=tensor(starts, device),
        )  # fmt: skip
        local = local_columns(x, k, windows)
        same(got, np.where(local < 0, -1, local + np.array(offsets)[:, None]))
        got = flashinfer.top_k_ragged_transform(
            padded(x, device), tensor(offsets, device), tensor(LENGTHS, device), k
        )
        local = local_columns(x, k, BEGIN_AT_0)
        same(got, np.where(local < 0, -1, local + np.array(offsets)[:, None]))

    @pytest.mark.parametrize("with_starts", [False, True])
    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("page_size", [1, 16, 64])
    def test_pages(self, device, page_size, shared, with_starts):
        x = scores(8, 200)
        rng = np.random.default_rng(1)
        pages = -(-200 // page_size) + 2
        table = rng.integers(0, 5000, (3 if shared else 8, pages)).astype(np.int32)
        starts = [0, 3, 190, 0, 5, 199, 7, 20] if with_starts else [0] * 8
        first = [0, 1, 2, 0, 1, 2, 0, 1] if with_starts else [0] * 8
        batches = [0, 2, 1, 0, 2, 1, 0, 2] if shared else list(range(8))
        options: dict[str, Any] = {}
        if with_starts:
            options["row_starts"] = tensor(starts, device)
            options["page_table_row_starts"] = tensor(first, device)
        if shared:
            options["row_to_batch"] = tensor(batches, device)
        wide = torch.full((len(table), pages + 9), 10**6, dtype=torch.int32, device=device)
        view = wide[:, 4 : 4 + pages]
        view.copy_(torch.from_numpy(table))
        raw = out_of(8, 40, device)
        out = out_of(8, 40, device)
        got = flashinfer.top_k_page_table_transform(
            padded(x, device), view, tensor(LENGTHS, device), 40, page_size=page_size, out=out,
            out_raw_indices=raw, **options,
        )  # fmt: skip
        assert got is out
        windows = [(s, s + n) for s, n in zip(starts, LENGTHS, strict=True)]
        local = local_columns(x, 40, windows)
        want = np.full_like(local, -1)
        for r, j in np.ndindex(local.shape):
            page = first[r] + local[r, j] // page_size
            if local[r, j] >= 0 and page < pages:
                want[r, j] = table[batches[r], page] * page_size + local[r, j] % page_size
        same((got, raw), want, local)

    def test_pages_start_where_rows_do_if_they_are_columns(self, device):
        x = scores(4, 50)
        table = torch.arange(4 * 60, dtype=torch.int32, device=device).view(4, 60)
        starts = [0, 3, 10, 49]
        got = flashinfer.top_k_page_table_transform(
            padded(x, device), table, tensor([9] * 4, device), 5, row_starts=tensor(starts, device)
        )
        local = local_columns(x, 5, [(s, s + 9) for s in starts])
        want = np.where(
            local < 0, -1, local + np.array(starts)[:, None] + 60 * np.arange(4)[:, None]
        )
        same(got, want)

    def test_a_table_that_holds_less(self, device):
        """Pages and lines that are not in the table are -1, never read."""
        x = scores(3, 50)
        table = torch.arange(20, dtype=torch.int32, device=device).view(2, 10)
        raw = out_of(3, 50, device)
        got = flashinfer.top_k_page_table_transform(
            padded(x, device), table, tensor([50] * 3, device), 50,
            row_to_batch=tensor([1, -1, 2], device),
            page_table_row_starts=tensor([-2, 0, 0], device), row_starts=tensor([0] * 3, device),
            out_raw_indices=raw,
        )  # fmt: skip
        want = np.full((3, 50), -1)
        want[0, 2:12] = np.arange(10, 20)
        same((got, raw), want, np.tile(np.arange(50), (3, 1)))

    def test_a_table_whose_lines_are_strided(self, device):
        x = scores(4, 20)
        table = torch.arange(80, dtype=torch.int32, device=device).view(20, 4).t()
        got = flashinfer.top_k_page_table_transform(
            padded(x, device), table, tensor([20] * 4, device), 3
        )
        local = local_columns(x, 3, [(0, 20)] * 4)
        same(got, table.cpu().numpy()[np.arange(4)[:, None], local])

    def test_ties_towards_larger_indices_are_refused(self):
        x, n = torch.ones(2, 9), torch.ones(2).int()
        for call in (
            lambda: flashinfer.top_k(x, 2, tie_break=2),
            lambda: flashinfer.top_k_ragged_transform(x, n, n, 2, tie_break=2),
            lambda: flashinfer.top_k_page_table_transform(x, x.int(), n, 2, tie_break=2),
        ):
            with pytest.raises(NotImplementedError, match="tie_break is 2"):
                call()
        with pytest.raises(ValueError, match="tie_break is 3"):
            flashinfer.top_k(x, 2, tie_break=3)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"src_page_table": torch.ones(2, 9)}, r"src_page_table is torch.float32 of shape"),
            (
                {"src_page_table": torch.ones(9).int()},
                r"src_page_table is torch.int32 of shape \(9",
            ),
            ({"src_page_table": torch.ones(1, 9).int()}, "src_page_table has 1 lines for 2 rows"),
            ({"lengths": None}, "lengths is None, a NoneType"),
            ({"row_to_batch": torch.ones(3).int()}, r"row_to_batch has shape \(3,\)"),
            ({"row_starts": torch.ones(2)}, "row_starts has dtype"),
            ({"page_size": 3}, "page_size is 3; expected a power of two"),
            ({"page_size": 0}, "page_size is 0"),
            ({"page_size": 2, "row_starts": torch.ones(2).int()}, "page_table_row_starts is None"),
            ({"out": torch.ones(2, 4).int()}, r"out has shape \(2, 4\); expected \(2, 5\)"),
            ({"out_raw_indices": torch.ones(2, 5)}, "out_raw_indices has dtype"),
        ],
    )
    def test_bad_arguments(self, change, words):
        arguments = {
            "input": torch.ones(2, 9), "src_page_table": torch.ones(2, 9).int(),
            "lengths": torch.ones(2).int(), "k": 5,
        }  # fmt: skip
        with pytest.raises(ValueError, match=words):
            flashinfer.top_k_page_table_transform(**{**arguments, **change})

    def test_outputs_that_overlap(self):
        memory = torch.zeros(15, dtype=torch.int32)
        with pytest.raises(ValueError, match="out and out_raw_indices overlap"):
            flashinfer.top_k_page_table_transform(
                torch.ones(2, 9), torch.ones(2, 9).int(), torch.ones(2).int(), 5,
                out=memory[:10].view(2, 5), out_raw_indices=memory[5:].view(2, 5),
            )  # fmt: skip


def test_torch_topk(device):
    x = scores(6, 200)
    view = padded(x, device)
    got = pytorch.topk(view, 7)
    oracle.assert_same([t.cpu().numpy() for t in got], oracle.top_k(x, 7, order="torch"))
    got = pytorch.topk(view, 3, 0, False)
    want = oracle.top_k(np.ascontiguousarray(x.T), 3, largest=False, order="torch")
    oracle.assert_same([t.cpu().numpy().T.copy() for t in got], want)
    out = torch.empty(6, 7, device=device), torch.empty(6, 7, dtype=torch.int64, device=device)
    assert pytorch.topk(view, 7, out=out).values is out[0]
    assert set(inspect_names(pytorch.topk)) == {"input", "k", "dim", "largest", "sorted", "out"}


def inspect_names(function) -> list[str]:
    import inspect

    return list(inspect.signature(function).parameters)


@pytest.mark.gpu
def test_captured_in_a_graph_and_without_waiting():
    x = scores(8, 3000)
    view, out = padded(x, "cuda"), out_of(8, 64, "cuda")
    lengths = tensor([0, 5, 64, 65, 1000, 2999, 3000, 9000], "cuda")
    table = torch.arange(8 * 3000, dtype=torch.int32, device="cuda").view(8, 3000)
    vllm.top_k_per_row_decode(view, 1, lengths, out, 8, *view.stride(), 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        vllm.top_k_per_row_decode(view, 1, lengths, out, 8, *view.stride(), 64)
        paged = flashinfer.top_k_page_table_transform(view, table, lengths, 64)
    lengths.copy_(tensor([7, 3000, 0, 1, 2, 100, 64, 65], "cuda"))
    graph.replay()
    local = local_columns(x, 64, [(0, int(n)) for n in lengths.cpu()])
    same(out, local)
    same(paged, np.where(local < 0, -1, local + 3000 * np.arange(8)[:, None]))
