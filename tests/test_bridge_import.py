"""Memory from torch and NumPy into JAX and back: shared, strides kept, alive as long as needed."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge
import jtopk
from bridge import _dlpack
from faces import to_numpy, to_torch

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]

# Name, a view of a storage of 5000 floats, and the element of the storage it begins at.
VIEWS = {
    "dense": (lambda s: s[:64].view(8, 8), 0),
    "padded": (lambda s: s.view(10, 500)[:, :257], 0),
    "padded-offset": (lambda s: s[3:2503].view(10, 250)[:, :129], 3),
    "last-short-row": (lambda s: s.as_strided((3, 200), (2400, 1)), 0),
    "expanded": (lambda s: s[7:107].expand(6, 100), 7),
    "overlapping": (lambda s: s.as_strided((9, 40), (3, 1), 65), 65),
    "transposed": (lambda s: s.view(50, 100).t(), 0),
    "step-2": (lambda s: s.view(50, 100)[:, 1::2], 1),
    "rank-3": (lambda s: s.view(5, 10, 100)[:, -1, :], 900),
    "one-row": (lambda s: s.as_strided((1, 77), (1, 1), 5), 5),
    "one-element": (lambda s: s[::3][:1], 0),
    "scalar": (lambda s: s[11], 11),
    "empty": (lambda s: s[:0].view(0, 7), 0),
}


def storage(device: str = "cpu") -> torch.Tensor:
    return torch.arange(5000, dtype=torch.float32, device=device)


def pointer(view: jtopk.StridedRows) -> int:
    return view.buffer.unsafe_buffer_pointer()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_imported_in_place(name, device):
    memory = storage(device)
    make, first = VIEWS[name]
    tensor = make(memory)
    view = bridge.to_jax(tensor, copy=False)
    assert view.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(view.dense(), tensor.cpu().numpy())
    if tensor.numel():
        boundary = 64 if device == "cpu" else 256
        assert pointer(view) % boundary == 0
        assert pointer(view) + 4 * view.offset == tensor.data_ptr()
        assert memory.data_ptr() <= pointer(view)
        assert view.offset == first % (boundary // 4)
        # The buffer ends where the view does: nothing behind it is in reach.
        assert view.buffer.shape[0] == view.offset + jtopk._strides.span(view.shape, view.strides)


@pytest.mark.parametrize("device", DEVICES)
def test_a_result_is_exported_in_place(device):
    array = bridge.to_jax(storage(device)).buffer
    tensor = bridge.to_torch(array)
    assert tensor.data_ptr() == array.unsafe_buffer_pointer()
    view = jtopk.StridedRows(array, (3, 4), (100, 2), 7)
    assert bridge.to_torch(view).stride() == (100, 2)
    np.testing.assert_array_equal(bridge.to_torch(view).cpu().numpy(), view.dense())


@pytest.mark.parametrize("device", DEVICES)
def test_jax_keeps_torch_memory_alive(device):
    memory = storage(device)
    expected = memory.cpu().numpy().copy()
    view = bridge.to_jax(memory)
    del memory
    gc.collect()
    others = [torch.full((5000,), -1.0, device=device) for _ in range(20)]
    np.testing.assert_array_equal(view.dense(), expected)
    del others


@pytest.mark.parametrize("device", DEVICES)
def test_torch_keeps_jax_memory_alive(device):
    array = jnp.arange(5000.0) + 1
    if device == "cpu":
        array = jax.device_put(array, jax.devices("cpu")[0])
    expected = np.array(array)
    tensor = bridge.to_torch(array)
    del array
    gc.collect()
    others = [jnp.full(5000, -1.0) for _ in range(20)]
    np.testing.assert_array_equal(tensor.cpu().numpy(), expected)
    del others


def test_numpy_memory_is_released_with_the_array():
    owner = np.zeros(4096, np.float32)
    alive = weakref.ref(owner)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bridge.CopyWarning)
        view = bridge.to_jax(owner[16:])
    del owner
    gc.collect()
    shared = alive() is not None
    del view
    gc.collect()
    assert shared and alive() is None


def aligned(nbytes: int, ahead: int = 0) -> np.ndarray:
    """Bytes that begin `ahead` past a GPU's boundary, and own nothing in front of them."""
    raw = np.zeros(nbytes + 512, np.uint8)
    skip = -raw.ctypes.data % 256 + ahead
    region = _dlpack._Region(raw.ctypes.data + skip, nbytes, raw)
    region.__array_interface__["data"] = (raw.ctypes.data + skip, False)
    return np.asarray(region)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.bool_])
@pytest.mark.parametrize("writeable", [True, False])
def test_numpy_is_imported_in_place(dtype, writeable):
    base = aligned(4096).view(dtype)
    base[:] = np.arange(base.size) % 7
    x = base.reshape(8, -1)[:, 3:50]
    base.flags.writeable = x.flags.writeable = writeable
    view = bridge.to_jax(x, copy=False)
    assert view.dtype == dtype
    assert pointer(view) + view.offset * x.itemsize == x.ctypes.data
    np.testing.assert_array_equal(np.asarray(view.dense()), x)


def test_numpy_strides_that_jax_cannot_carry():
    x = aligned(4096).view(np.float32)
    with pytest.raises(ValueError, match=r"negative strides \(-4,\)"):
        bridge.to_jax(x[::-1])
    odd = np.lib.stride_tricks.as_strided(x, (3,), (6,))
    with pytest.raises(ValueError, match=r"strides of \(6,\) bytes.*itemsize 4"):
        bridge.to_jax(odd)
    np.testing.assert_array_equal(bridge.to_jax(x[:1][::-1]).dense(), x[:1])  # one: no step


def test_numpy_views_made_by_as_strided_know_the_room_in_front():
    x = aligned(4096).view(np.float32)
    x[:] = np.arange(1024)
    windows = np.lib.stride_tricks.as_strided(x[3:], (5, 9), (40, 4))
    view = bridge.to_jax(windows, copy=False)
    assert view.offset == 3 and pointer(view) == x.ctypes.data
    np.testing.assert_array_equal(view.dense(), windows)


def test_nothing_need_be_aligned_where_nothing_is_read():
    empty = aligned(64, ahead=16)[8:8]
    assert bridge.to_jax(empty, copy=False).shape == (0,)


@pytest.mark.parametrize("dtype", [">f4", "U2", "O", "M8[s]", [("a", "f4")]])
def test_numpy_dtypes_that_jax_lacks(dtype):
    with pytest.raises(TypeError, match=r"tensor has dtype .*; expected numbers or bools"):
        bridge.to_jax(np.zeros(64, dtype))


class LikeCuPy:
    """What the import uses of a CuPy array, over memory of the CPU."""

    __cuda_array_interface__ = None  # never read: it only says what kind of array this is

    class Pointer:
        def __init__(self, mem, ptr):
            self.mem, self.ptr = mem, ptr

        def __add__(self, nbytes):
            return LikeCuPy.Pointer(self.mem, self.ptr + nbytes)

    class Memory:
        def __init__(self, owner):
            self.owner, self.ptr = owner, owner.ctypes.data

    def __init__(self, shape, dtype, memptr, strides=None):
        self.data, self.dtype, self.shape = memptr, np.dtype(dtype), shape
        self.itemsize, self.size = self.dtype.itemsize, int(np.prod(shape))
        self.strides = strides or tuple(4 * n for n in jtopk._strides.dense_strides(shape))

    def __dlpack__(self, **kwargs):
        first = (self.data.ptr - self.data.mem.ptr) // 4
        flat = torch.from_numpy(self.data.mem.owner.view(np.float32))
        return flat[first : first + self.size].__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return 1, 0


def test_what_looks_like_cupy_is_imported_in_place():
    owner = aligned(4096)
    owner.view(np.float32)[:] = np.arange(1024)
    memory = LikeCuPy.Memory(owner)
    here = LikeCuPy.Pointer(memory, memory.ptr + 4 * 3)
    view = bridge.to_jax(LikeCuPy((4, 7), np.float32, here, (400, 4)), copy=False)
    assert pointer(view) == memory.ptr and view.offset == 3 and view.strides == (100, 1)
    want = np.lib.stride_tricks.as_strided(owner.view(np.float32)[3:], (4, 7), (400, 4))
    np.testing.assert_array_equal(view.dense(), want)
    with pytest.raises(ValueError, match=r"negative strides \(-4,\)"):
        bridge.to_jax(LikeCuPy((3,), np.float32, here, (-4,)))


def test_other_producers():
    """A jax.Array, and anything that has only __dlpack__."""
    array = jnp.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(bridge.to_jax(array).dense(), array)

    class Producer:
        def __init__(self, tensor):
            self.tensor = tensor

        def __dlpack__(self, **kwargs):
            return self.tensor.__dlpack__(**kwargs)

        def __dlpack_device__(self):
            return self.tensor.__dlpack_device__()

    tensor = storage().view(50, 100)[:, :9]
    view = bridge.to_jax(Producer(tensor), copy=False)
    assert view.strides == (100, 1)
    np.testing.assert_array_equal(view.dense(), tensor.numpy())
    with pytest.raises(TypeError, match="tensor is a list"):
        bridge.to_jax([1.0])


def unaligned() -> torch.Tensor:
    """A tensor whose storage begins 16 bytes past a boundary."""
    return torch.from_numpy(aligned(4096, ahead=16).view(np.float32))


def test_copy_none_copies_only_if_it_must_and_says_so():
    tensor = unaligned()
    with pytest.warns(bridge.CopyWarning, match="4096 bytes were copied.*no multiple of 64"):
        view = bridge.to_jax(tensor)
    tensor += 1
    np.testing.assert_array_equal(view.dense(), np.zeros(1024, np.float32))
    # Further in, the boundary below the view lies inside the storage.
    assert pointer(bridge.to_jax(tensor[20:])) % 64 == 0


def test_copy_false_refuses_to_copy():
    with pytest.raises(ValueError, match=r"copy=False, but address 0x.* no multiple of 64"):
        bridge.to_jax(unaligned(), copy=False)


@pytest.mark.parametrize("make", [storage, unaligned, lambda: aligned(4096).view(np.float32)])
def test_copy_true_always_copies(make):
    source = make()
    expected = np.asarray(source).copy()
    view = bridge.to_jax(source, copy=True)
    source += 1
    np.testing.assert_array_equal(view.dense(), expected)


def test_copy_keeps_strides():
    tensor = unaligned().view(32, 32)[:, :7]
    with pytest.warns(bridge.CopyWarning):
        view = bridge.to_jax(tensor)
    assert (view.shape, view.strides, view.offset) == ((32, 7), (32, 1), 0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(3).to_sparse(), "is sparse"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "is quantised"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj(), "conjugate"),
        (lambda: torch.ones(3, dtype=torch.complex64).conj().imag, "negative view"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.ones(3, requires_grad=True), "requires grad"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_what_is_no_plain_memory_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        bridge.to_jax(make())


def test_64_bits_are_not_narrowed():
    with pytest.raises(TypeError, match=r"tensor has dtype float64.*jax_enable_x64"):
        bridge.to_jax(torch.ones(64, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"tensor has dtype int64"):
        bridge.to_jax(np.ones(64, np.int64))
    for wide in (torch.ones(64, dtype=torch.complex128), np.ones(64, np.complex128)):
        with pytest.raises(TypeError, match=r"tensor has dtype complex128.*would narrow"):
            bridge.to_jax(wide)
    with jax.enable_x64(True):
        view = bridge.to_jax(torch.full((64,), 2**40 + 1, dtype=torch.int64))
        assert view.dtype == np.int64 and int(view.dense()[5]) == 2**40 + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "uint16", "int8"])
def test_every_bit_pattern_survives(name, device):
    size = 1 if "8" in name.split("_")[0] else 2
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.arange(2 ** (8 * size), dtype=f"u{size}").view(dtype)
    tensor = to_torch(x).to(device)
    view = bridge.to_jax(tensor, copy=False)
    assert view.dtype == dtype
    back = bridge.to_torch(view)
    assert back.data_ptr() == tensor.data_ptr()
    np.testing.assert_array_equal(to_numpy(back).view(f"u{size}"), x.view(f"u{size}"))


def test_a_deleted_array_is_a_clear_error():
    array = jnp.ones(8)
    array.delete()
    with pytest.raises(ValueError, match="array was deleted or donated"):
        bridge.to_torch(array)


def test_only_jax_arrays_are_exported():
    with pytest.raises(TypeError, match=r"array is a ndarray; expected a jax\.Array"):
        bridge.to_torch(np.ones(8))


def test_imports_keep_to_themselves():
    """jtopk does without torch; bridge does not touch the GPU."""
    code = (
        "import sys, jtopk; assert 'torch' not in sys.modules; "
        "import bridge, torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_pinned_memory():
    tensor = torch.arange(5000.0).pin_memory()[3:]
    np.testing.assert_array_equal(bridge.to_jax(tensor).dense(), tensor.numpy())


@pytest.mark.gpu
def test_cupy_is_imported_in_place():
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(5000, dtype=cupy.float32).reshape(50, 100)[:, 3:80]
    view = bridge.to_jax(x, copy=False)
    assert pointer(view) % 256 == 0 and pointer(view) + 4 * view.offset == x.data.ptr
    np.testing.assert_array_equal(view.dense(), x.get())
    del x
    gc.collect()
    assert float(view.dense()[0, 0]) == 3.0


@pytest.mark.gpu
def test_data_written_on_another_stream_is_waited_for():
    stream = torch.cuda.Stream()
    memory = torch.zeros(2_000_000, device="cuda")
    for i in range(1, 200):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000)
            memory.fill_(float(i))
            view = bridge.to_jax(memory.view(1000, 2000)[:, :1999])
        got = jtopk.top_k(view, 1, backend="mosaic_gpu")
        np.testing.assert_array_equal(got.values, np.full((1000, 1), i, np.float32))
