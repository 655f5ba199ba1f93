"""Blocks that are not at a server's own holder: at another one, behind memory, or about to be saved."""

from collections.abc import Generator
from pathlib import Path

import pytest

from schemas.attach import Ask, Half, Have, Saved, SlotsGiven, Use, WantSlots
from schemas.block import BlockHasher, join_hashes
from services.attach.connector.identity import layout_of
from services.telemetry import Key, SpanName, SpanRecord
from tests.attach.core_rig import IDENTITY
from tests.attach.fake_server import FakeServer, fake_server
from tests.attach.live_holders import LiveHolders, live_holders
from tests.attach.test_door import half
from tests.attach.test_halves import alone, prompt
from tests.waiting import wait_until

SIZE = IDENTITY.block_size


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return [tmp_path / "0.sock", tmp_path / "1.sock"]


@pytest.fixture
def holders(paths: list[Path]) -> Generator[LiveHolders]:
    with live_holders(*paths) as both:
        yield both


@pytest.fixture
def servers(holders: LiveHolders, paths: list[Path]) -> Generator[list[FakeServer]]:
    """One at each holder."""
    with fake_server(paths[0], "a") as one, fake_server(paths[1], "b") as other:
        one.await_proven()
        other.await_proven()
        yield [one, other]


def test_what_a_server_of_another_holder_computed_is_loaded(
    holders: LiveHolders, servers: list[FakeServer], paths: list[Path]
) -> None:
    one, other = servers
    right = alone(paths[0], prompt(1))
    one.run(prompt(1))
    holders.await_located(prompt(1))
    ran = other.run(prompt(1))
    assert (ran.num_loaded, ran.answer) == (5 * SIZE, right), "at the first try"


def test_a_server_whose_kv_differs_from_another_holder_s_does_not_begin_to_share(
    holders: LiveHolders, paths: list[Path]
) -> None:
    with fake_server(paths[0], "a") as one:
        one.await_proven()
        one.run(prompt(8))
        holders.await_located(prompt(8))  # what came before it, the canary, is known as well
        with fake_server(paths[1], "b", wrong=1) as other:
            assert "came from elsewhere" in other.await_off()
        with fake_server(paths[1], "c") as third:
            third.await_proven()
            ran = third.run(prompt(8))
            assert (ran.num_loaded, ran.answer) == (0, alone(paths[0], prompt(8))), "it believes no other holder now"


def test_a_holder_that_was_read_slowly_once_is_tried_again(holders: LiveHolders, paths: list[Path]) -> None:
    """The asking server says that it computes a token in no time: next to that, all reading is slow."""

    def hashes_of(seed: int, num_blocks: int) -> bytes:
        hasher = BlockHasher(SIZE, model_fingerprint=layout_of(IDENTITY).fingerprint)
        return join_hashes(hasher.extend(prompt(seed), num_blocks * SIZE))

    with fake_server(paths[0], "a") as one, half(paths[1]) as scheduler, half(paths[1], Half.WORKER) as worker:
        one.await_proven()
        for seed in (1, 2):
            wait_until(lambda seed=seed: one.run(prompt(seed)).num_loaded == 5 * SIZE)
            holders.await_located(prompt(seed))

        def num_brought(seed: int) -> int:
            scheduler.send(Ask(seed, hashes_of(seed, 5), Use.COMPARE))
            answers = [scheduler.receive()]
            while isinstance(answers[-1], Have) and answers[-1].has_more:
                answers.append(scheduler.receive())
            assert isinstance(answers[-1], Have)
            return len(answers[-1].slots)

        assert num_brought(1) == 5
        scheduler.send(WantSlots(4))
        given = scheduler.receive()
        assert isinstance(given, SlotsGiven)
        worker.send(Saved(1, given.slots, hashes_of(3, 4), 1e-9))
        wait_until(lambda: num_brought(3) == 4)
        assert num_brought(2) == 0
        wait_until(lambda: num_brought(2) == 5)


def test_a_trace_shows_what_was_asked_fetched_and_loaded(servers: list[FakeServer], holders: LiveHolders) -> None:
    one, other = servers
    trace_id, mine = "ab" * 16, "cd" * 8
    one.run(prompt(7))
    holders.await_located(prompt(7))
    headers = {"traceparent": f"00-{trace_id}-{mine}-01"}

    def spans() -> dict[str, SpanRecord]:
        return {span.name: span for span in holders.spans if span.trace_id == trace_id}

    other.run(prompt(7), trace_headers=headers)
    wait_until(lambda: SpanName.ATTACH_LOAD in spans())
    found = spans()
    for name in (SpanName.ATTACH_ASK, SpanName.ATTACH_FETCH, SpanName.ATTACH_LOAD):
        assert (found[name].parent_id, found[name].attributes[Key.SERVER]) == (mine, "b")
    assert found[SpanName.ATTACH_LOAD].attributes[Key.NUM_BLOCKS] == 5
    for name in (SpanName.LOCATE, SpanName.KV_TRANSFER):
        assert found[name].parent_id == found[SpanName.ATTACH_FETCH].span_id
    # A server that passes no trace on has one begun.
    other.run(prompt(7))
    wait_until(lambda: (holders.spans[-1].name, holders.spans[-1].trace_id != trace_id) == (SpanName.ATTACH_LOAD, True))
    ask, load = holders.spans[-2:]
    assert (ask.name, load.parent_id) == (SpanName.ATTACH_ASK, ask.span_id)


def test_a_hint_of_a_proxy_leads_to_another_holder(servers: list[FakeServer]) -> None:
    one, other = servers
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    params = one.run(prompt(2), kv_transfer_params=asked).params
    assert params is not None and params["do_remote_prefill"] and not params["do_remote_decode"]
    assert params["kvmesh"] == {"holder": "attach-0", "tokens": 5 * SIZE}
    # A proxy may set more, and sends all of it to the decode server.
    told = params | {"remote_host": "10.0.0.1", "remote_port": 1}
    assert other.run(prompt(2), kv_transfer_params=told).num_loaded == 5 * SIZE


def test_a_hint_waits_for_what_is_about_to_be_saved_at_its_own_holder(
    holders: LiveHolders, servers: list[FakeServer], paths: list[Path]
) -> None:
    one, _ = servers
    with fake_server(paths[0], "c") as third:
        third.await_proven()
        params = one.run(prompt(3), kv_transfer_params={"do_remote_decode": True}).params
        assert third.run(prompt(3), kv_transfer_params=params).num_loaded == 5 * SIZE, "at the first try"


@pytest.mark.parametrize(
    "own",
    [
        {"holder": "nobody", "tokens": 1_000},
        {"holder": "x" * 5_000, "tokens": 1},
        {"holder": "attach-1", "tokens": -1},
        {"holder": 3, "tokens": "x"},
        {"holder": "mesh.>", "tokens": 1_000},
        {"holder": "", "tokens": 1_000},
    ],
)
def test_a_hint_that_lies_costs_a_wait(servers: list[FakeServer], paths: list[Path], own: dict[str, object]) -> None:
    _, other = servers
    ran = other.run(prompt(4), kv_transfer_params={"do_remote_prefill": True, "kvmesh": own})
    assert (ran.num_loaded, ran.answer) == (0, alone(paths[0], prompt(4)))


@pytest.mark.slow
def test_what_memory_gave_up_comes_back_from_disk(tmp_path: Path) -> None:
    path = tmp_path / "0.sock"
    with (
        live_holders(path, num_blocks=16, url="disk", path=str(tmp_path / "disk")),
        fake_server(path, "a") as server,
    ):
        server.await_proven()
        right = alone(path, prompt(5))
        server.run(prompt(5))
        wait_until(lambda: server.run(prompt(5)).num_loaded == 5 * SIZE)
        for seed in range(100, 104):  # more than memory holds
            wait_until(lambda one=seed: server.run(prompt(one)).num_loaded == 5 * SIZE)
        ran = server.run(prompt(5))
        assert (ran.num_loaded, ran.answer) == (5 * SIZE, right)


def test_a_holder_that_is_started_again_has_what_its_disk_has(tmp_path: Path) -> None:
    path, options = tmp_path / "0.sock", {"url": "disk", "path": str(tmp_path / "disk")}
    with fake_server(path, "a") as server:
        with live_holders(path, **options):
            server.await_proven()
            wait_until(lambda: server.run(prompt(6)).num_loaded == 5 * SIZE)
        with live_holders(path, **options):
            wait_until(lambda: server.clients[Half.SCHEDULER].is_proven)
            wait_until(lambda: server.run(prompt(6)).num_loaded == 5 * SIZE)
            assert server.run(prompt(6)).answer == alone(path, prompt(6))
