"""What must be so once every request has ended: nothing runs, nothing is leased, every block is accounted for."""

from typing import NamedTuple

from services.runtime import now_ms
from services.sim.platform.mesh import SimMesh
from services.worker.kv.contents import WorkerHolder
from services.worker.kv.holder import KVHolder


class Held(NamedTuple):
    """What somebody still holds and nobody needs any more."""

    what: str
    num_blocks: int


OVERDUE_MS = 1_000
"""How long after its expiry a lease may be found open: the sweep goes by a clock of its own."""


def problems_now(mesh: SimMesh) -> list[str]:
    """Return what must not be at any time: a worker's books that do not add up, a lease that outlives its time."""
    problems: list[str] = []
    for service in mesh.services.values():
        if not service.is_running or service.process.is_paused:
            continue
        tables = [gate.leases for gate in service.gates if isinstance(gate, KVHolder)]
        for gate in service.gates:
            if isinstance(gate, WorkerHolder):
                gate.cache.check_integrity()
        for leases in tables:
            late = [lease.lease_id for lease in leases if lease.expires_at_ms + OVERDUE_MS < now_ms()]
            problems += [f"{service.name}: {lease_id} has expired and is still open" for lease_id in late]
        problems += [
            f"{service.name}: {gate.num_orphaned} blocks are in use and nobody's"
            for gate in service.gates
            if isinstance(gate, KVHolder) and gate.num_orphaned
        ]
    return problems


def held_at_rest(mesh: SimMesh) -> list[Held]:
    """Return what is still held. Asserts that every cache's own books are right."""
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
    return held
