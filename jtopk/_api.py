"""The public JAX function: checks its arguments, brings them to one form, picks a backend."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from jtopk import _backend, _check, _mosaic, _plan, _strides, _transforms, _xla
from jtopk._order import Order
from jtopk._strided_rows import StridedRows


class TopK(NamedTuple):
    """Values and their columns, each of the operand's shape with k in place of the axis."""

    values: Any
    indices: Any


export.register_namedtuple_serialization(TopK, serialized_name="jtopk.TopK")


def top_k(
    operand: Any,
    k: int,
    *,
    axis: int = -1,
    largest: bool = True,
    sorted: bool = True,
    lengths: Any = None,
    starts: Any = None,
    backend: str | None = None,
) -> TopK:
    """The k largest (or smallest) elements of every row: exact, reproducible, ties by column.

    The order is `jax.lax.top_k`'s on every backend: +NaN > +inf > ... > +0 > -0 > ... > -inf >
    -NaN; for smallest, the reverse. Equal values come by ascending column either way.

    Args:
      operand: `jax.Array`, `StridedRows`, or anything `jnp.asarray` takes. Any rank from 1;
        every dimension but `axis` is a dimension of rows. float32, bfloat16, float16,
        float8_e4m3fn, float8_e5m2, (u)int8/16/32; float64 and (u)int64 with x64 enabled.
      k: how many, a static integer of 0 or more. At most the row's columns, unless `lengths`
        is given.
      axis: the axis along which columns lie.
      largest: largest first, or smallest first.
      sorted: return values in order. Without, the same elements in an order that is
        unspecified but always the same.
      lengths: valid columns of each row, int32 or int64, of the operand's shape without
        `axis`. Row r is columns `[starts[r], starts[r] + lengths[r])`. Numbers outside the row
        are clamped into it: a start to [0, columns], a length to [0, columns - start].
      starts: first valid column of each row, likewise; 0 if not given.
      backend: None to choose by device, or "mosaic_gpu", "xla", "interpret".

    Returns:
      TopK(values, indices): the operand's shape with k in place of `axis`. Values have the
      operand's bits; indices are int32 columns of the whole row. A row with fewer than k valid
      columns ends with index -1 and the value that ranks last (-inf or the integer minimum;
      +inf or the maximum for smallest).

    Raises:
      TypeError: operand of an unsupported dtype or without dimensions; k or axis no integer.
      ValueError: k negative or larger than the row, axis out of range, lengths or starts of the
        wrong shape or dtype, rows longer than int32 can index.
      NotImplementedError: `backend` names one that cannot run here.
    """
    return top_k_ordered(
        operand, k, axis=axis, largest=largest, sorted=sorted, lengths=lengths, starts=starts,
        backend=backend, order=Order.TOTAL,
    )  # fmt: skip


def top_k_ordered(
    operand: Any,
    k: int,
    *,
    axis: int,
    largest: bool,
    sorted: bool,
    lengths: Any,
    starts: Any,
    backend: str | None,
    order: Order,
) -> TopK:
    """`top_k` under a given order of values; the torch face comes in here."""
    if not isinstance(operand, StridedRows):
        operand = as_array("operand", operand)
    _check.dtype(str(operand.dtype), argument="operand", x64=jax.config.jax_enable_x64)
    axis = _check.axis(axis, operand.shape, argument="axis", of="operand")
    columns = operand.shape[axis]
    _check.columns(columns, of="operand")
    k = _check.k(k, columns, has_lengths=lengths is not None)
    row_shape = operand.shape[:axis] + operand.shape[axis + 1 :]
    if lengths is not None:
        lengths = row_numbers("lengths", lengths, row_shape, columns)
    if starts is not None:
        starts = row_numbers("starts", starts, row_shape, columns)
    chosen = _backend.choose(
        backend, operand.buffer if isinstance(operand, StridedRows) else operand
    )
    values, indices = _top_k(
        operand, lengths, starts, k=k, axis=axis, largest=bool(largest), sorted=bool(sorted),
        backend=chosen, order=order,
    )  # fmt: skip
    return TopK(values, indices)


def as_array(name: str, x: Any) -> jax.Array:
    """`jnp.asarray`, but a 64-bit value is refused where JAX would narrow it without a word."""
    if not isinstance(x, jax.Array) and not jax.config.jax_enable_x64:
        for leaf in jax.tree.leaves(x):
            found = getattr(leaf, "dtype", None)
            if found is not None and str(found) in ("float64", "int64", "uint64"):
                _check.dtype(str(found), argument=name, x64=False)
    return jnp.asarray(x)


def row_numbers(name: str, x: Any, row_shape: tuple[int, ...], columns: int) -> jax.Array:
    """`lengths` or `starts` as an array of integers, still to be clamped on the device."""
    if isinstance(x, jax.Array):
        _check.row_numbers(name, x.shape, str(x.dtype), row_shape)
        if x.dtype == np.int64 and not jax.config.jax_enable_x64:
            # Made where x64 was enabled: the next call would wrap it to int32.
            with jax.enable_x64(True):
                x = jnp.clip(x, 0, columns).astype(jnp.int32)
        return x
    x = np.asarray(x)
    _check.row_numbers(name, x.shape, str(x.dtype), row_shape)
    # Clamped before JAX narrows it: 2**32 + 5 must not become 5.
    return jnp.asarray(x.clip(0, columns).astype(np.int32))


@functools.partial(jax.jit, static_argnames=("k", "axis", "largest", "sorted", "backend", "order"))
def _top_k(
    operand: jax.Array | StridedRows,
    lengths: jax.Array | None,
    starts: jax.Array | None,
    *,
    k: int,
    axis: int,
    largest: bool,
    sorted: bool,
    backend: str,
    order: Order,
) -> tuple[jax.Array, jax.Array]:
    if isinstance(operand, StridedRows):
        buffer, view = (
            operand.buffer,
            _strides.row_view(operand.shape, operand.strides, operand.offset, axis),
        )
    else:
        buffer, view = (
            operand.reshape(-1),
            _strides.row_view(operand.shape, _strides.dense_strides(operand.shape), 0, axis),
        )

    def xla(view, buffer, starts, lengths):
        return _xla.top_k(
            buffer, view, k, largest=largest, order=order, starts=starts, lengths=lengths
        )

    def kernel(view, buffer, starts, lengths, interpret=False):
        return _mosaic.top_k(
            buffer, view, k, largest=largest, sorted=sorted, order=order,
            starts=starts, lengths=lengths, interpret=interpret,
        )  # fmt: skip

    def run(view, buffer, starts, lengths):
        if view.columns == 0:
            buffer = jnp.zeros(1, buffer.dtype)  # nothing is read, but no kernel takes no buffer
        arguments = (view, buffer, starts, lengths)
        if k == 0 or view.rows == 0 or backend == "xla":
            return xla(*arguments)
        if backend == "interpret":
            return kernel(*arguments, interpret=True)
        if backend == "mosaic_gpu":
            return kernel(*arguments)
        if _plan.unsupported(buffer.dtype) is not None:
            return xla(*arguments)
        return jax.lax.platform_dependent(
            buffer, starts, lengths,
            cuda=functools.partial(kernel, view), default=functools.partial(xla, view),
        )  # fmt: skip

    values, indices = _transforms.top_k(run, view, buffer, starts, lengths)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)
