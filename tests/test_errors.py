"""Every row of the table of bad input, in both faces: which error, and that it names the
argument and its value. Nothing is launched.
"""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtopk
import pallas_kernels
from jtopk import _backend

X = np.arange(24, dtype=np.float32).reshape(3, 8)
FACES = ("jax", "torch")

pytestmark = pytest.mark.usefixtures("nothing_launched")
faces = pytest.mark.parametrize("face", FACES)


def call(face: str, x: Any, k: Any = 2, **options: Any) -> Any:
    """`top_k` of a face; NumPy arrays become its own arrays."""
    if face == "jax":
        return jtopk.top_k(x, k, **options)
    torch = pytest.importorskip("torch")
    import bridge

    def tensor(value: Any) -> Any:
        return torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value

    return bridge.top_k(tensor(x), k, **{name: tensor(value) for name, value in options.items()})


# k


@faces
def test_k_negative(face: str) -> None:
    with pytest.raises(ValueError, match=r"\bk\b.*-1"):
        call(face, X, -1)


@faces
def test_k_larger_than_the_row(face: str) -> None:
    with pytest.raises(ValueError, match=r"k=9.*8 columns"):
        call(face, X, 9)
    with pytest.raises(ValueError, match=r"k=4.*3 columns"):
        call(face, X, 4, **{"axis" if face == "jax" else "dim": 0})


@faces
@pytest.mark.parametrize("k", [2.0, "3", None, True, [1], np.float32(2)])
def test_k_not_an_integer(face: str, k: Any) -> None:
    with pytest.raises(TypeError, match=r"\bk\b.*" + re.escape(repr(k))):
        call(face, X, k)


def test_k_traced() -> None:
    with pytest.raises(TypeError, match=r"\bk\b.*static"):
        jax.jit(lambda k: jtopk.top_k(X, k))(2)


# The operand


@faces
@pytest.mark.parametrize("dtype", ["complex64", "bool"])
def test_dtype_without_an_order(face: str, dtype: str) -> None:
    with pytest.raises(TypeError, match=dtype):
        call(face, X.astype(dtype))


@faces
def test_no_dimensions(face: str) -> None:
    with pytest.raises(TypeError, match=r"shape \(\)|0-d"):
        call(face, np.array(1, np.float32), 0)


def test_axis() -> None:
    with pytest.raises(ValueError, match=r"axis=2 .*\(3, 8\)"):
        jtopk.top_k(X, 1, axis=2)
    with pytest.raises(ValueError, match=r"axis=-3 .*\(3, 8\)"):
        jtopk.top_k(X, 1, axis=-3)
    with pytest.raises(TypeError, match=r"axis .*1\.0"):
        jtopk.top_k(X, 1, axis=1.0)


def test_dim() -> None:
    with pytest.raises((ValueError, IndexError), match=r"dim=2 .*\(3, 8\)"):
        call("torch", X, 1, dim=2)


@faces
@pytest.mark.parametrize("dtype", ["float64", "int64", "uint64"])
def test_64_bits_are_never_narrowed(face: str, dtype: str) -> None:
    assert not jax.config.jax_enable_x64
    with pytest.raises(TypeError, match=rf"{dtype}.*x64"):
        call(face, X.astype(dtype))


def test_64_bit_scalars_in_a_list() -> None:
    with pytest.raises(TypeError, match=r"operand.*float64.*x64"):
        jtopk.top_k([np.float64(0.1), np.float64(0.2)], 1)


# lengths and starts


@faces
@pytest.mark.parametrize("name", ["lengths", "starts"])
@pytest.mark.parametrize("shape", [(), (2,), (4,), (3, 1), (1, 3)], ids=str)
def test_row_numbers_of_the_wrong_shape(face: str, name: str, shape: tuple[int, ...]) -> None:
    expected = rf"{name}.*{re.escape(str(shape))}.*\(3,\)"
    with pytest.raises(ValueError, match=expected):
        call(face, X, **{name: np.zeros(shape, np.int32)})


@faces
@pytest.mark.parametrize("name", ["lengths", "starts"])
@pytest.mark.parametrize("dtype", ["float32", "bool", "int16", "uint32"])
def test_row_numbers_of_the_wrong_dtype(face: str, name: str, dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*{dtype}.*int32 or int64"):
        call(face, X, **{name: np.zeros(3, dtype)})


def test_row_numbers_on_the_device_are_checked_too() -> None:
    with pytest.raises(ValueError, match=r"lengths.*\(2,\)"):
        jtopk.top_k(X, 2, lengths=jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match=r"starts.*float32"):
        jtopk.top_k(X, 2, starts=jnp.zeros(3))


@pytest.mark.parametrize("name", ["lengths", "starts"])
def test_row_numbers_on_another_torch_device(name: str) -> None:
    torch = pytest.importorskip("torch")
    numbers = torch.zeros(3, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match=rf"{name}.*meta"):
        call("torch", X, **{name: numbers})


def test_row_numbers_on_another_jax_device() -> None:
    # In a process of its own, since it needs two devices.
    script = """
import jax, jax.numpy as jnp, jtopk
jax.config.update("jax_num_cpu_devices", 2)
here, there = jax.devices("cpu")
x = jax.device_put(jnp.ones((3, 8)), here)
for name in ("lengths", "starts"):
    try:
        jtopk.top_k(x, 2, **{name: jax.device_put(jnp.ones(3, jnp.int32), there)})
    except ValueError as error:
        assert name in str(error) and "device" in str(error), error
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


# StridedRows


@pytest.mark.parametrize(
    ("shape", "strides", "offset"), [((3, 8), (9, 1), 0), ((3, 8), (8, 1), 3), ((1, 1), (1, 1), 26)]
)
def test_strided_rows_that_leave_the_buffer(shape, strides, offset: int) -> None:
    buffer = jnp.zeros(25)
    with pytest.raises(ValueError, match=r"offset.*element 2[56] .*25 elements"):
        jtopk.StridedRows(buffer, shape, strides, offset)


def test_strided_rows_arguments() -> None:
    buffer = jnp.zeros(25)
    with pytest.raises(ValueError, match=r"strides.*negative.*\(-1, 1\)"):
        jtopk.StridedRows(buffer, (3, 8), (-1, 1))
    with pytest.raises(ValueError, match=r"offset.*negative.*-1"):
        jtopk.StridedRows(buffer, (3, 8), (8, 1), -1)
    with pytest.raises(ValueError, match=r"strides.*\(3, 8\).*\(1,\)"):
        jtopk.StridedRows(buffer, (3, 8), (1,))
    with pytest.raises(TypeError, match=r"shape.*2\.5"):
        jtopk.StridedRows(buffer, (2.5, 8), (8, 1))
    with pytest.raises(TypeError, match=r"buffer.*\(5, 5\)"):
        jtopk.StridedRows(buffer.reshape(5, 5), (5,), (1,))
    with pytest.raises(TypeError, match=r"buffer.*list"):
        jtopk.StridedRows([1.0], (1,), (1,))


def test_rows_too_long_for_int32() -> None:
    rows = jtopk.StridedRows(jnp.zeros(1, jnp.int8), (2**31,), (0,))
    with pytest.raises(ValueError, match=r"operand.*2147483648 columns"):
        jtopk.top_k(rows, 1)


# Backends


def test_backend_unknown() -> None:
    with pytest.raises(ValueError, match=r"backend.*'cuda'"):
        jtopk.top_k(X, 1, backend="cuda")


def test_backend_that_cannot_run_here() -> None:
    reason = _backend.gpu_problem()
    if reason is None:
        operand = jax.device_put(X, jax.devices("cpu")[0])
        reason = "operand is on cpu"
    else:
        operand = X
    with pytest.raises(NotImplementedError, match=f"'mosaic_gpu'.*{re.escape(reason)}"):
        jtopk.top_k(operand, 1, backend="mosaic_gpu")


def test_interpreter_that_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas_kernels, "unavailable", lambda: "jax is too old")
    with pytest.raises(NotImplementedError, match=r"'interpret'.*jax is too old"):
        jtopk.top_k(X, 1, backend="interpret")


# out=, in torch alone


def out_like(torch: Any, shape=(3, 2), values="float32", indices="int64", device="cpu") -> Any:
    return (
        torch.empty(shape, dtype=getattr(torch, values), device=device),
        torch.empty(shape, dtype=getattr(torch, indices), device=device),
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shape": (3, 3)}, r"out.*\(3, 3\).*\(3, 2\)"),
        ({"shape": (6,)}, r"out.*\(6,\).*\(3, 2\)"),
        ({"values": "float16"}, r"out.*float16.*float32"),
        ({"indices": "int32"}, r"out.*int32.*int64"),
        ({"device": "meta"}, r"out.*meta.*cpu"),
    ],
    ids=["shape", "rank", "values", "indices", "device"],
)
def test_out(options: dict[str, Any], match: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=match):
        call("torch", X, out=out_like(torch, **options))


def test_out_over_the_input() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X.copy())
    with pytest.raises(ValueError, match=r"out.*overlap"):
        call("torch", x, out=(x[:, :2], out_like(torch)[1]))
    storage = torch.zeros(64)
    view = storage[:24].view(3, 8)
    with pytest.raises(ValueError, match=r"out.*overlap"):
        call("torch", view, out=(storage[20:26].view(3, 2), out_like(torch)[1]))


# Tensors JAX cannot read


def test_meta_tensor() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"input.*meta"):
        call("torch", torch.empty(3, 8, device="meta"))


def test_sparse_tensor() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"input.*sparse"):
        call("torch", torch.from_numpy(X.copy()).to_sparse())


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensor() -> None:
    torch = pytest.importorskip("torch")
    x = torch.quantize_per_tensor(torch.from_numpy(X.copy()), 1.0, 0, torch.quint8)
    with pytest.raises(ValueError, match=r"input.*quanti[sz]ed"):
        call("torch", x)


def test_conjugate_tensor() -> None:
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X.astype(np.complex64)).conj()
    with pytest.raises(ValueError, match=r"input.*conj"):
        call("torch", x)


def test_negated_view() -> None:
    """The imaginary part of a conjugate is real, but its memory holds the other sign."""
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(X.astype(np.complex64)).conj().imag
    assert x.is_neg()
    with pytest.raises(ValueError, match=r"input.*neg"):
        call("torch", x)


def test_not_a_tensor() -> None:
    pytest.importorskip("torch")
    with pytest.raises(TypeError, match=r"input.*list"):
        call("torch", [[1.0, 2.0]], 1)
