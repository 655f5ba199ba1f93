"""Tenants that wait for a worker's blocks are given them in turn: who has no backlog does not wait for another's."""

import itertools

import msgspec
import pytest

from schemas.handoff import BlocksReserved
from schemas.ids import RequestId
from schemas.request import AttemptAccepted, RefusalReason, Refused, RunAttempt
from services.engine.turns import TenantTurns
from services.holder.core.actions import Action, Publish, Submit
from services.holder.core.events import SequenceRemoved
from services.holder.core.leases import LeaseTable
from services.worker.core import AttemptCore
from tests.worker import worker_cases as case

NUM_FLOOD, NUM_AT_ONCE = 400, 64
BLOCKS = 3
"""Of one request."""


def of(tenant: str, request: RunAttempt) -> RunAttempt:
    return msgspec.structs.replace(request, tenant=tenant)


def reserved_of(actions: list[Action]) -> list[RequestId]:
    said = [action.message for action in actions if isinstance(action, Publish)]
    return [message.request_id for message in said if isinstance(message, BlocksReserved)]


def decode_core(num_blocks: int, *, max_queued: int = 1_000) -> AttemptCore:
    limits = case.limits(case.DECODE, num_blocks=num_blocks, max_queued=max_queued)
    return AttemptCore(limits, case.block_cache(num_blocks), LeaseTable())


def test_who_comes_to_a_full_worker_gets_the_room_that_is_next() -> None:
    """400 answers wait where 64 run, and one of another tenant comes last."""
    core = decode_core(NUM_AT_ONCE * BLOCKS)
    for number in range(NUM_FLOOD):
        case.ask(core, of("a", case.reserve(number, first=number)))
    case.ask(core, of("b", case.reserve(NUM_FLOOD, first=NUM_FLOOD)))
    assert core.num_queued == NUM_FLOOD - NUM_AT_ONCE + 1
    assert reserved_of(case.hear(core, case.cancel(0), 1)) == [f"r{NUM_FLOOD}"]


def test_tenants_that_wait_are_given_as_many_blocks_however_many_wait_of_each() -> None:
    core = decode_core(BLOCKS)
    case.ask(core, of("a", case.reserve(0)))
    for number in range(1, 31):
        case.ask(core, of("a" if number <= 20 else "b", case.reserve(number, first=10 * number)))
    given, running = list[int](), 0
    for _ in range(20):
        (reserved,) = reserved_of(case.hear(core, case.cancel(running), 1))
        running = int(reserved[1:])
        given.append(running)
    assert sorted(given) == [*range(1, 11), *range(21, 31)], "ten of each, of each the first"
    assert all((left <= 20) != (right <= 20) for left, right in itertools.pairwise(given)), "in turn"


def test_a_tenant_of_small_requests_is_given_more_of_them() -> None:
    """What counts is the blocks."""
    core = decode_core(6)
    case.ask(core, of("a", case.reserve(0, num_tokens=20)))
    for number in range(1, 31):
        large = number <= 10
        num_tokens, first = (20 if large else 2), 30 * number
        case.ask(core, of("a" if large else "b", case.reserve(number, num_tokens=num_tokens, first=first)))
    blocks, running = {"a": 0, "b": 0}, [0]
    while sum(blocks.values()) < 48:
        come = reserved_of([action for number in running for action in case.hear(core, case.cancel(number), 1)])
        running = [int(name[1:]) for name in come]
        for number in running:
            blocks["a" if number <= 10 else "b"] += 6 if number <= 10 else 2
    assert abs(blocks["a"] - blocks["b"]) <= 6


def test_a_prompt_waits_for_no_other_tenant_s_backlog() -> None:
    limits = case.limits(case.PREFILL, num_blocks=BLOCKS, max_queued=100)
    core = AttemptCore(limits, case.block_cache(BLOCKS), LeaseTable())
    for number in range(20):
        case.ask(core, of("a", case.run_prefill(number, first=10 * number, split=False)))
    reply, _ = case.ask(core, of("b", case.run_prefill(20, first=500, split=False)))
    assert isinstance(reply, AttemptAccepted)
    (first,) = [attempt for attempt in core.records.values() if attempt.stage == "computing"]
    case.hear(core, case.cancel(0), 1)
    actions = case.hear(core, SequenceRemoved(first.key), 2)
    assert [action.sequence.request_id for action in actions if isinstance(action, Submit)] == ["r20"]


@pytest.mark.parametrize("most", [4, 5, 60])
def test_a_tenant_s_backlog_leaves_the_others_places_in_the_queue(most: int) -> None:
    core = decode_core(BLOCKS, max_queued=most)
    case.ask(core, of("a", case.reserve(0)))
    taken, number = dict.fromkeys("abcdefgh", 0), 0
    for tenant in taken:
        for _ in range(most + 2):
            number += 1
            reply, _ = case.ask(core, of(tenant, case.reserve(number, first=number)))
            taken[tenant] += isinstance(reply, AttemptAccepted)
            assert isinstance(reply, AttemptAccepted) or (
                isinstance(reply, Refused) and reply.reason is RefusalReason.OVERLOADED
            )
    assert (taken["a"], taken["b"], taken["c"]) == (most, most // 2, most // 3)
    assert sum(taken.values()) <= 2 * most, "however many tenants there are"


def test_turns_are_not_saved_up() -> None:
    """Who had nothing to ask for is served next, and then like the others."""
    turns, given = TenantTurns(), dict.fromkeys("ab", 0)
    for _ in range(100):
        turns.gave("a", 1)
    for _ in range(20):
        first, _ = turns.order(["a", "b"])
        turns.gave(first, 1)
        given[first] += 1
    assert given == {"a": 10, "b": 10}
