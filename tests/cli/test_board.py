"""`kvmesh top`: what is made of what is heard, and that it fits a narrow terminal."""

import io

import msgspec
import pytest
from rich.console import Console

from schemas import observe as story
from schemas.handoff import KVLanded
from schemas.ids import GatewayId, LeaseId, RequestId, WorkerId
from schemas.observe import AttachedServer
from schemas.worker import BlockCounts, LeftReason, TransferRate, WorkerLeft, WorkerLoad, WorkerRates
from services.cli.board import Board
from services.cli.limits import FORGET_AFTER_S, RATE_WINDOW_S, SILENT_AFTER_S
from services.cli.top import POOL_WIDTH, frame, pool_bar
from tests.wire import examples

NOW_MS = 1_000_000


def told(kind: type[story.StoryMessage], number: int = 1, *, age_ms: int = 5, **fields: object) -> story.StoryMessage:
    return kind(
        request_id=RequestId(f"req-{number}"), attempt=1, deadline_ms=NOW_MS + 60_000, gateway_id=GatewayId("g"),
        age_ms=age_ms, **fields,
    )  # fmt: skip


def load(worker_id: str, **fields: object) -> WorkerLoad:
    info = msgspec.structs.replace(examples.INFO, worker_id=WorkerId(worker_id))
    return msgspec.structs.replace(examples.LOAD, worker=info, state="ready", **fields)


def landed(num_bytes: int) -> KVLanded:
    return KVLanded(
        **examples.REQUEST, **examples.HANDOFF, lease_id=LeaseId("l"), carrier="shm", num_tokens=9, num_bytes=num_bytes
    )


def busy() -> Board:
    board = Board(0.0)
    board.policy, board.is_ready = "cost", True
    rates = WorkerRates(
        transfers=(TransferRate(source=examples.SOURCE, carrier="shm", bytes_per_s=2**30, latency_ms=1.5),),
        decode_step_ms=3.25,
    )
    for name in (examples.SOURCE, examples.TARGET, "a-worker-with-a-very-long-name-indeed"):
        board.add_message(load(name, rates=rates), 9.0, NOW_MS)
    for number in range(3):
        board.add_message(told(story.RequestAccepted, number, num_prompt_tokens=1, max_tokens=2), 9.0, NOW_MS)
    board.add_message(told(story.RequestPlaced, 1, prefill_worker=examples.SOURCE), 9.0, NOW_MS)
    board.add_message(told(story.FirstTokenReceived, 2, age_ms=30), 9.0, NOW_MS)
    board.add_message(told(story.FirstTokenReceived, 2, age_ms=50), 9.0, NOW_MS)
    board.add_message(told(story.RequestFailed, 7, code="overloaded", detail="", status=429, num_tokens=0), 9.0, NOW_MS)
    board.add_message(landed(5 * 2**20), 9.0, NOW_MS)
    return board


def test_attached_servers_have_a_row_each() -> None:
    board = busy()
    servers = [AttachedServer(server=name, model="m", url="", sharing="on") for name in ("a" * 36, "b")]
    board.servers = {WorkerId("attach-0"): tuple(servers)}
    console = Console(width=80, file=io.StringIO())
    with console.capture() as drawn:
        console.print(frame(board, 10.0, "nats://x"))
    rows = [line for line in drawn.get().splitlines() if " on " in line]
    assert [row.split()[0] for row in rows] == ["a" * 15 + "…", "b"]
    assert max(map(len, drawn.get().splitlines())) <= 80


def test_requests_are_where_their_story_says() -> None:
    board = busy()
    assert board.phases(10.0) == {"placing": 1, "prefill": 1, "decode": 1}
    board.add_message(told(story.RequestResumed, 2, num_answered_tokens=3, reason="drains", moved_by="d"), 10.0, NOW_MS)
    assert board.phases(10.0) == {"placing": 2, "prefill": 1}
    board.add_message(told(story.RequestFinished, 2, finish_reason="stop", num_tokens=9), 10.0, NOW_MS)
    board.add_message(told(story.RequestCancelled, 1, reason="gone", num_tokens=0), 10.0, NOW_MS)
    assert board.phases(10.0) == {"placing": 1}
    assert (board.ends, board.num_resumed) == ({"finished": 1, "cancelled": 1, "failed": 1}, 1)
    assert board.num_moved == 1, "and it was migrated"


def test_a_request_whose_end_is_not_heard_is_dropped_after_its_deadline() -> None:
    board = busy()
    assert sum(board.phases(69.0).values()) == 3
    assert sum(board.phases(71.0).values()) == 0


def test_rates_are_averages_over_the_window() -> None:
    board = busy()
    for at, num_tokens in (
        (8.0, 1_000),
        (9.0, 1_050),
        (10.0, 1_100),
    ):
        board.add_message(load("w", num_tokens=num_tokens), at, NOW_MS)
    assert board.tokens.per_s(RATE_WINDOW_S) == pytest.approx(100 / RATE_WINDOW_S)
    assert board.tokens.per_s(9.5 + RATE_WINDOW_S) == pytest.approx(50 / RATE_WINDOW_S)
    assert board.tokens.per_s(99.0) == 0


def test_a_worker_is_silent_then_forgotten_and_one_that_leaves_goes_at_once() -> None:
    board = busy()
    assert [quiet for _, quiet in board.workers(9.0 + SILENT_AFTER_S + 0.1)] == [True, True, True]
    stale = WorkerLeft(worker_id=examples.SOURCE, incarnation="another", reason=LeftReason.DIED)
    board.add_message(stale, 9.5, NOW_MS)
    assert examples.SOURCE in board.loads
    board.add_message(msgspec.structs.replace(stale, incarnation=examples.INFO.incarnation), 9.5, NOW_MS)
    assert examples.SOURCE not in board.loads
    assert list(board.workers(9.0 + FORGET_AFTER_S + 1)) == []


def draw(board: Board, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), record=True, highlight=False)
    console.print(frame(board, 10.0, "nats://127.0.0.1:4222"))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_says_it_all_and_fits(width: int) -> None:
    text = draw(busy(), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for said in (
        "policy cost ready", "1 placing 1 prefill 1 decode", "p50 40 ms", "prefill-0 → decode-0 shm", "1,024",
        "overloaded 1", "refused 12 reads", "leaked 3 blocks", "3.2",
    ):  # fmt: skip
        assert said in words, text


def test_an_empty_mesh_is_drawn() -> None:
    text = draw(Board(0.0), 80)
    assert "no scheduler answers" in text and "not ready" in text


@pytest.mark.parametrize(
    "counts",
    [
        BlockCounts(total=1000, free=999, running=1, leased=0),
        BlockCounts(total=1000, free=0, running=0, leased=1000),
        BlockCounts(total=1000, free=1, running=333, leased=333, cached=333),
        BlockCounts(total=3, free=0, running=1, leased=1, cached=1),
    ],
)
def test_a_pool_s_bar_shows_every_state_that_has_a_block(counts: BlockCounts) -> None:
    bar = pool_bar(counts).plain
    assert len(bar) == POOL_WIDTH
    for mark, num in (("█", counts.running), ("▓", counts.leased), ("▒", counts.cached), ("·", counts.free)):
        assert (mark in bar) == (num > 0)
