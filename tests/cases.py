"""The table of cases every face of the product must answer like the oracle.

A case is one call. Every new combination of shape, strides, k and dtype costs a compilation,
so a case's rows differ in kind of data (`data_rows`), not its arrays; and the table is a
covering set, not a product: each value of a parameter occurs, and pairs where they can interact.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib

import ml_dtypes
import numpy as np

import oracle

FLOATS = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = FLOATS + INTEGERS
SIZES = (1, 31, 32, 33, 127, 128, 129, 255, 256, 257, 4096)
OFFSETS = (0, 1, 3, 64)
ROWS = 12

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def from_bits(bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return bits.astype(f"u{dtype.itemsize}").view(dtype)


def data_rows(name: str, columns: int, seed: int) -> np.ndarray:
    """ROWS rows of `columns` values, each row of another kind."""
    rng = np.random.default_rng(seed)
    dtype = numpy_dtype(name)
    width = 8 * dtype.itemsize
    # Drawn in two halves, since `integers` of 2**64 needs care.
    patterns = rng.integers(0, 2**32, (4, columns), np.uint64) << np.uint64(32)
    patterns |= rng.integers(0, 2**32, (4, columns), np.uint64)
    patterns >>= np.uint64(64 - width)
    random, ordered, mixed, noise = (from_bits(row, dtype) for row in patterns)
    few = rng.integers(0, 2, columns).astype(bool)

    if name in INTEGERS:
        info = np.iinfo(dtype)
        low = rng.integers(-3 if info.min else 0, 4, columns).astype(dtype)
        ascending = np.sort(ordered)
        extremes = np.where(few, dtype.type(info.max), dtype.type(info.min))
        sparse = np.where(rng.integers(0, 8, columns) == 0, mixed, dtype.type(info.min))
        sparse_high = np.where(rng.integers(0, 8, columns) == 0, mixed, dtype.type(info.max))
        rows = [
            random, np.full(columns, 5, dtype), np.where(few, dtype.type(1), dtype.type(2)),
            ascending, ascending[::-1], low, extremes, sparse, sparse_high,
            np.arange(columns).astype(dtype), np.roll(ascending, columns // 3), noise,
        ]  # fmt: skip
        return np.stack(rows)

    sign = 1 << (width - 1)
    zero, one = np.zeros((), dtype), np.ones((), dtype)
    infinity = oracle.last_value(dtype, largest=False)
    normal = rng.standard_normal(columns)
    ascending = np.sort(normal).astype(dtype)
    special = np.array([0.0, 1.0, -1.0], dtype)
    signed = rng.integers(0, 2, columns).astype(np.uint64) * np.uint64(sign)
    # Just past the infinity, or in a type without one past the largest number, lie the NaNs.
    first_nan = int(oracle.bits(infinity.reshape(1))[0]) + 1
    payloads = np.uint64(first_nan) + rng.integers(0, sign - first_nan, columns, np.uint64)
    nans = from_bits(payloads | signed, dtype)
    smallest_normal = int(oracle.bits(np.array([ml_dtypes.finfo(dtype).smallest_normal], dtype))[0])
    denormals = rng.integers(1, smallest_normal, columns, np.uint64) | signed
    infinities = np.where(few, infinity, -infinity)
    rows = [
        normal.astype(dtype), np.where(rng.integers(0, 3, columns) == 0, nans, ordered),
        np.where(rng.integers(0, 3, columns) == 0, mixed, infinities),
        np.where(few, zero, -zero), from_bits(denormals, dtype), np.full(columns, one),
        np.where(few, one, -one), ascending, ascending[::-1],
        (1 + rng.random(columns) / 64).astype(dtype), random,
        np.select(
            [rng.integers(0, 4, columns) == n for n in range(3)],
            [nans, infinities, from_bits(signed, dtype)],
            rng.choice(special, columns),
        ),
    ]  # fmt: skip
    return np.stack(rows)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, and the memory its operand lies in.

    `strides` and `offset` count elements; strides of None are row-major. Elements of the
    storage that no row reads hold `padding`: a NaN or an infinity that would win if it were
    read. `tail` of them lie behind the last row.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    k: int
    axis: int = -1
    largest: bool = True
    sorted: bool = True
    strides: tuple[int, ...] | None = None
    offset: int = 0
    tail: int = 5
    padding: str = "inf"
    lengths: np.ndarray | None = None
    starts: np.ndarray | None = None
    seed: int = 0

    @property
    def step(self) -> tuple[int, ...]:
        if self.strides is not None:
            return self.strides
        return tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape)))

    def storage(self) -> np.ndarray:
        """The flat memory, of its own in every call."""
        dtype = numpy_dtype(self.dtype)
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.step, strict=True))
        if 0 in self.shape:
            span = 0
        flat = np.full(self.offset + span + self.tail, self._padding_value(), dtype)
        view = self.view(flat)
        columns = self.shape[self.axis]
        rows = math.prod(self.shape) // max(columns, 1)
        seed = zlib.crc32(self.name.encode()) + self.seed
        data = np.resize(data_rows(self.dtype, max(columns, 1), seed), (rows, columns))
        by_row = tuple(n for d, n in enumerate(self.shape) if d != self.axis % len(self.shape))
        view[...] = np.moveaxis(data.reshape(*by_row, columns), -1, self.axis)
        return flat

    def view(self, flat: np.ndarray) -> np.ndarray:
        """The operand as a NumPy view of its storage."""
        # As bits: as_strided does not know ml_dtypes' types.
        size = flat.dtype.itemsize
        bits = np.lib.stride_tricks.as_strided(
            oracle.bits(flat)[self.offset :], self.shape, [s * size for s in self.step]
        )
        return bits.view(flat.dtype)

    def expected(self, order: str) -> tuple[np.ndarray, np.ndarray]:
        operand = np.moveaxis(self.view(self.storage()), self.axis, -1)
        values, indices = oracle.top_k(
            np.ascontiguousarray(operand), self.k, largest=self.largest, order=order,
            lengths=self.lengths, starts=self.starts,
        )  # fmt: skip
        return np.moveaxis(values, -1, self.axis), np.moveaxis(indices, -1, self.axis)

    def _padding_value(self) -> np.ndarray:
        dtype = numpy_dtype(self.dtype)
        best = oracle.last_value(dtype, largest=not self.largest)
        if self.padding == "inf" or self.dtype in INTEGERS:
            return best
        return from_bits(oracle.bits(best.reshape(1)) + np.uint8(1), dtype)[0]


def next_multiple(n: int, of: int) -> int:
    return -(-n // of) * of


def _sizes() -> list[Case]:
    """Every size on either side of a vector, warp, tile or radix bound, both directions."""
    cases = []
    ks = itertools.cycle((1, 7, None))
    for dtype, n, largest in itertools.product(("float32", "bfloat16"), SIZES, (True, False)):
        k = min(next(ks) or n, n)
        cases.append(
            Case(
                f"{dtype}-{n}-k{k}-{'largest' if largest else 'smallest'}",
                dtype,
                (ROWS, n),
                k,
                largest=largest,
                strides=(next_multiple(n, 256), 1),
                padding="nan" if n % 2 else "inf",
            )
        )
    cases.append(Case("long-rows", "float32", (ROWS, 70001), 2048, strides=(70144, 1)))
    return cases


def _dtypes() -> list[Case]:
    offsets = itertools.cycle(OFFSETS)
    return [
        Case(
            f"{dtype}-{n}-{'largest' if largest else 'smallest'}", dtype, (ROWS, n), k,
            largest=largest, strides=(512, 1), offset=next(offsets),
            padding="nan" if largest else "inf",
        )
        for dtype in DTYPES
        for n, k, largest in ((33, 33, True), (257, 64, False))
    ]  # fmt: skip


def _strides() -> list[Case]:
    """Row strides and offsets of one shape, paddings taking turns."""
    n = 257
    cases = []
    for i, stride in enumerate((n, n + 1, 512, 1024)):
        for j, offset in enumerate(OFFSETS):
            padding = ("inf", "nan")[(i + j) % 2]
            name = f"stride{stride}-offset{offset}-{padding}"
            strides = (stride, 1)
            cases.append(
                Case(name, "float32", (ROWS, n), 9, strides=strides, offset=offset, padding=padding)
            )
    for dtype, offset in zip(("bfloat16", "int8", "uint16", "float8_e5m2"), OFFSETS, strict=True):
        for stride in (n + 1, 1024):
            name = f"stride{stride}-offset{offset}-{dtype}"
            cases.append(Case(name, dtype, (ROWS, n), 9, strides=(stride, 1), offset=offset))
    return cases


def _storage() -> list[Case]:
    """Views that are no padded matrix."""
    n = 129
    return [
        Case("expanded", "float32", (ROWS, n), 7, strides=(0, 1), offset=3),
        Case("expanded-bfloat16", "bfloat16", (3, 4, n), 7, strides=(0, 130, 1)),
        Case("expanded-columns", "float32", (ROWS, n), 7, strides=(3, 0)),
        Case("transposed", "float32", (ROWS, n), 7, strides=(1, ROWS)),
        Case("transposed-padded", "int16", (ROWS, n), 7, strides=(1, 16), offset=1),
        Case("column-step-2", "float32", (ROWS, n), 7, strides=(2 * n + 3, 2), offset=1),
        Case("overlapping", "float32", (ROWS, n), 7, strides=(5, 1), offset=1),
        Case("overlapping-one-apart", "uint8", (ROWS, n), 7, strides=(1, 1)),
        Case("ends-with-buffer", "float32", (ROWS, n), 7, strides=(256, 1), offset=64, tail=0),
        Case("ends-with-buffer-bfloat16", "bfloat16", (ROWS, n), 7, strides=(n + 1, 1), tail=0),
        Case("ends-with-buffer-int8", "int8", (ROWS, 31), 7, strides=(33, 1), offset=3, tail=0),
        Case("one-row", "float32", (1, n), 7, strides=(1, 1), offset=3),
        Case("one-column", "float32", (ROWS, 1), 1, strides=(7, 3)),
    ]


def _axes() -> list[Case]:
    return [
        Case("rank-1", "float32", (257,), 7, offset=3),
        Case("rank-1-bfloat16-all", "bfloat16", (33,), 33, largest=False),
        Case("rank-1-length", "int32", (33,), 7, lengths=np.array(5), starts=np.array(30)),
        Case("rank-3", "float32", (3, 4, 129), 7),
        Case("rank-3-padded", "float32", (3, 4, 129), 7, strides=(4 * 256, 256, 1)),
        Case("rank-3-two-paddings", "bfloat16", (3, 4, 129), 7, strides=(2000, 256, 1), offset=1),
        Case("axis-0", "float32", (129, ROWS), 7, axis=0),
        Case("axis-0-padded", "int32", (129, ROWS), 7, axis=0, largest=False, strides=(16, 1)),
        Case("axis-1-of-3", "float32", (3, 129, 4), 7, axis=1, strides=(129 * 8, 8, 1), offset=1),
        Case(
            "axis-minus-3", "float16", (129, 3, 4), 130, axis=-3,
            lengths=np.arange(124, 136, dtype=np.int32).reshape(3, 4),
        ),
        Case(
            "rank-3-lengths", "float32", (3, 4, 129), 7,
            lengths=np.arange(12, dtype=np.int64).reshape(3, 4),
            starts=np.arange(0, 144, 12, dtype=np.int64).reshape(3, 4),
        ),
        Case("no-rows", "float32", (0, 33), 7),
        Case("no-rows-of-3", "bfloat16", (3, 0, 33), 7),
        Case("k0", "float32", (ROWS, 33), 0),
        Case("no-columns", "float32", (ROWS, 0), 0),
        Case("no-columns-filled", "float32", (ROWS, 0), 3, lengths=np.full(ROWS, 2, np.int32)),
    ]  # fmt: skip


def _windows() -> list[Case]:
    """Lengths and starts, in range and far out of it; int64 numbers must not wrap to int32."""
    cases = []
    n = 129
    for i, (dtype, k, largest) in enumerate(
        [
            ("float32", 7, True), ("float32", n + 5, False), ("bfloat16", 7, False),
            ("bfloat16", n, True), ("int8", 40, True), ("int8", 40, False), ("int32", n + 1, True),
            ("uint8", 7, False), ("uint32", 7, True), ("float8_e4m3fn", n + 5, True),
            ("float8_e5m2", 7, False), ("float64", n + 5, True), ("int64", 7, False),
        ]
    ):  # fmt: skip
        lengths32 = [-1, INT32_MIN, INT32_MAX, 0, k - 1, k, k + 1, n, n + 1, 1, n - 1, 3]
        lengths64 = [2**33, -(2**33), 2**32 + 3, 2**63 - 1, -(2**63), k, k + 1, 0, -1, n, 5, k - 1]
        starts32 = [0, -1, n - 1, n, n - 3, INT32_MAX, INT32_MIN, 1, n + 1, 5, 64, n - 7]
        starts64 = [2**33, -(2**33), 2**32 + 3, 0, n - 2, 1, 31, n, -1, 33, 100, 2]
        lengths = np.array(lengths64 if i % 2 else lengths32, f"int{64 if i % 2 else 32}")
        starts = np.array(starts32 if i % 3 else starts64, f"int{32 if i % 3 else 64}")
        # Rows are of one kind each: another roll brings every number to another kind of row.
        lengths, starts = np.roll(lengths, 5 * i), np.roll(starts, 7 * i)
        name = f"{dtype}-k{k}-{'largest' if largest else 'smallest'}"
        shared = {"dtype": dtype, "shape": (ROWS, n), "k": k, "largest": largest}
        shared |= {"strides": (256, 1), "offset": OFFSETS[i % 4]}
        cases.append(Case(f"lengths-{name}", **shared, lengths=lengths))
        if k <= n and i % 2:
            cases.append(Case(f"starts-{name}", **shared, starts=starts, padding="nan"))
        cases.append(
            Case(f"windows-{name}", **shared, lengths=lengths, starts=starts, padding="nan")
        )
    return cases


def _unsorted() -> list[Case]:
    return [
        Case("float32", "float32", (ROWS, 257), 64, sorted=False, strides=(512, 1), padding="nan"),
        Case("bfloat16", "bfloat16", (ROWS, 4096), 33, sorted=False, largest=False),
        Case(
            "lengths", "int8", (ROWS, 129), 40, sorted=False,
            lengths=np.arange(36, 48, dtype=np.int32), strides=(256, 1),
        ),
    ]  # fmt: skip


GROUPS = {
    "size": _sizes(),
    "dtype": _dtypes(),
    "stride": _strides(),
    "storage": _storage(),
    "axis": _axes(),
    "window": _windows(),
    "unsorted": _unsorted(),
}
CASES = [
    dataclasses.replace(case, name=f"{group}-{case.name}")
    for group, cases in GROUPS.items()
    for case in cases
]
