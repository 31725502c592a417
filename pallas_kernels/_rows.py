"""What the kernels share: a row's window, and the way of what was selected to the outputs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import _index, _window
from pallas_kernels import _leaves as leaf
from pallas_kernels._compat import pl, plgpu
from pallas_kernels._index import Index, row_number


class RowKernel:
    """A kernel's body, with its refs in reach."""

    def __init__(self, config, keys, x_gmem, view, operands_gmem, outputs_gmem, smem, interpret):
        self.config = config
        self.keys = keys
        self.x_gmem = x_gmem
        self.view = view
        self.operands_gmem = operands_gmem
        self.outputs_gmem = outputs_gmem
        self.smem = smem
        self.interpret = interpret
        self.wg = jax.lax.axis_index("warpgroup")
        self.width = leaf.vector_width(x_gmem.dtype)

    def first_row(self) -> jax.Array:
        """The first row of this block, or of this team of it."""
        return jax.lax.axis_index("block")

    def window(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row's valid columns."""
        start = row_number(self.operands_gmem, "starts", row)
        length = None
        if "lengths" in self.operands_gmem:
            group = self.view.group
            length = row_number(self.operands_gmem, "lengths", row // group)
            length = _window.of_group(length, row, group)
        return _window.clamp(start, length, self.view.columns, is_end=self.config.lengths_are_ends)

    def writer(self, row, begin):
        """A function `write(place, columns, bits, width)` to the row's outputs."""
        config = self.config

        def mapping(kind: Index):
            return _index.mapping(
                kind, self.view, self.operands_gmem, row, begin, page_bits=config.page_bits,
                interpret=self.interpret,
            )  # fmt: skip

        to_index, to_local = mapping(config.index), mapping(Index.LOCAL)

        def write(place, columns, bits, width: int) -> None:
            # A column that is not written must not be looked up either.
            columns = jnp.where(place < 0, -1, columns)
            written = {"values": lambda: bits, "indices": lambda: to_index(columns, width)}
            written["local"] = lambda: to_local(columns, width)
            for name, target_gmem in self.outputs_gmem.items():
                leaf.store_run(
                    target_gmem.at[row], place, written[name](), width=width,
                    interpret=self.interpret,
                )  # fmt: skip

        return write

    def write_fill(self, write, taken) -> None:
        step = 4 * leaf.LANES

        def some(i, _):
            place = i * step + self.iota(step, 4)
            place = jnp.where(place < taken, -1, place)
            bits = self.splat(step, 4, self.fill, jnp.uint32)
            write(place, self.splat(step, 4, -1), bits, 4)

        self.each_own(taken // step, self.config.k, step, some)

    def each_own(self, first, size: int, step: int, body) -> None:
        """Runs `body(i)` for this warpgroup's share of the steps `first .. size / step`."""
        groups = self.config.warpgroups
        mine = (pl.cdiv(size, step) - first - self.wg + groups - 1) // groups
        jax.lax.fori_loop(0, mine, lambda i, _: body(first + self.wg + i * groups, None), None)

    @property
    def fill(self) -> jax.Array:
        return jnp.uint32(self.config.fill_bits)

    def iota(self, size: int, width: int) -> jax.Array:
        return plgpu.layout_cast(
            jax.lax.broadcasted_iota(jnp.int32, (size,), 0), leaf.layout(size, width)
        )

    def splat(self, size: int, width: int, value, dtype=jnp.int32) -> jax.Array:
        return plgpu.layout_cast(jnp.full((size,), value, dtype), leaf.layout(size, width))
