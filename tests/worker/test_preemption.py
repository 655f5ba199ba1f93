"""A decode worker without room lets its youngest answers go on where there is some, instead of letting others wait."""

import msgspec
import pytest

from schemas.handoff import BlocksReserved, FirstToken
from schemas.ids import RequestId
from schemas.request import AttemptAccepted, AttemptFailure, RequestFailure
from services.engine.interface import Sequence
from services.holder.core.actions import Action, Emit, Submit, Withdraw
from services.holder.core.events import ReadEnded, SequenceRemoved
from services.times import Times
from tests.worker import worker_cases as case
from tests.worker.test_survival_core import Bench, failures
from tests.worker.worker_cases import one, published

READERS_COME_MS = Times().worker.readers_come_ms

BLOCKS = 3
"""What each request of these tests needs."""


def key(number: int) -> tuple[RequestId, int]:
    return RequestId(f"r{number}"), 1


def decoding(bench: Bench, number: int, *, num_answered: int = 0, num_tokens: int = 1) -> Sequence:
    """An answer is decoded here, and has so many tokens from here."""
    request = msgspec.structs.replace(case.reserve(number, first=100 * number), num_answered_tokens=num_answered)
    case.ask(bench.decode, request, number)
    case.hear(bench.decode, case.offered(number))
    ended = ReadEnded(bench.read_of(f"r{number}"), case.WHOLE, first_token=FirstToken(token_id=9))
    sequence = one(case.hear(bench.decode, ended), Submit).sequence
    for index in range(num_answered + 1, num_answered + 1 + num_tokens):
        case.hear(bench.decode, case.sampled(sequence, index), number)
    return sequence


def wants_room(bench: Bench, number: int = 9, *, spare: int = BLOCKS) -> list[Action]:
    request = msgspec.structs.replace(case.reserve(number, first=100 * number), spare_blocks=spare)
    reply, actions = case.ask(bench.decode, request, 50)
    assert isinstance(reply, AttemptAccepted)
    return bench.checked(actions)


def stored(bench: Bench, number: int, num_blocks: int) -> None:
    attempt = bench.decode.records[key(number)]
    bench.cache.store(attempt.tables, attempt.hasher.hashes[:num_blocks], 0, num_blocks * 4, 0, ended=False)
    attempt.num_stored_blocks = num_blocks


def lent(bench: Bench, number: int) -> None:
    """Whoever goes on has come for what is here."""
    tables = bench.cache.lend(bench.decode.records[key(number)].hasher.hashes[:1], 0)
    assert tables is not None
    bench.leases.grant(
        lease_id=case.offered(number).lease_id, holder=case.DECODE, reader=case.PREFILL, request_id=key(number)[0],
        attempt=2, tables=tables.tables, num_tokens=4, progress=None, expires_at_ms=10_000, is_lent=True,  # type: ignore[arg-type]
    )  # fmt: skip


def said(actions: list[Action]) -> RequestFailure:
    (failure,) = failures(actions)
    return failure


def test_the_youngest_answer_moves_and_its_blocks_go_to_who_waits_once_they_are_being_read() -> None:
    bench = Bench()
    decoding(bench, 1)
    decoding(bench, 2)
    assert wants_room(bench) == [Withdraw(key(2))]
    stored(bench, 2, 1)
    actions = bench.checked(case.hear(bench.decode, SequenceRemoved(key(2)), 60))
    assert said(actions) == RequestFailure(
        code=AttemptFailure.PREEMPTED, detail="it makes room for r9", retryable=True, held_blocks=1
    )
    assert published(actions) == [], "its KV is not given up before it is read"
    assert key(2) not in bench.decode.wanted_by()
    lent(bench, 2)
    actions = bench.checked(case.tick(bench.decode, 70))
    assert published(actions) == [BlocksReserved]
    assert key(2) not in bench.decode.records and bench.decode.records[key(9)].stage == "reserved"


def test_whoever_waits_for_room_has_it_after_a_while_though_nobody_reads() -> None:
    bench = Bench()
    decoding(bench, 1)
    decoding(bench, 2)
    wants_room(bench)
    stored(bench, 2, 1)
    case.hear(bench.decode, SequenceRemoved(key(2)), 60)
    bench.leases.expect_no_more(60 + READERS_COME_MS)
    assert published(bench.checked(case.tick(bench.decode, 60 + READERS_COME_MS))) == [BlocksReserved]


def test_what_holds_nothing_full_gives_its_blocks_at_once() -> None:
    bench = Bench()
    decoding(bench, 1)
    decoding(bench, 2)
    wants_room(bench)
    actions = bench.checked(case.hear(bench.decode, SequenceRemoved(key(2)), 60))
    assert said(actions).held_blocks == 0 and published(actions) == [BlocksReserved]


@pytest.mark.parametrize("spare", [0, BLOCKS - 1])
def test_nothing_moves_where_nobody_else_has_room(spare: int) -> None:
    bench = Bench()
    decoding(bench, 1)
    decoding(bench, 2)
    assert wants_room(bench, spare=spare) == []


def test_an_answer_moves_once_only() -> None:
    bench = Bench()
    decoding(bench, 1)
    decoding(bench, 2, num_answered=1)
    assert wants_room(bench) == [Withdraw(key(1))]


def test_nothing_moves_in_vain() -> None:
    """All that may move would not be room enough."""
    bench = Bench(num_blocks=6)
    decoding(bench, 1)
    decoding(bench, 2, num_answered=1)
    request = msgspec.structs.replace(case.reserve(9, num_tokens=20, first=900), spare_blocks=100)
    assert case.ask(bench.decode, request, 50)[1] == []


def test_while_one_moves_no_other_does() -> None:
    bench = Bench()
    decoding(bench, 1)
    decoding(bench, 2)
    wants_room(bench)
    assert case.tick(bench.decode, 55) == []
    stored(bench, 2, 1)
    case.hear(bench.decode, SequenceRemoved(key(2)), 60)
    assert case.tick(bench.decode, 65) == []


def test_several_move_for_one_that_is_large_as_far_as_there_is_room_for_them() -> None:
    bench = Bench(num_blocks=9)
    for number in (1, 2, 3):
        decoding(bench, number)
    request = msgspec.structs.replace(case.reserve(9, num_tokens=20, first=900), spare_blocks=2 * BLOCKS)
    assert case.ask(bench.decode, request, 50)[1] == [Withdraw(key(3)), Withdraw(key(2))]


def test_a_cancel_while_it_is_read_changes_nothing() -> None:
    bench = Bench()
    decoding(bench, 1)
    decoding(bench, 2)
    wants_room(bench)
    stored(bench, 2, 1)
    assert [a for a in case.hear(bench.decode, SequenceRemoved(key(2)), 60) if isinstance(a, Emit)]
    assert bench.checked(case.hear(bench.decode, case.cancel(2), 61)) == []
    lent(bench, 2)
    assert published(case.tick(bench.decode, 70)) == [BlocksReserved]
