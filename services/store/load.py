"""Makes what a store runs on, before its event loop: memory, and the tier behind it with what that has."""

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataplane.blocks.layout import KVLayout, uniform_shape
from dataplane.machine import available_bytes
from dataplane.memory.arena import ArenaTooLargeError
from dataplane.memory.content_macs import BlockContents
from schemas.ids import WorkerId
from schemas.worker import WorkerInfo, WorkerRole
from services.config import MeshConfig, StoreConfig, state_dir
from services.engine.checkpoint import layout_for, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.errors import UserError
from services.holder.parts import HolderParts
from services.holder.platform import THREADS, Platform
from services.store.blocks import StoreLimits, StoreMemory
from services.store.disk import DiskTier
from services.store.tiers import BackTier, TierError
from services.store.values import BlockValues
from services.trust.credentials import HolderCredentials, holder_credentials

log = logging.getLogger(__name__)

DISK_URL = "disk"
SERVER_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
GIB = 1 << 30

OpenTier = Callable[[StoreConfig, BlockValues], BackTier | None]


@dataclass(frozen=True, kw_only=True)
class StoreParts(HolderParts):
    """A store's memory, and what it knows of its tiers."""

    values: BlockValues
    memory: StoreMemory
    tier: BackTier | None


def load_store(config: MeshConfig, store_id: str) -> StoreParts:
    """Map the memory and read what the tier behind it has. Raises UserError: a bad URL, an unwritable folder, a server
    that does not answer, a bound that holds no block, too little memory."""
    credentials = holder_credentials(config)
    checkpoint = read_checkpoint(config.model.path or str(DEMO_MODEL_DIR), config.engine.name)
    check_memory(config.store)
    return make_parts(
        config,
        store_id,
        layout_for(config, checkpoint),
        credentials,
        model=config.model.name or checkpoint.name,
        context_length=checkpoint.context_length,
    )


def check_memory(settings: StoreConfig) -> None:
    """Raise UserError where there is too little memory for a store's."""
    needed, available = settings.memory_bytes, available_bytes()
    if available is not None and needed > available:
        raise UserError(
            f"store.memory_bytes (--memory-gib) = {needed / GIB:.3g} GiB, and {available / GIB:.3g} are free: lower it"
        )


def make_parts(
    config: MeshConfig,
    store_id: str,
    layout: KVLayout,
    credentials: HolderCredentials,
    *,
    model: str,
    context_length: int,
    open_behind: OpenTier | None = None,
    platform: Platform = THREADS,
) -> StoreParts:
    """Return the parts of a store for KV of this layout, `open_tier` unless another is given. Raises UserError."""
    # Map an arena of as many whole blocks as the configured memory holds, one at least.
    settings = config.store
    num_blocks = settings.memory_bytes // layout.block_bytes
    if num_blocks < 1:
        raise UserError(f"store.memory_bytes = {settings.memory_bytes} hold no block of {layout.block_bytes} bytes")
    shape = uniform_shape(layout, num_blocks)
    try:
        arena = platform.make_arena(shape)
    except ArenaTooLargeError as error:
        raise UserError(str(error)) from error
    # From here on the arena is mapped: any error must give it back.
    try:
        values = BlockValues(BlockContents(arena, shape, credentials.content_secrets))
        # A value on the tier is a block and its header: the tier's bound must hold one.
        if settings.url and settings.max_bytes < values.value_bytes:
            raise UserError(f"store.max_bytes = {settings.max_bytes} hold no block of {values.value_bytes} bytes")
        tier = (open_behind or open_tier)(settings, values)
        # At most a quarter of the blocks may wait to be written: a block that waits cannot be evicted.
        limits = StoreLimits(
            worker_id=WorkerId(store_id),
            fingerprint=layout.fingerprint,
            block_size=layout.block_size,
            lease_ms=config.worker.lease_ms,
            times=config.times,
            value_bytes=values.value_bytes,
            max_bytes=settings.max_bytes,
            max_unwritten=max(1, num_blocks // 4),
        )
        memory = StoreMemory(limits, layout, num_blocks, tier.name if tier else None)
        # Learn what the tier has from earlier runs, and delete what is over the bound.
        if tier is not None:
            _restore(memory, tier)
    except BaseException:
        arena.close()
        raise
    # Each start is a new incarnation: events and leases of an earlier run do not count for it.
    info = WorkerInfo(
        worker_id=limits.worker_id,
        incarnation=secrets.token_hex(8),
        role=WorkerRole.STORE,
        model=model,
        fingerprint=layout.fingerprint,
        num_blocks=num_blocks,
        num_blocks_behind=memory.back.max_values,
        block_size=layout.block_size,
        context_length=context_length,
    )
    return StoreParts(
        info=info,
        arena=arena,
        shape=shape,
        values=values,
        memory=memory,
        tier=tier,
        credentials=credentials,
        platform=platform,
    )


def open_tier(settings: StoreConfig, values: BlockValues) -> BackTier | None:
    """Return the tier behind memory, None for memory alone. Raises UserError."""
    if not settings.url:
        return None
    if settings.url == DISK_URL:
        root = Path(settings.path) if settings.path else state_dir() / "store"
        return DiskTier(root, values.identity, values.value_bytes, values.earlier)
    if settings.url.split("://")[0] in SERVER_SCHEMES and "://" in settings.url:
        from services.store.remote import ValkeyTier  # noqa: PLC0415 - its client takes 3 MB, which few have a use for

        return ValkeyTier(
            settings.url,
            values.identity,
            values.value_bytes,
            timeout_s=settings.timeout_ms / 1000,
            ttl_s=settings.ttl_s,
            earlier=values.earlier,
        )
    raise UserError(
        "the store's URL is invalid: give disk, redis://host:port/0 or valkey://host:port/0, or leave it out"
    )


def _restore(memory: StoreMemory, tier: BackTier) -> None:
    """Let the memory know what the tier has. Raises UserError."""
    try:
        surplus = memory.back.restore(entry.key for entry in tier.scan())
        tier.delete(surplus)
    except TierError as error:
        tier.close()
        raise UserError(f"the store cannot read what it had: {error}") from error
    if surplus:
        log.warning("gave up %d blocks of the %s tier: they are over the bound", len(surplus), tier.name)
