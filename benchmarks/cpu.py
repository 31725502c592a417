"""Top-k on a CPU, in milliseconds: jtopk on XLA, jax.lax.top_k, and torch.topk if installed.

    python benchmarks/cpu.py OUT.json

Medians of 25 runs after one that compiles, in one process and random order. Every answer is
checked against the oracle before it is timed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jtopk

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import oracle

RUNS = 25
CELLS = [
    (1, 1048576, 8, "float32"),
    (1, 1048576, 8, "int32"),
    (1, 1048576, 8, "bfloat16"),
    (1, 1048576, 2048, "float32"),
    (64, 131072, 64, "float32"),
    (64, 131072, 64, "int32"),
    (64, 131072, 64, "bfloat16"),
    (64, 4096, 2048, "float32"),
    (64, 4096, 2048, "int8"),
]


def data(rows: int, columns: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind in "iu":
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, (rows, columns), dtype, endpoint=True)
    return rng.standard_normal((rows, columns)).astype(dtype)


def timed(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = np.random.default_rng(0)
    for run in range(-1, RUNS):
        # In an order drawn anew: what runs after torch finds caches and cores as torch left them.
        for name in order.permutation([*calls]):
            call = calls[name]
            start = time.perf_counter()
            call()
            if run >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(statistics.median(t), 3) for name, t in times.items()}


def cell(rows: int, columns: int, k: int, dtype: str) -> dict[str, Any]:
    x = data(rows, columns, dtype)
    operand = jnp.asarray(x)
    ours = jax.jit(lambda x: jtopk.top_k(x, k))
    theirs = jax.jit(lambda x: jax.lax.top_k(x, k))
    oracle.assert_same(ours(operand), oracle.top_k(x, k))
    calls = {
        "jtopk": lambda: jax.block_until_ready(ours(operand)),
        "lax": lambda: jax.block_until_ready(theirs(operand)),
    }
    if importlib.util.find_spec("torch"):
        import torch

        bits = torch.from_numpy(x.view(f"i{x.itemsize}").copy())
        tensor = bits.view(getattr(torch, dtype))
        calls["torch"] = lambda: torch.topk(tensor, k)
    return {"rows": rows, "cols": columns, "k": k, "dtype": dtype, "ms": timed(calls)}


def cpu() -> str:
    """The processor's name and how many of it there are."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    (name, *_) = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{name}, {os.cpu_count()} cores"


def main(out: Path) -> None:
    cells = [cell(*shape) for shape in CELLS]
    names = [n for n in ("jax", "torch", "numpy") if importlib.util.find_spec(n)]
    report = {
        "date": datetime.date.today().isoformat(),
        "chip": cpu(),
        "versions": {n: importlib.metadata.version(n) for n in names},
        "command": "python benchmarks/cpu.py",
        "cells": cells,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table("rows", "columns", "k", "dtype", "jtopk ms", "lax / jtopk", "torch / jtopk")
    for c in cells:
        ms = c["ms"]
        others = [f"{ms[n] / ms['jtopk']:.2f}" if n in ms else "-" for n in ("lax", "torch")]
        shape = [str(c[n]) for n in ("rows", "cols", "k", "dtype")]
        table.add_row(*shape, f"{ms['jtopk']:.2f}", *others)
    Console().print(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
