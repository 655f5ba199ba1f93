"""Known bugs of this field, put back one at a time: each must be caught by the simulator within a stated number of
seeds. `python -m tests.sim.bugs` prints the table.

A bug is a patch of our own code, as small as the mistake would be. What is said of peers is from public issue trackers
and from reading (PEERS figures in the README).
"""

import argparse
import asyncio
import copy
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import pytest
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dataplane.blocks.cache import BlockCache
from dataplane.memory import frames
from dataplane.memory.checksum import FrameHash
from dataplane.protocol import stream
from dataplane.protocol.gate import LeaseRefusedError
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.stream import Landing
from schemas.block import BlockHasher
from schemas.ids import LeaseId
from schemas.message import RequestMessage
from schemas.observe import RunStage
from schemas.request import AttemptEnd, CancelRequest
from schemas.worker import WorkerLeft
from services import runtime
from services.bus import typed
from services.bus.base import BusError
from services.clocks import OldestScheduler
from services.holder.core import attempts as attempts_module
from services.holder.core.actions import Emit
from services.holder.core.attempt import InFlightDuplicate
from services.holder.core.attempts import Attempts
from services.holder.core.checks import WorkerLimits
from services.holder.core.copies import CopyCore, Why
from services.holder.core.events import AttemptUnwanted, DeadlinePassed, EngineDied, ReadEnded
from services.holder.core.inflight import InFlightDuplicates
from services.holder.core.leases import Grant, LeaseTable
from services.holder.kv.blocks import LentBlocks, StreamLease
from services.presence import FailureDetector
from services.scheduler.oldest import OldestClock
from services.sim.mesh import MeshShape
from services.sim.platform.engine import SimEngineThread
from services.sim.platform.threads import CoThread
from services.sim.scenario import FAULT_KINDS, Fault, FaultKind, Scenario
from services.sim.world import SimOptions, simulate
from services.telemetry import MeshClock
from services.times import DecodeTimes, PrefillTimes
from services.worker import attempt_rules
from services.worker.core import TABLE
from services.worker.engine_feed import EngineFeed

Patch = Callable[[pytest.MonkeyPatch], None]
FIRST_SEED = 50_000
DEFAULT_OPTIONS = SimOptions()
HURRIED = SimOptions(
    shape=MeshShape(num_blocks=32, lease_ms=300, step_s=0.01, policy="least_loaded"), num_requests=40, span_s=0.6
)
"""Leases end while readers are held up, and their blocks are soon used again."""
OVER_TCP = SimOptions(shape=MeshShape(carrier="tcp", policy="least_loaded"))
STALE_HINTS = SimOptions(shape=MeshShape(num_prefill=3, num_blocks=40, step_s=0.01), num_requests=40, span_s=0.6)
"""The directory is behind, and little is kept for long."""
BUSY = SimOptions(shape=MeshShape(step_s=0.05, policy="least_loaded"), num_requests=80, span_s=4.0)
"""No worker is ever idle."""
SLEEPY = SimOptions(shape=MeshShape(step_s=0.02), num_requests=40, span_s=6.0)
"""Requests go on coming long after the first fault."""
ALONE = SimOptions(shape=MeshShape(num_prefill=1, num_decode=1))
"""Whoever dies is missed."""
MISSED = dataclasses.replace(
    ALONE, scenario=Scenario(faults=(Fault(do="kill", target="prefill-0", at_s=0.3, for_s=20.0),))
)
"""... for longer than a new request waits."""
NO_BROKER = SimOptions(scenario=Scenario(faults=(Fault(do="broker", at_s=0.3, for_s=100.0),), may_fail=True))
"""What is under way cannot be ended well."""
RESUMED = SimOptions(
    shape=MeshShape(num_prefill=1, step_s=0.03, num_blocks=256, policy="least_loaded"),
    num_requests=40,
    scenario=Scenario(
        faults=tuple(Fault(do="kill", target="decode", at_s=at_s, for_s=0.3) for at_s in (0.3, 0.8, 1.3, 1.8))
    ),
)
"""Answers go on where their prompts were computed."""
OUT_OF_REACH = SimOptions(
    shape=MeshShape(has_store=True, num_blocks=40),
    num_requests=40,
    scenario=Scenario(faults=(Fault(do="refusal", at_s=0.3, for_s=5.0, share=0.8),)),
)
"""Holders grant leases, and cannot be reached."""
BURSTS = SimOptions(shape=MeshShape(step_s=0.03, num_blocks=256), num_requests=60, span_s=0.4)
"""Prompts that begin alike are computed at one time."""
DRAINED = SimOptions(
    shape=MeshShape(num_prefill=3, num_decode=3, num_blocks=256, step_s=0.03),
    num_requests=40,
    scenario=Scenario(
        faults=tuple(
            Fault(do="drain", target=target, at_s=at_s, for_s=0.3)
            for at_s in (0.3, 0.8, 1.3, 1.8)
            for target in ("decode", "prefill")
        )
    ),
)
"""Workers leave in the middle of answers and prompts, one after another."""
LONG_ANSWERS = SimOptions(
    shape=MeshShape(num_prefill=3, num_decode=3, num_blocks=256, step_s=0.15, drain_s=30.0),
    scenario=Scenario(faults=tuple(Fault(do="drain", target="decode", at_s=at_s, for_s=0.3) for at_s in (0.8, 1.5))),
)
"""Workers leave whose answers take seconds yet."""
CUT_COPIES = SimOptions(
    shape=MeshShape(num_decode=3, num_blocks=64, carrier="tcp"),
    num_requests=60,
    span_s=4.0,
    scenario=Scenario(
        faults=(
            *(
                Fault(do="drain", target=role, at_s=at_s, for_s=0.3)
                for at_s in (0.8, 1.8)
                for role in ("decode", "prefill")
            ),
            Fault(do="truncation", at_s=0.5, for_s=3.0, share=0.7),
        )
    ),
)
"""What workers leave behind arrives in part, and is asked for later."""
CUT_OFF = SimOptions(
    shape=MeshShape(num_gateways=2, step_s=0.3),
    scenario=Scenario(faults=(Fault(do="bus_cut", target="gateway-1", at_s=0.5, for_s=5.0),)),
)
"""A gateway loses the broker in the middle of its answers."""
CUT_SERVERS = SimOptions(shape=MeshShape(num_servers=3, num_gateways=2, step_s=0.02), num_requests=40, span_s=3.0)
"""One of the broker's servers fails while answers are under way."""
WHOLE_HALF = SimOptions(
    shape=MeshShape(num_prefill=3, num_decode=3, num_schedulers=3, num_directories=3, num_gateways=3, num_servers=3,
                    step_s=0.1),
    num_requests=40,
    span_s=4.0,
    scenario=Scenario(faults=(Fault(do="unplug", target="nats-1", at_s=0.5, for_s=8.0),)),
)  # fmt: skip
"""A machine that is cut off has all that it needs to serve alone."""
SKEWED = SimOptions(shape=MeshShape(skew_s=660.0))
"""Clocks differ by minutes."""
TWO_CLOCKS = SimOptions(shape=MeshShape(skew_s=660.0, num_schedulers=2))
SLOW_STEPS = SimOptions(shape=MeshShape(num_prefill=2, num_decode=2, step_s=0.02))
"""Whoever is killed was probably computing."""
LONG_LEASES = SimOptions(shape=MeshShape(lease_ms=600_000, step_s=0.01))


@dataclass(frozen=True)
class Bug:
    """`within`: the number of seeds after which it must have been caught. `kinds`: the faults that bring it out."""

    name: str
    text: str
    patch: Patch
    kinds: tuple[FaultKind, ...] = ()
    within: int = 20
    options: SimOptions = DEFAULT_OPTIONS


@dataclass(frozen=True)
class Catch:
    """`num_seeds`: how many it took. `problem`: what the simulator said; empty: it was not caught."""

    bug: str
    num_seeds: int
    problem: str


def hunt(bug: Bug) -> Catch:
    """Simulate with the bug in place until a check fails."""
    with pytest.MonkeyPatch.context() as patch:
        bug.patch(patch)
        for number in range(bug.within):
            if problems := problems_of(bug, number):
                return Catch(bug.name, number + 1, problems[0])
    return Catch(bug.name, bug.within, "")


def problems_of(bug: Bug, number: int) -> list[str]:
    """Return what the simulator says to one of the bug's seeds: nothing, where the bug is not in place."""
    return simulate(FIRST_SEED + number, dataclasses.replace(bug.options, kinds=bug.kinds)).verdict.problems


BUGS: list[Bug] = []


def bug(text: str, *kinds: FaultKind, within: int = 20, options: SimOptions | None = None) -> Callable[[Patch], Patch]:
    """Register the decorated patch, under its name."""

    def register(patch: Patch) -> Patch:
        BUGS.append(Bug(patch.__name__, text, patch, kinds, within, options or DEFAULT_OPTIONS))
        return patch

    return register


# Clocks.


@bug("a message carries the date of its deadline, by its sender's clock", options=SKEWED)
def a_deadline_is_a_date(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(typed, "departing", lambda message, now_ms: dated(message, time.time_ns() // 1_000_000 - now_ms))
    patch.setattr(typed, "arriving", lambda message, now_ms: dated(message, now_ms - time.time_ns() // 1_000_000))


def dated(message: Any, ahead_ms: int) -> Any:
    if not isinstance(message, RequestMessage):
        return message
    return msgspec.structs.replace(message, deadline_ms=max(0, message.deadline_ms + ahead_ms))


@bug("deadlines go by the clock that is set", "clock_step", options=SKEWED)
def a_deadline_goes_by_the_date(patch: pytest.MonkeyPatch) -> None:
    right = runtime.now_ms
    for name, module in list(sys.modules.items()):
        if name.startswith("services.") and getattr(module, "now_ms", None) is right:
            patch.setattr(module, "now_ms", lambda: time.time_ns() // 1_000_000)


@bug("how long a gateway's word is good is compared with the holder's own clock", options=SKEWED)
def a_word_ends_by_another_s_clock(patch: pytest.MonkeyPatch) -> None:
    from services.trust.credentials import SignerClocks

    patch.setattr(SignerClocks, "is_over", lambda self, proof, now_ms: proof.until_ms < now_ms)


@bug("spans have the dates of their own machines", options=SKEWED)
def spans_go_by_their_machines(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MeshClock, "compare", lambda self, unix_ns, asked_ns: None)


@bug("of two schedulers each tells the time of its own machine, and services go by both", options=TWO_CLOCKS)
def schedulers_tell_two_times(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OldestClock, "follows", lambda self, told: False)
    patch.setattr(OldestScheduler, "follows", lambda self, told: True)


# Leases and what guards the holder's memory.


@bug(
    "a read goes on under a lease that has ended: neither epoch nor lease is checked, at its start or after",
    "plane_cut",
    "stall",
    options=HURRIED,
)
def stale_lease_is_read(patch: pytest.MonkeyPatch) -> None:
    grant = LeaseTable.grant

    def granted_by(table: LeaseTable) -> dict[LeaseId, Grant]:
        return vars(table).setdefault("granted", {})

    def remember(self: LeaseTable, **terms: Any) -> Grant:
        lease = granted_by(self)[terms["lease_id"]] = grant(self, **terms)
        return lease

    def open_anyway(self: LentBlocks[Any], ticket: Any) -> StreamLease[Any]:
        lease = granted_by(self.leases).get(ticket.lease_id)
        if lease is None:
            raise LeaseRefusedError(ticket.lease_id, "unknown")
        return StreamLease(self, lease, self.telemetry.child_of(lease.traceparent))

    patch.setattr(LentBlocks, "open", open_anyway)
    patch.setattr(LeaseTable, "grant", remember)
    patch.setattr(StreamLease, "still_valid", lambda self: True)
    patch.setattr(LentBlocks, "close_lease", lambda self, lease: None)


@bug("the sweep of expired leases stops at the first one that still lives", "plane_cut", options=HURRIED)
def sweep_stops_at_first_living_lease(patch: pytest.MonkeyPatch) -> None:
    expire = LeaseTable.expire

    def stops(
        self: LeaseTable, now_ms: int, concerns: Callable[[Grant], bool] = lambda _: True, detail: str = ""
    ) -> list[Grant]:
        leases = list(self)
        over = 0
        while over < len(leases) and leases[over].expires_at_ms <= now_ms:
            over += 1
        return expire(self, now_ms, lambda lease: lease in leases[:over] and concerns(lease), detail)

    patch.setattr(LeaseTable, "expire", stops)


@bug("an expired lease is forgotten, its blocks are not given back", *FAULT_KINDS)
def expired_lease_keeps_its_blocks(patch: pytest.MonkeyPatch) -> None:
    def forgotten(self: Attempts, attempt: Any, lease: Any, *, notifies_other_end: bool) -> list[Any]:
        attempt.downstream.lease = None
        return []

    patch.setattr(Attempts, "lease_gone", forgotten)


@bug("the lease takes no references of its own: its blocks are used again once the prompt is computed")
def lease_without_references(patch: pytest.MonkeyPatch) -> None:
    share, free = BlockCache.share, BlockCache.free
    patch.setattr(BlockCache, "share", lambda self, tables: None)

    def free_if_held(self: BlockCache, tables: Any) -> None:
        try:
            free(self, tables)
        except AssertionError:
            return  # nobody noticed

    patch.setattr(BlockCache, "free", free_if_held)
    assert share


# An engine's death.


@bug("what a dead engine's step was writing is believed", "kill_engine", "hang_engine", options=BUSY)
def void_blocks_are_believed(patch: pytest.MonkeyPatch) -> None:
    on_died = EngineFeed._on_died

    def believe(self: EngineFeed, death: Any) -> None:
        for number in death.in_step:
            if (attempt := self._attempts.of_engine.get(number)) is not None:
                self.note_written(attempt, len(attempt.token_ids))
        on_died(self, death)

    patch.setattr(EngineFeed, "_on_died", believe)


@bug("an engine that was given up writes on: nothing tells its life from the next one's", "kill_engine")
def dead_engine_writes_on(patch: pytest.MonkeyPatch) -> None:
    kill = SimEngineThread.kill_engine

    def leave_it_running(self: SimEngineThread, start_s: float) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(CoThread, "abandon", lambda _: None)
            kill(self, start_s)

    patch.setattr(SimEngineThread, "kill_engine", leave_it_running)


@bug("an attempt is told twice that its engine died", "kill_engine")
def death_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    died = attempt_rules.engine_died

    def twice(attempts: Attempts, attempt: Any, event: Any, now_ms: int) -> list[Any]:
        actions = died(attempts, attempt, event, now_ms)
        return [*actions, *(action for action in actions if isinstance(action, Emit))]

    set_rule(patch, EngineDied, twice)


@bug("the lease on what a dead engine was to write is kept", "kill_engine", options=SLOW_STEPS)
def lease_outlives_its_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(attempt_rules, "_dropped_by_engine", lambda attempts, attempt: [])


# The stream.


@bug("tags are computed and never compared", "corruption")
def tags_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream, "is_proved", lambda *_: True)


@bug("a frame is verified before it is whole: by its first bytes", "corruption")
def digests_the_beginning(patch: pytest.MonkeyPatch) -> None:
    new = FrameHash.new

    class Beginning:
        def __init__(self, hasher: Any) -> None:
            self._hasher, self._room = hasher, 64

        def update(self, data: memoryview) -> None:
            self._hasher.update(data.cast("B")[: self._room])
            self._room -= min(self._room, data.nbytes)

        def intdigest(self) -> int:
            return self._hasher.intdigest()

    patch.setattr(FrameHash, "new", lambda self, sequence: Beginning(new(self, sequence)))


@bug("a piece of a frame is skipped on its way, and digested all the same")
def skips_a_piece(patch: pytest.MonkeyPatch) -> None:
    copy = frames.copy

    def copy_most(source: Any, target: Any, *rest: Any) -> int:
        last = target.views()[-1]
        before = last.copy()
        digest = copy(source, target, *rest)
        last[...] = before
        return digest

    patch.setattr(frames, "copy", copy_most)


@bug("what has arrived is believed before the holder has confirmed it", "corruption", options=OVER_TCP)
def believes_before_commit(patch: pytest.MonkeyPatch) -> None:
    received = Landing.received

    def believe(self: Any, data: Any, digest: Any) -> None:
        received(self, data, digest)
        end = data.first_token + data.num_tokens
        self._committed[data.layer : data.layer + data.num_layers] = [end] * data.num_layers

    patch.setattr(Landing, "received", believe)


@bug(
    "failure per block, not per transfer: what any layer has of a broken read counts as landed",
    "truncation",
    "corruption",
)
def keeps_what_any_layer_has(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Landing, "num_landed_tokens", property(lambda self: max(self._received)))


@bug("a layer is announced before its keys and values are written")
def announces_before_writing(patch: pytest.MonkeyPatch) -> None:
    advance = KVProgress.advance

    def early(self: KVProgress, layer: int, num_tokens: int, mark: int = 0) -> None:
        for each in range(self.num_layers):
            advance(self, each, num_tokens, mark)

    patch.setattr(KVProgress, "advance", early)


# Block identity and the cache.


@bug("a block's identity is its own tokens', without those before it")
def hash_without_its_past(patch: pytest.MonkeyPatch) -> None:
    extend = BlockHasher.extend

    def unchained(self: Any, token_ids: Any, num_tokens: int) -> list[Any]:
        known = self.hashes
        while (end := (len(known) + 1) * self.block_size) <= num_tokens:
            self.hashes = []
            known += extend(self, token_ids[end - self.block_size : end], self.block_size)
        self.hashes = known
        return known

    patch.setattr(BlockHasher, "extend", unchained)


@bug("blocks are known for reuse as soon as they are allocated, before they are computed", *FAULT_KINDS)
def cached_before_computed(patch: pytest.MonkeyPatch) -> None:
    from services.worker.engine_feed import EngineFeed

    submit = EngineFeed.submit

    def early(self: Any, action: Any) -> None:
        submit(self, action)
        self.note_written(action.attempt, len(action.attempt.token_ids))

    patch.setattr(EngineFeed, "submit", early)


@bug("the whole prompt may come from the cache, its last token too")
def whole_prompt_from_cache(patch: pytest.MonkeyPatch) -> None:
    admit = BlockCache.admit

    def greedy(self: BlockCache, hashes: Any, num_tokens: int, max_cached_tokens: int, **rest: Any) -> Any:
        return admit(self, hashes, num_tokens, max_cached_tokens + 1, **rest)

    patch.setattr(BlockCache, "admit", greedy)


@bug(
    "a lender looks at how many blocks it holds, not at which",
    "delay",
    "loss",
    "reordering",
    options=STALE_HINTS,
    within=60,
)
def lends_by_count(patch: pytest.MonkeyPatch) -> None:
    lend = BlockCache.lend

    def any_blocks(self: BlockCache, hashes: Any, first_block: int, tenant: str = "") -> Any:
        found = lend(self, hashes, first_block, tenant)
        if found is not None:
            return found
        [(_, kept)] = self.contents()
        here = [block_hash for block_hash in kept if self.holds(block_hash, tenant)][: len(hashes)]
        return lend(self, here, first_block, tenant) if here else None

    patch.setattr(BlockCache, "lend", any_blocks)


@bug("a partial last block is kept under a full block's identity", options=RESUMED)
def partial_block_counts_as_full(patch: pytest.MonkeyPatch) -> None:
    keep = EngineFeed.note_written

    def rounded_up(self: EngineFeed, attempt: Any, num_tokens: int, *, ended: bool = False) -> None:
        block_size = attempt.hasher.block_size
        up = min(len(attempt.token_ids), -(-num_tokens // block_size) * block_size)
        keep(self, attempt, up, ended=ended)

    patch.setattr(EngineFeed, "note_written", rounded_up)


# Requests and their attempts.


@bug("the choices of one request share one id")
def choices_share_one_id(patch: pytest.MonkeyPatch) -> None:
    import services.gateway.api.routes as http

    make_jobs = http.make_jobs

    def same_id(model: Any, prepared: Any, request_id: Any, *rest: Any, **more: Any) -> Any:
        jobs = make_jobs(model, prepared, request_id, *rest, **more)
        return [dataclasses.replace(job, request_id=request_id) for job in jobs]

    patch.setattr(http, "make_jobs", same_id)


@bug("tokens are handed on as they come: a message that comes twice is heard twice", "duplication", "reordering")
def tokens_without_index(patch: pytest.MonkeyPatch) -> None:
    from services.gateway.request.core import RequestCore

    receive = RequestCore._receive  # pyright: ignore[reportPrivateUsage]

    def as_it_comes(self: Any, event: Any, now_ms: int) -> Any:
        return receive(self, dataclasses.replace(event, index=len(self.tokens)), now_ms)

    patch.setattr(RequestCore, "_receive", as_it_comes)


@bug("nobody asks for a token that was lost", "loss")
def nobody_asks_for_lost_tokens(patch: pytest.MonkeyPatch) -> None:
    from services.gateway.request.progress_watch import Look, Watch

    patch.setattr(Watch, "look", lambda self, needed, now_ms: Look())


@bug("a worker's death is not told to its requests", "kill")
def death_is_not_told(patch: pytest.MonkeyPatch) -> None:
    from services.gateway.request.core import RequestCore
    from services.gateway.request.progress_watch import Look, Watch

    patch.setattr(RequestCore, "_lose_worker", lambda self, event, now_ms: [])
    patch.setattr(Watch, "look", lambda self, needed, now_ms: Look())


@bug("a later attempt draws from another seed", "kill", "pause", "drain")
def new_seed_for_a_new_attempt(patch: pytest.MonkeyPatch) -> None:
    import services.gateway.requests as requests

    make = requests.attempt_message

    def reseeded(job: Any, proof: Any, gateway_id: Any, action: Any, prompt: Any) -> Any:
        sampling = msgspec.structs.replace(job.sampling, seed=job.sampling.seed + action.attempt - 1)
        return make(dataclasses.replace(job, sampling=sampling), proof, gateway_id, action, prompt)

    patch.setattr(requests, "attempt_message", reseeded)


@bug("an answer that goes on elsewhere counts its tokens from zero again", "kill", "pause", "drain")
def resumed_answer_counts_from_zero(patch: pytest.MonkeyPatch) -> None:
    import services.gateway.requests as requests

    make = requests.attempt_message

    def uncounted(*arguments: Any) -> Any:
        return msgspec.structs.replace(make(*arguments), num_answered_tokens=0)

    patch.setattr(requests, "attempt_message", uncounted)


@bug("a failure in mid-stream ends with [DONE], as if all were well", options=NO_BROKER)
def failure_ends_as_success(patch: pytest.MonkeyPatch) -> None:
    from services.gateway.api.answer import Answer

    async def done(self: Any, send: Any, fail: Any) -> None:
        self._abandon("another choice has failed")
        if not self._status:
            await self._begin(send, 200, b"text/event-stream; charset=utf-8", {})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

    patch.setattr(Answer, "_fail", done)


@bug("a refusal does not say when to come back", options=MISSED)
def refusal_without_retry_after(patch: pytest.MonkeyPatch) -> None:
    import services.gateway.api.answer as answer

    patch.setattr(answer, "retry_after_of", lambda fail: "")


# A gateway that loses the broker.


@bug("a worker that has ended an attempt of a gateway that was gone tells it of no end", "bus_cut", options=CUT_OFF)
def known_without_an_end(patch: pytest.MonkeyPatch) -> None:
    unwanted = attempt_rules.unwanted

    def silent(attempts: Attempts, attempt: Any, event: AttemptUnwanted, now_ms: int) -> Any:
        return unwanted(attempts, attempt, AttemptUnwanted(event.key), now_ms)

    set_rule(patch, AttemptUnwanted, silent)


# A broker that stands still.


@bug("a flush that lies: it returns at once although nothing came back", "broker_pause")
def a_flush_that_lies(patch: pytest.MonkeyPatch) -> None:
    from services.sim.platform.bus import SimBus

    async def flush(self: SimBus, timeout_s: float = 0.0) -> None:
        await asyncio.sleep(0)

    patch.setattr(SimBus, "flush", flush)


@bug("a partitioned client: what a flush that was given up leaves behind ends its reading, and nobody connects it anew",
     "broker_pause")  # fmt: skip
def a_deaf_client(patch: pytest.MonkeyPatch) -> None:
    from services.bus.base import RequestTimedOutError
    from services.sim.platform.bus import SimBroker, SimBus

    flush, arrive = SimBus.flush, SimBroker._arrive  # pyright: ignore[reportPrivateUsage]

    async def leaves_a_trap(self: SimBus, timeout_s: float = 10.0) -> None:
        try:
            await flush(self, timeout_s)
        except RequestTimedOutError:
            vars(self)["is_partitioned"] = True
            raise

    def unheard(self: SimBroker, at_s: float, target: SimBus, land: Any) -> None:
        if "is_partitioned" not in vars(target):
            arrive(self, at_s, target, land)

    patch.setattr(SimBus, "flush", leaves_a_trap)
    patch.setattr(SimBroker, "_arrive", unheard)


# A broker of three servers.


@bug("a client goes to servers that it was told of, and that are in no list of its own", "kill_server",
     options=CUT_SERVERS)  # fmt: skip
def connects_to_a_discovered_address(patch: pytest.MonkeyPatch) -> None:
    from services.sim.platform.bus import SimBroker, SimBus

    found_fewer = SimBroker.found_fewer

    def believes(self: SimBroker, bus: SimBus) -> None:
        if self.stranger not in bus.order:
            bus.order.insert(1, self.stranger)
        found_fewer(self, bus)

    patch.setattr(SimBroker, "found_fewer", believes)


@bug(
    "a lonely server is left before another one has answered: who is cut off with it has no broker", options=WHOLE_HALF
)
def leaves_before_another_one_has_answered(patch: pytest.MonkeyPatch) -> None:
    from services.sim.platform.bus import SimBroker, SimBus

    def leaves(self: SimBroker, bus: SimBus) -> None:
        def leave() -> None:
            if bus.is_connected and bus.view.is_lonely:
                left = bus.server
                bus.disconnected()
                self.call_later(0.01, bus.connected)
                self._publish_end(bus, left)  # pyright: ignore[reportPrivateUsage]

        self.call_later(0.1, leave)

    patch.setattr(SimBroker, "found_fewer", leaves)


@bug("that nobody serves a question counts as a death while members change servers", "split", "stop_server",
     options=CUT_SERVERS)  # fmt: skip
def unserved_counts_during_a_reroute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FailureDetector, "is_rerouted", lambda self, now_ms: False)


@bug("what was asked over a connection that is lost is not asked again", "kill_server", options=CUT_SERVERS)
def forgets_to_ask_again(patch: pytest.MonkeyPatch) -> None:
    from services.bus.base import LOST
    from services.bus.typed import TypedBus

    ask = TypedBus.ask

    async def waits(self: Any, *given: Any, **named: Any) -> Any:
        try:
            return await ask(self, *given, **named)
        except BusError as error:
            if error.reason == LOST:
                await asyncio.Event().wait()
            raise

    patch.setattr(TypedBus, "ask", waits)


# What is said of it all.


@bug("a lease's end is in no trace")
def release_is_not_traced(patch: pytest.MonkeyPatch) -> None:
    from services.holder.observe.transfers import HolderSpans

    patch.setattr(HolderSpans, "lease_ended", lambda self, lease: None)


@bug("a holder does not tell its reader what its end of a transfer is called")
def transfer_is_not_linked(patch: pytest.MonkeyPatch) -> None:
    start = LentBlocks.serve_reads

    def nameless(self: LentBlocks[Any], *given: Any) -> None:
        self.telemetry = copy.copy(self.telemetry)
        self.telemetry.child_of = lambda _: ""  # type: ignore[method-assign]
        start(self, *given)

    patch.setattr(LentBlocks, "serve_reads", nameless)


@bug("a dispatch ends with the reply and not with the worker's acceptance")
def dispatch_counts_its_way_back(patch: pytest.MonkeyPatch) -> None:
    from services.gateway.observe.answer_observer import ChoiceSpans

    answered = ChoiceSpans._answered  # pyright: ignore[reportPrivateUsage]

    def untold(self: Any, live: Any, attempt: Any, worker_id: Any, accepted_ns: int = 0, error: str = "") -> None:
        answered(self, live, attempt, worker_id, 0, error)

    patch.setattr(ChoiceSpans, "_answered", untold)


@bug("a step is linked to a span that is called otherwise")
def step_is_linked_to_nothing(patch: pytest.MonkeyPatch) -> None:
    from services.worker.observe.spans import WorkerSpans

    link = WorkerSpans._link  # pyright: ignore[reportPrivateUsage]

    def misled(self: Any, attempt: Any, *arguments: Any) -> None:
        attempt.times.compute = ""
        link(self, attempt, *arguments)

    patch.setattr(WorkerSpans, "_link", misled)


@bug("tokens that were read count as computed as well")
def read_tokens_count_twice(patch: pytest.MonkeyPatch) -> None:
    from services.holder.core.content import PromptKV

    report = PromptKV.report

    def both(self: Any, **named: Any) -> Any:
        right = report(self, **named)
        return msgspec.structs.replace(right, recomputed_tokens=right.recomputed_tokens + right.transferred_tokens)

    patch.setattr(PromptKV, "report", both)


@bug("a request that is cancelled is forgotten before its blocks are given back", "disconnect")
def cancelled_run_keeps_its_blocks(patch: pytest.MonkeyPatch) -> None:
    forget = Attempts.forget_attempt

    def keeps(self: Any, attempt: Any, now_ms: int) -> Any:
        attempt.tables = () if attempt.has_ended and attempt.upstream is not None else attempt.tables
        return forget(self, attempt, now_ms)

    patch.setattr(Attempts, "forget_attempt", keeps)


# What an answer must be.


def _give_grammars(patch: pytest.MonkeyPatch, wrap: Callable[[Any, Any], Any]) -> None:
    """Let the engine have what `wrap` makes of each sequence and its grammar."""
    from services.worker.engine_feed import EngineFeed

    give = EngineFeed._give  # pyright: ignore[reportPrivateUsage]

    def wrapped(self: EngineFeed, sequence: Any) -> None:
        if sequence.grammar is not None:
            future: Future[Any] = Future()
            future.set_result(wrap(sequence, sequence.grammar.result()))
            sequence.grammar = future
        give(self, sequence)

    patch.setattr(EngineFeed, "_give", wrapped)


@bug("a grammar's state is not made again of the answer's tokens where it goes on", "kill", options=RESUMED)
def grammar_forgets_at_a_resume(patch: pytest.MonkeyPatch) -> None:
    class Forgetful:
        def __init__(self, sequence: Any, grammar: Any) -> None:
            self.num_forgotten = sequence.index if sequence.attempt > 1 else 0
            self.grammar = grammar

        def allowed(self, answer: Any) -> Any:
            return self.grammar.allowed(answer[self.num_forgotten :])

    _give_grammars(patch, Forgetful)


@bug("the first token, which the prefill worker samples, is under no mask")
def no_mask_on_token_0(patch: pytest.MonkeyPatch) -> None:
    class Late:
        def __init__(self, sequence: Any, grammar: Any) -> None:
            self.grammar = grammar

        def allowed(self, answer: Any) -> Any:
            return self.grammar.allowed(answer) if answer else self.grammar.allowed(answer) | True

    _give_grammars(patch, Late)


# Two workers and what they tell each other.


@bug(
    "an abort without a barrier: blocks are given away while a read or the engine still writes them",
    "disconnect",
    "kill",
    "pause",
    "stall",
)
def abort_without_barrier(patch: pytest.MonkeyPatch) -> None:
    from services.holder.core.actions import Withdraw
    from services.holder.kv.reads import KVReads

    end = Attempts.end_attempt

    def at_once(self: Any, attempt: Any, reason: str, now_ms: int, **how: Any) -> list[Any]:
        if attempt.upstream is None:
            return end(self, attempt, reason, now_ms, **how)
        if attempt.has_ended:
            return []
        stopped = [Withdraw(attempt.key)] if attempt.stage is RunStage.COMPUTING else []
        attempt.stage = RunStage.ENDING
        return [*stopped, *self.forget_attempt(attempt, now_ms)]

    patch.setattr(Attempts, "end_attempt", at_once)
    patch.setattr(KVReads, "end_reads", lambda self, read: None)


def given_times(patch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Have workers' attempts wait by other times."""
    make = Attempts.__init__

    def made(self: Any, limits: WorkerLimits, *others: Any, **more: Any) -> None:
        times = msgspec.structs.replace(limits.times, **parts)
        make(self, dataclasses.replace(limits, times=times), *others, **more)

    patch.setattr(Attempts, "__init__", made)


def set_rule(patch: pytest.MonkeyPatch, event: type, rule: Any) -> None:
    """Have workers do something else with an attempt wherever an event means something to it."""
    for rules in TABLE.values():
        if event in rules:
            patch.setitem(cast("dict[type, Any]", rules), event, rule)


@bug("the reader says once that it has room; where that is lost both ends wait", "loss", within=40)
def reserved_is_said_once(patch: pytest.MonkeyPatch) -> None:
    given_times(patch, decode=DecodeTimes(reserved_again_ms=10**9))


@bug(
    "nothing but the reader's own word ends a lease, however dead it is", "kill", "loss", options=LONG_LEASES, within=40
)
def only_the_reader_ends_a_lease(patch: pytest.MonkeyPatch) -> None:
    left, cancelled, grant = attempt_rules.worker_left, attempt_rules.cancelled, LeaseTable.grant

    def kept(attempts: Attempts, attempt: Any, event: CancelRequest, now_ms: int) -> list[Any]:
        is_of_the_dead = event.end is AttemptEnd.CANCELLED and attempt.lease is not None
        return [] if is_of_the_dead else cancelled(attempts, attempt, event, now_ms)

    def goes_on(*_: Any) -> list[Any]:
        return []

    def unheard(attempts: Attempts, attempt: Any, event: Any, now_ms: int) -> list[Any]:
        return left(attempts, attempt, event, now_ms) if attempt.upstream is not None else []

    def of_decoders(self: Attempts) -> dict[Any, Any]:
        received = [each for each in self.records.values() if each.upstream is not None and not each.has_ended]
        return {each.key: each.request.gateway_id for each in received}

    set_rule(patch, WorkerLeft, unheard)
    set_rule(patch, CancelRequest, kept)
    patch.setitem(cast("dict[type, Any]", TABLE[RunStage.HANDING_OVER]), DeadlinePassed, goes_on)
    patch.setattr(Attempts, "wanted_by", of_decoders)
    given_times(patch, prefill=PrefillTimes(landed_grace_ms=10**9))
    # Else each lease ends with its request's deadline.
    patch.setattr(LeaseTable, "grant", lambda self, **terms: grant(self, **terms | {"ends_by_ms": 1 << 60}))


@bug("a lease that its reader has not used is left to its time", options=OUT_OF_REACH)
def lease_is_not_returned(patch: pytest.MonkeyPatch) -> None:
    from services.holder.kv.reads import KVReads

    patch.setattr(KVReads, "_give_back", lambda self, holder, request, granted: None)


@bug("the heartbeat waits for the engine: a busy worker looks dead", options=BUSY)
def heartbeat_waits_for_the_engine(patch: pytest.MonkeyPatch) -> None:
    from services.holder.holder import Holder
    from services.worker.report import WorkerLoads
    from services.worker.shell import Worker

    on_ping, load = Holder._on_ping, WorkerLoads.load  # pyright: ignore[reportPrivateUsage]

    async def when_idle(self: Any, received: Any) -> Any:
        while isinstance(self._owner, Worker) and self._owner.core.records:
            await asyncio.sleep(0.01)
        return await on_ping(self, received)

    def load_when_idle(self: Any, reporter: Any, now_ms: int) -> Any:
        if self.core.records:
            raise RuntimeError("later")
        return load(self, reporter, now_ms)

    patch.setattr(Holder, "_on_ping", when_idle)
    patch.setattr(WorkerLoads, "load", load_when_idle)


@bug(
    "a worker that was declared dead goes on under its old name, and is never used again",
    "pause",
    options=SLEEPY,
    within=30,
)
def fenced_worker_never_comes_back(patch: pytest.MonkeyPatch) -> None:
    from services.holder.holder import Holder

    patch.setattr(Holder, "_fence", lambda self, *arguments, **named: None)


@bug("what the client has had is computed again and handed on again", "kill", "pause", "drain")
def resumed_answer_repeats_itself(patch: pytest.MonkeyPatch) -> None:
    from services.gateway.request.core import RequestCore

    begin = RequestCore._begin_attempt  # pyright: ignore[reportPrivateUsage]

    def from_zero(self: Any) -> None:
        self.tokens = []
        begin(self)

    patch.setattr(RequestCore, "_begin_attempt", from_zero)


@bug("the first token after a hand-over is taken for the second")
def first_token_twice(patch: pytest.MonkeyPatch) -> None:
    submit = Attempts.submit

    def shifted(self: Any, attempt: Any) -> Any:
        attempt.token_ids += attempt.token_ids[attempt.num_prompt_tokens :]
        return submit(self, attempt)

    patch.setattr(Attempts, "submit", shifted)


# Waiting for what another request fills.


def _wait_for_ever(patch: pytest.MonkeyPatch) -> None:
    """Take the bound of a wait away: what is left is whether it ends by itself."""
    patch.setattr(attempts_module, "DUPLICATE_WAIT_SHARE", 1)
    given_times(patch, decode=DecodeTimes(duplicate_lands_within_ms=10**9))


@bug("who waits for another's blocks does not hear that it has ended without them", "disconnect", options=BURSTS)
def waits_for_a_dead_duplicate(patch: pytest.MonkeyPatch) -> None:
    _wait_for_ever(patch)
    patch.setattr(
        InFlightDuplicates, "fills", lambda self, duplicate: duplicate.attempt.num_stored_blocks < duplicate.end_block
    )


@bug("who waits is waited for: two wait for each other", options=BURSTS)
def waits_for_who_waits(patch: pytest.MonkeyPatch) -> None:
    _wait_for_ever(patch)

    def all_others(self: InFlightDuplicates, attempt: Any) -> list[Any]:
        return [
            other
            for other in self.attempts.values()
            if other.hasher.hashes[:1] == attempt.hasher.hashes[:1] and other is not attempt
        ]

    def find(self: InFlightDuplicates, attempt: Any) -> InFlightDuplicate | None:
        found = next((a for a in all_others(self, attempt) if a.num_stored_blocks < len(a.hasher.hashes)), None)
        return InFlightDuplicate(found, 1, 0) if found is not None and attempt.hasher.hashes else None

    patch.setattr(InFlightDuplicates, "find", find)
    patch.setattr(
        InFlightDuplicates, "fills", lambda self, duplicate: duplicate.attempt.num_stored_blocks < duplicate.end_block
    )


@bug("blocks that were waited for count as there, whether they are or not", "disconnect", options=BURSTS)
def waited_for_is_there(patch: pytest.MonkeyPatch) -> None:
    allocate = Attempts.allocate
    patch.setattr(InFlightDuplicates, "fills", lambda self, duplicate: False)

    def believe(self: Any, attempt: Any, **terms: Any) -> bool:
        duplicate = self._duplicates.find_any(attempt)
        has_room = allocate(self, attempt, **terms)
        if has_room and duplicate is not None and attempt.kv is not None:
            num_tokens = min(duplicate.end_block * self.limits.block_size, attempt.num_prompt_tokens - 1)
            attempt.kv.num_cached_tokens = attempt.kv.num_present_tokens = num_tokens
        return has_room

    def find_any(self: InFlightDuplicates, attempt: Any) -> InFlightDuplicate | None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(InFlightDuplicates, "fills", lambda self, duplicate: True)
            return self.find(attempt)

    patch.setattr(InFlightDuplicates, "find_any", find_any, raising=False)
    patch.setattr(Attempts, "allocate", believe)


# Workers that leave.


@bug("an answer that moves gives its blocks back while the engine still writes them", options=DRAINED)
def moved_before_the_engine_lets_go(patch: pytest.MonkeyPatch) -> None:
    def at_once(self: Any, attempt: Any, detail: str, now_ms: int) -> Any:
        return [self.migrate(attempt, detail, now_ms), *self.forget_attempt(attempt, now_ms)]

    patch.setattr(Attempts, "move", at_once)


@bug("a prompt that moves leaves the lease of its hand-over open", options=DRAINED)
def moved_prompt_leaves_its_lease(patch: pytest.MonkeyPatch) -> None:
    from services.prefill import hand_over

    patch.setattr(hand_over, "FINISHED_TOKENS", 0)
    patch.setattr(attempt_rules, "_dropped_by_engine", lambda attempts, attempt: [])


@bug("the token that an answer moves with is counted among those whose KV is in place", options=DRAINED)
def moved_with_a_token_that_was_never_computed(patch: pytest.MonkeyPatch) -> None:
    def keep_ended(self: EngineFeed, attempt: Any) -> None:
        self.note_written(attempt, len(attempt.token_ids), ended=True)

    patch.setattr(EngineFeed, "keep_ended", keep_ended)


@bug("the last token that came before an answer moved is handed on twice", options=DRAINED)
def token_twice_after_a_move(patch: pytest.MonkeyPatch) -> None:
    from services.gateway.request.core import RequestCore

    fail = RequestCore._fail_worker  # pyright: ignore[reportPrivateUsage]

    def forgetful(self: Any, worker_id: Any, failure: Any, now_ms: int) -> Any:
        if failure.code == "draining" and self.tokens:
            self.tokens.pop()
        return fail(self, worker_id, failure, now_ms)

    patch.setattr(RequestCore, "_fail_worker", forgetful)


@bug("what a worker migrates goes on only once it has left", options=DRAINED)
def moves_when_the_worker_has_left(patch: pytest.MonkeyPatch) -> None:
    from services.gateway.request.core import RequestCore

    fail = RequestCore._fail_worker  # pyright: ignore[reportPrivateUsage]

    def waits(self: Any, worker_id: Any, failure: Any, now_ms: int) -> Any:
        return [] if failure.code == "draining" else fail(self, worker_id, failure, now_ms)

    patch.setattr(RequestCore, "_fail_worker", waits)


@bug("a worker that leaves waits for its answers to end, however long they are", options=LONG_ANSWERS)
def leaves_when_its_answers_have_ended(patch: pytest.MonkeyPatch) -> None:
    from schemas.worker import LeaveAnswered
    from services.worker.shell import Worker

    may_leave = Worker.may_leave

    async def as_the_last(self: Worker, *, forced: bool) -> LeaveAnswered:
        return msgspec.structs.replace(await may_leave(self, forced=forced), is_last=True)

    patch.setattr(Worker, "may_leave", as_the_last)


@bug("a worker that leaves waits for ever for readers that nobody sends", options=LONG_ANSWERS)
def waits_for_readers_that_never_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaseTable, "expect_no_more", lambda self, now_ms: None)


@bug("what a worker leaves behind is kept for whole, however much of it has landed", options=CUT_COPIES)
def left_behind_is_kept_unread(patch: pytest.MonkeyPatch) -> None:
    read_ended = CopyCore._read_ended  # pyright: ignore[reportPrivateUsage]

    def believes(self: CopyCore, event: ReadEnded, now_ms: int) -> Any:
        copy = self.reading.get(event.read)
        if copy is not None and copy.why is Why.LEFT_BEHIND:
            num_tokens = len(copy.hashes) * self._limits.block_size  # pyright: ignore[reportPrivateUsage]
            event = dataclasses.replace(event, outcome=dataclasses.replace(event.outcome, num_landed_tokens=num_tokens))
        return read_ended(self, event, now_ms)

    patch.setattr(CopyCore, "_read_ended", believes)


def main() -> None:
    """Hunt every bug and print what it took. Exit code 1 where one was not caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--only", default="", help="a bug's name")
    options = parser.parse_args()
    chosen = [b for b in BUGS if options.only in ("", b.name)]
    progress = Console(stderr=True)
    catches: list[Catch] = []
    for each in track(chosen, "hunting", console=progress, transient=True):
        caught = hunt(each)
        if caught.problem and (without := problems_of(each, caught.num_seeds - 1)):
            sys.exit(
                f"{each.name}: seed {FIRST_SEED + caught.num_seeds - 1} fails without the bug as well: {without[0]}"
            )
        catches.append(caught)
    if options.json:
        document = {
            "planted": len(catches),
            "caught": sum(bool(c.problem) for c in catches),
            "bugs": [dataclasses.asdict(c) for c in catches],
        }
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        table = Table("bug", "caught after", "as")
        for catch in catches:
            table.add_row(
                catch.bug, f"{catch.num_seeds} seeds" if catch.problem else "[red]never[/red]", catch.problem[:90]
            )
        Console().print(table)
    sys.exit(any(not c.problem for c in catches))


if __name__ == "__main__":
    main()
