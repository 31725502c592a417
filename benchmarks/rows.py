"""Device time of rows of 4 K to 1 M: every cell of the field as measured on an H200, and ours.

    python benchmarks/rows.py OUT.json [--peers PEERS.json] [--only TEXT] [--quick]

Inputs are padded (the row stride is the columns rounded up to 256, plus 256, padding full of +inf)
and rotated over at least 200 MB, so that none is found in L2. Each call is replayed from a CUDA
graph that holds one call for each input; the time is the median over replays, for one call. Every
answer is checked before it is timed, and after.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import bridge

BANDWIDTH = 4.2e12
"""Bytes a second that a kernel was seen to read on an H200."""

ROTATED = 200_000_000


@dataclasses.dataclass(frozen=True)
class Cell:
    rows: int
    cols: int
    k: int
    dtype: str = "float32"
    data: str = "randn"

    def floor_us(self) -> float:
        return self.rows * self.cols * getattr(torch, self.dtype).itemsize / BANDWIDTH * 1e6


def fill(x: torch.Tensor, data: str, seed: int) -> None:
    """Writes a row distribution into a float32 view."""
    rows, cols = x.shape
    g = torch.Generator("cuda").manual_seed(seed)

    def randn() -> torch.Tensor:
        return torch.randn(rows, cols, generator=g, device="cuda")

    def rand() -> torch.Tensor:
        return torch.rand(rows, cols, generator=g, device="cuda")

    if data == "randn":
        x.copy_(randn())
    elif data == "equal":
        x.fill_(1.0)
    elif data == "narrow":
        x.copy_(1 + rand() * 1e-3)
    elif data == "relu":
        x.copy_(randn().relu())
    elif data == "lognormal":
        x.copy_(randn().exp())
    elif data == "up":
        x.copy_(randn().sort(dim=1).values)
    elif data == "down":
        x.copy_(randn().sort(dim=1, descending=True).values)
    elif data == "outlier":
        x.copy_(randn())
        x[:, cols // 3] = 1e30
    elif data == "two":
        x.copy_((rand() < 0.5).float())
    elif data == "recency":
        x.copy_(randn() + torch.linspace(0, 8, cols, device="cuda"))
    elif data == "bf16":
        x.copy_(randn().bfloat16().float())
    else:
        raise ValueError(f"data is {data!r}")


DATA = "equal narrow relu lognormal up down outlier two recency bf16".split()


def inputs(cell: Cell) -> list[torch.Tensor]:
    stride = -(-cell.cols // 256) * 256 + 256
    dtype = getattr(torch, cell.dtype)
    one = cell.rows * stride * dtype.itemsize
    made = []
    for i in range(max(1, min(48, math.ceil(ROTATED / one)))):
        storage = torch.full((cell.rows * stride,), torch.inf, dtype=dtype, device="cuda")
        view = storage.as_strided((cell.rows, cell.cols), (stride, 1))
        if i < 4:
            fill(view, cell.data, i)
        else:
            view.copy_(made[i % 4].roll(i, 0))
        made.append(view)
    return made


def wrong(got: Any, x: torch.Tensor, k: int) -> str | None:
    """Why an answer is not the stable top-k of x."""
    rows = min(len(x), 64)
    picked = torch.linspace(0, len(x) - 1, rows, device="cuda").long()
    values, indices = got.values[picked], got.indices[picked].long()
    x = x[picked]
    want = torch.sort(x, dim=1, descending=True, stable=True)
    if not torch.equal(values, want.values[:, :k]):
        return "values"
    if not torch.equal(indices, want.indices[:, :k]):
        return "indices"
    return None


def replay(graph: torch.cuda.CUDAGraph, calls: int, seconds: float) -> float:
    """Median microseconds of a call."""
    times = []
    begin = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < seconds and len(times) < 200):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / calls)
    return statistics.median(times)


def graph_of(call: Any, xs: list[torch.Tensor], repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(repeats):
            call(i, xs[i % len(xs)])
    return graph


def measure(cell: Cell, *, sorted: bool, with_torch: bool, seconds: float) -> dict[str, Any]:
    xs = inputs(cell)
    shape = (cell.rows, cell.k)
    outs = [
        (
            torch.empty(shape, dtype=xs[0].dtype, device="cuda"),
            torch.empty(shape, dtype=torch.int32, device="cuda"),
        )
        for _ in xs
    ]

    def ours(i: int, x: torch.Tensor) -> Any:
        return bridge.top_k(
            x, cell.k, sorted=sorted, index_dtype=torch.int32, out=outs[i % len(xs)]
        )

    result: dict[str, Any] = {**dataclasses.asdict(cell), "sorted": sorted}
    result["floor_us"] = round(cell.floor_us(), 2)
    if reason := wrong(ours(0, xs[0]), xs[0], cell.k):
        return {**result, "wrong": reason}
    repeats = max(len(xs), 8 if cell.floor_us() < 100 else 1)
    graph = graph_of(ours, xs, repeats)
    result["us"] = round(replay(graph, repeats, seconds), 2)
    last = outs[(repeats - 1) % len(xs)]
    got = bridge.TopK(*last) if hasattr(bridge, "TopK") else type(ours(0, xs[0]))(*last)
    if reason := wrong(got, xs[(repeats - 1) % len(xs)], cell.k):
        return {**result, "wrong": f"{reason} after replay"}
    if with_torch:
        n = min(len(xs), 4)
        graph = graph_of(lambda i, x: torch.topk(x, cell.k, sorted=sorted), xs[:n], n)
        result["torch_us"] = round(replay(graph, n, seconds / 2), 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--peers", type=Path, help="a table of the field's times")
    parser.add_argument("--only", default="", help="part of ROWSxCOLS k=K DTYPE DATA")
    parser.add_argument("--data", action="store_true", help="other distributions than randn")
    parser.add_argument("--torch", action="store_true", help="time torch.topk too")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each measurement")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds for all")
    options = parser.parse_args()
    peers = json.loads(options.peers.read_text()) if options.peers else []
    best = {Cell(p["B"], p["N"], p["k"], p["dtype"], p["data"]): p for p in peers}
    cells = list(best) or [Cell(64, 131072, 2048)]
    if options.data:
        cells = [
            Cell(rows, cols, k, data=data)
            for rows, cols, k in ((64, 131072, 2048), (1024, 131072, 2048), (4096, 32768, 512))
            for data in ("randn", *DATA)
        ]
    begin = time.perf_counter()
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "chip": torch.cuda.get_device_name(),
        "versions": {n: importlib.metadata.version(n) for n in ("jax", "torch", "numpy")},
        "command": " ".join(["python benchmarks/rows.py", *sys.argv[2:]]),
        "cells": [],
    }
    for cell in cells:
        name = f"{cell.rows}x{cell.cols} k={cell.k} {cell.dtype} {cell.data}"
        if options.only not in name or time.perf_counter() - begin > options.limit:
            continue
        try:
            result = measure(cell, sorted=True, with_torch=options.torch, seconds=options.seconds)
        except RuntimeError as error:
            result = {**dataclasses.asdict(cell), "error": str(error)[:300]}
        peer = best.get(cell)
        if peer:
            result["best_us"] = peer["best_us"]
        report["cells"].append(result)
        options.out.write_text(json.dumps(report, indent=1) + "\n")
        us = result.get("us")
        line = f"{name:42} {us} us, floor {cell.floor_us():.1f}"
        if us and peer:
            target = max(peer["best_us"] / 1.2, cell.floor_us() / 0.92)
            target = peer["best_us"] if peer["best_us"] < 5 else target
            line += f", best {peer['best_us']} ({peer['best']}), ratio {peer['best_us'] / us:.2f}"
            line += "" if us <= target else f"  short of {target:.1f}"
        print(line, *(f"{n}: {result[n]}" for n in ("wrong", "error") if n in result), flush=True)
    ratios = [c["best_us"] / c["us"] for c in report["cells"] if "us" in c and "best_us" in c]
    if ratios:
        print(f"geometric mean of best/ours {statistics.geometric_mean(ratios):.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
