"""The ways into the product, each of which runs any case of the table.

Add a way by adding to `FACES`. A face that cannot run here says why in `problem()`; which cases
of the table it answers is `takes(case)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtopk
import oracle
from cases import Case, numpy_dtype

Answer = tuple[np.ndarray, np.ndarray]
GPU = (pytest.mark.gpu,)


class Face(Protocol):
    name: str
    order: str
    """The oracle's name of this face's order: "total" or "torch"."""
    marks: tuple[pytest.MarkDecorator, ...]

    def problem(self) -> str | None:
        """Why no case runs here, or None."""

    def takes(self, case: Case) -> bool:
        """Whether the table's test runs this case by this face."""

    def run(self, case: Case) -> Answer:
        """Values and indices, having checked that the operand's storage is as it was."""


def x64_for(case: Case) -> contextlib.AbstractContextManager[Any]:
    return jax.enable_x64(True) if case.dtype.endswith("64") else contextlib.nullcontext()


def everything(case: Case) -> bool:
    return True


def kernel_dtypes(case: Case) -> bool:
    return not case.dtype.endswith("64")


def groups(*names: str) -> Callable[[Case], bool]:
    return lambda case: case.name.startswith(names)


@dataclasses.dataclass(frozen=True)
class JaxFace:
    """`jtopk.top_k` on an array or on a view of a flat buffer."""

    name: str
    strided: bool
    backend: str | None = None
    marks: tuple[pytest.MarkDecorator, ...] = ()
    takes: Callable[[Case], bool] = everything
    order: str = "total"

    def problem(self) -> str | None:
        return None

    def run(self, case: Case) -> Answer:
        with x64_for(case):
            flat = case.storage()
            buffer = jnp.asarray(flat if self.strided else case.view(flat).copy())
            before = np.array(buffer)
            operand = buffer
            if self.strided:
                operand = jtopk.StridedRows(buffer, case.shape, case.step, case.offset)
            got = jtopk.top_k(
                operand, case.k, axis=case.axis, largest=case.largest, sorted=case.sorted,
                lengths=self._row_numbers(case.lengths), starts=self._row_numbers(case.starts),
                backend=self.backend,
            )  # fmt: skip
            assert isinstance(got, jtopk.TopK)
            assert got.indices.dtype == np.int32
            np.testing.assert_array_equal(oracle.bits(np.asarray(buffer)), oracle.bits(before))
            return np.asarray(got.values), np.asarray(got.indices)

    def _row_numbers(self, numbers: np.ndarray | None) -> Any:
        """On the device where JAX can hold them; the dense face hands over NumPy arrays."""
        if numbers is None or not self.strided:
            return numbers
        if numbers.dtype == np.int64 and not jax.config.jax_enable_x64:
            return numbers
        return jnp.asarray(numbers)


@dataclasses.dataclass(frozen=True)
class TorchFace:
    """`bridge.top_k` on a contiguous tensor or on a view of a padded storage."""

    name: str
    strided: bool
    device: str = "cpu"
    marks: tuple[pytest.MarkDecorator, ...] = ()
    takes: Callable[[Case], bool] = everything
    order: str = "torch"

    def problem(self) -> str | None:
        return None if importlib.util.find_spec("torch") else "torch is not installed"

    def run(self, case: Case) -> Answer:
        import torch

        import bridge

        with x64_for(case):
            flat = case.storage()
            storage = to_torch(flat if self.strided else case.view(flat).copy()).to(self.device)
            before = to_numpy(storage)
            tensor = storage
            if self.strided:
                tensor = torch.as_strided(storage, case.shape, case.step, case.offset)
            numbers = {
                name: torch.from_numpy(np.array(value)).to(self.device)
                for name in ("lengths", "starts")
                if (value := getattr(case, name)) is not None
            }
            got = bridge.top_k(tensor, case.k, case.axis, case.largest, case.sorted, **numbers)
            assert got.indices.dtype == torch.int64
            assert got.values.device == got.indices.device == tensor.device
            assert got.values.dtype == tensor.dtype
            np.testing.assert_array_equal(oracle.bits(to_numpy(storage)), oracle.bits(before))
            return to_numpy(got.values), to_numpy(got.indices)


def to_torch(x: np.ndarray) -> Any:
    """A tensor of memory that torch allocated, and so aligned.

    By way of its bits, since torch knows none of ml_dtypes' NumPy types.
    """
    import torch

    bits = torch.from_numpy(np.array(x).view(f"i{x.dtype.itemsize}"))
    return bits.clone().view(getattr(torch, x.dtype.name))


def to_numpy(tensor: Any) -> np.ndarray:
    """A copy, bits untouched."""
    import torch

    dtype = numpy_dtype(str(tensor.dtype).removeprefix("torch."))
    bits = tensor.detach().contiguous().view(getattr(torch, f"int{8 * dtype.itemsize}"))
    return np.array(bits.cpu().numpy()).view(dtype)


FACES: list[Face] = [
    JaxFace("jax-dense", strided=False),
    JaxFace("jax-strided", strided=True),
    TorchFace("torch-contiguous", strided=False),
    TorchFace("torch-strided", strided=True),
    JaxFace("mosaic-strided", strided=True, backend="mosaic_gpu", marks=GPU, takes=kernel_dtypes),
    TorchFace("cuda-strided", strided=True, device="cuda", marks=GPU),
    # A compilation takes seconds there: of these only what the others leave open.
    JaxFace("gpu-xla", strided=True, backend="xla", marks=GPU, takes=groups("dtype", "window")),
    TorchFace(
        "cuda-contiguous", strided=False, device="cuda", marks=GPU, takes=groups("axis", "unsorted")
    ),
]
