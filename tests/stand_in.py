"""A stand-in for the launched kernel, on a CPU.

It reads raw memory at the addresses and by the numbers a launch passes, as the kernel's
interface says, and selects by the oracle.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest
import torch

import oracle
from bridge import _dlpack, _launch, _private

STREAM = 77


def memory(address: int, count: int, dtype: Any) -> np.ndarray:
    """`count` elements at an address, writable."""
    dtype = np.dtype(dtype)
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, np.uint8).view(dtype)


class StandIn:
    """What `pallas_kernels.Kernel` does, by NumPy on memory of the CPU."""

    def __init__(self, config, dtype, largest, index_dtype, words):
        self.config = config
        self.dtype = np.dtype(dtype)
        self.largest = largest
        self.index_dtype = np.dtype(index_dtype)
        self.words = dict(words)

    def launch(self, stream: int, packed: bytes) -> None:
        assert stream == STREAM
        addresses = np.frombuffer(packed, np.uint64).tolist()
        base = addresses.pop(0)
        assert base % 256 == 0
        count = 9 + 2 * self.config.row_dims
        assert all(n % 256 == 0 for n in addresses[:count])
        numbers = [n >> 8 for n in addresses[:count]]
        rows, columns, offset, column_stride, end, group, *table = numbers[:9]
        sizes, strides = numbers[9::2], numbers[10::2]
        operands: dict[str, Any] = {}
        for name, address in zip(self.words, addresses[count:], strict=False):
            length = rows
            if name == "lengths":
                length = rows // group
            if name == "table":
                length = (table[0] - 1) * table[2] + table[1]
            operands[name] = memory(address, length, f"i{4 * self.words[name]}")
        outputs = addresses[count + len(operands) :]
        k = self.config.k
        kinds = [self.dtype] * self.config.values
        kinds += [self.index_dtype] * (1 + self.config.local)
        written = [
            memory(address, rows * k, kind).reshape(rows, k)
            for address, kind in zip(outputs, kinds, strict=True)
        ]
        item = self.dtype.itemsize
        readable = np.zeros(0, self.dtype)
        if columns:  # and nothing outside of [offset, end)
            readable = memory(base + offset * item, end - offset, self.dtype)
        for row in range(rows):
            index = np.unravel_index(row, sizes)
            first = sum(int(i) * s for i, s in zip(index, strides, strict=True))
            x = readable[first + np.arange(columns) * column_stride]
            values, selected = self.select(x, self.window(row, columns, group, operands))
            if self.config.values:
                written[0][row] = values
            begin = self.window(row, columns, group, operands)[0]
            written[self.config.values][row] = self.place(selected, begin, row, operands, table)
            if self.config.local:
                written[-1][row] = np.where(selected < 0, -1, selected - begin)

    def window(self, row, columns, group, operands) -> tuple[int, int]:
        begin = min(max(int(operands["starts"][row]), 0), columns) if "starts" in operands else 0
        if "lengths" not in operands:
            return begin, columns
        length = int(operands["lengths"][row // group]) - (group - 1 - row % group)
        end = length if self.config.lengths_are_ends else begin + length
        return begin, min(max(end, begin), columns)

    def select(self, x, window) -> tuple[np.ndarray, np.ndarray]:
        begin, end = window
        values, indices = oracle.top_k(
            x[None], self.config.k, largest=self.largest, order="torch",
            starts=np.array([begin]), lengths=np.array([end - begin]),
        )  # fmt: skip
        if not self.config.sort:
            values, indices = oracle.by_column(values, indices)
        return values[0], indices[0].astype(np.int64)

    def place(self, columns, begin, row, operands, table) -> np.ndarray:
        local = columns - begin
        match self.config.index.value:
            case "column":
                return columns
            case "offset":
                local = local + operands["offsets"][row]
            case "page":
                batch = int(operands["batches"][row]) if "batches" in operands else row
                page = local >> self.config.page_bits
                page = page + (operands["page_starts"][row] if "page_starts" in operands else 0)
                held = (page >= 0) & (page < table[1]) & (0 <= batch < table[0]) & (columns >= 0)
                line = np.zeros(1, np.int32)
                if 0 <= batch < table[0]:
                    line = operands["table"][batch * table[2] :][: table[1]]
                inside = local & (2**self.config.page_bits - 1)
                number = line[np.where(held, page, 0)].astype(np.int64)
                return np.where(held, (number << self.config.page_bits) + inside, -1)
        return np.where(columns < 0, -1, local)


def empty(shape, strides, dtype):
    """On a 256-byte boundary, as torch's allocator for GPUs does it."""
    count = math.prod(shape)
    memory = torch.empty(count + 256, dtype=dtype)
    return memory[-memory.data_ptr() % 256 // memory.itemsize :][:count].view(shape)


class StandIns:
    """In place of `_launch._kernels`; remembers what would have been compiled."""

    def __init__(self) -> None:
        self.compiled: set[Any] = set()

    def get(self, device: int, *kind: Any) -> StandIn:
        self.compiled.add(kind)
        return StandIn(*kind)


def install(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Has `_launch.run` and its like run on CPU tensors and stand-ins."""
    made = StandIns()
    monkeypatch.setattr(_launch, "_kernels", made)
    monkeypatch.setattr(_launch, "calls", {})
    monkeypatch.setattr(_launch, "unavailable", lambda device: None)
    monkeypatch.setattr(_private, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(_private, "current_device", lambda: -1)
    monkeypatch.setattr(_private, "empty", empty)
    return made


def launch_everything(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Has the whole torch face launch CPU tensors; what goes by DLPack fails."""
    made = install(monkeypatch)
    monkeypatch.setattr(_launch, "takes", lambda input: True)

    def imported(*args, **kwargs):
        pytest.fail("the call went by DLPack")

    monkeypatch.setattr(_dlpack, "to_jax", imported)
    return made
