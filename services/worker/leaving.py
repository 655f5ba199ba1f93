"""Whom a worker that leaves offers its hottest blocks, and which these are. Pure.

Of layers with windows nothing is offered: such blocks are of no use by themselves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane.blocks.kept import Content
from schemas.ids import BlockHash
from schemas.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from services.holder.limits import LEAVING_SHARE, MESSAGE_BLOCKS


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """Blocks of one tenant that `receiver` is offered, the hottest in front."""

    receiver: WorkerInfo
    tenant: str
    hashes: tuple[BlockHash, ...]


def hottest_first(used_last: Sequence[Content], heat: bytes) -> list[Content]:
    """Return these blocks, the one that was asked for most often in front. `heat` has a byte for each, or for the
    first of them; those that are equally hot, or that nothing is known of, keep their order.

    So a block stays behind those that come before it in its sequence: it is used when they are, and asked for when they
    are.
    """
    known = heat.ljust(len(used_last), b"\0")
    return [content for _, content in sorted(zip(known, used_last, strict=False), key=lambda pair: -pair[0])]


def left_behind(me: WorkerInfo, hottest: Sequence[Content], fleet: Iterable[WorkerLoad]) -> list[LeftBehind]:
    """Return what is to be offered to whom, the hottest first. A store takes all that it has room for; without one,
    whoever does the same work as we do and has most room comes first, as far as it may give up its own for ours."""
    like = [
        load
        for load in fleet
        if load.worker.worker_id != me.worker_id
        and load.worker.fingerprint == me.fingerprint
        and load.state == WorkerState.READY
    ]
    stores = [load for load in like if load.worker.role == WorkerRole.STORE]
    like = sorted(stores or like, key=lambda load: (load.worker.role != me.role, -_room(load), load.worker.worker_id))
    offers: list[LeftBehind] = []
    left = list(hottest)
    for load in like:
        taken, left = left[: _room(load)], left[_room(load) :]
        by_tenant: dict[str, list[BlockHash]] = {}
        for content in taken:
            by_tenant.setdefault(content.tenant, []).append(content.block_hash)
        for tenant, hashes in by_tenant.items():
            parts = range(0, len(hashes), MESSAGE_BLOCKS)
            offers += [LeftBehind(load.worker, tenant, tuple(hashes[at : at + MESSAGE_BLOCKS])) for at in parts]
    return offers


def _room(load: WorkerLoad) -> int:
    """Return how many blocks somebody takes of one that leaves. A store makes room by itself."""
    blocks = load.blocks
    return blocks.total if load.worker.role == WorkerRole.STORE else (blocks.free + blocks.cached) // LEAVING_SHARE
