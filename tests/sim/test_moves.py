"""The simulator's checks of workers that leave: what they must accept, and what they must not."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.ids import GatewayId, RequestId, WorkerId
from schemas.message import Message, encode
from schemas.observe import RequestFinished, RequestPlaced, RequestResumed
from schemas.request import AttemptFailure, Progress, RequestFailure, RequestTokens, TokensEmitted
from schemas.worker import LeaveAnswered
from services.config import MeshConfig
from services.sim.mesh import MeshShape
from services.sim.platform.plane import SimNetwork
from services.sim.scenario import FaultKind
from services.sim.verdict.leaving import LeaveTap
from services.sim.verdict.moves import WENT_WRONG, MoveTap
from services.sim.verdict.rest import held_at_rest
from services.sim.world import World, simulate
from tests.sim.bugs import DRAINED

REQUEST = RequestId("req-1")
DRAINS: set[FaultKind] = {"drain"}


class Told:
    """A request whose attempts run on `decode-{attempt}`, and what a tap is told of it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.tap = MoveTap(lambda: self.now_s)

    def story(self, word: str, event: type[Message], attempt: int, **fields: Any) -> None:
        terms = {"request_id": REQUEST, "attempt": attempt, "deadline_ms": 1, "gateway_id": GatewayId("gateway-0")}
        self.tap.note_message(f"mesh.v1.request.{REQUEST}.{word}", encode(event(**terms, **fields)))

    def placed(self, attempt: int = 1) -> None:
        workers = {"prefill_worker": WorkerId("prefill-0"), "decode_worker": WorkerId(f"decode-{attempt}")}
        self.story("placed", RequestPlaced, attempt, **workers)

    def resumed(self, attempt: int = 2, moved_by: str | None = "decode-1") -> None:
        self.story("resumed", RequestResumed, attempt, num_answered_tokens=1, reason="", moved_by=moved_by)

    def finished(self, attempt: int = 2) -> None:
        self.story("finished", RequestFinished, attempt, finish_reason="stop", num_tokens=1)

    def said(
        self, worker: str = "decode-1", attempt: int = 1, code: AttemptFailure | None = AttemptFailure.DRAINING
    ) -> None:
        failure = RequestFailure(code=code, detail="", retryable=True) if code else None
        tokens = RequestTokens(request_id=REQUEST, attempt=attempt, index=0, failure=failure)
        emitted = TokensEmitted(worker_id=WorkerId(worker), requests=(tokens,))
        self.tap.note_message(f"mesh.v1.tokens.{worker}.gateway-0", encode(emitted))

    def problems(self, kinds: set[FaultKind] = DRAINS) -> list[str]:
        return list(self.tap.problems(kinds))


def moved() -> Told:
    told = Told()
    told.placed()
    told.said()
    told.resumed()
    told.placed(2)
    return told


def test_an_answer_that_goes_on_elsewhere_is_right() -> None:
    told = moved()
    told.said("decode-2", 2, None)
    told.finished()
    assert not told.problems() and told.tap.num_moved == 1


def test_an_answer_may_end_before_it_goes_on() -> None:
    told = Told()
    told.placed()
    told.said()
    told.finished(1)
    assert not told.problems()


def test_an_answer_that_was_migrated_and_neither_ends_nor_goes_on() -> None:
    told = moved()
    told.said("decode-2", 2)
    told.finished(4)
    assert "nothing came of it" in told.problems()[0]
    assert not told.problems({"broker"}), "nobody knows what it lost"


def test_one_move_goes_on_once() -> None:
    told = moved()
    told.resumed()
    told.finished()
    assert "began 2 times" in told.problems()[0]


@pytest.mark.parametrize("code", [None, *sorted(WENT_WRONG)])
def test_nothing_goes_on_for_a_worker_that_has_given_nothing_away(code: AttemptFailure | None) -> None:
    told = Told()
    told.placed()
    told.said(code=code)
    told.resumed()
    told.finished()
    assert "has migrated nothing" in told.problems({"loss"})[0]


def test_what_was_lost_and_asked_for_again_was_migrated() -> None:
    told = Told()
    told.placed()
    failure = RequestFailure(code=AttemptFailure.DRAINING, detail="", retryable=True)
    tokens = RequestTokens(request_id=REQUEST, attempt=1, index=0, failure=failure)
    terms = {"request_id": REQUEST, "attempt": 1, "deadline_ms": 1, "worker_id": WorkerId("decode-1")}
    told.tap.note_message("mesh.v1.worker.decode-1.progress", encode(Progress(**terms, known=True, tokens=tokens)))  # type: ignore[arg-type]
    told.resumed()
    told.finished()
    assert not told.problems()


def test_an_answer_goes_on_at_once() -> None:
    told = Told()
    told.placed()
    told.said()
    told.now_s = 0.5
    told.resumed()
    told.finished()
    assert "waited 0.500 s" in told.problems()[0]
    assert not told.problems({"drain", "loss"}), "it had to be asked for"


def test_a_prompt_that_the_decode_worker_has_already_may_be_migrated() -> None:
    told = Told()
    told.placed()
    told.said("prefill-0")
    told.now_s = 0.5
    told.said(code=None)
    told.finished(1)
    assert not told.problems()


def test_who_drains_does_not_take_back_what_it_gave_away() -> None:
    told = moved()
    told.said("decode-1", 2, None)
    told.finished()
    assert not told.problems()
    told.tap.note_message("mesh.v1.worker.decode-1.draining", b"")
    told.said("decode-1", 2, None)
    assert "answers attempt 2" in told.problems()[0]
    told = moved()
    for word in ("draining", "joined"):
        told.tap.note_message(f"mesh.v1.worker.decode-1.{word}", b"")
    told.said("decode-1", 2, None)
    told.finished()
    assert not told.problems()


@dataclass(eq=False)
class Leaver:
    name: str = "decode-0"
    is_running: bool = True


@pytest.mark.parametrize("is_last", [False, True])
def test_a_worker_is_soon_gone_unless_it_is_the_last(is_last: bool) -> None:
    leaver, now_s = Leaver(), 0.0
    mesh: Any = SimpleNamespace(
        shape=MeshShape(), network=SimNetwork(random.Random(0)), services={leaver.name: leaver}, config=MeshConfig()
    )
    tap = LeaveTap(mesh, lambda: now_s)
    tap.note_message("mesh.v1.worker.decode-0.leave", encode(LeaveAnswered(is_last=is_last)))
    now_s = tap.within_s
    assert not tap.problems_now(DRAINS)
    now_s += 0.1
    assert bool(tap.problems_now(DRAINS)) is not is_last
    assert not tap.problems_now({"drain", "kill"})
    leaver.is_running = False
    assert not tap.problems_now(DRAINS)


def test_a_reader_that_is_expected_for_ever_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers that expect somebody have gone when all is at rest; one that stays would be found."""
    found: list[str] = []
    rest = World._rest  # pyright: ignore[reportPrivateUsage]

    async def expecting(self: World) -> None:
        await rest(self)
        assert not held_at_rest(self.mesh)
        (holder,) = self.mesh.services["decode-0"].gates
        holder.leases.expect(REQUEST, 2**62)  # type: ignore[attr-defined]
        found.extend(what for what, _ in held_at_rest(self.mesh))

    monkeypatch.setattr(World, "_rest", expecting)
    verdict = simulate(1, DRAINED).verdict
    assert found == ["decode-0: 1 readers are expected that nobody sends"]
    assert not verdict.problems and verdict.num_moved
