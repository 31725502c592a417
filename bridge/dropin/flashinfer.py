"""flashinfer's top-k functions, as of version 0.7.

    from bridge.dropin import flashinfer

Then `flashinfer.top_k`, `flashinfer.top_k_ragged_transform` and
`flashinfer.top_k_page_table_transform` are jtopk's. They are deterministic and safe in CUDA graphs
whatever `deterministic` and `dsa_graph_safe` say, and of equal values take the smaller index.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import _checks
from bridge._top_k import top_k as _top_k
from bridge.dropin._rows import Places, Window, check_input, select


def top_k(
    input: torch.Tensor,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest of each row.

    Args:
      input: (rows, columns), any strides.
      k: at most the row's columns.
      sorted: in descending order, or in one that is unspecified but the same in every run.
      tie_break: 0 or 1. 2, which prefers larger indices, is not done.

    Returns:
      Values of input's dtype and int64 indices, (rows, k).

    Raises:
      ValueError, TypeError: as for `bridge.top_k`; input of other than two dimensions.
      NotImplementedError: `tie_break` is 2.
    """
    check_input("input", input, k)
    _smaller_indices(tie_break)
    values, indices = _top_k(input, k, sorted=sorted)
    return values, indices


topk = top_k


def top_k_ragged_transform(
    input: torch.Tensor,
    offsets: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Top-k columns of each row's window, counted from its start, plus the row's offset.

    Args:
      input: (rows, columns), any strides.
      offsets: int32 or int64, (rows,).
      lengths: valid columns of each row, int32 or int64, (rows,).
      k: any number.
      tie_break: 0 or 1.
      row_starts: first valid column of each row, likewise; 0 if None.

    Returns:
      int32 (rows, k), in an order that is the same in every run, then -1.

    Raises:
      ValueError, TypeError: a tensor of the wrong shape, dtype or device, or k negative.
      NotImplementedError: `tie_break` is 2.
    """
    k = check_input("input", input, k)
    _smaller_indices(tie_break)
    _check_rows(input, offsets=offsets, lengths=lengths, row_starts=row_starts)
    out = torch.empty((input.shape[0], k), dtype=torch.int32, device=input.device)
    select(input, k, Window(lengths, row_starts), Places(offsets=offsets), out)
    return out


def top_k_page_table_transform(
    input: torch.Tensor,
    src_page_table: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    row_to_batch: torch.Tensor | None = None,
    deterministic: bool = False,
    tie_break: int = 0,
    dsa_graph_safe: bool = False,
    row_starts: torch.Tensor | None = None,
    page_table_row_starts: torch.Tensor | None = None,
    *,
    page_size: int = 1,
    out: torch.Tensor | None = None,
    out_raw_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Top-k columns of each row's window, looked up in a page table.

    Column c, counted from the row's start, becomes `page * page_size + c % page_size` where
    page is `src_page_table[row_to_batch[r], page_table_row_starts[r] + c // page_size]`.

    Args:
      input: (rows, columns), any strides.
      src_page_table: int32 (batches, pages). What lies outside it becomes -1.
      lengths: valid columns of each row, int32 or int64, (rows,).
      k: any number.
      row_to_batch: each row's line in the table, likewise; its own if None.
      tie_break: 0 or 1.
      row_starts: first valid column of each row, likewise; 0 if None.
      page_table_row_starts: first page of each row in its line; row_starts if None, which for
        pages of more than one column counts something else and must then be given.
      page_size: columns a page, a power of two up to 2**30.
      out: int32 (rows, k) to write to.
      out_raw_indices: int32 (rows, k) for the columns themselves, counted from the row's start.

    Returns:
      int32 (rows, k), `out` if given: in an order that is the same in every run, then -1.

    Raises:
      ValueError, TypeError: a tensor of the wrong shape, dtype or device, or a number out of
        range.
      NotImplementedError: `tie_break` is 2.
    """
    k = check_input("input", input, k)
    _smaller_indices(tie_break)
    _check_rows(
        input, lengths=lengths, row_to_batch=row_to_batch, row_starts=row_starts,
        page_table_row_starts=page_table_row_starts,
    )  # fmt: skip
    table = src_page_table
    if not isinstance(table, torch.Tensor) or table.ndim != 2 or table.dtype != torch.int32:
        what = f"{table.dtype} of shape {tuple(table.shape)}" if hasattr(table, "dtype") else table
        raise ValueError(f"src_page_table is {what}; expected torch.int32 of two dimensions")
    if table.device != input.device:
        raise ValueError(f"src_page_table is on {table.device}; expected {input.device}")
    if not (0 < page_size <= 2**30 and page_size & (page_size - 1) == 0):
        raise ValueError(f"page_size is {page_size}; expected a power of two up to 2**30")
    if page_table_row_starts is None:
        if page_size > 1 and row_starts is not None:
            raise ValueError(
                f"page_table_row_starts is None, with row_starts and page_size={page_size}; "
                "expected the first page of each row"
            )
        page_table_row_starts = row_starts
    if row_to_batch is None and len(table) < len(input):
        raise ValueError(
            f"src_page_table has {len(table)} lines for {len(input)} rows; expected row_to_batch"
        )
    shape = (input.shape[0], k)
    for name, tensor in (("out", out), ("out_raw_indices", out_raw_indices)):
        if tensor is not None:
            _checks.one_out(name, tensor, input, shape, torch.int32)
    if out is None:
        out = torch.empty(shape, dtype=torch.int32, device=input.device)
    if out_raw_indices is not None and _checks.overlap(out, out_raw_indices):
        raise ValueError("out and out_raw_indices overlap each other")
    places = Places(
        table=table, page_bits=page_size.bit_length() - 1, batches=row_to_batch,
        page_starts=page_table_row_starts,
    )  # fmt: skip
    select(input, k, Window(lengths, row_starts), places, out, out_raw_indices)
    return out


def _check_rows(input: torch.Tensor, **numbers: Any) -> None:
    for name, tensor in numbers.items():
        if tensor is not None or name in ("lengths", "offsets"):
            _checks.row_numbers(name, tensor, input, (input.shape[0],))


def _smaller_indices(tie_break: int) -> None:
    if int(tie_break) == 2:
        raise NotImplementedError(
            "tie_break is 2, which prefers larger indices; jtopk takes the smaller (0 or 1)"
        )
    if int(tie_break) not in (0, 1):
        raise ValueError(f"tie_break is {tie_break}; expected 0, 1 or 2")
