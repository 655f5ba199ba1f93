"""The workers that a placement chooses from, one by one and as arrays: a row for each worker's slot. Pure.

What does not depend on a request is kept up to date as workers speak; what does is computed for all of them at once.
"""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from schemas.directory import Tier
from schemas.ids import WorkerId
from schemas.worker import WorkerInfo, WorkerLoad, WorkerRole, WorkerState
from services.scheduler.limits import START_DECODE_STEP_MS, START_TOKEN_BYTES
from services.scheduler.placement.known_rates import Floats, Ints, Links, Pairs, Slots, Speeds, filled, grown
from services.scheduler.placement.known_worker import KnownWorker, idle

Rows = npt.NDArray[np.void]
_COMPUTES = (WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.AGGREGATED)

ROW = np.dtype(
    [
        ("waiting_tokens", np.float64),
        ("requests", np.int64),
        ("waiting", np.int64),
        ("queued", np.int64),
        ("running", np.int64),
        ("usable_blocks", np.int64),
        ("free_blocks", np.int64),
        ("placed_blocks", np.int64),
        ("block_size", np.int64),
        ("max_tokens", np.int64),
        ("step_ms", np.float64),
        ("token_bytes", np.float64),
    ]
)
"""What placements read of a worker, as `KnownWorker` names it. `max_tokens`: of prompt and answer; `step_ms`: of a
decode step, and `token_bytes`: of a token's KV; 0: not measured."""


class Demand(NamedTuple):
    """What is asked for."""

    num_prompt_tokens: int
    max_tokens: int
    tenant: str = ""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_tokens


class Group(NamedTuple):
    """The workers that understand each other's KV and may be given requests, by role, ordered by id."""

    prefill: Slots
    decode: Slots
    aggregated: Slots

    @property
    def has_pairs(self) -> bool:
        return bool(len(self.prefill) and len(self.decode))


class Queues(NamedTuple):
    """What a new request would find before it on each of some workers."""

    prompts_ms: Floats
    """The prompts in line are computed after this long."""
    answers_ms: Floats
    """Enough answers have ended after this long that there is room to decode; 0: there is."""
    num_waiting: npt.NDArray[np.int64]


class FleetView:
    """The workers that are known to live, by id, and what follows from all of them together.

    Policies read it and change nothing; slots are those of `groups`, or of `slots`."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, KnownWorker] = {}
        self.rows: Rows = np.zeros(0, ROW)
        """By slot."""
        self._by_slot: list[KnownWorker | None] = []
        self._free: list[int] = []
        self._speeds = Speeds()
        self._pairs = Pairs()
        self._slots: dict[WorkerId, int] = {}
        self._lined: dict[int, KnownWorker] = {}
        """By slot: where tenants are in line."""
        self._asked: tuple[Demand, Queues] | None = None
        """The queues that were last asked for, of all workers, until anything changes."""

    def __contains__(self, incarnation: tuple[WorkerId, str]) -> bool:
        """Return whether this incarnation is known to live."""
        worker = self.workers.get(incarnation[0])
        return worker is not None and worker.info.incarnation == incarnation[1]

    def add_worker(self, info: WorkerInfo) -> KnownWorker:
        """Return a worker that has just become known."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        worker = self.workers[info.worker_id] = self._by_slot[slot] = KnownWorker(info, idle(info), slot)
        self._slots[info.worker_id] = slot
        self._pairs.add_source(slot, info.worker_id)
        self._write(worker)
        self._regroup()
        return worker

    def note_load(self, load: WorkerLoad, now_ms: int) -> None:
        """Note what a known worker reports of itself."""
        worker = self.workers[load.worker.worker_id]
        state, before = worker.state, worker.load.rates
        worker.observe(load)
        self._write(worker)
        if load.rates.prefill != before.prefill:
            self._speeds.observe(worker.slot, load.rates.prefill)
        if load.rates.transfers != before.transfers:
            self._pairs.observe(worker.slot, load.rates.transfers, now_ms)
        else:
            self._pairs.renew(worker.slot, now_ms)
        if worker.state != state:
            self._regroup()

    def drain(self, worker: KnownWorker) -> None:
        """Give a worker nothing new."""
        worker.is_draining = True
        self._regroup()

    def leave(self, worker_id: WorkerId) -> None:
        """Forget a known worker."""
        slot = self.workers.pop(worker_id).slot
        del self._slots[worker_id]
        self._by_slot[slot] = None
        self._free.append(slot)
        self.rows[slot] = 0
        self._lined.pop(slot, None)
        self._forget_sums()
        self._speeds.observe(slot, ())
        self._pairs.remove_worker(slot)
        self._regroup()

    def place(self, worker: KnownWorker, *, tenant: str, num_tokens: int, num_blocks: int) -> None:
        """Count a request as load until the worker reports its own."""
        worker.place(tenant=tenant, num_tokens=num_tokens, num_blocks=num_blocks)
        self._write(worker)

    def worker(self, slot: int) -> KnownWorker:
        worker = self._by_slot[slot]
        assert worker is not None, f"slot {slot} is nobody's"
        return worker

    def slots(self, worker_ids: Collection[WorkerId]) -> Slots:
        """Return the slots of those that are known."""
        return np.array([self._slots[each] for each in worker_ids if each in self._slots], np.intp)

    def by_id(self, slots: Slots) -> Slots:
        """Return slots in the order of their workers' ids."""
        return slots[np.argsort(self._ranks[slots], kind="stable")]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Who may be given requests."""
        members: dict[str, dict[str, list[int]]] = {}
        for worker in self.usable:
            roles = members.setdefault(worker.info.fingerprint, {role: [] for role in _COMPUTES})
            roles[worker.info.role].append(worker.slot)
        return tuple(Group(**{role: np.array(s, np.intp) for role, s in roles.items()}) for roles in members.values())

    @cached_property
    def usable(self) -> list[KnownWorker]:
        """The workers that may be given requests, ordered by id."""
        ordered = sorted(self.workers.values(), key=lambda worker: worker.info.worker_id)
        return [worker for worker in ordered if worker.state == WorkerState.READY and worker.info.role in _COMPUTES]

    @cached_property
    def _ranks(self) -> Slots:
        """Each slot's place in the order of ids."""
        ranks = np.zeros(len(self.rows), np.intp)
        ranks[[worker.slot for worker in self.usable]] = np.arange(len(self.usable))
        return ranks

    @property
    def is_measured(self) -> bool:
        """Whether anybody has computed a prompt yet."""
        return self._speeds.has_measured()

    def compute_ms(self, slots: Slots, first_token: int | Ints, end_token: int | Ints | Floats) -> Floats:
        """Return how long each worker computes the prompt's tokens [first_token, end_token), undisturbed."""
        return self._speeds.compute_ms(slots, first_token, end_token)

    def links(self, sources: Slots, readers: Slots, tiers: Sequence[Tier] = ()) -> Links:
        """Return how each reader reads from each source, which keep the blocks in these tiers (an arena)."""
        return self._pairs.between(sources, readers, self._slots, tiers)

    def link_rates(self, sources: Slots, readers: Slots) -> Floats:
        """Return the bytes per second of each reader from each source's arena, `[sources, readers]`."""
        return self._pairs.rates(sources, readers, self._slots)

    def quickest(self, readers: Slots) -> Floats:
        """Return the bytes per second of each reader's quickest source."""
        return self._pairs.quickest(readers, self._slots)

    def step_ms(self, slots: Slots) -> Floats:
        """Return how long each worker's decode step takes."""
        return self._step_ms[slots]

    def token_bytes(self, slots: Slots) -> Floats:
        """Return the bytes of one token's KV on each worker."""
        return self._token_bytes[slots]

    def queues(self, demand: Demand, slots: Slots) -> Queues:
        """Predict what a request would wait for on each worker."""
        if self._asked is None or self._asked[0] != demand:
            self._asked = demand, self._queues(demand)
        queues = self._asked[1]
        return Queues(queues.prompts_ms[slots], queues.answers_ms[slots], queues.num_waiting[slots])

    def _queues(self, demand: Demand) -> Queues:
        rows, slots = self.rows, np.arange(len(self.rows))
        waiting, waiting_tokens = rows["waiting"].copy(), rows["waiting_tokens"].copy()
        for slot, worker in self._lined.items():
            waiting[slot], waiting_tokens[slot] = worker.before(demand.tenant, demand.num_prompt_tokens)
        # The prompts in line are taken to be as long as this one: their context decides their speed.
        whole_ms = self.compute_ms(slots, 0, demand.num_prompt_tokens)
        prompts_ms = waiting_tokens * whole_ms / demand.num_prompt_tokens
        # Room comes as answers end: those who run end within about one answer's time, and let as many in. It is given
        # to tenants in turn, and in the order of arrival: whoever is small waits behind whoever is large.
        num_needed = needed_blocks(demand, np.maximum(rows["block_size"], 1))
        must_wait = (rows["queued"] > 0) | (num_needed > rows["usable_blocks"])
        num_at_once = (rows["usable_blocks"] + rows["placed_blocks"]) // num_needed
        num_at_once = np.maximum(np.maximum(num_at_once, rows["running"]), 1)
        answers_ms = demand.max_tokens * self.step_ms(slots) * waiting / num_at_once
        return Queues(prompts_ms, np.where(must_wait, answers_ms, 0.0), waiting)

    def fitting(self, slots: Slots, demand: Demand) -> Slots:
        """Return those that have room for prompt and answer."""
        return slots[self.rows["max_tokens"][slots] >= demand.num_tokens]

    def replica_of(self, decoding: KnownWorker, avoided: Collection[WorkerId]) -> WorkerId | None:
        """Return who should be offered what `decoding` completes: a store, else whoever decodes too and has most
        room."""
        like = [
            w
            for w in self.workers.values()
            if w is not decoding
            and w.info.fingerprint == decoding.info.fingerprint
            and not w.is_draining
            and w.info.worker_id not in avoided
        ]
        stores = [w for w in like if w.info.role == WorkerRole.STORE]
        peers = [w for w in like if w.info.role in (WorkerRole.DECODE, WorkerRole.AGGREGATED)]
        chosen = max(stores or peers, key=lambda w: w.num_usable_blocks, default=None)
        return chosen.info.worker_id if chosen else None

    @cached_property
    def _step_ms(self) -> Floats:
        return filled(self.rows["step_ms"], START_DECODE_STEP_MS)

    @cached_property
    def _token_bytes(self) -> Floats:
        return filled(self.rows["token_bytes"], START_TOKEN_BYTES)

    def _write(self, worker: KnownWorker) -> None:
        info, load = worker.info, worker.load
        self._forget_sums()
        if worker.lines:
            self._lined[worker.slot] = worker
        else:
            self._lined.pop(worker.slot, None)
        self.rows[worker.slot] = (
            worker.num_waiting_tokens, worker.num_requests, worker.num_waiting, load.num_queued, load.num_running,
            worker.num_usable_blocks, worker.num_free_blocks, worker.num_placed_blocks, max(1, info.block_size),
            min(info.context_length, info.num_blocks * info.block_size), load.rates.decode_step_ms,
            load.rates.kv_token_bytes,
        )  # fmt: skip

    def _forget_sums(self) -> None:
        """What was made of all rows is to be made anew."""
        self._asked = None
        for name in ("_step_ms", "_token_bytes"):
            self.__dict__.pop(name, None)

    def _regroup(self) -> None:
        for name in ("groups", "usable", "_ranks"):
            self.__dict__.pop(name, None)

    def _grow(self) -> None:
        before, capacity = len(self._by_slot), max(16, 2 * len(self._by_slot))
        self.rows = grown(self.rows, (capacity,), 0)
        self._speeds.grow(capacity)
        self._pairs.grow(capacity)
        self._by_slot += [None] * (capacity - before)
        self._free += range(capacity - 1, before - 1, -1)


def needed_blocks(demand: Demand, block_size: Any) -> Any:
    """Return how many blocks the prompt and the answer fill; of one size or of an array of them."""
    return -(-demand.num_tokens // block_size)
