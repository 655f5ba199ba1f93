"""Overload is refused with a word on when to come again; nobody's flood takes all; replicas are named."""

import pytest
from msgspec.structs import replace

from schemas.ids import RequestId, WorkerId
from schemas.request import Placement, PlaceRequest, RefusalReason, Refused
from schemas.worker import (
    BlockCounts,
    PrefillRate,
    TenantLine,
    WorkerDraining,
    WorkerInfo,
    WorkerLoad,
    WorkerRates,
    WorkerRole,
)
from services.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.scheduler.limits import MAX_RETRY_MS, MAX_TENANTS
from services.scheduler.placement.admission import Admission, AdmissionLimits, Wait
from services.scheduler.placement.policy import POLICIES
from services.times import PresenceTimes

SETTINGS = SchedulerConfig(max_queue_ms=10_000, max_queued_requests=8)
ROLES: dict[str, WorkerRole] = {"p": "prefill", "d": "decode", "a": "aggregated", "s": "store"}


def load(
    name: str, *, waiting: int = 0, queued: int = 0, running: int = 0, free: int = 100, cached: int = 0,
    tokens_per_s: float = 0, step_ms: float = 0, fingerprint: str = "f",
) -> WorkerLoad:  # fmt: skip
    """A worker whose role is its initial. `waiting`: prompt tokens in line."""
    return WorkerLoad(
        worker=WorkerInfo(
            worker_id=WorkerId(name), incarnation="1", role=ROLES[name[0]], model="m", fingerprint=fingerprint,
            num_blocks=1_000, block_size=16, context_length=16_000,
        ),
        state="ready",
        blocks=BlockCounts(total=1_000, free=free, running=1_000 - free - cached, leased=0, cached=cached),
        num_running=running,
        num_queued=queued,
        num_uncomputed_tokens=waiting,
        rates=WorkerRates(
            prefill=(PrefillRate(context_tokens=0, tokens_per_s=tokens_per_s),) if tokens_per_s else (),
            decode_step_ms=step_ms,
        ),
    )  # fmt: skip


def mesh(*workers: WorkerLoad, policy: str = "cost", settings: SchedulerConfig = SETTINGS) -> SchedulerCore:
    core = SchedulerCore(replace(settings, policy=policy), PresenceTimes())
    for worker in workers:
        core.handle(worker, 0)
    return core


def ask(*, attempt: int = 1, tokens: int = 100, max_tokens: int = 100, tenant: str = "") -> PlaceRequest:
    return PlaceRequest(
        request_id=RequestId("r"), attempt=attempt, deadline_ms=10**9, num_prompt_tokens=tokens, max_tokens=max_tokens,
        tenant=tenant,
    )  # fmt: skip


def overload(core: SchedulerCore, request: PlaceRequest, now_ms: int = 0) -> int | None:
    """When to come again; None: it was placed."""
    decision = core.place(request, now_ms)
    if isinstance(decision, Placement):
        return None
    assert isinstance(decision, Refused) and decision.reason == RefusalReason.OVERLOADED, decision
    return decision.retry_after_ms


@pytest.mark.parametrize("policy", POLICIES)
def test_where_rates_are_known_the_bound_is_the_predicted_wait_of_the_best(policy: str) -> None:
    busy = [load("p0", waiting=12_500, tokens_per_s=1_000), load("d0", tokens_per_s=0)]
    core = mesh(*busy, policy=policy)
    assert overload(core, ask()) == 12_500, "12.5 s in line, 10 s allowed"
    assert overload(core, ask(attempt=2)) is None, "what was begun goes on"
    assert overload(mesh(*busy, load("p1", waiting=9_000), policy=policy), ask()) is None
    assert overload(mesh(load("p0", waiting=10**6, tokens_per_s=1_000), busy[1], policy=policy), ask()) == MAX_RETRY_MS
    assert overload(mesh(load("p0", waiting=10_001, tokens_per_s=1_000), busy[1], policy=policy), ask()) == 10_001


@pytest.mark.parametrize("policy", POLICIES)
def test_many_short_prompts_are_no_overload_once_rates_are_known(policy: str) -> None:
    workers = [load("p0", queued=500, waiting=500, tokens_per_s=1_000), load("d0")]
    assert overload(mesh(*workers, policy=policy), ask()) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_without_rates_the_bound_is_a_number_of_requests_on_every_worker(policy: str) -> None:
    full, free = load("p0", queued=9, waiting=90_000), load("p1", queued=7)
    retry_ms = overload(mesh(full, load("d0"), policy=policy), ask())
    assert retry_ms is not None and 1_000 <= retry_ms <= MAX_RETRY_MS
    assert overload(mesh(full, free, load("d0"), policy=policy), ask()) is None
    assert overload(mesh(free, load("d0", queued=9), policy=policy), ask()) is not None
    assert overload(mesh(load("a0", queued=9), load("a1", queued=9), policy=policy), ask()) is not None


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_placed_and_not_reported_yet_fills_the_queue_too(policy: str) -> None:
    core = mesh(load("p0", tokens_per_s=1_000), load("d0", free=1_000), policy=policy)
    taken = [overload(core, ask(tokens=1_000)) is None for _ in range(15)]
    assert taken == [True] * 11 + [False] * 4
    core.handle(load("p0", waiting=5_000, tokens_per_s=1_000), 100)
    assert overload(core, ask(tokens=1_000), 100) is None


def test_nobody_is_sent_back_to_a_queue_that_is_as_long_as_before() -> None:
    """A queue that is refused at its bound is hardly over it: the time until it is below would always be the least."""
    core = mesh(load("p0", tokens_per_s=1_000), load("d0", free=1_000))
    said = [retry_ms for _ in range(100) if (retry_ms := overload(core, ask(tokens=500))) is not None]
    assert len(said) > 50 and min(said) >= SETTINGS.max_queue_ms


def test_a_decode_worker_without_room_is_a_queue_as_well() -> None:
    """Ten wait where two run, an answer takes 100 steps of 50 ms: 25 s."""
    prefill = load("p0", tokens_per_s=1_000)
    crowded = load("d0", queued=10, running=2, free=3, step_ms=50)
    assert overload(mesh(prefill, crowded), ask()) == 25_000
    assert overload(mesh(prefill, load("d0", running=2, free=3, cached=50, step_ms=50)), ask()) is None
    assert overload(mesh(prefill, crowded, load("d1")), ask()) is None


def test_who_would_fit_waits_behind_those_who_came_first() -> None:
    """Room is given in the order of arrival: six blocks of room are none while somebody larger waits for more."""
    crowded = load("d0", queued=10, running=2, free=6, step_ms=50)
    assert overload(mesh(load("p0", tokens_per_s=1_000), crowded), ask(tokens=50, max_tokens=40)) is None, "10 s"
    assert overload(mesh(load("p0", tokens_per_s=1_000), crowded), ask(tokens=10, max_tokens=80)) == 20_000


def test_a_burst_is_refused_before_the_worker_has_said_that_it_waits() -> None:
    """26 blocks, 13 a request: two at a time, 5 s each. Nothing is reported of the burst yet."""
    core = mesh(load("p0", tokens_per_s=10_000), load("d0", free=26, step_ms=50))
    taken = [overload(core, ask()) is None for _ in range(12)]
    assert taken == [True] * 4 + [False] * 8


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenants_flood_leaves_half_of_the_queue_to_the_others(policy: str) -> None:
    core = mesh(load("p0", tokens_per_s=1_000), load("d0", free=1_000), policy=policy)
    taken = {"flood": 0, "calm": 0}
    for number in range(100):
        tenant = "calm" if number % 20 == 0 else "flood"
        retry_ms = overload(core, ask(tokens=500, tenant=tenant), number)
        taken[tenant] += retry_ms is None
        assert retry_ms is None or 1_000 <= retry_ms <= 10_000
    assert taken["calm"] == 5, "its own share is never refused"
    assert 10 <= taken["flood"] <= 13, "half of ten seconds, and its turn now and then"
    late = 60_000
    core.handle(load("p0", waiting=9_000, tokens_per_s=1_000), late)
    core.handle(load("d0", free=1_000), late)
    assert overload(core, ask(tokens=500, tenant="flood"), late) is None, "nobody else is there any more"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenant_s_backlog_is_not_the_others_wait(policy: str) -> None:
    """Workers serve tenants in turn: 336 answers and 90 s of prompts of one tenant delay another's by one of each."""
    line = TenantLine(tenant="flood", num_queued=336, num_uncomputed_tokens=90_000)
    prefill = replace(load("p0", waiting=90_000, tokens_per_s=1_000), lines=(replace(line, num_queued=0),))
    decode = replace(load("d0", queued=336, running=64, free=0, step_ms=8), lines=(line,))
    core = mesh(prefill, decode, policy=policy)
    assert overload(core, ask(max_tokens=1_500, tenant="flood")) is not None
    assert overload(core, ask(tokens=4, max_tokens=4, tenant="calm")) is None
    both = [replace(prefill, lines=(line, replace(line, tenant="calm"))), decode]
    assert overload(mesh(*both, policy=policy), ask(tenant="calm")) is not None, "its own backlog is its own"
    unknown = [replace(each, lines=()) for each in (prefill, decode)]
    assert overload(mesh(*unknown, policy=policy), ask(tenant="calm")) is not None, "nobody says whose it is"


def test_what_was_placed_for_a_tenant_is_before_its_own_requests_only() -> None:
    core = mesh(load("p0", tokens_per_s=1_000), load("d0", free=1_000))
    placed = sum(overload(core, ask(tokens=1_000, tenant="flood")) is None for _ in range(100))
    assert placed == 11, "ten seconds"
    placement = core.place(ask(tokens=500, tenant="calm"), 0)
    assert isinstance(placement, Placement) and placement.terms is not None
    assert placement.terms.queue_ms == pytest.approx(500), "as much of the other's as of its own"


def test_a_tenants_name_has_a_bound() -> None:
    decision = mesh(load("p0"), load("d0")).place(ask(tenant="t" * 3_000), 0)
    assert isinstance(decision, Refused) and decision.reason == RefusalReason.INVALID


def test_the_books_on_tenants_are_bounded() -> None:
    admission = Admission(AdmissionLimits())
    for number in range(2 * MAX_TENANTS):
        assert admission.refusal(f"t{number}", [Wait(0, 0, True)], number) is None
        admission.placed(f"t{number}", 1, number)
    assert len(admission._tenants) == MAX_TENANTS


REPLICATING = SchedulerConfig(replicate=True)


@pytest.mark.parametrize(
    ("workers", "replica"),
    [
        ((load("p0"), load("d0", free=900), load("d1", free=10), load("s0", free=0)), "s0"),
        ((load("p0"), load("d0", free=900), load("s0", fingerprint="g")), None),
        ((load("p0"), load("d0", free=900, running=0), load("d1", free=10, cached=80, running=1),
          load("d2", free=80, running=1)), "d1"),
        ((load("p0"), load("d0"), load("a0", running=9), load("p1")), "a0"),
        ((load("a0"), load("a1", running=1)), "a1"),
        ((load("p0"), load("d0")), None),
    ],
)  # fmt: skip
def test_the_replica_is_a_store_else_another_that_decodes(workers: tuple[WorkerLoad, ...], replica: str | None) -> None:
    placement = mesh(*workers, settings=REPLICATING).place(ask(), 0)
    assert isinstance(placement, Placement)
    assert placement.decode_worker in ("d0", None) and placement.replica == replica
    placement = mesh(*workers).place(ask(), 0)
    assert isinstance(placement, Placement) and placement.replica is None


def test_a_draining_worker_is_no_replica() -> None:
    core = mesh(load("p0"), load("d0"), load("d1", running=1), settings=REPLICATING)
    core.handle(WorkerDraining(worker_id=WorkerId("d1"), incarnation="1"), 0)
    placement = core.place(ask(), 0)
    assert isinstance(placement, Placement) and placement.replica is None
