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
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = "import sys; from jtopk._cli import main; sys.exit(main(sys.argv[1:]))"
SANITIZED = [
    "-k",
    "ends-with-buffer and mosaic or test_rows_start_at_every_residue and 257",
    "tests/test_top_k.py",
    "tests/test_kernel_gpu.py",
]


def run(command: list[str], log: Path, **environment: str) -> tuple[int, str]:
    """Exit code and output, which is also appended to the log."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}
    )
    text = done.stdout + done.stderr
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n{text}\n")
    return done.returncode, text


def last(pattern: str, text: str) -> str:
    found = re.findall(pattern, text)
    return found[-1] if found else ""


def chip() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def main(out: Path) -> int:
    log = out.with_suffix(".log")
    python = sys.executable
    sanitize = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", python]
    report: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "chip": chip(),
        "versions": {n: importlib.metadata.version(n) for n in ("jax", "torch", "numpy")},
        "command": "python benchmarks/record_gpu_check.py",
    }
    code, text = run([python, "-m", "pytest", "-q", "-n", "8", "-m", "gpu"], log)
    codes = [code]
    report["pytest -m gpu"] = last(r"\d+ passed[^\n]*|\d+ failed[^\n]*", text)
    code, text = run([python, "-c", DEMO, "demo", "--json"], log)
    codes.append(code)
    report["demo"] = json.loads(last(r"\{.*\}", text) or "{}")
    separate = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    small = ["demo", "--json", "--rows", "4", "--columns", "9000", "-k", "300"]
    code, text = run([*sanitize, "-c", DEMO, *small], log, **separate)
    codes.append(code)
    report["memcheck of the demo"] = last(r"ERROR SUMMARY: [^\n]*", text)
    code, text = run([*sanitize, "-m", "pytest", "-q", "-m", "gpu", *SANITIZED], log, **separate)
    codes.append(code)
    report["memcheck of the tests at a buffer's end"] = last(r"ERROR SUMMARY: [^\n]*", text)
    report["exit codes"] = codes
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "demo"}, indent=1))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
