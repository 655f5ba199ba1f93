"""Answers those who ask for a lease: with what is in memory, and what can be brought there in time."""

import asyncio
import time
from collections.abc import Callable, Sequence

from schemas.block import split_hashes
from schemas.ids import BlockHash
from services.store.backing import Backing
from services.store.core import StoreCore

Changed = Callable[[], None]


class Lender:
    """Collects the blocks of a lease. A block is loaded once, however many ask for it at a time."""

    def __init__(self, core: StoreCore, backing: Backing | None, tasks: asyncio.TaskGroup, changed: Changed) -> None:
        self._core = core
        self._backing = backing
        self._tasks = tasks
        self._changed = changed
        self._loads: dict[BlockHash, asyncio.Task[list[int]]] = {}

    async def collect(self, joined: bytes, timeout_s: float) -> list[int]:
        """Return the blocks of the leading run of these hashes that is here within `timeout_s`, a reference to each."""
        hashes = split_hashes(joined)
        deadline = time.monotonic() + timeout_s
        blocks: list[int] = []
        while len(blocks) < len(hashes):
            rest = hashes[len(blocks) :]
            more = self._core.take(rest) or await self._fetch(rest, deadline)
            if not more:
                break
            blocks += more
        return blocks

    async def close(self) -> None:
        """End the waiting for loads; a thread that still runs fills blocks that nobody else gets."""
        loads = set(self._loads.values())
        for load in loads:
            load.cancel()
        if loads:
            await asyncio.wait(loads)

    async def _fetch(self, hashes: Sequence[BlockHash], deadline: float) -> list[int]:
        """Bring the leading run that lies behind memory; return its blocks, a reference to each."""
        if (other := self._loads.get(hashes[0])) is not None:
            await asyncio.wait([other], timeout=max(0.0, deadline - time.monotonic()))
            return self._core.take(hashes)
        load = self._start_load(hashes, deadline)
        if load is None:
            return []
        done, _ = await asyncio.wait([load], timeout=max(0.0, deadline - time.monotonic()))
        if not done:  # it goes on, for whoever asks next
            load.add_done_callback(self._give_back)
            return []
        return [] if load.cancelled() else load.result()

    def _start_load(self, hashes: Sequence[BlockHash], deadline: float) -> asyncio.Task[list[int]] | None:
        """Load as much as there is room for; None where nothing can be loaded now."""
        if self._backing is None or not self._backing.can_load:
            return None
        run = self._core.behind(hashes)
        run = next((run[:at] for at, block_hash in enumerate(run) if block_hash in self._loads), run)
        blocks = self._core.allocate_up_to(len(run))
        if not blocks:
            return None
        run = run[: len(blocks)]
        task = self._tasks.create_task(self._load(self._backing, run, blocks, deadline), name="load")
        self._loads.update(dict.fromkeys(run, task))
        return task

    async def _load(self, backing: Backing, hashes: list[BlockHash], blocks: list[int], deadline: float) -> list[int]:
        try:
            loaded = await backing.load(hashes, blocks, deadline)
        finally:
            for block_hash in hashes:
                del self._loads[block_hash]
        filled = self._core.loaded(blocks, hashes[: loaded.num_loaded], loaded.lost)
        self._changed()
        return filled

    def _give_back(self, load: asyncio.Task[list[int]]) -> None:
        if not load.cancelled():
            self._core.give_back(load.result())
