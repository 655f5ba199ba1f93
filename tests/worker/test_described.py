"""What a worker says it holds: requests by how far they are, leases by their age."""

import pytest

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.protocol.progress import KVProgress
from schemas.ids import LeaseId, RequestId
from schemas.observe import HeldRequest, RunStage
from services.holder import report
from services.holder.core.leases import LeaseTable
from services.holder.report import describe
from services.worker.core import AttemptCore
from tests.wire.examples import LOAD
from tests.worker import worker_cases as case

NOW = 1_000


def held_by(core: AttemptCore, now_ms: int = NOW) -> list[HeldRequest]:
    return [attempt.held(now_ms) for attempt in core.records.values()]


def stages(core: AttemptCore, now_ms: int = NOW) -> list[tuple[str, RunStage, int, str]]:
    return [(held.request_id, held.stage, held.age_ms, held.reading_from) for held in held_by(core, now_ms)]


def test_a_prefill_workers_requests_by_stage() -> None:
    cache, leases = case.block_cache(2), LeaseTable()
    core = AttemptCore(case.limits(case.PREFILL, num_blocks=2), cache, leases)
    case.hear(core, case.reserved(1), 100)
    case.ask(core, case.run_prefill(1), 100)
    case.ask(core, case.run_prefill(2, first=50), 300)
    assert stages(core) == [("r1", "computing", 900, ""), ("r2", "queued", 700, "")]
    assert [(held.part, held.num_prompt_tokens) for held in held_by(core)] == [("prefill", 6), ("prefill", 6)]
    [lease] = describe(LOAD, (), leases, NOW).leases
    assert (lease.reader, lease.num_blocks, lease.age_ms, lease.left_ms) == (case.DECODE, 2, 900, 100)


def test_a_decode_workers_requests_by_stage() -> None:
    core = AttemptCore(case.limits(case.DECODE, num_blocks=3), case.block_cache(3), LeaseTable())
    case.ask(core, case.reserve(1), 100)
    case.ask(core, case.reserve(2, first=50), 300)
    assert stages(core) == [("r1", "reserved", 900, ""), ("r2", "queued", 700, "")]
    case.decide(core, case.offered(1), 300)
    assert stages(core)[0] == ("r1", "receiving", 900, case.PREFILL)
    case.decide(core, case.cancel(1), 400)
    assert stages(core)[0][1] == "ending"


def test_the_oldest_of_many_are_listed_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_LISTED", 2)
    requests = [
        HeldRequest(request_id=RequestId(f"r{age}"), attempt=1, part="prefill", stage="queued", age_ms=age)
        for age in (5, 30, 10)
    ]
    leases = LeaseTable()
    for granted_ms in (500, 100, 300):
        leases.grant(
            lease_id=LeaseId(f"l{granted_ms}"), holder=case.PREFILL, reader=case.DECODE, num_tokens=4,
            tables=(BlockTable((Segment(0, 1),)),), expires_at_ms=5_000, granted_ms=granted_ms,
            request_id=RequestId("r1"), attempt=1, progress=KVProgress(1, 4),
        )  # fmt: skip
    described = describe(LOAD, requests, leases, NOW)
    assert [held.request_id for held in described.requests] == ["r30", "r10"]
    assert [held.lease_id for held in described.leases] == ["l100", "l300"]
    assert (described.num_requests, described.num_leases) == (3, 3)
