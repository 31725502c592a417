"""Top-k of padded logits, and what a kernel that ignores the row stride returns."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import torch
from rich.console import Console
from rich.table import Table

import bridge
import jtopk
from jtopk import _backend

PAD_TO = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--columns", type=int, default=900_000, help="valid columns of a row")
    parser.add_argument("-k", "--k", type=int, default=2048, help="how many of each row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Runs the demonstration; 0 if every row is right, 1 if not, 2 for sizes it cannot take."""
    if arguments.rows < 1 or not 1 <= arguments.k <= arguments.columns:
        print(
            f"jtopk demo: rows={arguments.rows}, columns={arguments.columns}, k={arguments.k}; "
            "expected at least one row and 1 <= k <= columns",
            file=sys.stderr,
        )
        return 2
    report = demonstrate(arguments.rows, arguments.columns, arguments.k, arguments.seed)
    if arguments.json:
        print(json.dumps(report))
    else:
        _show(report, Console())
    return 0 if report["right"] else 1


def demonstrate(rows: int, columns: int, k: int, seed: int = 0) -> dict[str, Any]:
    """Makes padded logits, selects from them and compares with torch.topk.

    Returns:
      What ran where and how long, and for each row how many of its k answers are wrong by each
      way.
    """
    device = torch.device("cuda" if torch.cuda.is_available() and _sees_cuda() else "cpu")
    problem = _backend.gpu_problem() if device.type == "cuda" else "logits are on cpu"
    logits, lengths = _padded_logits(rows, columns, k, seed, device)

    @bridge.jit
    def pipeline(logits: Any, lengths: Any) -> tuple[Any, Any, Any]:
        """Selected logits, their columns, and their softmax: one program, strides kept."""
        top = jtopk.top_k(logits, k, lengths=lengths)
        return top.values, top.indices, jax.nn.softmax(top.values, axis=-1)

    def by_torch_face() -> tuple[torch.Tensor, torch.Tensor]:
        return bridge.top_k(logits, k, lengths=lengths)

    def by_pipeline() -> tuple[torch.Tensor, torch.Tensor]:
        return pipeline(logits, lengths)[:2]

    answers = {"bridge.top_k": by_torch_face(), "bridge.jit": by_pipeline()}
    milliseconds = {
        "bridge.top_k": _time(by_torch_face, device),
        "bridge.jit": _time(by_pipeline, device),
        "torch.topk without lengths": _time(lambda: torch.topk(logits, k), device),
    }
    shown = {**answers, "size(1) for the stride": _wrong_stride(logits, k, lengths)}
    wrong: dict[str, list[int]] = {name: [] for name in shown}
    for r, length in enumerate(lengths.tolist()):
        expected = _expected(logits[r, :length], k)
        for name, (values, indices) in shown.items():
            wrong[name].append(_count_wrong((values[r], indices[r]), expected))
    return {
        "rows": rows, "columns": columns, "k": k, "row_stride": logits.stride(0),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "backend": "xla" if problem else "mosaic_gpu", "backend_reason": problem,
        "versions": {m.__name__: m.__version__ for m in (jtopk, jax, torch)},
        "lengths": lengths.tolist(), "bytes_copied": _bytes_copied(logits),
        "milliseconds": milliseconds, "wrong": wrong,
        "right": not any(map(any, (wrong[name] for name in answers))),
    }  # fmt: skip


def _sees_cuda() -> bool:
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:
        return False


def _padded_logits(
    rows: int, columns: int, k: int, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits as a GEMM leaves them: rows rounded up to 256, sliced, the padding never cleared."""
    generator = torch.Generator().manual_seed(seed)
    stride = -(-columns // PAD_TO) * PAD_TO
    if stride == columns:
        stride += PAD_TO
    storage = torch.full((rows, stride), torch.inf)
    storage[:, :columns] = torch.randn(rows, columns, generator=generator)
    lengths = torch.randint(k, columns + 1, (rows,), generator=generator, dtype=torch.int32)
    for r, length in enumerate(lengths.tolist()):
        storage[r, length:] = torch.inf
    return storage.to(device)[:, :columns], lengths.to(device)


def _wrong_stride(
    logits: torch.Tensor, k: int, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out if row r is read from r * size(1) instead of r * stride(0)."""
    misread = logits.as_strided(logits.shape, (logits.shape[1], 1))
    return bridge.top_k(misread, k, lengths=lengths)


def _expected(row: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk's values of a row's valid columns, and the lowest columns that hold them.

    torch.topk leaves open which of several equal values it takes; a stable sort does not.
    """
    return torch.topk(row, k).values, torch.sort(row, descending=True, stable=True).indices[:k]


def _count_wrong(
    got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> int:
    """In how many places the value's bits or the column differ."""
    bits = [values.view(torch.int32) for values, _ in (got, expected)]
    return int(((bits[0] != bits[1]) | (got[1] != expected[1])).sum())


def _bytes_copied(logits: torch.Tensor) -> int:
    """0 if the JAX buffer lies in the torch storage, else what it holds."""
    view = bridge.to_jax(logits)
    storage = logits.untyped_storage()
    address = view.buffer.unsafe_buffer_pointer()
    shared = storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()
    return 0 if shared else view.buffer.nbytes


def _time(call: Callable[[], Any], device: torch.device, repeats: int = 3) -> float:
    """Wall-clock milliseconds of a call and its work on the device, best of a few."""
    best = float("inf")
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        call()
        _synchronise(device)
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _show(report: dict[str, Any], console: Console) -> None:
    rows, columns, k = report["rows"], report["columns"], report["k"]
    console.print(
        f"[bold]Top {k} of {rows} rows of {columns} logits[/bold], "
        f"row stride {report['row_stride']}, padding +inf, a length for each row\n"
    )
    table = Table(title=f"wrong answers of {k} in each row, against torch.topk")
    table.add_column("row", justify="right")
    table.add_column("length", justify="right")
    for name in report["wrong"]:
        table.add_column(name, justify="right")
    for r in range(rows):
        counts = [counts[r] for counts in report["wrong"].values()]
        cells = [f"[red]{n}[/red]" if n else "[green]0[/green]" for n in counts]
        table.add_row(str(r), str(report["lengths"][r]), *cells)
    console.print(table)
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in report["milliseconds"].items())
    reason = f" ({report['backend_reason']})" if report["backend_reason"] else ""
    console.print(f"device   {report['device']}")
    console.print(f"backend  {report['backend']}{reason}")
    console.print(f"time     {times}")
    console.print(f"copied   {report['bytes_copied']} bytes of logits")
    verdict = "[green]every row is right[/green]" if report["right"] else "[red]WRONG[/red]"
    console.print(f"result   {verdict}")
