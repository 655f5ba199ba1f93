"""How much damage is caught on its way: one random bit flipped in each of many transfers, and clean ones beside."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from dataplane.blocks.layout import BlockTable, Segment, num_blocks_for, uniform_shape
from dataplane.carriers.tcp import TcpReader
from dataplane.memory import frames
from dataplane.protocol.stream import TransferFailedError
from dataplane.protocol.wire import Wire
from tests.plane import fake_card
from tests.plane.harness import LAYOUT, Holder, Target

NUM_BLOCKS = 256
NUM_TOKENS = NUM_BLOCKS * LAYOUT.block_size
_ROW_BYTES = LAYOUT.num_layers * 2 * LAYOUT.token_bytes
"""Of one token over all layers."""


@dataclass
class Corruption:
    """`num_caught`: damaged transfers that ended in an error, what had landed before being right. `num_wrong`: those,
    and clean ones, that gave a byte that was not the holder's. `num_untouched`: the bit lay beyond what was sent."""

    num_flipped: int = 0
    num_caught: int = 0
    num_wrong: int = 0
    num_untouched: int = 0
    num_clean_blocks: int = 0
    num_false_alarms: int = 0


class BitFlip:
    """Flips one bit of the KV that crosses, counted from the first byte of the transfer."""

    def __init__(self, bit: int) -> None:
        self.done = False
        self._left, self._mask = bit // 8, 1 << bit % 8

    def pass_on(self, data: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        """See bytes pass, in their order; one of them may be changed, in place."""
        if not self.done and self._left < data.size:
            data.reshape(-1)[self._left] ^= self._mask
            self.done = True
        self._left -= data.size


@dataclass
class _Tap:
    """A wire as a carrier sees it that receives a frame's bytes."""

    wire: Wire
    flip: BitFlip

    def receive_into(self, view: Any, deadline: float) -> int:
        received = self.wire.receive_into(view, deadline)
        self.flip.pass_on(np.frombuffer(view, np.uint8, received))
        return received

    @property
    def has_ended(self) -> bool:
        return self.wire.has_ended


@contextmanager
def tapped(flip: BitFlip) -> Iterator[None]:
    """Damage the KV that a reader of this process takes in: from a socket, or out of a holder's memory or card."""
    take, copy = TcpReader.take_frame, frames.copy

    def take_damaged(carrier: TcpReader, wire: Any, data: Any, stats: Any, deadline: float) -> Any:
        return take(carrier, _Tap(wire, flip), data, stats, deadline)  # type: ignore[arg-type]

    def copy_damaged(source: Any, target: Any, stats: Any, hasher: Any) -> int:
        on_the_way = np.concatenate([rows.flatten() for rows in source.views()])
        flip.pass_on(on_the_way)
        return copy(frames.packed_rows(on_the_way, source.row_bytes, len(source.parts)), target, stats, hasher)

    with (
        mock.patch.object(fake_card, "crossed", flip.pass_on),
        mock.patch.object(TcpReader, "take_frame", take_damaged),
        mock.patch.object(frames, "copy", copy_damaged),
    ):
        yield


def measure(
    carrier: str, *, num_flips: int, num_clean_blocks: int = 0, seed: int = 0, digests: bool = True
) -> Corruption:
    """Do that many transfers over a carrier, a bit of each flipped, and clean ones of so many blocks in all."""
    rng, result = random.Random(seed), Corruption()
    table = (BlockTable((Segment(0, NUM_BLOCKS),)),)
    shape = uniform_shape(LAYOUT, NUM_BLOCKS)
    holder = Holder((carrier,), NUM_TOKENS, shape=shape, tables=table, digests=digests)
    target = Target(shape=shape, tables=table)
    try:
        holder.compute_all()
        for _ in range(num_flips):
            first = rng.randrange(0, NUM_TOKENS)
            _one_damaged(
                holder, target, carrier, (first, rng.randint(first + 1, min(first + 600, NUM_TOKENS))), rng, result
            )
        while result.num_clean_blocks < num_clean_blocks:
            _one_clean(holder, target, carrier, result)
    finally:
        target.close()
        holder.close()
    return result


def _one_damaged(
    holder: Holder, target: Target, carrier: str, tokens: tuple[int, int], rng: random.Random, result: Corruption
) -> None:
    first, end = tokens
    flip = BitFlip(rng.randrange((end - first) * _ROW_BYTES * 8))
    with tapped(flip):
        num_landed, failed = _read(holder, target, carrier, first, end)
    wrong = _is_wrong(holder, target, first, num_landed)
    result.num_flipped += 1
    result.num_untouched += not flip.done
    result.num_wrong += wrong
    result.num_caught += failed and not wrong


def _one_clean(holder: Holder, target: Target, carrier: str, result: Corruption) -> None:
    num_landed, failed = _read(holder, target, carrier, 0, NUM_TOKENS)
    result.num_clean_blocks += num_blocks_for(num_landed, LAYOUT.block_size) or NUM_BLOCKS
    result.num_false_alarms += failed
    result.num_wrong += _is_wrong(holder, target, 0, num_landed)


def _read(holder: Holder, target: Target, carrier: str, first: int, end: int) -> tuple[int, bool]:
    """Return up to where what came is believed, and whether the reader was told of an error."""
    try:
        return target.read_from(holder, carrier, first_token=first, num_tokens=end).num_tokens, False
    except TransferFailedError as error:
        return error.num_landed_tokens, True


def _is_wrong(holder: Holder, target: Target, first: int, end: int) -> bool:
    return end > first and not np.array_equal(target.landed(end, first), holder.kv[:, :, first:end])


if __name__ == "__main__":
    for name in ("tcp", "shm"):
        print(name, measure(name, num_flips=1_000, num_clean_blocks=100_000))
