"""Runs on a GPU what CI cannot and records it: GPU tests, the demonstration, compute-sanitizer.

    python benchmarks/record_gpu_check.py OUT.json [STEP...]

Without steps named, all are run. Where memory's ends are looked at, compute-sanitizer runs with an
allocator that gives every array an allocation of its own, so that a read past a buffer's end is
one past an allocation's.
"""

from __future__ import annotations

import concurrent.futures
import datetime
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT = 360
"""Seconds a step may take; then it is killed, and its exit code is -9."""

DEMO = "import sys; from jtopk._cli import main; sys.exit(main(sys.argv[1:]))"
AT_THE_END = [
    "-k",
    "ends-with-buffer and mosaic or test_rows_start_at_every_residue and 257",
    "tests/test_top_k.py",
    "tests/test_kernel_gpu.py",
]
DROPINS = ["-k", "cuda or graph", "tests/test_dropin.py"]
LAUNCHED = ["-k", "graph or compile_nothing", "tests/test_launch_gpu.py"]
RACES = [
    "-k",
    "lanes or residue and 257",
    "tests/test_kernel_leaves.py",
    "tests/test_kernel_gpu.py",
]


def run(command: list[str], log: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and output, which goes to the log as it comes."""
    with log.open("w") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        # In a session of its own, so that a hang's children end with it.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **environment},
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
    return code, log.read_text()


def last(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    return found[-1] if found else ""


def chip() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def main(out: Path, chosen: list[str]) -> int:
    python = sys.executable
    # pytest-benchmark, if there is one, warns of xdist, and warnings are errors here.
    pytest = ["-m", "pytest", "-q", "-p", "no:benchmark", "-m", "gpu"]
    pytest += ["-o", "faulthandler_timeout=120"]

    def sanitize(tool: str) -> list[str]:
        return ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", python]

    summary = r"(?:ERROR|RACECHECK) SUMMARY: [^\n]*"
    separate = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    small = ["demo", "--json", "--rows", "4", "--columns", "9000", "-k", "300"]
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "chip": chip(),
        "versions": {n: importlib.metadata.version(n) for n in ("jax", "torch", "numpy")},
        "command": " ".join(["python benchmarks/record_gpu_check.py", *chosen]),
    }
    steps = {
        "demo": ([python, "-c", DEMO, "demo", "--json"], r"\{.*\}", {}),
        "memcheck-demo": ([*sanitize("memcheck"), "-c", DEMO, *small], summary, separate),
        "memcheck-ends": ([*sanitize("memcheck"), *pytest, *AT_THE_END], summary, separate),
        "memcheck-vllm": (
            [
                *sanitize("memcheck"),
                *pytest,
                *DROPINS,
                "--deselect",
                f"{DROPINS[-1]}::TestFlashinfer",
            ],
            summary,
            {},
        ),
        "memcheck-flashinfer": (
            [*sanitize("memcheck"), *pytest, *DROPINS[:-1], f"{DROPINS[-1]}::TestFlashinfer"],
            summary,
            {},
        ),
        "memcheck-launch": ([*sanitize("memcheck"), *pytest, *LAUNCHED], summary, {}),
        "racecheck": ([*sanitize("racecheck"), *pytest, *RACES], summary, {}),
        "tests": ([python, *pytest, "-n", "12"], r"\d+ (?:passed|failed)[^\n]*", {}),
    }
    unknown = set(chosen) - set(steps)
    if unknown:
        raise SystemExit(f"unknown steps {sorted(unknown)}; there are {', '.join(steps)}")
    names = chosen or list(steps)

    def outcome(name: str) -> tuple[int, str]:
        command, _, environment = steps[name]
        return run(command, out.with_name(f"{out.stem}.{name}.log"), environment)

    codes = []

    def record(name: str, code: int, text: str) -> None:
        codes.append(code)
        report[name] = {"exit code": code, "result": last(steps[name][1], text)}
        out.write_text(json.dumps(report, indent=1) + "\n")

    alone = [name for name in names if name in ("demo", "tests")]
    for name in alone:
        record(name, *outcome(name))
    # The sanitizers wait for the host most of the time, so they share the GPU.
    together = [name for name in names if name not in alone]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for name, (code, text) in zip(together, pool.map(outcome, together), strict=True):
            record(name, code, text)
    if "demo" in report:
        report["demo"]["result"] = json.loads(report["demo"]["result"] or "{}")
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(out.read_text())
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
