"""Exact top-k of rows by radix selection: the kernel.

A block takes one row at a time. Its warpgroups share the row's chunks, each a contiguous part:

1. Digit by digit from the top, histogram the keys that agree with the digits found so far, and
   find the bin in which the k-th largest key lies. After the last digit that key, the *cut*, is
   known exactly, and so is how many keys equal to it are still wanted.
2. Read the row once more and keep what lies above the cut, and of what equals it the leftmost.
   Every element's place in the output follows from counts of those before it, not from the
   order in which lanes arrive, so the result is the same in every run.
3. If asked, sort what was kept by key and column.

A key is a uint32 that is larger where a value ranks earlier; the map is the caller's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import _index, _record, _window
from pallas_kernels import _leaves as leaf
from pallas_kernels._compat import WARPGROUP_SEMANTICS, InterpretGPUParams, pl, plgpu
from pallas_kernels._index import OPERANDS, Index, row_number

BINS = 2048
DIGIT_BITS = 11
BIN_WIDTH = 4
SORT_LIMIT = 4096
"""Largest k sorted in shared memory, 8 bytes an element."""

LAST_COLUMN = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """What a compiled kernel depends on. Everything else is in the numbers of `_record`.

    Attributes:
      k: outputs a row.
      sort: sort the outputs in shared memory; `k` is then at most `SORT_LIMIT`. Without, they
        come by ascending column.
      key_bits: keys lie below `2**key_bits`.
      fill_bits: bits of the value that fills a row with fewer than k valid columns.
      row_dims: dimensions of rows.
      unit_stride: whether columns are neighbours in memory.
      warpgroups: warpgroups of 128 threads a block.
      blocks: blocks of the grid; each takes every blocks-th row.
      values: whether values are written too.
      index: what is written for a column.
      page_bits: for `Index.PAGE`, columns a page as a power of two.
      local: whether a second index is written, `Index.LOCAL` of the same columns.
      lengths_are_ends: whether `lengths` holds the column behind each row's last valid one.
    """

    k: int
    sort: bool
    key_bits: int
    fill_bits: int
    row_dims: int
    unit_stride: bool
    warpgroups: int
    blocks: int
    values: bool = True
    index: Index = Index.COLUMN
    page_bits: int = 0
    local: bool = False
    lengths_are_ends: bool = False

    @property
    def sort_size(self) -> int:
        return max(leaf.LANES, 1 << (self.k - 1).bit_length())


def select_rows(
    config: SelectConfig,
    to_key: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    numbers: jax.Array | Sequence[jax.Array],
    *,
    rows: int,
    index_dtype: Any = jnp.int32,
    operands: Mapping[str, jax.Array] | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """Launches the kernel.

    Args:
      config: the compiled kernel's parameters.
      to_key: maps a vector of values' bits (uint32) to keys (uint32).
      x: flat buffer of values, any type of 32 bits or fewer.
      numbers: where rows are: an int32 array from `_record.pack`, or one operand for each of
        `_record.numbers`, whose address is the number shifted up by `PARAMETER_SHIFT`.
      rows: rows of the outputs. A kernel that is launched by its address, and not by JAX, takes
        the row count from the numbers alone.
      index_dtype: int32 or int64.
      operands: those of `OPERANDS` that the call has. Any number in them is safe. With rows in
        groups, `lengths` has one number a group.
      interpret: run on the CPU in JAX's GPU interpreter, with race detection.

    Returns:
      Of shape (rows, k): values of x's dtype if the configuration has them, indices, and local
      indices if it has those.
    """
    operands = {} if operands is None else operands
    indices = jax.ShapeDtypeStruct((rows, config.k), index_dtype)
    outputs = {
        "values": jax.ShapeDtypeStruct((rows, config.k), x.dtype) if config.values else None,
        "indices": indices,
        "local": indices if config.local else None,
    }
    outputs = {name: output for name, output in outputs.items() if output is not None}
    numbers = (numbers,) if isinstance(numbers, jax.Array) else tuple(numbers)
    scratch = {
        "histogram_smem": plgpu.SMEM((config.warpgroups, BINS), jnp.int32),
        "scan_smem": plgpu.SMEM((config.warpgroups, leaf.CHUNK // leaf.LANES * 4), jnp.int32),
    }
    if config.sort:
        scratch["keys_smem"] = plgpu.SMEM((config.sort_size,), jnp.uint32)
        scratch["columns_smem"] = plgpu.SMEM((config.sort_size,), jnp.int32)
    if interpret:
        scratch["barrier"] = plgpu.Barrier(num_arrivals=config.warpgroups)
    named = [name for name in OPERANDS if name in operands]

    def body(x_gmem, *refs, **smem):
        numbers_gmem, refs = refs[: len(numbers)], refs[len(numbers) :]
        operands_gmem = dict(zip(named, refs, strict=False))
        outputs_gmem = dict(zip(outputs, refs[len(named) :], strict=True))
        view = _record.unpack(_reader(numbers_gmem, interpret), config.row_dims)
        block = jax.lax.axis_index("block")
        kernel = _Select(config, to_key, x_gmem, view, operands_gmem, outputs_gmem, smem, interpret)
        mine = (view.rows - block + config.blocks - 1) // config.blocks
        jax.lax.fori_loop(0, mine, lambda i, _: kernel.row(block + i * config.blocks), None)

    run = plgpu.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=WARPGROUP_SEMANTICS),
        interpret=InterpretGPUParams(detect_races=True) if interpret else None,
    )
    # Traced with 32-bit defaults: under x64 every literal in the kernel would be an int64.
    with jax.enable_x64(False):
        return run(x, *numbers, *(operands[name] for name in named))


def _reader(numbers_gmem: Sequence[Any], interpret: bool) -> Callable[[int], _record.Wide]:
    """How the kernel reads the i-th number: from memory, or from the launch's parameters."""
    if len(numbers_gmem) == 1:
        (packed,) = numbers_gmem
        return lambda i: _record.Wide(packed[2 * i], packed[2 * i + 1])
    return lambda i: leaf.parameter(numbers_gmem[i], interpret=interpret)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What a warpgroup knows when it writes its part of a row."""

    cut: jax.Array
    above: jax.Array
    """Keys above the cut in the parts left of this one."""
    equal: jax.Array
    """Keys equal to the cut in those parts."""
    wanted: jax.Array
    """Keys equal to the cut that belong to the answer, in the whole row."""
    everything: jax.Array
    """Whether all valid columns belong to the answer, whatever their keys."""


class _Select:
    """The kernel's body for one row, with its refs in reach."""

    def __init__(self, config, to_key, x_gmem, view, operands_gmem, outputs_gmem, smem, interpret):
        self.config = config
        self.to_key = to_key
        self.x_gmem = x_gmem
        self.view = view
        self.operands_gmem = operands_gmem
        self.outputs_gmem = outputs_gmem
        self.smem = smem
        self.interpret = interpret
        self.wg = jax.lax.axis_index("warpgroup")
        self.width = leaf.vector_width(x_gmem.dtype)

    def row(self, row: jax.Array) -> None:
        config = self.config
        begin, end = self.window(row)
        start = leaf.row_start(self.view, row, interpret=self.interpret)
        # Chunks begin on 16-byte boundaries of the buffer, so a row starts inside its first.
        lead = start.low & (self.width - 1) if config.unit_stride else jnp.int32(0)
        first = (begin + lead) // leaf.CHUNK
        chunks = (end + lead + leaf.CHUNK - 1) // leaf.CHUNK - first
        share = (chunks + config.warpgroups - 1) // config.warpgroups
        own = first + self.wg * share
        stop = jnp.minimum(own + share, first + chunks)
        taken = jnp.minimum(end - begin, config.k)

        def chunk(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Columns, bits and validity of a chunk."""
            at = i * leaf.CHUNK - lead
            bits = leaf.load_row(
                self.x_gmem, self.view, start, at, begin, end, unit_stride=config.unit_stride,
                interpret=self.interpret,
            )  # fmt: skip
            columns = at + self.iota(leaf.CHUNK, self.width)
            return columns, bits, (columns >= begin) & (columns < end)

        def select() -> tuple[jax.Array, ...]:
            return self.find_cut(chunk, own, stop, taken)

        def keep_all() -> tuple[jax.Array, ...]:
            left = jnp.clip(own * leaf.CHUNK - lead, begin, end) - begin
            return jnp.uint32(0), left, jnp.int32(0), jnp.int32(0)

        everything = end - begin <= config.k
        cut, above, equal, wanted = jax.lax.cond(everything, keep_all, select)
        part = _Part(cut, above, equal, wanted, everything)
        if config.sort:
            self.clear_sorted()
            self.barrier()
            self.keep(chunk, own, stop, part, self.store_to_sort)
            self.barrier()
            self.sort()
            self.write_sorted(row, start, taken, begin)
        else:
            write = self.writer(row, begin)
            self.keep(chunk, own, stop, part, write)
            self.write_fill(write, taken)
        self.barrier()  # shared memory is about to be used for the next row

    def window(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The row's valid columns."""
        start = row_number(self.operands_gmem, "starts", row)
        length = None
        if "lengths" in self.operands_gmem:
            group = self.view.group
            length = row_number(self.operands_gmem, "lengths", row // group)
            length = _window.of_group(length, row, group)
        return _window.clamp(start, length, self.view.columns, is_end=self.config.lengths_are_ends)

    # Step 1.

    def find_cut(self, chunk, own, stop, taken) -> tuple[jax.Array, ...]:
        """The key of the last element taken, counts to this part's left, equals wanted."""
        key_bits = self.config.key_bits
        histogram = self.smem["histogram_smem"].at[self.wg]

        def digit_pass(i, carry):
            # `cut` is known in the bits of `known`; this pass finds the next DIGIT_BITS.
            cut, known, above, _, wanted = carry
            top = key_bits - DIGIT_BITS * i
            shift = jnp.maximum(top - DIGIT_BITS, 0)
            mask = (jnp.uint32(1) << (top - shift).astype(jnp.uint32)) - jnp.uint32(1)
            shift = shift.astype(jnp.uint32)
            histogram[...] = self.splat(BINS, BIN_WIDTH, 0)

            def count(j, _):
                _, bits, valid = chunk(j)
                key = self.to_key(bits)
                digit = ((key >> shift) & mask).astype(jnp.int32)
                counts = valid & ((key & known) == cut)
                leaf.histogram_add(
                    histogram, jnp.where(counts, digit, -1), width=self.width,
                    interpret=self.interpret,
                )  # fmt: skip

            jax.lax.fori_loop(own, stop, count, None)
            self.barrier()
            digit, wanted = self.find_bin(wanted)
            bins = self.iota(BINS, BIN_WIDTH)
            equal = jnp.int32(0)
            for w in range(self.config.warpgroups - 1):
                part = self.load_bins(w)
                over = self.sum(jnp.where(bins > digit, part, 0), BIN_WIDTH)
                same = self.sum(jnp.where(bins == digit, part, 0), BIN_WIDTH)
                left = w < self.wg
                above = above + jnp.where(left, over, 0)
                equal = equal + jnp.where(left, same, 0)
            self.barrier()
            return (
                cut | (digit.astype(jnp.uint32) << shift), known | (mask << shift),
                above, equal, wanted,
            )  # fmt: skip

        none = jnp.int32(0)
        cut, _, above, equal, wanted = jax.lax.fori_loop(
            0, pl.cdiv(key_bits, DIGIT_BITS), digit_pass,
            (jnp.uint32(0), jnp.uint32(0), none, none, taken),
        )  # fmt: skip
        return cut, above, equal, wanted

    def find_bin(self, wanted: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The bin that holds the `wanted`-th largest key, and its rank within the bin."""
        counts = self.load_bins(0)
        for w in range(1, self.config.warpgroups):
            counts = counts + self.load_bins(w)
        below, total = self.scan(counts, BIN_WIDTH)
        above = total - below - counts
        here = (above < wanted) & (wanted <= above + counts)
        # Just one bin is the one, so that sums pick it out.
        digit = self.sum(jnp.where(here, self.iota(BINS, BIN_WIDTH), 0), BIN_WIDTH)
        return digit, wanted - self.sum(jnp.where(here, above, 0), BIN_WIDTH)

    # Step 2.

    def keep(self, chunk, own, stop, part: _Part, write) -> None:
        """Hands what belongs to the answer, by ascending column, to `write`.

        `write(place, columns, bits, width)` skips what has place -1. Bits are keys if they are
        to be sorted.
        """

        def one(i, counts):
            above, equal = counts
            columns, bits, valid = chunk(i)
            key = self.to_key(bits)
            over = valid & ((key > part.cut) | part.everything)
            ties = valid & (key == part.cut) & ~part.everything
            # Two counts in one scan: a chunk has fewer than 2**16 columns.
            both = jnp.where(over, 1, 0) + jnp.where(ties, 1 << 16, 0)
            before, total = self.scan(both, self.width)
            over_before = above + (before & 0xFFFF)
            ties_before = equal + (before >> 16)
            kept = over | (ties & (ties_before < part.wanted))
            place = over_before + jnp.minimum(ties_before, part.wanted)
            place = jnp.where(kept, place, -1)
            write(place, columns, key if self.config.sort else bits, self.width)
            return above + (total & 0xFFFF), equal + (total >> 16)

        jax.lax.fori_loop(own, stop, one, (part.above, part.equal))

    # Step 3.

    def store_to_sort(self, place, columns, keys, width: int) -> None:
        for name, what in (("columns_smem", columns), ("keys_smem", keys)):
            leaf.store_run(self.smem[name], place, what, width=width, interpret=self.interpret)

    def clear_sorted(self) -> None:
        """Fills the arrays to sort with what sorts last."""

        @pl.when(self.wg == 0)
        def clear():
            size = self.config.sort_size
            width = min(4, size // leaf.LANES)
            self.smem["keys_smem"][...] = self.splat(size, width, 0, jnp.uint32)
            self.smem["columns_smem"][...] = self.splat(size, width, LAST_COLUMN)

    def sort(self) -> None:
        """Bitonic sort (Batcher 1968) of the kept keys and columns."""
        steps = self.config.sort_size.bit_length() - 1

        def merge(log_block, _):
            def step(i, _):
                leaf.compare_exchange(
                    self.smem["keys_smem"], self.smem["columns_smem"],
                    log_block, log_block - 1 - i, warpgroup=self.wg,
                    warpgroups=self.config.warpgroups, interpret=self.interpret,
                )  # fmt: skip
                self.barrier()

            jax.lax.fori_loop(0, log_block, step, None)

        jax.lax.fori_loop(1, steps + 1, merge, None)

    def write_sorted(self, row, start, taken, begin) -> None:
        step = min(self.config.sort_size, 4 * leaf.LANES)
        width = step // leaf.LANES
        write = self.writer(row, begin)

        def some(i, _):
            at = i * step
            place = at + self.iota(step, width)
            columns = self.smem["columns_smem"][pl.ds(at, step)]
            columns = plgpu.layout_cast(columns, leaf.layout(step, width))
            columns = jnp.where(place < taken, columns, -1)
            bits = None
            if self.config.values:
                bits = leaf.gather_row(
                    self.x_gmem, self.view, start, columns, unit_stride=self.config.unit_stride,
                    width=width, interpret=self.interpret,
                )  # fmt: skip
                bits = jnp.where(place < taken, bits, self.fill)
            write(place, columns, bits, width)

        self.each_own(0, self.config.k, step, some)

    # Output.

    def write_fill(self, write, taken) -> None:
        step = 4 * leaf.LANES

        def some(i, _):
            place = i * step + self.iota(step, 4)
            place = jnp.where(place < taken, -1, place)
            bits = self.splat(step, 4, self.fill, jnp.uint32)
            write(place, self.splat(step, 4, -1), bits, 4)

        self.each_own(taken // step, self.config.k, step, some)

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

    def each_own(self, first, size: int, step: int, body) -> None:
        """Runs `body(i)` for this warpgroup's share of the steps `first .. size / step`."""
        groups = self.config.warpgroups
        mine = (pl.cdiv(size, step) - first - self.wg + groups - 1) // groups
        jax.lax.fori_loop(0, mine, lambda i, _: body(first + self.wg + i * groups, None), None)

    # Vectors and shared memory.

    @property
    def fill(self) -> jax.Array:
        return jnp.uint32(self.config.fill_bits)

    def iota(self, size: int, width: int) -> jax.Array:
        return plgpu.layout_cast(
            jax.lax.broadcasted_iota(jnp.int32, (size,), 0), leaf.layout(size, width)
        )

    def splat(self, size: int, width: int, value, dtype=jnp.int32) -> jax.Array:
        return plgpu.layout_cast(jnp.full((size,), value, dtype), leaf.layout(size, width))

    def load_bins(self, warpgroup: int) -> jax.Array:
        bins = self.smem["histogram_smem"][warpgroup]
        return plgpu.layout_cast(bins, leaf.layout(BINS, BIN_WIDTH))

    def scan(self, x: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        scratch = self.smem["scan_smem"].at[self.wg]
        return leaf.exclusive_scan(x, scratch, width=width, interpret=self.interpret)

    def sum(self, x: jax.Array, width: int) -> jax.Array:
        scratch = self.smem["scan_smem"].at[self.wg]
        return leaf.reduce_sum(x, scratch, width=width, interpret=self.interpret)

    def barrier(self) -> None:
        leaf.block_barrier(self.smem.get("barrier"), interpret=self.interpret)
