"""`torch.ops.jtopk.top_k`: the operator behind `bridge.top_k`, for all that transforms calls.

Fresh contiguous outputs, whatever the input's strides. Autograd scatters the gradient of the values
to the columns they came from; vmap makes its dimension one more dimension of rows.
"""

from __future__ import annotations

from typing import Any

import torch

from bridge import _checks, _execute, _launch, _private
from bridge._checks import Arguments

SCHEMA = (
    "top_k(Tensor input, SymInt k, int dim=-1, bool largest=True, bool sorted=True, "
    "Tensor? lengths=None, Tensor? starts=None, ScalarType index_dtype=long) "
    "-> (Tensor values, Tensor indices)"
)
NAME = "jtopk::top_k"

# Calls by `define` cost 4 us less than torch.library.custom_op's.
_library = torch.library.Library("jtopk", "DEF")
_library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))


def _real(*given: Any) -> tuple[torch.Tensor, ...]:
    arguments = Arguments(*given)
    call = _launch.remembered(arguments)
    if call is not None:
        return tuple(call(arguments.input, arguments.starts, arguments.lengths))
    _checks.plain("input", arguments.input)
    return tuple(result.contiguous() for result in _execute.run(_checks.call(arguments)))


_library.impl("top_k", _real, "CPU")
_library.impl("top_k", _real, "CUDA")


@torch.library.register_fake(NAME, lib=_library)
def _fake(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    input, k, dim, *_, index_dtype = _checks.call(Arguments(*given))
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
    def vmap(info: Any, in_dims: tuple[int | None, ...], *given: Any) -> tuple[Any, Any]:
        """One more dimension of rows, in front; what has no batch is expanded, not copied."""
        arguments = Arguments(*given)
        # Arguments left at their defaults have no place in in_dims.
        batch = dict(zip(Arguments._fields, in_dims, strict=False))

        def in_front(name: str) -> torch.Tensor | None:
            tensor = getattr(arguments, name)
            if tensor is None:
                return None
            if batch.get(name) is None:
                return tensor.expand(info.batch_size, *tensor.shape)
            return tensor.movedim(batch[name], 0)

        rank = arguments.input.ndim - (batch["input"] is not None)
        if rank == 0:
            raise TypeError("input has shape (); expected at least one dimension")
        moved = {name: in_front(name) for name in ("input", "lengths", "starts")}
        out = top_k(*arguments._replace(dim=arguments.dim % rank + 1, **moved))
        return tuple(out), (0, 0)


torch.library.register_vmap(NAME, _Differentiable.vmap, lib=_library)


def top_k(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator, under torch.func too, to whose transforms an operator cannot answer."""
    if _private.transforming():
        return _Differentiable.apply(*arguments)
    return torch.ops.jtopk.top_k(*arguments)


def _autograd(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = Arguments(*given)
    if _private.differentiating(arguments.input):
        return _Differentiable.apply(*arguments)
    return _below_autograd(*arguments)


def _below_autograd(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with _private.below_autograd():
        return torch.ops.jtopk.top_k.default(*arguments)


# Not by torch.library.register_autograd: with it forward gradients are dropped without a word and
# torch.func.grad raises.
_library.impl("top_k", _autograd, "Autograd")
