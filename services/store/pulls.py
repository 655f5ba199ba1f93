"""Takes in what workers are about to evict: asks for a lease, reads, files. A worker never waits for it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.layout import BlockTable, segments_of
from dataplane.reader import PlaneReader
from dataplane.stream import TransferFailedError
from schemas import subjects
from schemas.block import join_hashes
from schemas.ids import BlockHash, RequestId, WorkerId, new_id
from schemas.kv import BlocksCooling, LeaseGranted, RequestLease
from schemas.request import Refused
from services.bus.base import BusError
from services.bus.typed import Received, TypedBus
from services.runtime import now_ms
from services.store.backing import Backing, Complaints
from services.store.core import StoreCore

ASK_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 30.0
MAX_PULL_BLOCKS = 64
"""Blocks of one lease: what a worker has to keep for us at a time."""
MAX_REFUSALS = 16
"""Offered blocks in a row that the worker has given up meanwhile; one more, and the rest is taken for gone as well."""


@dataclass
class Puller:
    """One stream at a time from each worker, `MAX_PULLS` in all. `carrier`: which one is asked for, or "auto"."""

    core: StoreCore
    backing: Backing | None
    door: TypedBus
    reader: PlaneReader
    carrier: str
    tasks: asyncio.TaskGroup
    changed: Callable[[], None]
    complaints: Complaints

    def __post_init__(self) -> None:
        self._pulls: set[asyncio.Task[None]] = set()

    def offered(self, received: Received[BlocksCooling]) -> None:
        """A worker says what it will evict soon."""
        offer = received.message
        wanted = self.core.start_pull(offer.worker_id, offer.block_hashes)
        if wanted:
            task = self.tasks.create_task(self._pull(offer.worker_id, wanted), name=f"pull {offer.worker_id}")
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)

    async def close(self) -> None:
        """End all reads: nothing is written into the arena after it."""
        pulls = list(self._pulls)
        for pull in pulls:
            pull.cancel()
        if pulls:
            await asyncio.wait(pulls)

    async def _pull(self, worker_id: WorkerId, wanted: list[BlockHash]) -> None:
        num_refused = 0
        try:
            while wanted and num_refused <= MAX_REFUSALS:
                room = self.core.num_pullable(writes=self._writes)
                if room <= 0:
                    self.core.counts.num_dropped_offers += 1
                    return
                batch = wanted[: min(room, MAX_PULL_BLOCKS)]
                answer = await self._ask(worker_id, batch)
                if isinstance(answer, LeaseGranted):
                    num_refused, num_done = 0, await self._read(answer, batch)
                elif answer.reason == "gone":
                    num_refused, num_done = num_refused + 1, 1
                else:
                    return
                wanted = self.core.lacking(wanted[num_done:], worker_id)
        except (BusError, TransferFailedError) as error:
            self.complaints.say("pull", f"blocks of {worker_id} were not taken: {error}")
        finally:
            self.core.end_pull(worker_id)

    async def _ask(self, worker_id: WorkerId, batch: list[BlockHash]) -> LeaseGranted | Refused:
        request = RequestLease(
            request_id=RequestId(new_id("store")),
            attempt=1,
            deadline_ms=now_ms() + int(READ_TIMEOUT_S * 1000),
            reader=self.core.limits.store_id,
            fingerprint=self.core.layout.fingerprint,
            first_block=0,
            block_hashes=join_hashes(batch),
        )
        answer = await self.door.ask(subjects.LEASE, (worker_id,), request, ASK_TIMEOUT_S)
        assert isinstance(answer, LeaseGranted | Refused)
        return answer

    async def _read(self, granted: LeaseGranted, batch: list[BlockHash]) -> int:
        """Read what was granted and file it. Return the number of blocks; raises TransferFailedError."""
        block_size = self.core.layout.block_size
        num_blocks, rest = divmod(granted.num_tokens, block_size)
        if granted.first_token or rest or not 0 < num_blocks <= len(batch):
            raise TransferFailedError("protocol", f"granted tokens {granted.first_token} to {granted.num_tokens}")
        blocks = self.core.memory.allocate(num_blocks)
        if blocks is None:  # leases have taken the room meanwhile
            raise TransferFailedError("cancelled", "no room any more")
        num_landed = 0
        try:
            await self.reader.read(
                granted.endpoint,
                granted.ticket,
                carrier=self.carrier,
                tables=(BlockTable(segments_of(blocks)),),
                first_token=0,
                num_tokens=granted.num_tokens,
                deadline_s=READ_TIMEOUT_S,
            )
            num_landed = num_blocks
        except TransferFailedError as error:
            num_landed = error.num_landed_tokens // block_size  # verified all the same
            raise
        finally:
            self.core.pulled(blocks, batch[:num_landed], writes=self._writes)
            self.changed()
        return num_blocks

    @property
    def _writes(self) -> bool:
        return self.backing is not None and self.backing.is_up
