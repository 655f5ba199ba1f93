"""Brings blocks that a server asks for to its holder: from behind its memory, or from another holder of the mesh.

Whatever is not here within `fetch_s` the server computes; so it does with what it computes more quickly.
"""

import asyncio
import logging
import time
from collections.abc import Sequence

from schemas import subjects
from schemas.block import join_hashes
from schemas.directory import HolderPrefix, LocateBlocks
from schemas.ids import BlockHash, RequestId, WorkerId, is_subject_token, new_id
from services.attach.core import AttachCore, Bring
from services.attach.limits import DOUBT, MAX_RATES, MIN_FETCH_BLOCKS, RATED_BLOCKS
from services.bus.typed import TypedBus
from services.holder.core.events import CopyWanted
from services.holder.limits import MESSAGE_BLOCKS
from services.runtime import now_ms
from services.store.service import Store
from services.times import AttachTimes

log = logging.getLogger(__name__)


class Bringer:
    """One holder's. `changed` is set whenever a read of this holder has ended."""

    def __init__(self, store: Store, bus: TypedBus, tenant: str, times: AttachTimes) -> None:
        self._store = store
        self._bus = bus
        self._tenant = tenant
        self._times = times
        self._me = store.holder.parts.worker_id
        layout = store.holder.parts.shape.layout
        self._block_bytes, self._block_size = layout.block_bytes, layout.block_size
        self._rates: dict[WorkerId, float] = {}
        """By holder, bytes a second of what was read from it last."""
        self.changed = asyncio.Event()

    async def bring(self, asked: Bring, core: AttachCore, traceparent: str) -> None:
        """Bring the leading run of the blocks that are asked for, as far as somebody has it and reading it is quicker
        than computing it. Ends early where nobody asks any more. Raises TimeoutError, BusError: some may have come."""
        hashes, until_s = asked.hashes, time.monotonic() + asked.wait_ms / 1000
        async with asyncio.timeout(self._times.fetch_s + asked.wait_ms / 1000):
            num_here = await self._load(hashes)
            while (rest := hashes[num_here:]) and core.is_waiting(asked.server, asked.number):
                if not await self._fetch(rest, asked.hint, core.servers[asked.server].token_s, traceparent):
                    return
                # Whoever sent the hint may have been quicker than the blocks.
                num_here = self.num_here(asked)
                if time.monotonic() >= until_s:
                    return
                await asyncio.sleep(self._times.hint_retry_s)

    def num_here(self, asked: Bring) -> int:
        """Return how many of these blocks are here now."""
        return self._store.memory.num_leading(asked.hashes, self._tenant)

    async def _load(self, hashes: Sequence[BlockHash]) -> int:
        """Bring what lies behind memory. Return how many blocks of the run are in memory then."""
        if not self._store.memory.behind(hashes[:1], self._tenant):
            return 0
        async with self._store.loader.held(join_hashes(hashes), self._tenant, self._times.fetch_s):
            return self._store.memory.num_leading(hashes, self._tenant)

    async def _fetch(self, hashes: Sequence[BlockHash], hint: str, token_s: float, traceparent: str) -> bool:
        """Copy what another holder has, the one with the longest run. `token_s`: how long computing a token takes; 0:
        that is not known. Return False where computing is quicker."""
        source = await self._source(hashes, hint, traceparent)
        if source is None:
            return True
        wanted = hashes[: min(source.num_blocks, MESSAGE_BLOCKS)]
        rate = self._rates.get(source.worker_id, 0.0)
        read_s = len(wanted) * self._block_bytes / rate if rate else 0.0
        if token_s and read_s > len(wanted) * self._block_size * token_s:
            self._rates[source.worker_id] = rate * DOUBT
            return False
        began_s, num_before = time.monotonic(), self._store.memory.num_leading(hashes, self._tenant)
        deadline_ms = now_ms() + round(1000 * self._times.fetch_s)
        self._store.step(
            CopyWanted(source.worker_id, self._tenant, join_hashes(wanted), deadline_ms, traceparent), "attach"
        )
        while self._store.is_copying(wanted, self._tenant):
            self.changed.clear()
            await self.changed.wait()
        num_read = self._store.memory.num_leading(hashes, self._tenant) - num_before
        if num_read >= RATED_BLOCKS:
            self._note_rate(source.worker_id, num_read * self._block_bytes / (time.monotonic() - began_s))
        return True

    async def _source(self, hashes: Sequence[BlockHash], hint: str, traceparent: str) -> HolderPrefix | None:
        """Return who is to be read from, by what the directory says, or a hint; the holder decides at the lease."""
        if hint and is_subject_token(hint) and hint != self._me:
            return HolderPrefix(worker_id=WorkerId(hint), incarnation="", num_blocks=len(hashes))
        question = LocateBlocks(
            request_id=RequestId(new_id("attach")),
            attempt=1,
            deadline_ms=now_ms() + round(1000 * self._times.fetch_s),
            block_hashes=join_hashes(hashes),
        )
        located = await self._bus.ask(subjects.LOCATE, (), question, self._times.fetch_s, traceparent)
        others = [each for each in located.holders if each.worker_id != self._me and each.first_block == 0]
        best = max(others, key=lambda each: each.num_blocks, default=None)
        return best if best is not None and best.num_blocks >= MIN_FETCH_BLOCKS else None

    def _note_rate(self, holder: WorkerId, rate: float) -> None:
        self._rates.pop(holder, None)
        self._rates[holder] = rate
        if len(self._rates) > MAX_RATES:
            del self._rates[next(iter(self._rates))]
