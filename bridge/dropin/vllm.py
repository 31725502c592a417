"""vLLM's operators for the sparse-attention indexer, as of version 0.33.

In place of `torch.ops._C.persistent_topk` and its siblings:

    from bridge.dropin.vllm import persistent_topk

All write int32 columns, counted from the row's start, into the tensor they are given: the k
largest in an order that is the same in every run, then -1. Lengths may be any numbers; they are
clamped into the row.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import _checks
from bridge.dropin._rows import Places, Window, check_input, select


def persistent_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    output: torch.Tensor,
    workspace: Any,
    k: int,
    max_seq_len: int,
) -> None:
    """Top-k columns of each row of decode logits.

    Args:
      logits: (rows, columns), any strides.
      lengths: valid columns of each row, int32 or int64, (rows,) or of two dimensions that have
        a number for each row, such as (requests, tokens a request).
      output: int32 (rows, k), written.
      workspace: not used; there is no state between calls.
      k: any number; vLLM's own takes 512, 1024 or 2048.
      max_seq_len: not used; the lengths say it.

    Raises:
      ValueError, TypeError: a tensor of the wrong shape, dtype or device, or k negative.
    """
    k = check_input("logits", logits, k)
    lengths = _flat("lengths", lengths, logits, logits.shape[0])
    _checks.one_out("output", output, logits, (logits.shape[0], k), torch.int32)
    select(logits, k, Window(lengths), Places(), output)


def cooperative_topk(
    logits: torch.Tensor,
    lengths: torch.Tensor,
    output: torch.Tensor,
    workspace: Any,
    k: int,
    max_seq_len: int,
) -> None:
    """The same as `persistent_topk`, for any number of rows and any row stride."""
    persistent_topk(logits, lengths, output, workspace, k, max_seq_len)


def top_k_per_row_decode(
    logits: torch.Tensor,
    next_n: int,
    seq_lens: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """Top-k columns of each token's row of decode logits.

    Args:
      logits: (rows, columns), any strides; row r is token `r % next_n` of request `r // next_n`.
      next_n: tokens a request.
      seq_lens: int32 or int64. Of one dimension: each request's length, of which its last token
        sees all and each before it one less. Of two: (requests, next_n), each row's own length.
      indices: int32 (rows, topK), written.
      numRows: rows to do, the first ones; a multiple of next_n.
      stride0, stride1: the strides of logits, which are compared with it.
      topK: any number.

    Raises:
      ValueError, TypeError: a tensor of the wrong shape, dtype or device, numbers that
        contradict it, or topK negative.
    """
    topK = check_input("logits", logits, topK)
    logits, indices = _rows(logits, indices, numRows, stride0, stride1)
    if next_n < 1 or numRows % next_n:
        raise ValueError(f"next_n is {next_n}; expected a divisor of numRows, which is {numRows}")
    if isinstance(seq_lens, torch.Tensor) and seq_lens.ndim == 2:
        lengths, group = _flat("seq_lens", seq_lens, logits, numRows), 1
    else:
        requests = (numRows // next_n,)
        _checks.row_numbers("seq_lens", seq_lens, logits, requests, each="request")
        lengths, group = seq_lens, next_n
    _checks.one_out("indices", indices, logits, (numRows, topK), torch.int32)
    select(logits, topK, Window(lengths, group=group), Places(), indices)


def top_k_per_row_prefill(
    logits: torch.Tensor,
    rowStarts: torch.Tensor,
    rowEnds: torch.Tensor,
    indices: torch.Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    topK: int,
) -> None:
    """Top-k of columns `[rowStarts[r], rowEnds[r])` of each row of prefill logits.

    Args:
      logits: (rows, columns), any strides.
      rowStarts, rowEnds: int32 or int64, (rows,).
      indices: int32 (rows, topK), written.
      numRows: rows to do, the first ones.
      stride0, stride1: the strides of logits, which are compared with it.
      topK: any number.

    Raises:
      ValueError, TypeError: as for `top_k_per_row_decode`.
    """
    topK = check_input("logits", logits, topK)
    logits, indices = _rows(logits, indices, numRows, stride0, stride1)
    _checks.row_numbers("rowStarts", rowStarts, logits, (numRows,))
    _checks.row_numbers("rowEnds", rowEnds, logits, (numRows,))
    _checks.one_out("indices", indices, logits, (numRows, topK), torch.int32)
    window = Window(rowEnds, rowStarts, lengths_are_ends=True)
    select(logits, topK, window, Places(), indices)


def _flat(name: str, lengths: Any, logits: torch.Tensor, rows: int) -> torch.Tensor:
    """Lengths of one or two dimensions as one for each row."""
    if isinstance(lengths, torch.Tensor) and lengths.ndim == 2:
        lengths = lengths.reshape(-1)
    _checks.row_numbers(name, lengths, logits, (rows,))
    return lengths


def _rows(
    logits: torch.Tensor, indices: torch.Tensor, numRows: int, stride0: int, stride1: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows to do, once what the caller says of them is seen to be true."""
    rows = logits.shape[0]
    if not 0 <= numRows <= rows:
        raise ValueError(f"numRows is {numRows}; logits has {rows} rows")
    for d, claimed in enumerate((stride0, stride1)):
        # A dimension that is never stepped along has no stride to speak of.
        if logits.shape[d] > 1 and claimed != logits.stride(d):
            raise ValueError(
                f"stride{d} is {claimed}, but logits has strides {tuple(logits.stride())}"
            )
    if isinstance(indices, torch.Tensor) and indices.ndim == 2:
        indices = indices[:numRows]
    return logits[:numRows], indices
