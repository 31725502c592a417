"""Runs on a GPU what CI cannot and records it: GPU tests, the demonstration, memcheck.

    python benchmarks/record_gpu_check.py OUT.json

compute-sanitizer runs with an allocator that gives every array an allocation of its own, so
that a read past a buffer's end is one past an allocation's.
"""

from __future__ import annotations

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

LIMIT = 420
"""Seconds a step may take; then it is killed, and its exit code is -9."""

DEMO = "import sys; from jtopk._cli import main; sys.exit(main(sys.argv[1:]))"
SANITIZED = [
    "-k",
    "ends-with-buffer and mosaic or test_rows_start_at_every_residue and 257",
    "tests/test_top_k.py",
    "tests/test_kernel_gpu.py",
]


def run(command: list[str], log: Path, **environment: str) -> tuple[int, str]:
    """Exit code and output, which goes to the log as it comes."""
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        start = file.tell()
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
    with log.open() as file:
        file.seek(start)
        return code, file.read()


def last(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    return found[-1] if found else ""


def chip() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def main(out: Path) -> int:
    log = out.with_suffix(".log")
    python = sys.executable
    # pytest-benchmark, if there is one, warns of xdist, and warnings are errors here.
    pytest = ["-m", "pytest", "-q", "-p", "no:benchmark", "-m", "gpu"]
    pytest += ["-o", "faulthandler_timeout=120"]
    sanitize = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", python]
    separate = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    small = ["demo", "--json", "--rows", "4", "--columns", "9000", "-k", "300"]
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "chip": chip(),
        "versions": {n: importlib.metadata.version(n) for n in ("jax", "torch", "numpy")},
        "command": "python benchmarks/record_gpu_check.py",
    }
    steps = {
        "demo": ([python, "-c", DEMO, "demo", "--json"], r"\{.*\}", {}),
        "memcheck of the demo": (
            [*sanitize, "-c", DEMO, *small], r"ERROR SUMMARY: [^\n]*", separate,
        ),
        "memcheck of the tests at a buffer's end": (
            [*sanitize, *pytest, *SANITIZED], r"ERROR SUMMARY: [^\n]*", separate,
        ),
        "pytest -m gpu": ([python, *pytest, "-n", "12"], r"\d+ (?:passed|failed)[^\n]*", {}),
    }  # fmt: skip
    codes = []
    for name, (command, pattern, environment) in steps.items():
        code, text = run(command, log, **environment)
        codes.append(code)
        report[name] = {"exit code": code, "result": last(pattern, text)}
        out.write_text(json.dumps(report, indent=1) + "\n")
    report["demo"]["result"] = json.loads(report["demo"]["result"] or "{}")
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(out.read_text())
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
