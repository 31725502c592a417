"""Top-k on the GPU kernel: from a row view and an order to a launch."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from jtopk import _order, _plan, _strides
from jtopk._order import Order
from jtopk._strides import RowView


def top_k(
    buffer: jax.Array,
    view: RowView,
    k: int,
    *,
    largest: bool,
    sorted: bool,
    order: Order,
    starts: jax.Array | None,
    lengths: jax.Array | None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The top k of each row, `k > 0` and at least one row.

    Takes and returns what `_xla.top_k` does. `starts` and `lengths` need not be clamped.
    """
    kernel = kernel_for(
        np.dtype(buffer.dtype), view, k, largest=largest, sorted=sorted, order=order,
        interpret=interpret,
    )  # fmt: skip
    values, indices = pallas_kernels.select_rows(
        kernel.config,
        kernel.keys,
        buffer,
        # Each a literal: a partitioned function may have no constant arrays.
        jnp.stack([jnp.int32(word) for word in pallas_kernels.pack_numbers(kernel.numbers)]),
        rows=view.rows,
        operands={
            name: _row_numbers(numbers, view.columns)
            for name, numbers in (("starts", starts), ("lengths", lengths))
            if numbers is not None
        },
        interpret=interpret,
    )
    if kernel.sort_afterwards:
        values, indices = _sort(values, indices, kernel.keys.to_key)
    shape = (*view.row_shape, k)
    return values.reshape(shape), indices.reshape(shape)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Which kernel a call needs and the numbers it is launched with.

    Attributes:
      config, keys: for `pallas_kernels`; they and the dtypes decide what is compiled.
      numbers: where the rows are, for `pallas_kernels.pack_numbers`.
      sort_afterwards: whether k is too large for the kernel to put its output in order.
    """

    config: Any
    keys: Any
    numbers: list[int]
    sort_afterwards: bool


def kernel_for(
    dtype: np.dtype,
    view: RowView,
    k: int,
    *,
    largest: bool,
    sorted: bool,
    order: Order,
    group: int = 1,
    table: tuple[int, int, int] = (0, 0, 0),
    interpret: bool = False,
    **config: Any,
) -> Kernel:
    """The kernel for rows of `dtype` that lie as `view` says.

    `group` and `table` are as for `pallas_kernels.row_numbers`, `config` more of the kernel's
    configuration. An interpreted team has one warpgroup: see `pallas_kernels._team`.
    """
    plan = _plan.plan(
        view.rows, view.columns, k, sorted=sorted, unit_stride=view.column_stride == 1,
        itemsize=dtype.itemsize, members=1 if interpret else _plan.TEAM_WARPGROUPS,
    )  # fmt: skip
    row_shape, row_strides = _strides.merge_rows(view.row_shape, view.row_strides)
    last = _order.last_value(dtype, largest=largest)
    select = pallas_kernels.SelectConfig(
        k=k,
        sort=plan.sort == "kernel",
        key_bits=_order.bit_width(dtype),
        fill_bits=int(last.view(_order.bits_dtype(dtype))),
        row_dims=len(row_shape),
        unit_stride=view.column_stride == 1,
        warpgroups=plan.warpgroups,
        blocks=plan.blocks,
        teams=plan.teams,
        cluster=plan.cluster,
        capacity=plan.capacity,
        whole=plan.whole,
        **config,
    )
    numbers = pallas_kernels.row_numbers(
        columns=view.columns,
        column_stride=view.column_stride,
        offset=view.offset,
        row_shape=row_shape,
        row_strides=row_strides,
        group=group,
        table=table,
    )
    return Kernel(select, keys(dtype, largest, order), numbers, plan.sort == "xla")


def keys(dtype: np.dtype, largest: bool, order: Order) -> Any:
    """The order of a dtype's values, as the kernels take it."""
    which: dict[str, Any] = {"dtype": dtype, "largest": largest, "order": order}
    return pallas_kernels.Keys(
        to_key=functools.partial(_order.key, **which),
        from_key=functools.partial(_order.from_key, **which),
        kept=functools.partial(_order.kept, **which),
    )


def _row_numbers(x: jax.Array, columns: int) -> jax.Array:
    if x.dtype != jnp.int32:
        x = jnp.clip(x, 0, columns).astype(jnp.int32)
    return x.reshape(-1, 1)


def _sort(values, indices, to_key) -> tuple[jax.Array, jax.Array]:
    """Puts a selection that the radix design wrote in order; unfilled places stay last."""
    bits = _order.to_bits(values)
    key = to_key(bits.astype(_order.carrier_dtype(values.dtype)))
    last = jnp.where(indices < 0, jnp.uint32(0xFFFFFFFF), ~key)
    _, bits, indices = jax.lax.sort((last, bits, indices), num_keys=1, is_stable=True)
    return _order.from_bits(bits, values.dtype), indices
