"""What must be true at any time, and what must be true once every request has ended: no lease open, no reader
expected, every block free or cached."""

from typing import Any, NamedTuple, cast

from dataplane.blocks.cache import BlockCache
from services.holder.core.leases import LeaseTable
from services.holder.kv.blocks import LentBlocks
from services.sim.limits import OVERDUE_MS
from services.sim.mesh import Service, SimMesh
from services.store.blocks import StoreMemory


class Held(NamedTuple):
    """Something that is still held after all requests have ended."""

    what: str
    num_blocks: int


def problems_now(mesh: SimMesh) -> list[str]:
    """Return what is wrong now: block counts that do not add up, leases open after their expiry, blocks of no
    request."""
    problems: list[str] = []
    for service in mesh.services.values():
        if not service.is_running or service.process.is_paused:
            continue
        now_ms = service.process.clock.monotonic_ns(mesh.now_ns) // 1_000_000
        for holder in _holders(service):
            holder.memory.check_integrity()
            late = [lease.lease_id for lease in holder.leases if lease.expires_at_ms + OVERDUE_MS < now_ms]
            problems += [f"{service.name}: {lease_id} has expired and is still open" for lease_id in late]
            if orphaned := holder.num_orphaned:
                problems.append(f"{service.name}: {orphaned} blocks are in use and belong to no request")
    return problems


def held_at_rest(mesh: SimMesh) -> list[Held]:
    """Return what is still held. Raises AssertionError where a cache's own counts do not add up."""
    held: list[Held] = []
    for service in mesh.services.values():
        if not service.is_running or service.process.is_paused:
            continue
        for holder in _holders(service):
            held += _held_of(service.name, holder.memory, holder.leases)
    return held


def _holders(service: Service) -> list[LentBlocks[Any]]:
    return [cast("LentBlocks[Any]", gate) for gate in service.gates if isinstance(gate, LentBlocks)]


def _held_of(name: str, memory: BlockCache | StoreMemory, leases: LeaseTable) -> list[Held]:
    memory.check_integrity()
    held: list[Held] = []
    num_held = memory.num_blocks - memory.num_free - memory.num_cached
    if len(leases):
        held.append(Held(f"{name}: {len(leases)} leases are open", num_held))
    elif num_held and isinstance(memory, BlockCache):  # a store may be writing or reading some
        held.append(Held(f"{name}: {num_held} blocks are neither free nor cached", num_held))
    if num_expected := leases.num_expected:
        held.append(Held(f"{name}: {num_expected} readers are expected that nobody sends", 0))
    return held
