"""Which blocks a prefill worker is about to compute: placed shortly ago, and not yet in the directory. Pure.

A hint, as the directory's: the worker decides. Of each prompt some places are noted, not every block. Bounded, and
forgotten soon.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from schemas.block import BLOCK_HASH_BYTES
from schemas.ids import WorkerId
from services.scheduler.limits import IN_FLIGHT_MS, IN_FLIGHT_SHARE, IN_FLIGHT_SLACK_MS, MARK_BLOCKS, MAX_MARKS


class InFlightPrompt(NamedTuple):
    """This incarnation of a worker is computing a prompt's first `num_blocks` blocks, which are predicted to be there
    at `ready_ms`."""

    worker_id: WorkerId
    incarnation: str
    num_blocks: int
    ready_ms: float


@dataclass(frozen=True, slots=True)
class _Mark:
    maker: InFlightPrompt
    until_ms: int


class InFlightPrompts:
    """What was placed so shortly ago that it is still being computed."""

    def __init__(self) -> None:
        self._marks: dict[bytes, _Mark] = {}
        """By the hash of a block, which names all before it as well; the oldest in front."""

    def find(self, hashes: bytes, alive: Container[tuple[WorkerId, str]], now_ms: int) -> InFlightPrompt | None:
        """Return who makes most of this prompt's first blocks, of those alive (worker and incarnation)."""
        for num_blocks in _places(len(hashes) // BLOCK_HASH_BYTES):
            mark = self._marks.get(_hash_at(hashes, num_blocks))
            if mark is not None and self._holds(mark, alive, now_ms):
                return mark.maker._replace(num_blocks=num_blocks)
        return None

    def placed(self, hashes: bytes, maker: InFlightPrompt, alive: Container[tuple[WorkerId, str]], now_ms: int) -> None:
        """Note that a worker is to compute these blocks; what another one computes already stays its own."""
        predicted_ms = maker.ready_ms - now_ms
        until_ms = now_ms + min(IN_FLIGHT_MS, round(IN_FLIGHT_SHARE * predicted_ms) + IN_FLIGHT_SLACK_MS)
        for num_blocks in _places(len(hashes) // BLOCK_HASH_BYTES):
            key = _hash_at(hashes, num_blocks)
            if (mark := self._marks.get(key)) is not None and self._holds(mark, alive, now_ms):
                continue
            self._marks.pop(key, None)
            self._marks[key] = _Mark(maker, until_ms)
        while len(self._marks) > MAX_MARKS:
            del self._marks[next(iter(self._marks))]

    def failed(self, hashes: bytes, workers: Container[WorkerId]) -> None:
        """Forget that one of these workers computes these blocks."""
        for num_blocks in _places(len(hashes) // BLOCK_HASH_BYTES):
            key = _hash_at(hashes, num_blocks)
            if (mark := self._marks.get(key)) is not None and mark.maker.worker_id in workers:
                del self._marks[key]

    @staticmethod
    def _holds(mark: _Mark, alive: Container[tuple[WorkerId, str]], now_ms: int) -> bool:
        return now_ms < mark.until_ms and (mark.maker.worker_id, mark.maker.incarnation) in alive


def _hash_at(hashes: bytes, num_blocks: int) -> bytes:
    """Return the hash of the last of so many blocks."""
    return hashes[(num_blocks - 1) * BLOCK_HASH_BYTES : num_blocks * BLOCK_HASH_BYTES]


def _places(num_blocks: int) -> Iterator[int]:
    """Yield which numbers of blocks are noted of a prompt of `num_blocks`, the most first: all of it, each multiple of
    `MARK_BLOCKS`, and below that the powers of two."""
    if num_blocks:
        yield num_blocks
    yield from range((num_blocks - 1) // MARK_BLOCKS * MARK_BLOCKS, 0, -MARK_BLOCKS)
    place = MARK_BLOCKS // 2
    while place:
        if place < num_blocks:
            yield place
        place //= 2
