"""The one call behind the drop-ins: int32 places of the top k of rows, written to tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import pallas_kernels
from bridge import _checks, _launch
from bridge._checks import Arguments
from bridge._top_k import top_k
from jtopk import _check


@dataclasses.dataclass(frozen=True)
class Window:
    """Valid columns of rows.

    Attributes:
      lengths: valid columns of each row, or of each `group` rows, of which the last has them all
        and each before it one less.
      starts: first valid column of each row; 0 if None.
      lengths_are_ends: `lengths` holds the column behind each row's last valid one instead.
      group: rows that share a length.
    """

    lengths: torch.Tensor
    starts: torch.Tensor | None = None
    lengths_are_ends: bool = False
    group: int = 1


@dataclasses.dataclass(frozen=True)
class Places:
    """What is written for a column, counted from its row's start.

    The column plus the row's number in `offsets`; or with a `table`, its place in pages of
    `2**page_bits` columns: `table[batches[row], page_starts[row] + column // size]` is the page.
    Without `batches` a row's line in the table is its own, without `page_starts` it begins at 0.
    """

    offsets: torch.Tensor | None = None
    table: torch.Tensor | None = None
    page_bits: int = 0
    batches: torch.Tensor | None = None
    page_starts: torch.Tensor | None = None

    @property
    def kind(self) -> str:
        if self.table is not None:
            return "page"
        return "local" if self.offsets is None else "offset"


def select(
    input: torch.Tensor,
    k: int,
    window: Window,
    places: Places,
    out: torch.Tensor,
    local: torch.Tensor | None = None,
) -> None:
    """Writes the places of the k largest of each row to `out`, then -1.

    Their order is the same in every run. Arguments are checked by the caller, with `check_input`,
    `_checks.row_numbers` and `_checks.one_out`.

    Args:
      input: (rows, columns), any strides.
      out: int32 (rows, k).
      local: int32 (rows, k), for the columns themselves, counted from the row's start.
    """
    outputs = (out,) if local is None else (out, local)
    operands = {
        "starts": window.starts,
        "lengths": window.lengths,
        "offsets": places.offsets,
        "batches": places.batches,
        "page_starts": places.page_starts,
        "table": places.table,
    }
    if not (_launch.takes(input) and _launched(input, k, window, places, operands, outputs)):
        for target, result in zip(outputs, _by_parts(input, k, window, places), strict=False):
            target.copy_(result)


def _launched(
    input: torch.Tensor,
    k: int,
    window: Window,
    places: Places,
    operands: dict[str, torch.Tensor | None],
    outputs: tuple[torch.Tensor, ...],
) -> bool:
    """One launch, the mapping of indices in the kernel's last step; False if it has to go by JAX.

    All that is looked up again is what addresses do not say.
    """
    key = (
        k, window.lengths_are_ends, window.group, places.kind, places.page_bits,
        *map(_launch.tensor_key, (input, *operands.values(), *outputs)),
    )  # fmt: skip
    into = _launch.calls.get(key)
    if into is not None and into(outputs, input, *operands.values()):
        return True
    if _launch.unavailable(input.get_device()) is not None:
        return False
    if places.table is not None and places.table.stride(1) != 1:
        return False
    call = _launch.prepare(
        Arguments(input, k, 1, sorted=False, index_dtype=torch.int32), operands,
        group=window.group, values=False, index=pallas_kernels.Index(places.kind),
        page_bits=places.page_bits, local=len(outputs) == 2,
        lengths_are_ends=window.lengths_are_ends,
    )  # fmt: skip
    return call is not None and _launch.write(call, key, outputs, input, *operands.values())


def _by_parts(
    input: torch.Tensor, k: int, window: Window, places: Places
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch operations around `bridge.top_k`: places, then local columns."""
    rows, columns = input.shape
    begin = torch.zeros(rows, dtype=torch.int64, device=input.device)
    if window.starts is not None:
        begin = window.starts.long().clamp(0, columns)
    lengths = window.lengths.long()
    if window.group > 1:
        lengths = lengths.clamp(min=-(2**40)).repeat_interleave(window.group)
        token = torch.arange(rows, device=input.device) % window.group
        lengths = lengths - (window.group - 1 - token)
    if window.lengths_are_ends:
        lengths = lengths.clamp(-1, columns) - begin
    _, found = top_k(input, k, sorted=False, lengths=lengths, starts=begin)
    local = torch.where(found < 0, -1, found - begin[:, None])
    return _placed(local, places).to(torch.int32), local.to(torch.int32)


def _placed(local: torch.Tensor, places: Places) -> torch.Tensor:
    if places.table is None:
        if places.offsets is None:
            return local
        return torch.where(local < 0, -1, local + places.offsets[:, None])
    lines, pages = places.table.shape
    line = torch.arange(len(local), device=local.device)
    if places.batches is not None:
        line = places.batches.long()
    first = 0 if places.page_starts is None else places.page_starts.long()[:, None]
    page = first + (local >> places.page_bits)
    held = (local >= 0) & (page >= 0) & (page < pages) & ((line >= 0) & (line < lines))[:, None]
    if not (lines and pages):
        return torch.full_like(local, -1)
    number = places.table[line.clamp(0, lines - 1)[:, None], page.clamp(0, pages - 1)].long()
    inside = local & ((1 << places.page_bits) - 1)
    return torch.where(held, (number << places.page_bits) + inside, -1)


def check_input(name: str, input: Any, k: Any) -> int:
    """Raises unless `input` is a matrix of values jtopk orders; k as an int."""
    _checks.tensor(name, input)
    if input.ndim != 2:
        raise ValueError(f"{name} has shape {tuple(input.shape)}; expected two dimensions")
    _check.dtype(_checks.dtype_name(input.dtype), argument=name, x64=True)
    return _check.k(k, input.shape[1], has_lengths=True)
