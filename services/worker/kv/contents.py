"""What lies in a worker's blocks: what its engine's sequences leave there, and what the directory hears of it."""

from dataclasses import dataclass, field

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.kept import Content
from schemas.directory import BlocksEvicted, BlocksStored, Inventory
from schemas.ids import BlockHash
from services.engine.interface import Sequence
from services.worker.core.attempts import AnyAttempt
from services.worker.kv.holder import KVHolder
from services.worker.limits import COOLING_SHARE, MAX_COOLING_BLOCKS


@dataclass(kw_only=True)
class WorkerHolder(KVHolder[BlockCache]):
    """One worker's blocks. All of this is for the event loop."""

    _cooled: set[Content] = field(default_factory=set[Content])
    """Blocks that have been named as those that go next, and are still here."""

    @property
    def cache(self) -> BlockCache:
        return self.memory

    def computed(self, sequence: Sequence, attempt: AnyAttempt, num_tokens: int, *, ended: bool = False) -> None:
        """Note that a sequence's first `num_tokens` tokens have their KV here. `ended`: no more will be written."""
        num_full_blocks = num_tokens // self.shape.layout.block_size
        if num_full_blocks == attempt.num_stored_blocks and not ended:
            return  # most decode steps fill no block
        assert attempt.kv is not None, "it has blocks"
        hashes = attempt.hasher.extend(sequence.token_ids, num_tokens)
        num_stored, num_landed = attempt.num_stored_blocks, attempt.kv.num_present_tokens
        self.cache.store(sequence.tables, hashes, num_stored, num_tokens, num_landed, ended=ended)
        attempt.num_stored_blocks = num_full_blocks

    def ended(self, sequence: Sequence, attempt: AnyAttempt) -> None:
        """The engine has let go of a sequence; its blocks are still its own."""
        self.computed(sequence, attempt, sequence.num_computed_tokens, ended=True)

    def events(self) -> list[BlocksStored | BlocksEvicted]:
        """Return what the directory has to hear of what came and went since the last call."""
        changes = self.cache.take_changes()
        if self._cooled and changes.evicted:
            evicted = set(changes.evicted)
            self._cooled = {content for content in self._cooled if content.block_hash not in evicted}
        return self.ledger.events(changes)

    def inventory(self, offset: int, max_bytes: int) -> Inventory:
        """Return a page of what is held, from the `offset`-th block on, for a message of so many bytes."""
        return self.ledger.inventory(lambda: [("arena", self.cache.contents())], offset, max_bytes)

    def cooling(self) -> dict[str, list[BlockHash]]:
        """Return each tenant's blocks that will go soon and have not been named yet, while room is scarce."""
        if self.cache.num_free * COOLING_SHARE >= self.cache.num_blocks:
            return {}
        if len(self._cooled) > self.cache.num_blocks:
            self._cooled.clear()
        named = [block for block in self.cache.coldest(MAX_COOLING_BLOCKS) if block not in self._cooled]
        self._cooled.update(named)
        by_tenant: dict[str, list[BlockHash]] = {}
        for content in named:
            by_tenant.setdefault(content.tenant, []).append(content.block_hash)
        return by_tenant
