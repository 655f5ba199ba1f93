"""Which blocks the store takes from which worker. Pure.

A block that several workers offer is asked of the first; of another only when that one does not give it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from dataplane.blocks.kept import Content
from schemas.block import BLOCK_HASH_BYTES, split_hashes
from schemas.ids import BlockHash, WorkerId, is_subject_token
from schemas.kv import BlocksCooling, ReplicateBlocks
from services.store.blocks import StoreMemory
from services.store.limits import MAX_OFFERED_BLOCKS

# What can happen. What a worker offers comes as the message itself.


@dataclass(slots=True, frozen=True)
class BlocksGone:
    """The worker has given these up before they could be read."""

    worker_id: WorkerId
    contents: tuple[Content, ...]


@dataclass(slots=True, frozen=True)
class PullEnded:
    """No more is read from this worker, for now."""

    worker_id: WorkerId


@dataclass(slots=True, frozen=True)
class StoreDrainBegun:
    """The store is to leave: take nothing more."""


Event = BlocksCooling | ReplicateBlocks | BlocksGone | PullEnded | StoreDrainBegun

# What the shell is asked to do.


@dataclass(slots=True, frozen=True)
class StartPull:
    """Read what `next_pull` names of this worker's blocks until it names none; there is one pull at a time from each
    worker. Then say PullEnded."""

    worker_id: WorkerId


@dataclass(slots=True, frozen=True)
class NotTaken:
    """So many of the blocks that this worker has offered are left, and nobody else has offered them."""

    worker_id: WorkerId
    num_blocks: int


Action = StartPull | NotTaken


class StoreCore:
    """What workers have offered, as far as it is wanted. Not thread-safe. `num_not_taken`: blocks that were offered and
    not read, as the store was slow, full or short of room."""

    def __init__(self, memory: StoreMemory) -> None:
        self.memory = memory
        self.num_not_taken = 0
        self.draining = False
        self._offers: dict[WorkerId, dict[Content, None]] = {}
        """What is to be read from each worker that is pulled from, the block offered first in front."""
        self._also_offered: dict[WorkerId, dict[Content, None]] = {}
        """What is to be read from another worker already: this one is asked if the other does not give it."""

    @property
    def takes_blocks(self) -> bool:
        """Blocks of windowed layers are of no use by themselves: such a model's are not taken."""
        return not self.memory.layout.is_windowed

    def handle(self, event: Event, now_ms: int) -> list[Action]:
        """React to what has happened: return what is to be done, in order. Nothing here goes by the clock."""
        match event:
            case BlocksCooling(worker_id=worker_id, block_hashes=joined):
                if len(joined) % BLOCK_HASH_BYTES:
                    self.num_not_taken += 1
                    return []
                return self._offered(worker_id, event.tenant, split_hashes(joined))
            case ReplicateBlocks(source=source, block_hashes=joined):
                if event.fingerprint != self.memory.layout.fingerprint or len(joined) % BLOCK_HASH_BYTES:
                    self.num_not_taken += 1
                    return []
                # A sequence's last blocks are given up before its first: as a worker names those that cool.
                return self._offered(source, event.tenant, reversed(split_hashes(joined)))
            case BlocksGone(worker_id=worker_id, contents=contents):
                for content in contents:
                    self._offers[worker_id].pop(content, None)
                return self._ask_others(contents)[0]
            case PullEnded(worker_id=worker_id):
                actions, num_left = self._ask_others(self._offers.pop(worker_id))
                self.num_not_taken += num_left
                return [NotTaken(worker_id, num_left), *actions]
            case StoreDrainBegun():
                self.draining = True
                return []

    def next_pull(self, worker_id: WorkerId, max_blocks: int) -> list[Content]:
        """Return what to ask a worker for next, all of one tenant, the one offered first in front; nothing: all is
        taken."""
        offers = self._offers[worker_id]
        for content in [content for content in offers if self._has(content)]:
            del offers[content]
            for others in self._also_offered.values():
                others.pop(content, None)
        first = next(iter(offers), None)
        return list(islice((each for each in offers if first and each.tenant == first.tenant), max_blocks))

    def _has(self, content: Content) -> bool:
        return self.memory.holds(content.block_hash, content.tenant)

    def _offered(self, worker_id: WorkerId, tenant: str, hashes: Iterable[BlockHash]) -> list[Action]:
        """Note what is wanted of a worker's blocks, and begin to pull from it unless that goes on already."""
        if self.draining or not self.takes_blocks:
            return []
        if not is_subject_token(worker_id):
            self.num_not_taken += 1
            return []
        offers, also_offered = self._offers.get(worker_id, {}), self._also_offered.get(worker_id, {})
        for content in (Content(tenant, block_hash) for block_hash in hashes):
            if self._has(content) or content in offers or content in also_offered:
                continue
            if len(offers) + len(also_offered) >= MAX_OFFERED_BLOCKS:
                self.num_not_taken += 1
            elif any(content in others for others in self._offers.values()):
                also_offered[content] = None
            else:
                offers[content] = None
        if also_offered:
            self._also_offered[worker_id] = also_offered
        if not offers or worker_id in self._offers:
            return []
        self._offers[worker_id] = offers
        return [StartPull(worker_id)]

    def _ask_others(self, contents: Iterable[Content]) -> tuple[list[Action], int]:
        """Let whoever has offered these blocks as well be asked. Return whom to begin to pull from for it, and of how
        many blocks there is nobody."""
        actions: list[Action] = []
        num_left = 0
        for content in contents:
            other = next((worker_id for worker_id, also in self._also_offered.items() if content in also), None)
            if other is None or self.draining:
                num_left += 1
                continue
            del self._also_offered[other][content]
            if other not in self._offers:
                self._offers[other] = {}
                actions.append(StartPull(other))
            self._offers[other][content] = None
        self._also_offered = {worker_id: also for worker_id, also in self._also_offered.items() if also}
        return actions, num_left
