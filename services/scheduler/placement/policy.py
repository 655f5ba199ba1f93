"""What a placement policy is: a pure function from a question to a choice. Ours are written against the same interface
as anybody's (docs/policies.md). The simple ones are here; `cost` prices whole placements (`cost.py`).
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from schemas.directory import HolderPrefix
from schemas.ids import WorkerId
from schemas.request import KVSource, PlacementTerms
from services.scheduler.placement.fleet_view import Demand, FleetView, Group
from services.scheduler.placement.known_rates import Slots

NOBODY: Slots = np.zeros(0, np.intp)


class PolicyError(Exception):
    """A policy has chosen what cannot be."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request to place. Nothing in it may be changed."""

    demand: Demand
    first_block: bytes
    """The hash of the prompt's first block; empty where the prompt is shorter."""
    turn: int
    """So many requests were placed before."""
    fleet: FleetView
    groups: tuple[Group, ...]
    """Who may be chosen: a prefill worker with a decode worker of its group, or an aggregated worker alone. All have
    room for the request; who has a higher penalty than others is left out."""
    lone: tuple[Slots, ...]
    """Of each group the decode workers that may be chosen alone, for a prompt of which they hold the most."""
    against: Slots
    """By slot, a worker's penalty: it is suspect, or has failed this request before."""
    penalty: int = 0
    """The penalty of each pair and aggregated worker of `groups`."""
    holders: Sequence[HolderPrefix] = ()
    """Who is reported to hold which of the prompt's blocks; a hint."""
    lenders: Sequence[HolderPrefix] = ()
    """Those of them that may be read from."""

    @property
    def has_ways(self) -> bool:
        """Whether there is anybody in `groups`."""
        return any(group.has_pairs or len(group.aggregated) for group in self.groups)

    @property
    def firsts(self) -> Slots:
        """Who may compute the prompt, ordered by id."""
        slots = [group.aggregated for group in self.groups]
        slots += [group.prefill for group in self.groups if group.has_pairs]
        return self.fleet.by_id(np.concatenate([NOBODY, *slots]))

    def partners(self, first: int) -> Slots:
        """Return who may decode what `first` has computed; nobody: it does so itself."""
        return next((group.decode for group in self.groups if first in group.prefill), NOBODY)


class Choice(NamedTuple):
    """Who serves. Without `decode` the first does it alone. `sources`: what it reads from whom, in order."""

    prefill: WorkerId
    decode: WorkerId | None = None
    sources: tuple[KVSource, ...] = ()
    terms: PlacementTerms | None = None
    """Why, for people."""


Policy = Callable[[Question], Choice | None]
"""None: nobody can serve."""


def round_robin(question: Question) -> Choice | None:
    """Take turns, whatever the load."""
    return _one_by_one(question, lambda slots, phase: int(slots[question.turn % len(slots)]))


def least_loaded(question: Question) -> Choice | None:
    """Prefill is bound by tokens to compute, decode by sequences in the batch; equals take turns."""

    def pick(slots: Slots, phase: str) -> int:
        slots = np.roll(slots, -(question.turn % len(slots)))
        rows = question.fleet.rows[slots]
        if phase == "prefill":
            order = np.lexsort((rows["requests"], rows["waiting_tokens"]))
        else:
            order = np.lexsort((-rows["usable_blocks"], rows["requests"]))
        return int(slots[order[0]])

    return _one_by_one(question, pick)


def affinity(question: Question) -> Choice | None:
    """Send prompts that begin with the same block, as all turns of a conversation do, to the same worker.

    By rendezvous hashing: a worker that leaves moves its own prompts only. Whatever the load: prompts that share a
    system prompt all go to one worker.
    """
    if not question.first_block:
        return least_loaded(question)

    def weight(slot: int) -> bytes:
        worker_id = question.fleet.worker(slot).info.worker_id
        return hashlib.blake2b(question.first_block + worker_id.encode()).digest()

    return _one_by_one(question, lambda slots, phase: max(slots.tolist(), key=weight))


def _one_by_one(question: Question, pick: Callable[[Slots, str], int]) -> Choice | None:
    """Pick who computes the prompt, then who of its partners decodes."""
    firsts = question.firsts
    if not len(firsts):
        return None
    first = int(pick(firsts, "prefill"))
    partners = question.partners(first)
    decode = int(pick(partners, "decode")) if len(partners) else None
    worker = question.fleet.worker
    return Choice(worker(first).info.worker_id, worker(decode).info.worker_id if decode is not None else None)


POLICIES: Mapping[str, Policy] = {"affinity": affinity, "least_loaded": least_loaded, "round_robin": round_robin}
"""The simple ones, by name."""
