"""The half of the connector in a worker of vLLM's: copies pages to and from the holder's arena.

A page is one layer's keys and values of a block, as vLLM has them: bytes that mean something to servers of its identity
only. In the arena their first half lies among the layer's keys and the second among its values.
"""

import logging
import mmap
import queue
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from dataplane.blocks.layout import KEY, VALUE, uniform_shape
from dataplane.memory.arena import Arena, ArenaMissingError
from schemas.attach import BlockRefused, Compared, KVIdentity, Loaded, Saved, Welcome
from schemas.block import join_hashes
from services.attach.connector.client import HolderClient
from services.attach.connector.identity import NotServedError, layout_of
from services.attach.connector.plan import Compare, Load, StepPlan
from services.engine.vllm_engine.formats import TOLERANCE
from services.engine.vllm_engine.runs import runs_of

log = logging.getLogger(__name__)

Pages = npt.NDArray[np.uint8]
"""One layer's pages as bytes: [pages, bytes]."""


TOUCHED_BYTES = 1 << 30


class MappedArena:
    """The holder's arena in this process: for each layer [blocks, bytes] of keys and of values."""

    def __init__(self, identity: KVIdentity, welcome: Welcome) -> None:
        """Raises ArenaMissingError."""
        shape = uniform_shape(layout_of(identity), welcome.num_blocks)
        self.nonce = welcome.nonce
        self._arena = Arena.attach(welcome.arena, welcome.nonce, writes=True)
        if self._arena.num_bytes != shape.arena_bytes:
            self._arena.close()
            raise ArenaMissingError(welcome.arena, f"it has {self._arena.num_bytes} bytes, not {shape.arena_bytes}")
        self.half = shape.layout.block_size * shape.layout.token_bytes

        def plane(layer: int, part: int) -> Pages:
            first = shape.offset(layer, part, 0)
            whole = self._arena.array[first : first + welcome.num_blocks * self.half]
            return whole.reshape(welcome.num_blocks, self.half)

        self.planes = [(plane(layer, KEY), plane(layer, VALUE)) for layer in range(identity.num_layers)]
        # Linux clears a page, and enters it into this process's page table, when it is first touched: a step would copy
        # at a tenth of the speed. So all are read once, on a thread, beside the canary.
        threading.Thread(target=_touch, args=(self._arena.array,), name="kvmesh arena", daemon=True).start()

    def close(self) -> None:
        self.planes.clear()
        self._arena.close()


def _touch(memory: npt.NDArray[np.uint8]) -> None:
    for first in range(0, memory.size, TOUCHED_BYTES):
        memory[first : first + TOUCHED_BYTES : mmap.PAGESIZE].max()


class WorkerHalf:
    """Loads run on a thread of its own, between and beside vLLM's steps; the rest on vLLM's."""

    def __init__(self, client: HolderClient, identity: KVIdentity) -> None:
        self._client = client
        self._identity = identity
        self._pages: list[Pages] = []
        self._began_s = 0.0
        """When the step began that runs, by the monotonic clock."""
        self._saves_of, self._num_saves = "", 0
        """So many messages of what was saved were sent in this attachment."""
        self._arena: MappedArena | None = None
        self._lock = threading.Lock()
        """Of the arena that is mapped, and of what follows."""
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._loads: queue.SimpleQueue[tuple[str, Load] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_loads, name="kvmesh loads", daemon=True)

    def register_pages(self, layers: Mapping[int, Pages]) -> None:
        """Take vLLM's pages, by the layer. Raises NotServedError where they are not what the identity says."""
        identity = self._identity
        wanted = layout_of(identity).layer_block_bytes
        if sorted(layers) != [*range(identity.num_layers)]:
            raise NotServedError(f"vLLM has KV of layers {sorted(layers)}, not of each of {identity.num_layers}")
        for number, pages in layers.items():
            if pages.ndim != 2 or pages.shape[1] != wanted:
                raise NotServedError(f"a page of layer {number} has {pages.shape[1:]} bytes, and {wanted} are shared")
        self._pages = [layers[number] for number in range(identity.num_layers)]
        self._thread.start()

    def start_loads(self, plan: StepPlan) -> None:
        self._began_s = time.monotonic()
        for load in plan.loads:
            self._loads.put((plan.attachment, load))

    def save(self, plan: StepPlan) -> None:
        """Copy out what the step has computed, and compare what it is to compare. Its pages are written."""
        if not (plan.saves or plan.compares):
            return
        arena = self._arena_of(plan.attachment)
        if arena is None:
            return
        self._compare(arena, plan.compares)
        if not plan.saves:
            return
        for run in runs_of([(save.slot, save.page) for save in plan.saves]):
            for pages, (keys, values) in zip(self._pages, arena.planes, strict=True):
                rows = pages[run.engine_block : run.engine_block + run.num_blocks]
                keys[run.arena_block : run.arena_block + run.num_blocks] = rows[:, : arena.half]
                values[run.arena_block : run.arena_block + run.num_blocks] = rows[:, arena.half :]
        slots = tuple(save.slot for save in plan.saves)
        hashes = join_hashes([save.block_hash for save in plan.saves])
        if plan.attachment != self._saves_of:
            self._saves_of, self._num_saves = plan.attachment, 0
        self._num_saves += 1
        self._client.send_holder(Saved(self._num_saves, slots, hashes, time.monotonic() - self._began_s))

    def take_ended(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and those of them that failed."""
        with self._lock:
            loaded, failed = self._loaded, self._failed
            self._loaded, self._failed = set(), set()
        return loaded | failed, failed

    def close(self) -> None:
        self._loads.put(None)
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            if self._arena is not None:
                self._arena.close()
                self._arena = None

    # Loading, on its thread.

    def _run_loads(self) -> None:
        while (asked := self._loads.get()) is not None:
            attachment, load = asked
            began_s = time.monotonic()
            try:
                is_loaded = self._load(attachment, load)
            except Exception:
                # Each load ends: a request whose end is not reported would wait for ever, and keep its pages.
                log.exception("kvmesh: a load has failed")
                is_loaded = False
            num_loaded = len(load.slots) if is_loaded else 0
            self._client.send_holder(Loaded(load.number, num_loaded, time.monotonic() - began_s))
            with self._lock:
                (self._loaded if is_loaded else self._failed).add(load.request)

    def _load(self, attachment: str, load: Load) -> bool:
        """Copy slots into pages, and check what is in the pages then."""
        if (arena := self._arena_of(attachment)) is None:
            return False
        for run in runs_of(zip(load.slots, load.pages, strict=True)):
            for pages, (keys, values) in zip(self._pages, arena.planes, strict=True):
                rows = pages[run.engine_block : run.engine_block + run.num_blocks]
                rows[:, : arena.half] = keys[run.arena_block : run.arena_block + run.num_blocks]
                rows[:, arena.half :] = values[run.arena_block : run.arena_block + run.num_blocks]
        is_right = True
        for slot, page, digest, block_hash in zip(load.slots, load.pages, load.digests, load.hashes, strict=True):
            if self._page_digest(page) != digest:
                is_right = False
                log.error("kvmesh: a block that was loaded is damaged: its request is computed")
                self._client.send_holder(BlockRefused(slot, block_hash))
        return is_right

    def _page_digest(self, page: int) -> bytes:
        """Return the digest of a block's bytes as the holder has it (`BlockContents.digest`)."""
        hasher = xxhash.xxh3_128()
        for pages in self._pages:
            hasher.update(pages[page].data)
        return hasher.digest()

    # Comparing.

    def _compare(self, arena: MappedArena, compares: Sequence[Compare]) -> None:
        for each in compares:
            kept = [np.concatenate((keys[each.slot], values[each.slot])) for keys, values in arena.planes]
            hasher = xxhash.xxh3_128()
            for part in kept:
                hasher.update(part.data)
            if hasher.digest() != each.digest:
                self._client.send_holder(BlockRefused(each.slot, each.block_hash))
                continue
            difference = self._difference(kept, each.page)
            is_same = difference <= TOLERANCE[self._identity.dtype]
            self._client.send_holder(Compared(each.block_hash, difference, is_same))

    def _difference(self, kept: Sequence[Pages], page: int) -> float:
        """Return the largest difference of a block's values, of all layers, as a share of that layer's spread."""
        worst = 0.0
        for ours, theirs in zip((pages[page] for pages in self._pages), kept, strict=True):
            if np.array_equal(ours, theirs):
                continue
            one, other = self._values(ours), self._values(theirs)
            spread = max(float(one.max() - one.min()), 1e-30)
            difference = float(np.abs(one - other).max()) / spread
            worst = max(worst, difference if np.isfinite(difference) else np.inf)
        return worst

    def _values(self, row: Pages) -> npt.NDArray[np.float32]:
        if self._identity.dtype == "bfloat16":  # numpy has none: the upper half of a float32
            return (row.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return row.view(self._identity.dtype).astype(np.float32)

    def _arena_of(self, attachment: str) -> MappedArena | None:
        """Return the arena that a plan speaks of, mapped; None: its attachment is over, and its slots are others'."""
        with self._client.changed:
            welcome = self._client.welcome
        with self._lock:
            if welcome is None or welcome.attachment != attachment:
                return None
            if self._arena is not None and self._arena.nonce == welcome.nonce:
                return self._arena
            try:
                arena = MappedArena(self._identity, welcome)
            except ArenaMissingError as error:
                log.warning("kvmesh: %s", error)
                return None
            # What is mapped goes when the last copy from it has ended: its views keep it.
            if self._arena is not None:
                self._arena.close()
            self._arena = arena
            return arena
