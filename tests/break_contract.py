"""Breaks every row of the contract once, on purpose, and asks the tests to notice.

    python tests/break_contract.py [TEXT]

Each edit below is made alone, in a copy of the checkout; then tests run there until one fails. An
edit after which all pass is a row no test holds, and the exit code says so. TEXT chooses rows.
Some minutes; needs torch and a jax that interprets the kernel.
"""

from __future__ import annotations

import concurrent.futures
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOP_K, ERRORS, INTERPRET = "test_top_k.py", "test_errors.py", "test_kernel_interpret.py"
BRIDGE, IMPORT = "test_bridge_top_k.py", "test_bridge_import.py"

# (row, file, text there, text in its place, test files)
EDITS = [
    ("exact, XLA", "jtopk/_xla.py", "(key ^ sign, f", "((key ^ sign) >> 2 << 2, f", TOP_K),
    (
        "exact, kernel: a sampled cut that lets in too few", "pallas_kernels/_one_pass.py",
        "again = sampled & ((count < taken) | (count > capacity))",
        "again = sampled & (count < 0)", INTERPRET,
    ),
    (
        "exact, kernel: a cut one too high", "pallas_kernels/_one_pass.py",
        "limit = jnp.minimum(lowest + ends, highest)",
        "limit = jnp.minimum(lowest + ends, highest) >> 1", INTERPRET,
    ),
    (
        "order of JAX", "jtopk/_order.py",
        "if order is Order.TORCH:\n            is_nan", "if True:\n            is_nan", TOP_K,
    ),
    (
        "order of torch: zeros", "jtopk/_order.py",
        "if order is Order.TORCH:\n            # -0", "if False:\n            # -0", TOP_K,
    ),
    (
        "order of torch: NaN", "jtopk/_order.py",
        "if order is Order.TORCH:\n            is_nan", "if False:\n            is_nan", TOP_K,
    ),
    (
        "ties, XLA", "jtopk/_xla.py",
        "jax.lax.top_k(signed, k)[1]",
        "key.shape[-1] - 1 - jax.lax.top_k(signed[..., ::-1], k)[1]", TOP_K,
    ),
    (
        "ties, kernel", "pallas_kernels/_team.py",
        "(both[:, 0][None, :] < columns", "(both[:, 0][None, :] > columns", INTERPRET,
    ),
    (
        "ties at the cut, kernel", "pallas_kernels/_one_pass.py",
        "(before < most) & keeps", "(before <= most) & keeps", INTERPRET,
    ),
    (
        "sorted", "jtopk/_xla.py",
        "    return values, indices\n", "    return values[..., ::-1], indices[..., ::-1]\n", TOP_K,
    ),
    (
        "sorted=False, radix kernel: the same set", "pallas_kernels/_radix.py",
        "(ties_before < part.wanted)", "(ties_before <= part.wanted)", INTERPRET,
    ),
    (
        "values are the input's bits", "jtopk/_xla.py",
        "values = _order.from_bits(jnp.take_along_axis(bits, indices, axis=-1), dtype)",
        "values = jnp.take_along_axis(_order.from_bits(bits, dtype) + 0, indices, axis=-1)", TOP_K,
    ),
    (
        "lengths are clamped", "pallas_kernels/_window.py",
        "jnp.clip(length, 0, room)", "length", f"{TOP_K} {BRIDGE}",
    ),
    (
        "starts are clamped", "pallas_kernels/_window.py",
        "jnp.clip(start, 0, end)", "start", f"{TOP_K} {BRIDGE}",
    ),
    (
        "indices are columns of the whole row", "jtopk/_xla.py",
        "indices = (indices + begin[..., None]) % max(n, 1)", "pass", TOP_K,
    ),
    (
        "short rows: the value", "jtopk/_order.py",
        "bits = _largest_number_bits(dtype)\n    if largest:",
        "bits = _largest_number_bits(dtype)\n    if not largest:", TOP_K,
    ),
    (
        "short rows: integers", "jtopk/_order.py",
        "info.min if largest else info.max", "info.max if largest else info.min", TOP_K,
    ),
    (
        "short rows: index -1", "jtopk/_xla.py",
        "jnp.where(filled, indices, jnp.int32(-1))", "indices", TOP_K,
    ),
    ("k = 0, no columns", "jtopk/_xla.py", "if 0 in key.shape or k == 0:", "if False:", TOP_K),
    (
        "zero rows, k = 0: no launch", "jtopk/_api.py",
        'if k == 0 or view.rows == 0 or backend == "xla"', 'if backend == "xla"', "",
    ),
    (
        "padding: columns for the row stride", "jtopk/_strides.py",
        "    strides = normalise(shape, strides)\n    return RowView(",
        "    strides = dense_strides(shape)\n    return RowView(", TOP_K,
    ),
    (
        "padding: the same in the kernel", "pallas_kernels/_record.py",
        "words += [size, stride]", "words += [size, columns]", INTERPRET,
    ),
    (
        "padding: a row's end, kernel", "pallas_kernels/_one_pass.py",
        "valid = (columns >= place.begin) & (columns < place.end)",
        "valid = (columns >= place.begin) & (columns <= place.end)", INTERPRET,
    ),
    (
        "dtypes: signed integers", "jtopk/_order.py",
        "ranked = bits ^ sign\n", "ranked = bits\n", TOP_K,
    ),
    (
        "dtypes: nothing is narrowed", "jtopk/_check.py",
        '"complex128") and not x64', '"complex128") and False', f"{ERRORS} {TOP_K}",
    ),
    (
        "input is not written", "bridge/_execute.py",
        "input = arguments.input.detach()", "input = arguments.input.detach().nan_to_num_()",
        f"{TOP_K} {BRIDGE}",
    ),
    (
        "input is not copied", "bridge/_dlpack.py",
        "if lead is None or copy:", "if True:", IMPORT,
    ),
    (
        "storage offsets", "bridge/_dlpack.py",
        "StridedRows(self.share(lead), self.shape, self.strides, lead)",
        "StridedRows(self.share(lead), self.shape, self.strides, 0)", IMPORT,
    ),
    ("error: k negative", "jtopk/_check.py", "if number < 0:", "if False:", ERRORS),
    (
        "error: k larger than the row", "jtopk/_check.py",
        "if number > columns and not has_lengths:", "if False:", ERRORS,
    ),
    ("error: k a bool", "jtopk/_check.py", "if isinstance(value, bool):", "if False:", ERRORS),
    ("error: complex, bool", "jtopk/_check.py", "if name not in DTYPES:", "if False:", ERRORS),
    ("error: 0-d", "jtopk/_check.py", "if ndim == 0:", "if False:", ERRORS),
    ("error: shape of lengths", "jtopk/_check.py", "if shape != expected:", "if False:", ERRORS),
    (
        "error: dtype of lengths", "jtopk/_check.py",
        'if dtype_name not in ("int32", "int64"):', "if False:", ERRORS,
    ),
    (
        "error: device of lengths", "bridge/_checks.py",
        "if numbers.device != input.device:", "if False:", ERRORS,
    ),
    (
        "error: a view that leaves its buffer", "jtopk/_strided_rows.py",
        "if end > buffer.shape[0]:", "if False:", ERRORS,
    ),
    (
        "error: shape of out", "bridge/_checks.py",
        "if tuple(tensor.shape) != shape:", "if False:", ERRORS,
    ),
    ("error: dtype of out", "bridge/_checks.py", "if tensor.dtype != dtype:", "if False:", ERRORS),
    (
        "error: device of out", "bridge/_checks.py",
        "if tensor.device != input.device:", "if False:", ERRORS,
    ),
    (
        "error: out overlaps the input", "bridge/_checks.py",
        "if overlap(tensor, input):", "if False:", ERRORS,
    ),
    (
        "error: out overlaps itself", "bridge/_checks.py",
        "if _strides.overlaps_itself(shape, tensor.stride()):", "if False:", ERRORS,
    ),
    (
        "error: sparse", "bridge/_checks.py",
        "if tensor.layout is not torch.strided:", "if False:", ERRORS,
    ),
    ("error: quantised", "bridge/_checks.py", "if tensor.is_quantized:", "if False:", ERRORS),
    ("error: conj", "bridge/_checks.py", "if tensor.is_conj():", "if False:", ERRORS),
    ("error: meta", "bridge/_checks.py", 'if device.type == "meta":', "if False:", ERRORS),
    (
        "error: a device JAX does not see", "bridge/_dlpack.py",
        "if device.index not in _cuda_devices():", "if False:", f"{ERRORS} {IMPORT} {BRIDGE}",
    ),
    (
        "requires_grad has a gradient", "bridge/_top_k.py",
        "run = _execute.run(arguments) if _eager(input) else _operator.top_k(*arguments)",
        "run = _execute.run(arguments)", f"{ERRORS} {BRIDGE}",
    ),
    (
        "error: a backend that cannot run", "jtopk/_backend.py",
        "if reason is not None:\n        raise NotImplementedError",
        "if False:\n        raise NotImplementedError", ERRORS,
    ),
    ("import jtopk imports no torch", "jtopk/__init__.py", '"""', 'import torch\n"""', ""),
    (
        "import bridge initialises no CUDA", "bridge/__init__.py",
        '"""', 'import torch\n\ntorch.cuda.init()\n"""', "",
    ),
]  # fmt: skip


def noticed(edit: tuple[str, str, str, str, str]) -> tuple[str, str]:
    """The row, and the first test that failed once it was broken, or why there is none."""
    row, path, there, instead, files = edit
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        unwanted = shutil.ignore_patterns(".*", "__pycache__", "benchmarks")
        shutil.copytree(ROOT, copy, ignore=unwanted)
        source = (copy / path).read_text()
        if there not in source:
            return row, f"NOT BROKEN: {path} has no {there!r}"
        (copy / path).write_text(source.replace(there, instead, 1))
        tests = [f"tests/{name}" for name in files.split()] or ["tests"]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", *tests]
        done = subprocess.run(
            command, cwd=copy, env={"PYTHONPATH": str(copy), "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True,
        )  # fmt: skip
    if done.returncode == 0:
        return row, "NOT NOTICED"
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return row, lines[0].split(" - ")[0] if lines else f"exit code {done.returncode}"


def main(text: str = "") -> int:
    chosen = [edit for edit in EDITS if text in edit[0]]
    held = 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for row, outcome in pool.map(noticed, chosen):
            held += not outcome.startswith("NOT")
            print(f"{row}: {outcome}", flush=True)
    print(f"{held} of {len(chosen)} rows held")
    return int(held < len(chosen))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
