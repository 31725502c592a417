"""`jtopk.sharded_top_k` over several real processes, with collectives between them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

port, processes, process = map(int, sys.argv[1:])
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

import jtopk
import oracle

assert jax.process_count() == processes and jax.device_count() == 2 * processes
x = np.random.default_rng(0).integers(0, 9, (8, 16 * 61)).astype(np.float32)
lengths = np.array([0, 3, 976, 500, 2000, 61, 62, 900], np.int32)
for rows in (1, 2):
    mesh = Mesh(np.array(jax.devices()).reshape(rows, -1), ("r", "c"))
    sharding = NamedSharding(mesh, PartitionSpec("r", "c"))
    operand = jax.make_array_from_callback(x.shape, sharding, lambda where: x[where])
    for options in ({}, {"lengths": lengths}):
        got = jtopk.sharded_top_k(
            operand, 70, mesh=mesh, row_axis="r", column_axis="c", **options
        )
        want = oracle.top_k(x, 70, **options)
        for array, expected in zip(got, want, strict=True):
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(shard.data, expected[shard.index])
print("same", process)
"""


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_agree_with_the_oracle(processes, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", "JAX_PLATFORMS": "cpu"}
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(port), str(processes), str(i)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(processes)
    ]  # fmt: skip
    try:
        for i, worker in enumerate(workers):
            out, error = worker.communicate(timeout=180)
            assert worker.returncode == 0, error
            assert out.strip().endswith(f"same {i}")
    finally:
        for worker in workers:
            worker.kill()
