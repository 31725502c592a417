"""How a call behaves under JAX's transformations.

Batching: `vmap` adds one more dimension of rows, so any nesting of it is one call of a backend and
no loop. Derivatives: those of the values are a gather of the operand's at the columns taken, whose
transpose scatters; indices have none. The backend itself is never differentiated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.custom_partitioning
import jax.numpy as jnp
import numpy as np

from jtopk import _strides
from jtopk._strides import RowView

Backend = Callable[..., tuple[jax.Array, jax.Array]]
"""`backend(view, buffer, starts, lengths)`: values and indices of shape (*view.row_shape, k)."""


def top_k(
    backend: Backend,
    view: RowView,
    buffer: jax.Array,
    starts: jax.Array | None,
    lengths: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """What the backend returns, transformable."""
    values, indices = _batched(backend, view)(jax.lax.stop_gradient(buffer), starts, lengths)
    if jnp.issubdtype(buffer.dtype, jnp.inexact):
        values = differentiable(functools.partial(_take, view))(buffer, indices, values)
    return values, indices


def _batched(backend: Backend, view: RowView) -> Callable[..., tuple[jax.Array, jax.Array]]:
    @jax.custom_batching.custom_vmap
    def call(buffer, starts, lengths):
        if not _dense(view, buffer.size):
            return backend(view, buffer, starts, lengths)
        rows = _Rows(backend, view, starts is not None, lengths is not None)
        numbers = [x for x in (starts, lengths) if x is not None]
        spread = _by_type if _explicit(buffer) else _by_partitioner
        return spread(rows, buffer, *numbers)

    @call.def_vmap
    def rule(size, batched, buffer, starts, lengths):
        buffer_batched, *_ = batched
        step = 0  # every batch reads the same buffer
        if buffer_batched:
            step = buffer.shape[1]
            buffer = buffer.reshape(-1)
        wider = dataclasses.replace(
            view,
            row_shape=(size, *view.row_shape),
            row_strides=(step, *view.row_strides),
        )

        def rows(numbers, has_batch):
            if numbers is None or has_batch:
                return numbers
            return jnp.broadcast_to(numbers, (size, *numbers.shape))

        numbers = (rows(n, b) for n, b in zip((starts, lengths), batched[1:], strict=True))
        return _batched(backend, wider)(buffer, *numbers), (True, True)

    return call


def _dense(view: RowView, size: int) -> bool:
    """Whether the buffer is nothing but the rows, one after another."""
    shape = (*view.row_shape, view.columns)
    return (
        0 < len(view.row_shape)
        and 0 < size == view.rows * view.columns
        and (*view.row_strides, view.column_stride) == _strides.dense_strides(shape)
    )


def _explicit(x: jax.Array) -> bool:
    """Whether shardings are part of the array's type, so that no partitioner is to choose them."""
    return jax.sharding.AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The backend over dense rows, which need nothing of one another.

    Only the outermost dimension of rows is ever spread over devices: a device's part of the buffer
    is then whole rows.
    """

    backend: Backend
    view: RowView
    has_starts: bool
    has_lengths: bool

    def __call__(self, buffer: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
        given = iter(numbers)
        starts = next(given) if self.has_starts else None
        lengths = next(given) if self.has_lengths else None
        return self.backend(self.view, buffer, starts, lengths)

    def part(self, axes: Any, mesh: Any) -> tuple[_Rows, Any]:
        """What a device does, and the axes that its rows are spread over: none if they do not
        divide them."""
        names = () if axes is None else (axes,) if isinstance(axes, str) else axes
        shards = math.prod(mesh.shape[name] for name in names)
        outer, *inner = self.view.row_shape
        if outer % shards:
            return self, None
        view = dataclasses.replace(self.view, row_shape=(outer // shards, *inner))
        return dataclasses.replace(self, view=view), axes


def _by_type(rows: _Rows, buffer: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Spread as the buffer's type says."""
    sharding = jax.typeof(buffer).sharding
    part, axes = rows.part(sharding.spec[0], sharding.mesh)
    if axes is None:
        return rows(buffer, *numbers)
    spec = jax.sharding.PartitionSpec(axes)
    numbers = tuple(jax.sharding.reshard(x, spec) for x in numbers)
    return jax.shard_map(
        part, mesh=sharding.mesh, in_specs=(spec,) * (1 + len(numbers)), out_specs=(spec, spec),
        check_vma=False,
    )(buffer, *numbers)  # fmt: skip


def _by_partitioner(
    rows: _Rows, buffer: jax.Array, *numbers: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Spread as the compiler's partitioner chooses.

    Not told that rows are independent, it brings the whole operand together on every device.
    """
    call = jax.experimental.custom_partitioning.custom_partitioning(rows.__call__)

    def partition(mesh, arguments, results):
        spec = getattr(results[0].sharding, "spec", ())
        part, axes = rows.part(spec[0] if spec else None, mesh)
        where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axes))
        return mesh, part.__call__, (where, where), (where,) * len(arguments)

    names = [f"r{d}" for d in range(len(rows.view.row_shape))]
    of_rows, of_results = " ".join(names), " ".join([*names, "k"])
    of_operands = ", ".join([f"({of_rows} n)", *[of_rows] * len(numbers)])
    call.def_partition(
        partition=partition,
        sharding_rule=f"{of_operands} -> {of_results}, {of_results}",
        need_replication_factors=(*names[1:], "n", "k"),
        n=rows.view.columns,
    )
    return call(buffer, *numbers)


def differentiable(take: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """A function `(operand, indices, values)` that returns `values`, as taken from the operand.

    Args:
      take: `take(x, indices)` has the elements of an x like the operand at `indices`, linearly.
    """

    @jax.custom_jvp
    def attach(operand, indices, values):
        return values

    @attach.defjvp
    def rule(primals, tangents):
        operand, indices, values = primals
        # Attached again: in a derivative of this derivative they depend on the operand too.
        return attach(operand, indices, values), take(tangents[0], indices)

    return attach


def _take(view: RowView, buffer: jax.Array, indices: jax.Array) -> jax.Array:
    """Elements of each row at `indices`, 0 at unfilled places."""
    filled = indices >= 0
    if _dense(view, buffer.size):
        # Row by row, so that a partitioner sees that rows need nothing of one another.
        rows = buffer.reshape(*view.row_shape, view.columns)
        taken = jnp.take_along_axis(rows, jnp.where(filled, indices, 0), axis=-1)
        return jnp.where(filled, taken, jnp.zeros((), buffer.dtype))
    wide = view.span_end > np.iinfo(np.int32).max
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        kind = jnp.int64 if wide else jnp.int32
        place = indices.astype(kind) * view.column_stride + view.offset
        for d, stride in enumerate(view.row_strides):
            place += stride * jax.lax.broadcasted_iota(kind, place.shape, d)
        taken = buffer.at[jnp.where(filled, place, 0)].get(mode="promise_in_bounds")
        return jnp.where(filled, taken, jnp.zeros((), buffer.dtype))
