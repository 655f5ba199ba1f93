"""The moves that copy a frame's rows with one kernel: into a buffer, out of it, or from arena to arena. Pure."""

import numpy as np

from dataplane.blocks.layout import ITEM_BYTES, KVLayout
from dataplane.cards.device import ALIGNMENT, Moves
from dataplane.memory.extent import Frame
from dataplane.memory.rows import Int64s, SequenceRuns, Spans


def unsuited(layout: KVLayout) -> str | None:
    """Say why KV of this layout cannot live on a card, or None: it can."""
    head_bytes = layout.head_dim * ITEM_BYTES[layout.dtype]
    if head_bytes % ALIGNMENT:
        return f"a head of {layout.head_dim} {layout.dtype} has {head_bytes} bytes, not a multiple of {ALIGNMENT}"
    return None


def gather_moves(source: SequenceRuns, frame: Frame, first_byte: int = 0) -> Moves:
    """Return the moves that pack a frame's rows, the first at `first_byte` of the target."""
    runs = _runs(source, frame)
    packed = first_byte + runs[:, 2] * source.row_bytes
    return _moves(frame, (runs[:, 0], packed, runs[:, 2]), source.row_bytes, source.stride, source.row_bytes)


def scatter_moves(target: SequenceRuns, frame: Frame, first_byte: int = 0) -> Moves:
    """Return the moves that put a frame's packed rows, the first at `first_byte` of the source, where they belong."""
    runs = _runs(target, frame)
    packed = first_byte + runs[:, 2] * target.row_bytes
    return _moves(frame, (packed, runs[:, 0], runs[:, 2]), target.row_bytes, target.row_bytes, target.stride)


def pair_moves(source: SequenceRuns, target: SequenceRuns, frame: Frame) -> Moves:
    """Return the moves that copy a frame's rows from one arena to another, whatever the tables and shards of each.
    Raises ValueError when the rows are not of the same heads."""
    if source.row_bytes != target.row_bytes:
        raise ValueError(f"rows of {source.row_bytes} and {target.row_bytes} bytes")
    runs = _runs(source, frame, target)
    return _moves(frame, (runs[:, 0], runs[:, 1], runs[:, 2]), source.row_bytes, source.stride, target.stride)


def _moves(
    frame: Frame, columns: tuple[Int64s, Int64s, Int64s], row_bytes: int, source_stride: int, target_stride: int
) -> Moves:
    num_rows = 2 * frame.num_layers * frame.num_tokens
    return Moves(np.stack(columns, axis=1), num_rows, row_bytes, source_stride, target_stride)


def _runs(one: SequenceRuns, frame: Frame, other: SequenceRuns | None = None) -> Int64s:
    """Return per run the byte offset of its first row at one end, and at the other if there is one, and that row's
    number: [run, 3]."""
    ends = one if other is None else other
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for index, (part, other_part) in enumerate(zip(one.parts(frame), ends.parts(frame), strict=True)):
        parts.setdefault(part.group, []).append((part.first_byte, other_part.first_byte, index * frame.num_tokens))
    runs: list[Int64s] = []
    for group, firsts in parts.items():
        spans = other_spans = one.spans(group, frame)
        if other is not None:
            spans, other_spans = _cut(spans, other.spans(group, frame))
        of_part = np.stack((spans.slots * one.stride, other_spans.slots * ends.stride, spans.starts), axis=1)
        runs.append((np.array(firsts, np.int64)[:, np.newaxis] + of_part).reshape(-1, 3))
    if len(runs) == 1:
        return runs[0]
    found = np.concatenate(runs) if runs else np.empty((0, 3), np.int64)
    return found[np.argsort(found[:, 2])]  # groups take turns in the order of layers


def _cut(one: Spans, other: Spans) -> tuple[Spans, Spans]:
    """Return both cut at each other's borders."""
    starts = np.union1d(one.starts, other.starts)
    at_one = np.searchsorted(one.starts, starts, side="right") - 1
    at_other = np.searchsorted(other.starts, starts, side="right") - 1
    return (
        Spans(one.slots[at_one] + (starts - one.starts[at_one]), starts),
        Spans(other.slots[at_other] + (starts - other.starts[at_other]), starts),
    )
