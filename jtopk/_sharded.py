"""Top-k over a device mesh: rows, columns or both sharded.

Rows need no communication. For columns every shard selects its own k, one all-gather brings the
candidates together, and every shard selects among them. Candidates keep the order of their
columns, so that ties still go to the lowest column of the whole row.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

import pallas_kernels
from jtopk import _api, _check, _order, _transforms
from jtopk._api import TopK

Axis = str | tuple[str, ...] | None


def sharded_top_k(
    operand: Any,
    k: int,
    *,
    mesh: Mesh,
    row_axis: Axis = None,
    column_axis: Axis = None,
    largest: bool = True,
    sorted: bool = True,
    lengths: Any = None,
    starts: Any = None,
    backend: str | None = None,
) -> TopK:
    """`jtopk.top_k` along the last axis of an array that lies over a mesh.

    Each row costs one all-gather along `column_axis`, of k values and k columns from every
    shard; `row_axis` costs nothing. Sizes that the mesh does not divide are padded.

    Args:
      operand: `jax.Array` of shape (rows..., columns), as it lies or may be moved.
      k: as for `jtopk.top_k`.
      mesh: of one or more devices.
      row_axis: name or names of the mesh's axes over which the first dimension is sharded.
      column_axis: likewise for the columns.
      largest, sorted, lengths, starts, backend: as for `jtopk.top_k`; lengths and starts count
        columns of whole rows.

    Returns:
      TopK of shape (rows..., k): sharded like the operand's rows, whole along `column_axis`.
      Indices are columns of whole rows.

    Raises:
      TypeError, ValueError, NotImplementedError: as for `jtopk.top_k`; a mesh axis that does not
        exist or is given twice, or `row_axis` for an operand without rows.
    """
    operand = _api.as_array("operand", operand)
    _check.dtype(str(operand.dtype), argument="operand", x64=jax.config.jax_enable_x64)
    _check.axis(-1, operand.shape, argument="axis", of="operand")
    columns = operand.shape[-1]
    _check.columns(columns, of="operand")
    k = _check.k(k, columns, has_lengths=lengths is not None)
    row_shards = _shards("row_axis", row_axis, mesh)
    column_shards = _shards("column_axis", column_axis, mesh)
    if set(_names(row_axis)) & set(_names(column_axis)):
        raise ValueError(f"row_axis and column_axis are both {column_axis!r}; expected two axes")
    if row_shards > 1 and operand.ndim < 2:
        raise ValueError(f"row_axis is {row_axis!r}, but operand has shape {operand.shape}")
    row_shape = operand.shape[:-1]
    windows = [
        None if x is None else _api.row_numbers(name, x, row_shape, columns)
        for name, x in (("starts", starts), ("lengths", lengths))
    ]
    values, indices = _sharded(
        operand, *windows, k=k, mesh=mesh, row_axis=row_axis, column_axis=column_axis,
        shards=(row_shards, column_shards), largest=bool(largest), sorted=bool(sorted),
        backend=backend,
    )  # fmt: skip
    return TopK(values, indices)


def _names(axis: Axis) -> tuple[str, ...]:
    if axis is None:
        return ()
    return (axis,) if isinstance(axis, str) else tuple(axis)


def _shards(argument: str, axis: Axis, mesh: Mesh) -> int:
    for name in _names(axis):
        if name not in mesh.shape:
            raise ValueError(f"{argument} is {axis!r}; the mesh has axes {tuple(mesh.shape)}")
    return math.prod(mesh.shape[name] for name in _names(axis))


@functools.partial(
    jax.jit,
    static_argnames=(
        "k", "mesh", "row_axis", "column_axis", "shards", "largest", "sorted", "backend",
    ),
)  # fmt: skip
def _sharded(
    operand: jax.Array,
    starts: jax.Array | None,
    lengths: jax.Array | None,
    *,
    k: int,
    mesh: Mesh,
    row_axis: Axis,
    column_axis: Axis,
    shards: tuple[int, int],
    largest: bool,
    sorted: bool,
    backend: str | None,
) -> tuple[jax.Array, jax.Array]:
    *row_shape, columns = operand.shape
    begin, end = pallas_kernels.clamp_window(starts, lengths, columns)
    begin, end = (jnp.broadcast_to(x, row_shape) for x in (begin, end))
    ragged = starts is not None or lengths is not None

    # What pads a size lies behind the end of a row, or is a row of its own that is cut off.
    padding = [(0, 0)] * operand.ndim
    padding[-1] = (0, -columns % shards[1])
    if row_shape:
        padding[0] = (0, -row_shape[0] % shards[0])
    operand, begin, end = (
        jnp.pad(x, padding[: x.ndim]) if any(p != (0, 0) for p in padding[: x.ndim]) else x
        for x in (operand, begin, end)
    )
    ragged = ragged or padding[-1] != (0, 0)
    rows = PartitionSpec(*[row_axis, *[None] * (len(row_shape) - 1)][: len(row_shape)])
    whole = PartitionSpec(*rows, None)
    split = PartitionSpec(*rows, column_axis)

    over = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
    local = functools.partial(
        _of_shard, k=k, columns=column_axis, shards=shards[1], largest=largest, sorted=sorted,
        backend=backend, ragged=ragged,
    )  # fmt: skip
    select = over(local, in_specs=(split, rows, rows), out_specs=(whole, whole))

    take = over(
        functools.partial(_take, columns=column_axis), in_specs=(split, whole), out_specs=whole
    )
    values, indices = select(jax.lax.stop_gradient(operand), begin, end)
    if jnp.issubdtype(operand.dtype, jnp.inexact):
        values = _transforms.differentiable(take)(operand, indices, values)
    if row_shape:
        values, indices = values[: row_shape[0]], indices[: row_shape[0]]
    return values, indices


def _of_shard(
    x: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    *,
    k: int,
    columns: Axis,
    shards: int,
    largest: bool,
    sorted: bool,
    backend: str | None,
    ragged: bool,
) -> tuple[jax.Array, jax.Array]:
    """The answer for a shard's rows, from its columns and, if they are sharded, the others'."""
    own = x.shape[-1]
    first = jax.lax.axis_index(columns) * own if columns else 0
    begin, end = (jnp.clip(edge - first, 0, own) for edge in (begin, end))
    options: dict[str, Any] = {"largest": largest, "backend": backend}
    if ragged:
        options |= {"starts": begin, "lengths": end - begin}
    if not columns:
        return tuple(_api.top_k(x, k, sorted=sorted, **options))
    # Fewer candidates where a shard has fewer columns; in any order that keeps ties by column.
    values, indices = _api.top_k(x, min(k, own), sorted=False, **options)
    indices = jnp.where(indices < 0, -1, indices + first)
    carrier = _order.carrier_dtype(x.dtype)
    packed = jnp.stack([_order.to_bits(values).astype(carrier), indices.astype(carrier)])
    # (2, rows..., shards, k of a shard) -> (2, rows..., candidates)
    packed = jax.lax.all_gather(packed, columns, axis=packed.ndim - 1)
    count = jnp.sum(packed[1].astype(jnp.int32) >= 0, axis=-1)
    bits, indices = _compact(packed, count)
    candidates = _order.from_bits(bits.astype(_order.bits_dtype(x.dtype)), x.dtype)
    values, place = _api.top_k(
        candidates, k, sorted=sorted, lengths=count.sum(axis=-1), largest=largest, backend=backend
    )
    taken = jnp.take_along_axis(indices.astype(jnp.int32), jnp.maximum(place, 0), axis=-1)
    return values, jnp.where(place < 0, -1, taken)


def _compact(packed: jax.Array, count: jax.Array) -> jax.Array:
    """The first `count` of each shard's candidates, one shard's after another's."""
    *lead, shards, each = packed.shape
    behind = jnp.cumsum(count, axis=-1)[..., None, :]
    slot = jnp.arange(shards * each)[:, None]
    shard = jnp.minimum(jnp.sum(slot >= behind, axis=-1), shards - 1)
    before = jnp.take_along_axis(jnp.cumsum(count, axis=-1) - count, shard, axis=-1)
    source = shard * each + jnp.clip(slot[:, 0] - before, 0, each - 1)
    flat = packed.reshape(*lead, shards * each)
    return jnp.take_along_axis(flat, source[None], axis=-1)


def _take(x: jax.Array, indices: jax.Array, *, columns: Axis) -> jax.Array:
    """Elements of whole rows at `indices`, each from the shard that has it; 0 at unfilled ones."""
    own = x.shape[-1]
    first = jax.lax.axis_index(columns) * own if columns else 0
    column = indices - first
    here = (indices >= 0) & (column >= 0) & (column < own)
    taken = jnp.take_along_axis(x, jnp.clip(column, 0, max(own - 1, 0)), axis=-1)
    taken = jnp.where(here, taken, jnp.zeros((), x.dtype))
    return jax.lax.psum(taken, columns) if columns else taken
