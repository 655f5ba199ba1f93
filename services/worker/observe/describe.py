"""What a KV holder answers to whoever asks what it is doing. Pure."""

from collections.abc import Iterable

from schemas.observe import HeldLease, HeldRequest, WorkerDescribed
from schemas.worker import WorkerLoad
from services.worker.kv.leases import Grant

MAX_LISTED = 200
"""Requests, and leases, in one answer: the oldest."""


def describe(
    load: WorkerLoad, requests: Iterable[HeldRequest], leases: Iterable[Grant], now_ms: int
) -> WorkerDescribed:
    """Return the state of a worker or store at `now_ms` (Unix ms)."""
    held = sorted((_held(lease, now_ms) for lease in leases), key=lambda lease: -lease.age_ms)
    running = sorted(requests, key=lambda request: -request.age_ms)
    return WorkerDescribed(
        load=load,
        requests=tuple(running[:MAX_LISTED]),
        leases=tuple(held[:MAX_LISTED]),
        num_requests=len(running),
        num_leases=len(held),
    )


def _held(lease: Grant, now_ms: int) -> HeldLease:
    return HeldLease(
        lease_id=lease.lease_id,
        reader=lease.reader,
        num_blocks=lease.num_blocks,
        age_ms=max(0, now_ms - lease.granted_ms),
        left_ms=max(0, lease.expires_at_ms - now_ms),
    )
