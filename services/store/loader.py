"""Brings blocks from behind memory before they are lent, as far as that can be done in time."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from schemas.block import split_hashes
from schemas.ids import BlockHash
from services.store.backing import Backing, Loaded
from services.store.blocks import StoreMemory
from services.store.limits import LOAD_AHEAD, MAX_LOADS
from services.store.tiers import StoreKey, key_of
from services.times import StoreTimes


class Loader:
    """A block is loaded once, however many ask for it at a time; a few loads run at once, the others wait in turn."""

    def __init__(
        self,
        memory: StoreMemory,
        backing: Backing | None,
        tasks: asyncio.TaskGroup,
        changed: Callable[[], None],
        times: StoreTimes,
    ) -> None:
        self._times = times
        self._memory = memory
        self._backing = backing
        self._tasks = tasks
        self._changed = changed
        self._slots = asyncio.Semaphore(MAX_LOADS)
        self._loads: dict[StoreKey, asyncio.Task[None]] = {}
        self._asked_s: WeakKeyDictionary[asyncio.Task[None], float] = WeakKeyDictionary()
        """When somebody last waited for a load, by the monotonic clock."""
        self._is_closed = False

    @asynccontextmanager
    async def held(self, joined: bytes, tenant: str, timeout_s: float) -> AsyncGenerator[None]:
        """Keep in memory, for the time of the block, the leading run of these (joined) hashes of a tenant's that is
        there within `timeout_s`."""
        blocks = await self._collect(joined, tenant, timeout_s)
        try:
            yield
        finally:
            self._memory.give_back(blocks)

    def is_in_flight(self, block_hash: BlockHash, tenant: str) -> bool:
        """Return whether a block is being loaded now."""
        return key_of(tenant, block_hash) in self._loads

    async def close(self) -> None:
        """End the waiting for loads; a thread that still runs fills blocks that nobody else gets."""
        self._is_closed = True
        loads = set(self._loads.values())
        for load in loads:
            load.cancel()
        if loads:
            await asyncio.wait(loads)

    async def _collect(self, joined: bytes, tenant: str, timeout_s: float) -> list[int]:
        """Return the blocks of that run, a reference to each. What has to be loaded is waited for a moment: what comes
        later is for whoever asks next, most often the same reader."""
        hashes = split_hashes(joined)
        deadline = time.monotonic() + timeout_s
        blocks = self._memory.take(hashes, tenant)
        while len(blocks) < len(hashes) and (left_s := deadline - time.monotonic()) > 0:
            rest = hashes[len(blocks) :]
            wait_s = min(left_s, self._times.lend_after_s) if blocks else left_s
            load = self._loads.get(key_of(tenant, rest[0])) or await self._begin_load(rest, tenant, wait_s)
            if load is not None:
                self._asked_s[load] = time.monotonic()
                await asyncio.wait([load], timeout=min(left_s, self._times.lend_after_s))
            more = self._memory.take(rest, tenant)
            blocks += more
            if (not more and (load is None or load.done())) or (blocks and load is not None and not load.done()):
                break
        return blocks

    async def _begin_load(self, hashes: Sequence[BlockHash], tenant: str, wait_s: float) -> asyncio.Task[None] | None:
        """Wait for a turn, and load what is needed then; None where nothing can be loaded, or need be any more."""
        backing = self._backing
        if self._is_closed or backing is None or not self._memory.behind(hashes[:1], tenant):
            return None
        try:
            async with asyncio.timeout(wait_s):
                await self._slots.acquire()
        except TimeoutError:
            return None
        run = [key_of(tenant, each) for each in self._memory.behind(hashes, tenant)] if backing.is_up else []
        run = next((run[:at] for at, key in enumerate(run) if key in self._loads), run)
        blocks = self._memory.allocate_up_to(len(run), tenant)
        if not blocks:
            self._slots.release()
            return self._loads.get(key_of(tenant, hashes[0]))
        run = run[: len(blocks)]
        load = self._tasks.create_task(self._load(backing, run, blocks), name="load")
        self._loads.update(dict.fromkeys(run, load))
        return load

    async def _load(self, backing: Backing, keys: list[StoreKey], blocks: list[int]) -> None:
        """Fill blocks, a batch after the other: what is in place can be lent while the rest is still coming. Ends early
        when nobody asks for it any more."""
        # The start counts as the first question for the load; each reader that waits for it renews the time.
        size, me = backing.batch_blocks, asyncio.current_task()
        assert me is not None, "it runs in a task"
        self._asked_s.setdefault(me, time.monotonic())
        # A batch is what one call of the tier carries; up to `LOAD_AHEAD` of them are under way.
        waiting = deque((keys[at : at + size], blocks[at : at + size]) for at in range(0, len(keys), size))
        under_way: deque[tuple[list[StoreKey], list[int], asyncio.Task[Loaded]]] = deque()
        try:
            while waiting or under_way:
                while waiting and len(under_way) < LOAD_AHEAD:
                    part = waiting.popleft()
                    under_way.append((*part, self._tasks.create_task(backing.load_blocks(*part), name="load a batch")))
                # A batch stays in `under_way` until it has ended: the cleanup of a cancelled load looks there.
                part_keys, part_blocks, loading = under_way[0]
                loaded = await loading
                under_way.popleft()
                self._arrived(part_keys, part_blocks, loaded)
                # If a value is missing or nobody asks any more, begin no further batch: the waiting blocks go back.
                is_wanted = time.monotonic() - self._asked_s[me] < self._times.unasked_s
                if len(loaded.tags) < len(part_keys) or not is_wanted:
                    while waiting:
                        self._arrived(*waiting.popleft(), Loaded([], []))
        finally:
            # Blocks of batches that have not ended are not given back: a thread may still fill them.
            self._slots.release()
            for part_keys, *_ in (*waiting, *under_way):
                for key in part_keys:
                    del self._loads[key]

    def _arrived(self, keys: list[StoreKey], blocks: list[int], loaded: Loaded) -> None:
        for key in keys:
            del self._loads[key]
        self._memory.loaded(blocks, keys, loaded.tags, loaded.lost)
        self._changed()
