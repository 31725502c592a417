"""Host time of a call, in microseconds: what a server's thread pays before the GPU has any work.

    python benchmarks/host_time.py OUT.json

Every call is timed in turns of 500, so that the launch queue (1024 deep) never makes one wait,
with a synchronisation between turns that is not counted; 10,000 calls each, all in one run.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import torch

import bridge
import jtopk

TURN = 500
TURNS = 20


def measure(calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Mean of all turns and median of their means, for each call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, TURNS):  # the first two warm up
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(TURN):
                call()
            took = time.perf_counter() - start
            if turn >= 0:
                times[name].append(took / TURN * 1e6)
    torch.cuda.synchronize()
    return {
        name: {
            "mean": round(statistics.fmean(t), 2), "median of turns": round(statistics.median(t), 2)
        }
        for name, t in times.items()
    }  # fmt: skip


def main(out: Path) -> None:
    x = torch.randn(64, 1024, device="cuda")
    padded = torch.randn(64, 1280, device="cuda")[:, :1024]
    lengths = torch.full((64,), 900, dtype=torch.int32, device="cuda")
    k = 8
    into = bridge.top_k(x, k)
    a, b, c = (torch.randn(64, 8, device="cuda") for _ in range(3))
    strided = bridge.to_jax(padded)
    identity = jax.jit(lambda x: x.buffer)
    us = measure(
        {
            "torch.topk": lambda: torch.topk(x, k),
            "torch.add": lambda: torch.add(a, b),
            "torch.add, out=": lambda: torch.add(a, b, out=c),
            "bridge.top_k": lambda: bridge.top_k(x, k),
            "bridge.top_k, padded": lambda: bridge.top_k(padded, k),
            "bridge.top_k, padded, lengths": lambda: bridge.top_k(padded, k, lengths=lengths),
            "bridge.top_k, out=": lambda: bridge.top_k(x, k, out=into),
            "torch.ops.jtopk.top_k": lambda: torch.ops.jtopk.top_k(x, k),
            "jtopk.top_k of an imported view": lambda: jtopk.top_k(strided, k),
            "jax.jit identity of the same": lambda: identity(strided),
            "two torch.empty": lambda: (
                torch.empty((64, k), device="cuda"),
                torch.empty((64, k), dtype=torch.int64, device="cuda"),
            ),
        }
    )
    ratios = {
        "bridge.top_k / torch.topk": ("bridge.top_k", "torch.topk", 0.8),
        "bridge.top_k, out= / torch.add": ("bridge.top_k, out=", "torch.add", 1.1),
    }
    report = {
        "date": datetime.date.today().isoformat(),
        "chip": torch.cuda.get_device_name(),
        "versions": {n: importlib.metadata.version(n) for n in ("jax", "torch", "numpy")},
        "command": "python benchmarks/host_time.py",
        "shape": [64, 1024],
        "k": k,
        "calls": TURN * TURNS,
        "us": us,
        "ratios": {
            name: {"is": round(us[ours]["mean"] / us[theirs]["mean"], 3), "at most": limit}
            for name, (ours, theirs, limit) in ratios.items()
        },
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
