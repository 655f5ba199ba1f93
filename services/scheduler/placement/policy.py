"""Placement policies, chosen by name. Pure.

The simple ones pick one of several workers and are here; `cost` prices whole placements (`cost.py`).
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Literal

from services.errors import UserError
from services.scheduler.placement.known_worker import KnownWorker

Phase = Literal["prefill", "decode"]

Policy = Callable[[Phase, Sequence[KnownWorker], int, bytes], KnownWorker]
"""(phase, candidates: never empty, in a stable order; how many were picked before; the hash of the prompt's first
block: empty where the prompt is shorter) -> the one to use. Changes none."""


def round_robin(phase: Phase, candidates: Sequence[KnownWorker], turn: int, first_block: bytes) -> KnownWorker:
    """Take turns, whatever the load."""
    return candidates[turn % len(candidates)]


def least_loaded(phase: Phase, candidates: Sequence[KnownWorker], turn: int, first_block: bytes) -> KnownWorker:
    """Prefill is bound by tokens to compute, decode by sequences in the batch; equals take turns."""
    start = turn % len(candidates)
    rotated = [*candidates[start:], *candidates[:start]]
    if phase == "prefill":
        return min(rotated, key=lambda c: (c.num_uncomputed_tokens, c.num_requests))
    return min(rotated, key=lambda c: (c.num_requests, -c.num_usable_blocks))


def affinity(phase: Phase, candidates: Sequence[KnownWorker], turn: int, first_block: bytes) -> KnownWorker:
    """Send prompts that begin with the same block, as all turns of a conversation do, to the same worker.

    By rendezvous hashing: a worker that leaves moves its own prompts only. Whatever the load: prompts that share a
    system prompt all go to one worker.
    """
    if not first_block:
        return least_loaded(phase, candidates, turn, first_block)
    return max(candidates, key=lambda c: hashlib.blake2b(first_block + c.info.worker_id.encode()).digest())


POLICIES: dict[str, Policy | None] = {
    "affinity": affinity,
    "cost": None,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}
"""None: not picked worker by worker."""


def policy_named(name: str) -> Policy | None:
    """Return a policy; None for `cost`. Raises UserError with the names there are."""
    if name not in POLICIES:
        raise UserError(f"no placement policy is called {name!r}; there are: {', '.join(sorted(POLICIES))}")
    return POLICIES[name]
