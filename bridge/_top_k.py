"""Top-k of torch tensors in torch's order of values: the public function."""

from __future__ import annotations

from typing import Any

import torch

from bridge import _checks, _execute, _launch, _operator, _private
from bridge._checks import Arguments
from jtopk import TopK


def top_k(
    input: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    *,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int64,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> TopK:
    """The k largest (or smallest) elements of every row, read in place at any strides.

    Exact and reproducible, equal values by ascending column. The order is torch.topk's: NaN of
    either sign above +inf, +0 equal to -0. Differentiable in `input`.

    Args:
      input: dense tensor of any rank from 1 and any strides; every dimension but `dim` is a
        dimension of rows. dtypes as for `jtopk.top_k`.
      k: how many, 0 or more; at most the row's columns, unless `lengths` is given.
      dim: the dimension along which columns lie.
      largest: largest first, or smallest first.
      sorted: return values in order. Without, the same elements in an order that is
        unspecified but always the same.
      lengths: valid columns of each row, int32 or int64 on input's device, of input's shape
        without `dim`. Row r is columns `[starts[r], starts[r] + lengths[r])`; numbers outside
        the row are clamped into it, on the device.
      starts: first valid column of each row, likewise; 0 if not given.
      index_dtype: torch.int64 or torch.int32.
      out: values and indices to write to, through whatever strides they have.

    Returns:
      TopK(values, indices) on input's device: input's shape with k in place of `dim`. A row
      with fewer than k valid columns ends with index -1 and the value that ranks last.

    Raises:
      TypeError: unsupported dtype, a 0-d tensor, k or dim no integer.
      ValueError: as for `jtopk.top_k`; a tensor that is sparse, quantised, conjugated, meta or
        on a device JAX does not see; lengths, starts or out of the wrong shape, dtype or
        device; out that overlaps the input or itself.
      RuntimeError: a CUDA graph is being captured and the call has to go by JAX's runtime, which
        none can capture: a 64-bit dtype, or sorted with a k above 4096.
    """
    arguments = Arguments(input, k, dim, largest, sorted, lengths, starts, index_dtype)
    if torch.compiler.is_compiling():
        if out is not None:
            raise NotImplementedError("out is not traced by torch.compile; leave it to the graph")
        return TopK(*torch.ops.jtopk.top_k(*arguments))
    if type(input) is torch.Tensor and type(k) is type(dim) is int and _eager(input):
        call = _launch.remembered(arguments, out)
        if call is not None:
            if out is None:
                return TopK(*call(input, starts, lengths))
            if call(out, input, starts, lengths):
                return TopK(*out)
    return _checked(arguments, out)


def _eager(input: torch.Tensor) -> bool:
    """Whether nothing but this call has to know of the tensor: no gradient, transform or mode."""
    return not (_private.differentiating(input) or _private.transforming() or _private.modes())


def _checked(arguments: Arguments, out: Any) -> TopK:
    _checks.tensor("input", arguments.input)
    arguments = _checks.call(arguments)
    input, k, dim, *_, index_dtype = arguments
    if out is not None:
        if input.requires_grad and torch.is_grad_enabled():
            raise ValueError("out cannot be given for an input that requires grad")
        _checks.out(out, input, (*input.shape[:dim], k, *input.shape[dim + 1 :]), index_dtype)
        _execute.run_into(out, arguments)
        return TopK(*out)
    run = _execute.run(arguments) if _eager(input) else _operator.top_k(*arguments)
    return TopK(*run)
