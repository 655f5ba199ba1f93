"""Prompts that begin alike, at one time on one worker: each block is filled once, and nobody waits for ever."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import KVLayout, block_ids, uniform_shape
from schemas.block import pack_tokens
from schemas.handoff import BlocksReserved, FirstToken
from schemas.kv import PurgeBlocks, ReadEnd
from schemas.message import Message
from schemas.worker import LeftReason, WorkerLeft
from services.holder.core.attempt import Attempt
from services.holder.core.content import ReadOutcome
from services.holder.core.events import DrainBegun, Event, Fenced, ReadEnded
from services.holder.limits import DUPLICATE_WAIT_SHARE
from services.times import Times
from tests.share import examples
from tests.worker import worker_cases as case
from tests.worker.worker_world import WorkerWorld

DUPLICATE_LANDS_WITHIN_MS = Times().decode.duplicate_lands_within_ms

PROMPT = 18
"""Tokens: four blocks of four and two more."""


class Worker(WorkerWorld):
    """One worker, and what its attempts were given: the tokens of each prompt that its engine computed."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.said: list[Message] = []
        super().__init__(case.DECODE, num_blocks, self.said.append)

    def ask(self, *numbers: int, now_ms: int = 0, tenant: str = "", **terms: Any) -> None:
        for number in numbers:
            run = case.run_prefill(number, num_tokens=PROMPT, max_tokens=3, split=False, **terms)
            self.execute(case.decide(self.core, case.asked(msgspec.structs.replace(run, tenant=tenant)), now_ms))
            self.check()

    def reserve(self, *numbers: int, now_ms: int = 0, **terms: Any) -> None:
        for number in numbers:
            request = case.reserve(number, num_tokens=PROMPT, max_tokens=3, **terms)
            self.execute(case.decide(self.core, case.asked(request), now_ms))
            self.check()

    def hear(self, event: Event, now_ms: int = 0) -> None:
        self.handle(event, now_ms)
        self.execute(case.decide(self.lending, event, now_ms))
        self.check()

    def offer(self, number: int, now_ms: int = 0) -> None:
        self.hear(case.offered(number, num_tokens=PROMPT), now_ms)

    def land(self, number: int, *, now_ms: int = 0, num_tokens: int = PROMPT) -> None:
        """A hand-over ends: with all, or with so many tokens."""
        [read] = [read for read in self.reads if read.key[0] == f"r{number}"]
        self.reads.remove(read)
        outcome = ReadOutcome(num_tokens, 1, "tcp", is_whole=num_tokens == PROMPT)
        if num_tokens == PROMPT:
            event = ReadEnded(read, outcome, first_token=FirstToken(token_id=100))
        else:
            event = ReadEnded(read, outcome, ReadEnd.CLOSED, "cut")
        self.hear(event, now_ms)

    def run_all(self, *, now_ms: int = 0) -> None:
        """The engine computes all that it has."""
        for _ in range(100):
            if not self.running:
                return
            self.step(now_ms)
            self.check()
        raise AssertionError("the engine never comes to its end")

    def attempt(self, number: int) -> Attempt:
        key = (case.run_prefill(number).request_id, 1)
        found = self.core.records.get(key)
        assert found is not None, f"r{number} is not known"
        return found

    def stages(self, *numbers: int) -> list[str]:
        return [self.attempt(number).stage for number in numbers]

    def present(self, number: int) -> int:
        """Return how many of a prompt's tokens were in place when it began."""
        kv = self.attempt(number).kv
        assert kv is not None
        return kv.num_present_tokens


def test_each_block_is_computed_once_and_each_computes_its_own_rest() -> None:
    worker = Worker()
    worker.ask(*range(1, 6))
    assert worker.stages(*range(1, 6)) == ["computing", *["waiting_for_duplicate"] * 4]
    assert [worker.attempt(n).held(5).waiting_for for n in (1, 2, 5)] == ["", "r1", "r1"]
    assert [worker.attempt(n).num_awaited_tokens for n in (2, 5)] == [2, 2]
    assert worker.core.num_queued == 0, "they wait for no room"
    while worker.attempt(1).num_stored_blocks < 4:
        assert worker.stages(2) == ["waiting_for_duplicate"]
        worker.step(0)
    assert worker.stages(*range(1, 6)) == ["computing"] * 5
    assert [worker.present(n) for n in range(1, 6)] == [0, *[16] * 4]
    worker.run_all()
    assert worker.is_at_rest


def test_the_wait_is_over_as_soon_as_the_common_blocks_are_there() -> None:
    worker = Worker()
    other = case.run_prefill(1, num_tokens=90, max_tokens=3, split=False)
    worker.execute(case.decide(worker.core, case.asked(other), 0))
    worker.ask(2, first=1)
    assert worker.attempt(1).num_stored_blocks == 0
    for _ in range(20):
        if worker.stages(2) == ["computing"]:
            break
        worker.step(0)
    assert worker.attempt(1).num_stored_blocks >= 4 and worker.present(2) == 16


def test_who_has_nothing_in_common_does_not_wait() -> None:
    worker = Worker()
    worker.ask(1)
    worker.ask(2, first=30)
    short = case.run_prefill(3, num_tokens=4, split=False)  # its last token is computed in any case
    worker.execute(case.decide(worker.core, case.asked(short), 0))
    assert worker.stages(1, 2, 3) == ["computing"] * 3


def test_another_tenants_prompt_is_nobodys_duplicate() -> None:
    worker = Worker()
    worker.ask(1, tenant="a")
    worker.ask(2, tenant="b")
    worker.ask(3, tenant="a")
    assert worker.stages(1, 2, 3) == ["computing", "computing", "waiting_for_duplicate"]


def test_what_is_cached_is_not_waited_for() -> None:
    worker = Worker()
    case.keep(worker.cache, 16)
    worker.ask(1, 2)
    assert worker.stages(1, 2) == ["computing"] * 2 and worker.present(2) == 16


@pytest.mark.parametrize("how", ["cancel", "engine", "unwanted"])
def test_the_next_one_goes_on_where_the_computing_one_ends(how: str) -> None:
    worker = Worker()
    worker.ask(1, 2, 3)
    if how == "engine":
        worker.step(0, fails=True)
    elif how == "cancel":
        worker.hear(case.cancel(1))
        worker.step(0)
    else:
        worker.hear(Fenced("declared dead"))
        assert all(attempt.has_ended for attempt in worker.core.records.values())
        worker.run_all()
        assert worker.is_at_rest
        return
    assert worker.stages(2, 3) == ["computing", "waiting_for_duplicate"]
    assert worker.attempt(3).held(0).waiting_for == "r2"
    worker.run_all()
    assert worker.is_at_rest


def test_what_a_dead_one_has_left_is_shared() -> None:
    worker = Worker()
    run = case.run_prefill(1, num_tokens=90, max_tokens=3, split=False)
    worker.execute(case.decide(worker.core, case.asked(run), 0))
    same = case.run_prefill(2, num_tokens=90, max_tokens=3, split=False)
    worker.execute(case.decide(worker.core, case.asked(same), 0))
    worker.step(0)
    num_tokens = worker.attempt(1).num_stored_blocks * 4
    assert 0 < num_tokens < 88 and worker.stages(2) == ["waiting_for_duplicate"]
    worker.hear(case.cancel(1))
    worker.step(0)
    assert worker.stages(2) == ["computing"] and worker.present(2) >= num_tokens


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole_and_at_once() -> None:
    worker = Worker()
    worker.ask(1)
    run = case.with_sampling(case.run_prefill(2, num_tokens=PROMPT, split=False), prompt_logprobs=1)
    worker.execute(case.decide(worker.core, case.asked(run), 0))
    assert worker.stages(2) == ["computing"] and worker.present(2) == 0


def test_a_purge_ends_the_wait_for_what_will_not_be_kept() -> None:
    worker = Worker()
    worker.ask(1, 2)
    worker.hear(PurgeBlocks())
    worker.tick(1)
    assert worker.stages(2) == ["computing"] and worker.present(2) == 0


def test_a_drain_gives_back_who_waits() -> None:
    worker = Worker()
    worker.ask(1, 2)
    worker.hear(DrainBegun())
    assert worker.stages(1) == ["computing"] and len(worker.core.records) == 1
    assert worker.emitted[-1].failure is not None and worker.emitted[-1].failure.code == "draining"


def test_who_waits_holds_nothing_and_who_has_nothing_in_common_goes_first() -> None:
    worker = Worker(num_blocks=12)
    worker.ask(1, 2, 3)
    assert worker.cache.num_free == 12 - 5
    worker.ask(4, first=40)
    assert worker.stages(1, 2, 3, 4) == ["computing", "waiting_for_duplicate", "waiting_for_duplicate", "computing"]


def test_a_wait_takes_a_half_of_what_is_left_at_most() -> None:
    worker = Worker()
    worker.ask(1)
    worker.ask(2, now_ms=10, deadline_ms=4_010)
    until_ms = 10 + 4_000 // DUPLICATE_WAIT_SHARE
    worker.tick(until_ms - 1)
    assert worker.stages(2) == ["waiting_for_duplicate"]
    worker.tick(until_ms)
    assert worker.stages(2) == ["computing"]
    wait = worker.attempt(2).wait
    assert wait is not None and (wait.began_ms, wait.ended_ms) == (10, until_ms)
    assert wait.duplicate is None, "nothing is kept of who ends before it"


def test_layers_with_windows_wait_for_nobody() -> None:
    layout = KVLayout(
        weights="w", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, windows=(0, 8)
    )
    cache = BlockCache(uniform_shape(layout, 64), chunk_tokens=16)
    assert layout.is_windowed and not cache.keeps_what_is_computed
    assert not BlockCache(case.block_cache().shape, chunk_tokens=16, caching=False).keeps_what_is_computed


# Reservations.


def test_a_block_reaches_a_decode_worker_once() -> None:
    worker = Worker()
    worker.reserve(1, 2, 3)
    assert worker.stages(1, 2, 3) == ["reserved", "waiting_for_duplicate", "waiting_for_duplicate"]
    assert [type(m) for m in worker.said] == [BlocksReserved], "they have no room yet"
    worker.offer(1)
    worker.land(1)
    worker.tick(1)
    assert worker.stages(1, 2, 3) == ["computing", "reserved", "reserved"]
    assert [m.request_id for m in worker.said if isinstance(m, BlocksReserved)] == ["r1", "r2", "r3"]
    worker.offer(2)
    [read] = worker.reads
    assert read.first_token == 16, "the two tokens beyond are all that it reads"
    worker.land(2)
    assert worker.present(2) == PROMPT


def test_one_waits_where_the_landing_one_loses_its_source_and_goes_on() -> None:
    worker = Worker()
    worker.reserve(1, 2)
    worker.offer(1)
    worker.hear(WorkerLeft(worker_id=case.PREFILL, incarnation="a", reason=LeftReason.DIED))
    worker.land(1, num_tokens=8)
    worker.hear(case.aborted(2))
    assert worker.stages(1, 2) == ["computing", "waiting_for_duplicate"]
    worker.step(0)
    assert worker.stages(2) == ["computing"] and worker.present(2) == 16, "one computes, and both have it"
    worker.run_all()
    assert worker.is_at_rest


def test_a_reservation_goes_on_by_itself_where_the_other_one_is_cancelled() -> None:
    worker = Worker()
    worker.reserve(1, 2)
    worker.hear(case.cancel(1))
    assert worker.stages(2) == ["reserved"]


def test_a_reservation_does_not_wait_for_ever() -> None:
    worker = Worker()
    worker.reserve(1, 2, deadline_ms=10 * DUPLICATE_LANDS_WITHIN_MS)
    worker.tick(DUPLICATE_LANDS_WITHIN_MS - 1)
    assert worker.stages(2) == ["waiting_for_duplicate"]
    worker.tick(DUPLICATE_LANDS_WITHIN_MS)
    assert worker.stages(2) == ["reserved"]


def test_a_little_of_a_long_read_is_not_waited_for() -> None:
    worker = Worker()
    worker.execute(case.decide(worker.core, case.asked(case.reserve(1, num_tokens=90)), 0))
    worker.reserve(2)
    assert worker.stages(2) == ["reserved"]


def test_who_is_served_alone_waits_for_what_lands_here() -> None:
    worker = Worker()
    worker.reserve(1)
    worker.ask(2)
    assert worker.stages(2) == ["waiting_for_duplicate"]
    worker.offer(1)
    worker.land(1)
    worker.tick(1)
    assert worker.stages(2) == ["computing"] and worker.present(2) == 16


# Whatever happens.

EVENTS = (*("ask", "step") * 8, *("cancel", "fails", "tick"))
events = st.tuples(st.sampled_from(EVENTS), st.integers(0, 11))


def assert_apart(worker: Worker) -> None:
    """No block is two tenants', none is filled by two at a time, and nobody waits for one who does not fill."""
    of_block: dict[int, str] = {}
    filled: set[tuple[str, bytes]] = set()
    for attempt in worker.core.records.values():
        tenant = attempt.request.tenant
        for block in block_ids(attempt.tables[0].segments) if attempt.tables else ():
            assert of_block.setdefault(block, tenant) == tenant
        if attempt.stage == "waiting_for_duplicate":
            assert not attempt.tables and attempt.kv is None and attempt.wait is not None
            duplicate = attempt.wait.duplicate
            assert (
                duplicate is not None
                and duplicate.attempt.stage == "computing"
                and duplicate.attempt.num_stored_blocks < duplicate.end_block
            )
            assert duplicate.attempt.request.tenant == tenant
        if attempt.stage == "computing":
            first, last = attempt.num_stored_blocks, (attempt.num_prompt_tokens - 1) // 4
            for block_hash in attempt.hasher.hashes[first:last]:
                assert (tenant, block_hash) not in filled, "two compute it"
                filled.add((tenant, block_hash))


@settings(max_examples=examples(150), deadline=None)
@given(num_blocks=st.sampled_from([12, 24, 64]), chosen=st.lists(events, min_size=5, max_size=120))
def test_no_block_is_computed_twice_at_a_time_and_all_ends(num_blocks: int, chosen: list[tuple[str, int]]) -> None:
    worker = Worker(num_blocks)
    now_ms = number = 0
    for kind, choice in chosen:
        match kind:
            case "ask":
                number += 1
                common = 4 * (choice % 5)
                tokens = [*range(1, common + 1), *range(200 + choice, 216 + choice)]
                run = case.run_prefill(number, split=False, max_tokens=3, deadline_ms=now_ms + 10**6)
                run = msgspec.structs.replace(run, prompt=pack_tokens(tokens), tenant="ab"[choice % 2])
                worker.execute(case.decide(worker.core, case.asked(run), now_ms))
            case "cancel":
                worker.hear(case.cancel(max(1, number - choice)), now_ms)
            case "tick":
                now_ms += 50
                worker.tick(now_ms)
            case _:
                worker.step(now_ms, fails=kind == "fails" and not choice % 4)
        worker.check()
        assert_apart(worker)
    for _ in range(200):
        worker.step(now_ms)
        worker.tick(now_ms)
        assert_apart(worker)
    assert worker.is_at_rest
