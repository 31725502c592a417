"""`torch.ops.jtopk.top_k`: the operator behind `bridge.top_k`, for all that transforms calls.

Fresh contiguous outputs, whatever the input's strides. Autograd scatters the gradient of the values
to the columns they came from; vmap makes its dimension one more dimension of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from bridge import _checks, _execute, _launch

SCHEMA = (
    "top_k(Tensor input, SymInt k, int dim=-1, bool largest=True, bool sorted=True, "
    "Tensor? lengths=None, Tensor? starts=None, ScalarType? index_dtype=None) "
    "-> (Tensor values, Tensor indices)"
)
NAME = "jtopk::top_k"

# Calls by `define` cost 4 us less than torch.library.custom_op's.
_library = torch.library.Library("jtopk", "DEF")
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


def _real(
    input: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    index_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    index_dtype = torch.int64 if index_dtype is None else index_dtype
    call = _launch.remembered(
        input, k, dim, largest, sorted, lengths, starts, index_dtype, out=None
    )  # fmt: skip
    if call is not None:
        return tuple(call(input, starts, lengths))
    _checks.plain("input", input)
    k, dim = _checks.call(input, k, dim, lengths, starts, index_dtype)
    values, indices = _execute.run(input, k, dim, largest, sorted, lengths, starts, index_dtype)
    return values.contiguous(), indices.contiguous()


_library.impl("top_k", _real, "CPU")
_library.impl("top_k", _real, "CUDA")


@torch.library.register_fake(NAME, lib=_library)
def _fake(
    input: torch.Tensor,
    k: Any,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    index_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    index_dtype = torch.int64 if index_dtype is None else index_dtype
    k, dim = _checks.call(input, k, dim, lengths, starts, index_dtype)
    shape = (*input.shape[:dim], k, *input.shape[dim + 1 :])
    return input.new_empty(shape), input.new_empty(shape, dtype=index_dtype)


class _Differentiable(torch.autograd.Function):
    """Derivatives of the values, in both directions; indices have none."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return _below_autograd(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        input, _, dim, *_ = inputs
        _, indices = output
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        ctx.save_for_forward(indices)
        ctx.dim = dim % input.ndim
        ctx.shape = input.shape

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        dim, columns = ctx.dim, ctx.shape[ctx.dim]
        # Unfilled places (index -1) go to a column of their own, which is then cut off.
        column = torch.where(indices < 0, columns, indices.long())
        wide = (*ctx.shape[:dim], columns + 1, *ctx.shape[dim + 1 :])
        scattered = gradients[0].new_zeros(wide).scatter(dim, column, gradients[0])
        return (scattered.narrow(dim, 0, columns), *[None] * 7)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        (indices,) = ctx.saved_tensors
        taken = tangent.gather(ctx.dim, indices.long().clamp(min=0))
        return torch.where(indices < 0, 0, taken), None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        input: torch.Tensor,
        k: int,
        dim: int,
        largest: bool,
        sorted: bool,
        lengths: torch.Tensor | None,
        starts: torch.Tensor | None,
        index_dtype: torch.dtype | None,
    ) -> tuple[Any, Any]:
        """One more dimension of rows, in front; what has no batch is expanded, not copied."""

        def in_front(tensor: torch.Tensor | None, batch: int | None) -> torch.Tensor | None:
            if tensor is None:
                return None
            if batch is None:
                return tensor.expand(info.batch_size, *tensor.shape)
            return tensor.movedim(batch, 0)

        rank = input.ndim - (in_dims[0] is not None)
        if rank == 0:
            raise TypeError("input has shape (); expected at least one dimension")
        out = top_k(
            in_front(input, in_dims[0]), k, dim % rank + 1, largest, sorted,
            in_front(lengths, in_dims[5]), in_front(starts, in_dims[6]), index_dtype,
        )  # fmt: skip
        return tuple(out), (0, 0)


def top_k(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator, under torch.func too, to whose transforms an operator cannot answer."""
    if torch._C._are_functorch_transforms_active():
        return _Differentiable.apply(*arguments)
    return torch.ops.jtopk.top_k(*arguments)


def _autograd(
    input: torch.Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    lengths: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
    index_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (input, k, dim, largest, sorted, lengths, starts, index_dtype)
    if (input.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        return _Differentiable.apply(*arguments)
    return _below_autograd(*arguments)


def _below_autograd(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.jtopk.top_k.default(*arguments)


# Not by torch.library.register_autograd: with it forward gradients are dropped without a word and
# torch.func.grad raises.
_library.impl("top_k", _autograd, "Autograd")


@torch.library.register_vmap(NAME, lib=_library)
def _vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    defaults = (-1, True, True, None, None, None)[len(arguments) - 2 :]
    in_dims = (*in_dims, *[None] * len(defaults))
    return _Differentiable.vmap(info, in_dims, *arguments, *defaults)
