"""Which backend runs a call, and why another one cannot."""

from __future__ import annotations

import functools
from typing import Any

import jax

import pallas_kernels
from jtopk import _plan

BACKENDS = ("mosaic_gpu", "xla", "interpret")


@functools.cache
def gpu_problem() -> str | None:
    """Why this process cannot run the GPU kernel, or None if it can."""
    reason = pallas_kernels.unavailable()
    if reason is not None:
        return reason
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:
        return "JAX sees no NVIDIA GPU"
    for gpu in gpus:
        if float(gpu.compute_capability) < 9.0:
            return (
                f"{gpu.device_kind} has compute capability {gpu.compute_capability}; 9.0 is needed"
            )
    return None


def choose(backend: str | None, operand: Any) -> str:
    """The backend for a call: a name of `BACKENDS`, or "auto" for a choice made at lowering.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: a backend this process cannot run.
    """
    if backend is None:
        return "xla" if gpu_problem() is not None else "auto"
    if backend not in BACKENDS:
        raise ValueError(f"backend must be None or one of {', '.join(BACKENDS)}, got {backend!r}")
    reason = None
    if backend != "xla":
        reason = pallas_kernels.unavailable() or _plan.unsupported(operand.dtype)
    if backend == "mosaic_gpu" and reason is None:
        reason = gpu_problem()
        if reason is None and not isinstance(operand, jax.core.Tracer):
            platforms = {device.platform for device in operand.devices()}
            if platforms != {"gpu"}:
                reason = f"operand is on {', '.join(sorted(platforms))}"
    if reason is not None:
        raise NotImplementedError(f"backend {backend!r} cannot run this call: {reason}")
    return backend
