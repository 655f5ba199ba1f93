"""The tier behind memory as the event loop uses it: on threads, in bounded time, and left alone for a while after it
failed. Nothing of it raises: what cannot be had is a miss, and a line of the log."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from services.store.blocks import Unwritten, WriteBatch
from services.store.limits import BATCH_BYTES, LOAD_AHEAD, MAX_LOADS
from services.store.tiers import BackTier, StoreKey, TierError, TierFullError
from services.store.values import BadValueError, BlockValues

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """The first `len(tags)` blocks are filled, and prove their content by these; the values `lost` were damaged or
    gone."""

    tags: list[bytes]
    lost: list[StoreKey]


class Written(NamedTuple):
    """`failed`: not all was written; `full`: as there is no room for it."""

    keys: Sequence[StoreKey]
    failed: bool = False
    full: bool = False


class Backing:
    """Loads blocks from a tier and writes them to it. One that has failed is left alone for `pause_s`."""

    def __init__(self, tier: BackTier, values: BlockValues, pause_s: float) -> None:
        self.tier = tier
        self._pause_s = pause_s
        self.batch_blocks = max(1, BATCH_BYTES // values.value_bytes)
        self._values = values
        self._paused_until = 0.0
        self._to_delete: dict[StoreKey, None] = {}
        """What was given up and could not be deleted yet: it goes with the next write."""
        self._loads = ThreadPoolExecutor(MAX_LOADS * LOAD_AHEAD, "store-load")
        self._writes = ThreadPoolExecutor(1, "store-write")

    @property
    def is_up(self) -> bool:
        """Return whether it has not failed just now."""
        return time.monotonic() >= self._paused_until

    async def load_blocks(self, keys: Sequence[StoreKey], blocks: Sequence[int]) -> Loaded:
        """Fill blocks, `batch_blocks` at most, with one call of the tier."""
        return await asyncio.get_running_loop().run_in_executor(self._loads, self._load, keys, blocks)

    async def write_batch(self, batch: WriteBatch) -> Written:
        """Delete what the batch evicts, then write it."""
        return await asyncio.get_running_loop().run_in_executor(self._writes, self._write, batch)

    async def delete(self, keys: Sequence[StoreKey] | None) -> str:
        """Delete values, all that is there for None, after what is being written now. Return why that failed, for
        people; "": it is done. Values that could not be deleted go with the next write, if there is one."""
        return await asyncio.get_running_loop().run_in_executor(self._writes, self._delete, keys)

    def close(self) -> None:
        """Let go of the tier; does not wait for a call that it does not answer."""
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._writes.shutdown(wait=False, cancel_futures=True)
        self.tier.close()

    # On the threads.

    def _load(self, keys: Sequence[StoreKey], blocks: Sequence[int]) -> Loaded:
        if not self.is_up:
            return Loaded([], [])
        try:
            values = self.tier.read(keys)
        except TierError as error:
            self._failed(error)
            return Loaded([], [])
        tags: list[bytes] = []
        lost = [key for key, value in zip(keys, values, strict=True) if value is None]
        if lost:
            log.warning("%d blocks are gone from the %s tier", len(lost), self.tier.name)
        for key, value, block in zip(keys, values, blocks, strict=True):
            if value is None:
                break
            try:
                tags.append(self._values.unpack(key, value, block))
            except BadValueError as error:
                log.warning("dropped block %s of %s: %s", key.hex(), self.tier.name, error)
                with contextlib.suppress(TierError):
                    self.tier.delete([key])
                lost.append(key)
                break
        return Loaded(tags, lost)

    def _write(self, batch: WriteBatch) -> Written:
        try:
            self._to_delete.update(dict.fromkeys(batch.evicted))
            self._delete_pending()
            self.tier.write({each.key: self._packed(each) for each in batch.blocks})
        except TierFullError as error:
            log.warning("%s; as much is given up", error)
            return Written(error.written, failed=True, full=True)
        except TierError as error:
            self._failed(error)
            return Written(error.written, failed=True)
        return Written(batch.keys)

    def _packed(self, unwritten: Unwritten) -> bytearray:
        tag = unwritten.tag or self._values.contents.tag(unwritten.content, unwritten.block)
        return self._values.pack(unwritten.key, unwritten.block, tag)

    def _delete(self, keys: Sequence[StoreKey] | None) -> str:
        self._to_delete.update(dict.fromkeys(keys or ()))
        try:
            if keys is None:
                self.tier.delete_all()
                self._to_delete.clear()
            else:
                self._delete_pending()
        except TierError as error:
            self._failed(error)
            return str(error)
        return ""

    def _delete_pending(self) -> None:
        if self._to_delete:
            self.tier.delete(list(self._to_delete))
            self._to_delete.clear()

    def _failed(self, error: TierError) -> None:
        self._paused_until = time.monotonic() + self._pause_s
        log.warning("the %s tier fails: %s; left alone for %g s", self.tier.name, error, self._pause_s)
