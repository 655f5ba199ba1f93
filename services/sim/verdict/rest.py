"""What must be true at any time, and what must be true once every request has ended: no lease open, no reader
expected, every block free or cached."""

from typing import NamedTuple

from services.sim.limits import OVERDUE_MS
from services.sim.mesh import SimMesh
from services.worker.kv.contents import WorkerHolder
from services.worker.kv.holder import KVHolder


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
        tables = [gate.leases for gate in service.gates if isinstance(gate, KVHolder)]
        for gate in service.gates:
            if isinstance(gate, WorkerHolder):
                gate.cache.check_integrity()
        for leases in tables:
            late = [lease.lease_id for lease in leases if lease.expires_at_ms + OVERDUE_MS < now_ms]
            problems += [f"{service.name}: {lease_id} has expired and is still open" for lease_id in late]
        problems += [
            f"{service.name}: {gate.num_orphaned} blocks are in use and belong to no request"
            for gate in service.gates
            if isinstance(gate, KVHolder) and gate.num_orphaned
        ]
    return problems


def held_at_rest(mesh: SimMesh) -> list[Held]:
    """Return what is still held. Raises AssertionError where a cache's own counts do not add up."""
    held: list[Held] = []
    for service in mesh.services.values():
        if not service.is_running or service.process.is_paused:
            continue
        for gate in service.gates:
            if isinstance(gate, WorkerHolder):
                held += _of_worker(service.name, gate)
            elif isinstance(gate, KVHolder) and (num_leases := len(gate.leases)):
                held.append(Held(f"{service.name}: {num_leases} leases are open", num_leases))
    return held


def _of_worker(name: str, holder: WorkerHolder) -> list[Held]:
    cache = holder.cache
    cache.check_integrity()
    held: list[Held] = []
    num_held = cache.num_blocks - cache.num_free - cache.num_cached
    if len(holder.leases):
        held.append(Held(f"{name}: {len(holder.leases)} leases are open", num_held))
    elif num_held:
        held.append(Held(f"{name}: {num_held} blocks are neither free nor cached", num_held))
    if num_expected := holder.leases.num_expected:
        held.append(Held(f"{name}: {num_expected} readers are expected that nobody sends", 0))
    return held
