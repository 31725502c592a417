"""Settings and fixtures for every test."""

from __future__ import annotations

import functools
import os

# JAX would take most of a GPU's memory at its first use, and torch shares that GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import pytest

import pallas_kernels
from jtopk import _api, _backend

# Devices of the CPU for tests over meshes; all else runs on the first.
jax.config.update("jax_num_cpu_devices", 8)


@functools.cache
def no_gpu() -> str | None:
    """Why tests marked gpu cannot run, or None."""
    try:
        jax.devices("cuda")
    except RuntimeError:
        return "JAX sees no NVIDIA GPU"
    return _backend.gpu_problem()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := no_gpu()):
        pytest.skip(reason)


def pytest_report_header() -> str:
    kernel = pallas_kernels.unavailable() or "yes"
    return f"jax {jax.__version__}; interpreted kernel: {kernel}"


@pytest.fixture
def nothing_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if a call gets past its argument checks."""

    def launched(*args, **kwargs):
        pytest.fail("the call got past its argument checks")

    monkeypatch.setattr(_api, "_top_k", launched)
