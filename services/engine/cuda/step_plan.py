"""What a step on a card must know, as numbers in one piece of host memory that goes up in one copy. Pure, numpy only.

Tokens are rows of the flat batch, items in their order. Items of one token are `singles`, longer ones `chunks`: each
kind has a kernel. A cache group's block tables lie in one array of ints, `table`, one item's after another, each from
the first block that the item's queries see; `base` + b is where its block b's entry is.
"""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import BlockTable, KVLayout, num_blocks_for
from services.engine.interface import StepItem
from services.engine.sampler import GREEDY_BELOW, uniform

ALIGNMENT = 16
"""Of every field: kernels then read whole vectors of it, and are not compiled anew for other alignments."""

Ints = npt.NDArray[np.int64]


class StepLimits(NamedTuple):
    """The most tokens of a step, sequences in it, and tokens of a sequence."""

    num_tokens: int
    num_sequences: int
    sequence_tokens: int


class Field(NamedTuple):
    """`shape` numbers of numpy's `dtype` from byte `first_byte` on."""

    first_byte: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class Draws(NamedTuple):
    """The samples that are drawn, not greedy: which of the samples, and how."""

    samples: list[int]
    temperatures: list[float]
    top_ks: list[int]
    top_ps: list[float]
    numbers: list[float]
    """The random number of each, in [0, 1)."""


class GroupTables(NamedTuple):
    """One cache group's block tables in a step. `bases` and `slots` are per item and per row."""

    table: npt.NDArray[np.int32]
    bases: Ints
    slots: Ints


class StepPlan(NamedTuple):
    """A step. Arrays are per item, but `token_ids` and `positions` per row and `sample_rows` per sample."""

    num_rows: int
    token_ids: list[int]
    positions: Ints
    first_rows: Ints
    counts: Ints
    ends: Ints
    sample_rows: list[int]
    draws: Draws
    groups: tuple[GroupTables, ...]

    @property
    def is_decode(self) -> bool:
        """Say whether every item is one token."""
        return self.num_rows == len(self.counts)


class StepPlanner:
    """Plans steps. Keeps the block tables of the items of the last step as arrays: they seldom change."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._known: dict[int, tuple[BlockTable, npt.NDArray[np.int32]]] = {}

    def plan(self, items: Seq[StepItem]) -> StepPlan:
        """Raises ValueError when a sequence's block tables do not cover what it computes or sees."""
        starts = np.array([item.start for item in items], np.int64)
        counts = np.array([item.num_tokens for item in items], np.int64)
        ends = starts + counts
        first_rows = np.cumsum(counts) - counts
        num_rows = int(counts.sum())
        is_decode = num_rows == len(items)
        row_items = np.arange(num_rows) if is_decode else np.repeat(np.arange(len(items)), counts)
        positions = starts if is_decode else np.arange(num_rows) + (starts - first_rows)[row_items]
        known: dict[int, tuple[BlockTable, npt.NDArray[np.int32]]] = {}
        groups = tuple(
            self._group_tables(group, items, (starts, ends), (row_items, positions), known)
            for group in range(len(self.layout.groups))
        )
        self._known = known
        last_rows = (first_rows + counts - 1).tolist()
        return StepPlan(
            num_rows=num_rows,
            token_ids=_token_ids(items, is_decode=is_decode),
            positions=positions,
            first_rows=first_rows,
            counts=counts,
            ends=ends,
            sample_rows=[row for row, item in zip(last_rows, items, strict=True) if item.samples],
            draws=_draws(items),
            groups=groups,
        )

    def _group_tables(
        self,
        group: int,
        items: Seq[StepItem],
        span: tuple[Ints, Ints],
        rows: tuple[Ints, Ints],
        known: dict[int, tuple[BlockTable, npt.NDArray[np.int32]]],
    ) -> GroupTables:
        """`span`: each item's first token and end. `rows`: each row's item and position."""
        (starts, ends), (row_items, positions) = span, rows
        block_size, window = self.layout.block_size, self.layout.groups[group].window
        tables = [item.sequence.tables[group] for item in items]
        arrays = [self._blocks(table, known) for table in tables]
        kept_from = np.array([table.first_block for table in tables], np.int64)
        first = np.maximum(starts - window + 1, 0) // block_size if window else np.zeros_like(starts)
        end = -(-ends // block_size)
        sizes = np.array([array.size for array in arrays], np.int64)
        self._check(items, (kept_from, kept_from + sizes), (first, end), ends)
        lengths = end - first
        pieces = [
            array[at:until]
            for array, at, until in zip(arrays, (first - kept_from).tolist(), (end - kept_from).tolist(), strict=True)
        ]
        table = np.concatenate(pieces) if pieces else np.empty(0, np.int32)
        bases = np.cumsum(lengths) - lengths - first
        slots = table[bases[row_items] + positions // block_size].astype(np.int64) * block_size + positions % block_size
        return GroupTables(table, bases, slots)

    def _blocks(
        self, table: BlockTable, known: dict[int, tuple[BlockTable, npt.NDArray[np.int32]]]
    ) -> npt.NDArray[np.int32]:
        """Return a table's blocks as an array. The table is kept with it, so that its id stays its own."""
        found = self._known.get(id(table)) or known.get(id(table))
        if found is None:
            found = (table, _block_array(table))
        known[id(table)] = found
        return found[1]

    def _check(self, items: Seq[StepItem], kept: tuple[Ints, Ints], needed: tuple[Ints, Ints], ends: Ints) -> None:
        """Raise ValueError unless each item's table has the blocks that it needs, both from first to end."""
        late, short = needed[0] < kept[0], needed[1] > kept[1]
        if not (late.any() or short.any()):
            return
        at = int(np.argmax(late | short))
        name, block_size = items[at].sequence.request_id, self.layout.block_size
        if late[at]:
            raise ValueError(f"{name}: block {needed[0][at]} lies before this table, which begins at {kept[0][at]}")
        raise ValueError(
            f"{name}: token {int(ends[at])} lies past the {int(kept[1][at]) * block_size} slots of this request"
        )


def _block_array(table: BlockTable) -> npt.NDArray[np.int32]:
    """Return `layout.block_ids` as an array, in a few operations however many segments there are."""
    first, counts = np.array(table.segments, np.int32).reshape(-1, 2).T
    begins = np.cumsum(counts) - counts
    return (np.arange(int(counts.sum())) + np.repeat(first - begins, counts)).astype(np.int32)


class StepFields(NamedTuple):
    """Where a packed step has what: `slots` and the `bases` are per cache group. `num_bytes` is the end of it all."""

    token_ids: Field
    positions: Field
    slots: Field
    singles: Field
    single_bases: Field
    chunks: Field
    chunk_bases: Field
    tiles: Field
    table: Field
    sample_rows: Field
    draws: Field
    num_bytes: int


def pack(plan: StepPlan, host: npt.NDArray[np.uint8], *, num_rows: int, tile_tokens: int) -> StepFields:
    """Write a step into `host` and return where what is. Raises BufferTooSmallError.

    `num_rows`: as many rows, those that are too many being padding: their slot is -1 and their sequence is empty. What
    lies before the table is then at the same place for every decode of so many rows. `tile_tokens`: queries of a tile.
    """
    is_single = plan.counts == 1
    single_at, chunk_at = np.flatnonzero(is_single), np.flatnonzero(~is_single)
    padding = num_rows - plan.num_rows
    num_tiles = -(-plan.counts[chunk_at] // tile_tokens)
    num_groups = len(plan.groups)
    fields = _fields(
        num_rows=num_rows,
        num_groups=num_groups,
        num_singles=len(single_at) + padding,
        num_chunks=len(chunk_at),
        num_tiles=int(num_tiles.sum()),
        table_size=sum(group.table.size for group in plan.groups),
        num_samples=len(plan.sample_rows),
        num_draws=len(plan.draws.samples),
    )
    if fields.num_bytes > host.size:
        raise BufferTooSmallError(fields.num_bytes)
    _pack_rows(plan, host, fields)
    singles, chunks, tiles = (field_view(host, f) for f in (fields.singles, fields.chunks, fields.tiles))
    single_bases, chunk_bases = field_view(host, fields.single_bases), field_view(host, fields.chunk_bases)
    table = field_view(host, fields.table)
    count = len(single_at)
    singles[0, :count], singles[1, :count] = plan.first_rows[single_at], plan.ends[single_at]
    singles[0, count:], singles[1, count:] = np.arange(plan.num_rows, num_rows), 0
    chunks[0], chunks[1], chunks[2] = plan.first_rows[chunk_at], plan.counts[chunk_at], plan.ends[chunk_at]
    tiles[0] = np.repeat(np.arange(len(chunk_at)), num_tiles)
    tiles[1] = (np.arange(tiles.shape[1]) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile_tokens
    passed = 0
    for at, group in enumerate(plan.groups):
        bases = group.bases + passed
        single_bases[at, :count], single_bases[at, count:], chunk_bases[at] = bases[single_at], 0, bases[chunk_at]
        table[passed : passed + group.table.size] = group.table
        passed += group.table.size
    return fields


def largest_step_bytes(layout: KVLayout, limits: StepLimits) -> int:
    """Return a number of bytes that any step within the limits can be packed into."""
    num_groups = len(layout.groups)
    return _fields(
        num_rows=max(limits.num_tokens, limits.num_sequences),  # a graph's padding
        num_groups=num_groups,
        num_singles=limits.num_sequences,
        num_chunks=limits.num_sequences,
        num_tiles=limits.num_tokens,
        table_size=num_groups * limits.num_sequences * num_blocks_for(limits.sequence_tokens, layout.block_size),
        num_samples=limits.num_sequences,
        num_draws=limits.num_sequences,
    ).num_bytes


class BufferTooSmallError(Exception):
    """A step needs `num_bytes` bytes to be packed."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"a step needs {num_bytes} bytes")
        self.num_bytes = num_bytes


def _pack_rows(plan: StepPlan, host: npt.NDArray[np.uint8], fields: StepFields) -> None:
    """Write what is per row, per sample and per draw."""
    token_ids, positions = field_view(host, fields.token_ids), field_view(host, fields.positions)
    slots, draws = field_view(host, fields.slots), field_view(host, fields.draws)
    token_ids[: plan.num_rows], token_ids[plan.num_rows :] = plan.token_ids, 0
    positions[: plan.num_rows], positions[plan.num_rows :] = plan.positions, 0
    slots[:, plan.num_rows :] = -1
    for at, group in enumerate(plan.groups):
        slots[at, : plan.num_rows] = group.slots
    field_view(host, fields.sample_rows)[:] = plan.sample_rows
    for at, values in enumerate(plan.draws):
        draws[at] = values


def _fields(
    *, num_rows: int, num_groups: int, num_singles: int, num_chunks: int, num_tiles: int, table_size: int,
    num_samples: int, num_draws: int,
) -> StepFields:  # fmt: skip
    """Return where everything of these sizes is put."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (
        ("<i8", (num_rows,)),
        ("<i8", (num_rows,)),
        ("<i4", (num_groups, num_rows)),
        ("<i4", (2, num_singles)),
        ("<i4", (num_groups, num_singles)),
        ("<i4", (3, num_chunks)),
        ("<i4", (num_groups, num_chunks)),
        ("<i4", (2, num_tiles)),
        ("<i4", (table_size,)),
        ("<i8", (num_samples,)),
        ("<f8", (len(Draws._fields), num_draws)),
    )
    fields: list[Field] = []
    first_byte = 0
    for dtype, shape in shapes:
        fields.append(field := Field(first_byte, dtype, shape))
        first_byte = -(-(first_byte + field.num_bytes) // ALIGNMENT) * ALIGNMENT
    return StepFields(*fields, num_bytes=first_byte)


def field_view(host: npt.NDArray[np.uint8], field: Field) -> npt.NDArray[np.generic]:
    """Return a field of a packed step, as a view of it."""
    return host[field.first_byte : field.first_byte + field.num_bytes].view(field.dtype).reshape(field.shape)


def _token_ids(items: Seq[StepItem], *, is_decode: bool) -> list[int]:
    if is_decode:
        return [item.sequence.token_ids[item.start] for item in items]
    token_ids: list[int] = []
    for item in items:
        token_ids += item.sequence.token_ids[item.start : item.start + item.num_tokens]
    return token_ids


def _draws(items: Seq[StepItem]) -> Draws:
    draws = Draws([], [], [], [], [])
    at = 0
    for item in items:
        if not item.samples:
            continue
        sampling = item.sequence.sampling
        if sampling.temperature > GREEDY_BELOW:
            draws.samples.append(at)
            draws.temperatures.append(sampling.temperature)
            draws.top_ks.append(sampling.top_k)
            draws.top_ps.append(sampling.top_p)
            draws.numbers.append(uniform(sampling.seed, item.sequence.index))
        at += 1
    return draws
