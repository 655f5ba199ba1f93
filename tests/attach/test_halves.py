"""Both halves of the connector in a server that stands in for vLLM, and a holder that runs."""

import gc
import random
from pathlib import Path

import numpy as np
import pytest

from schemas.attach import Half, NotSaved
from services.attach.connector.plan import StepPlan
from tests.attach.core_rig import IDENTITY
from tests.attach.fake_server import FakeServer, fake_server
from tests.attach.live_holders import LiveHolders, live_holders
from tests.waiting import wait_until

SIZE = IDENTITY.block_size


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.sock"


@pytest.fixture
def holder(path: Path):
    with live_holders(path) as running:
        yield running


def prompt(seed: int, num_tokens: int = 5 * SIZE + 3) -> list[int]:
    return random.Random(seed).choices(range(1_000), k=num_tokens)


def alone(path: Path, tokens: list[int]) -> bytes:
    """Return what a server answers that is attached to nobody."""
    server = FakeServer(path.with_name("nobody.sock"), "alone")
    try:
        return server.run(tokens).answer
    finally:
        server.close()


def test_what_one_server_computes_another_loads(path: Path, holder: LiveHolders) -> None:
    with fake_server(path, "a") as one, fake_server(path, "b") as other:
        one.await_proven()
        other.await_proven()
        right = alone(path, prompt(1))
        assert one.run(prompt(1)).answer == right
        wait_until(lambda: other.run(prompt(1)).num_loaded == 5 * SIZE)
        again = other.run(prompt(1))
        assert (again.num_loaded, again.num_failed, again.answer) == (5 * SIZE, 0, right)
        wait_until(lambda: holder.describe().load.blocks.cached >= 5)


def test_a_longer_prompt_goes_on_behind_what_is_loaded(path: Path, holder: LiveHolders) -> None:
    with fake_server(path, "a") as server:
        server.await_proven()
        short, long = prompt(1, 4 * SIZE), prompt(1, 4 * SIZE) + prompt(2, 3 * SIZE + 1)
        server.run(short)
        wait_until(lambda: server.run(short).num_loaded == 3 * SIZE)  # its last token is always computed
        wait_until(lambda: server.run(long).num_loaded >= 4 * SIZE)
        wait_until(lambda: server.run(long).num_loaded == 7 * SIZE)
        assert server.run(long).answer == alone(path, long)


def test_another_salt_is_other_kv(path: Path, holder: LiveHolders) -> None:
    with fake_server(path, "a") as server:
        server.await_proven()
        wait_until(lambda: server.run(prompt(1), cache_salt="x").num_loaded == 5 * SIZE)
        assert server.run(prompt(1)).num_loaded == 0 and server.run(prompt(1), cache_salt="y").num_loaded == 0


@pytest.mark.slow
def test_ten_thousand_requests_with_a_salt_each_leave_what_fits(path: Path, holder: LiveHolders) -> None:
    """In a server, and in a holder of 64 blocks that are all of other requests: nothing grows with what went by."""
    with fake_server(path, "a") as server:
        server.await_proven()
        num_objects: list[int] = []
        for number in range(10_000):
            assert server.run(prompt(1, SIZE + 3), cache_salt=f"salt {number}").num_loaded == 0
            if number % 1_000 == 999:
                gc.collect()
                num_objects.append(len(gc.get_objects()))
        assert max(num_objects[1:]) - min(num_objects[1:]) < 1_000, num_objects
        wait_until(lambda: server.run(prompt(2), cache_salt="x").num_loaded == 5 * SIZE)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mm_features": [object()]}, NotSaved.IMAGES),
        ({"prompt_embeds": object()}, NotSaved.EMBEDDINGS),
        ({"lora_request": object()}, NotSaved.ADAPTER),
        ({"skip_reading_prefix_cache": True}, NotSaved.PROMPT_LOGPROBS),
    ],
)
def test_what_is_not_shared_is_answered_and_leaves_nothing(
    path: Path, holder: LiveHolders, fields: dict[str, object], reason: NotSaved
) -> None:
    with fake_server(path, "a") as server:
        server.await_proven()
        for _ in range(3):
            assert server.run(prompt(1), **fields).num_loaded == 0
        assert server.run(prompt(1)).num_loaded == 0, reason


def test_params_of_a_client_s_own_change_nothing(path: Path, holder: LiveHolders) -> None:
    lies = {"kvmesh": {"canary": "guessed", "use": "confused", "slots": [0]}, "remote_block_ids": [1, 2]}
    with fake_server(path, "a") as server:
        server.await_proven()
        wait_until(lambda: server.run(prompt(1)).num_loaded == 5 * SIZE)
        salts = {"kvmesh": {"salt": "x", "cache_salt": "x"}, "cache_salt": "x", "salt": "x"}
        for params in (lies, {"kvmesh": 7}, {"kvmesh": {"canary": None}}, salts):
            ran = server.run(prompt(1), kv_transfer_params=params)
            assert (ran.num_loaded, ran.answer) == (5 * SIZE, alone(path, prompt(1)))


# What is damaged, and who is wrong.


def test_a_block_that_is_damaged_at_rest_is_computed_and_given_up(path: Path, holder: LiveHolders) -> None:
    with fake_server(path, "a") as server:
        server.await_proven()
        wait_until(lambda: server.run(prompt(1)).num_loaded == 5 * SIZE)

        def damage(plan) -> None:
            for load in plan.loads:
                arena = server.worker._arena_of(plan.attachment)
                assert arena is not None
                arena.planes[0][0][load.slots[2], 5] ^= 1

        server.on_plan = damage
        ran = server.run(prompt(1))
        assert (ran.num_loaded, ran.num_failed, ran.answer) == (0, 1, alone(path, prompt(1)))
        server.on_plan = lambda plan: None
        wait_until(lambda: server.run(prompt(1)).num_loaded == 5 * SIZE)  # saved anew
        assert server.run(prompt(1)).answer == alone(path, prompt(1))


def swap_halves(server: FakeServer) -> None:
    """Plant a mistake: loading has a page's halves the other way round, and their digest goes with them."""
    load, digest = server.worker._load, server.worker._page_digest
    half = server.pages[0].shape[1] // 2

    def swap(pages) -> None:
        for rows in server.pages:
            for page in pages:
                rows[page] = np.concatenate((rows[page, half:], rows[page, :half]))

    def wrong(attachment, asked) -> bool:
        is_right = load(attachment, asked)
        swap(asked.pages)
        return is_right

    server.worker._load = wrong  # type: ignore[method-assign]
    assert digest


def take_neighbours(server: FakeServer) -> None:
    """Plant a mistake: the neighbour's page is saved."""

    def shift(plan) -> None:
        plan.saves[:] = [each._replace(page=max(1, each.page - 1)) for each in plan.saves]

    server.on_plan = shift


@pytest.mark.parametrize("plant", [swap_halves, take_neighbours])
def test_a_server_that_copies_wrongly_is_off_before_it_shares(path: Path, holder: LiveHolders, plant) -> None:
    server = FakeServer(path, "a")
    plant(server)
    try:
        server.start()
        server.await_off()
        for _ in range(3):
            ran = server.run(prompt(1))
            assert (ran.num_loaded, ran.answer) == (0, alone(path, prompt(1)))
    finally:
        server.close()


def test_a_server_that_does_not_read_what_it_loads_is_off(path: Path, holder: LiveHolders) -> None:
    server = FakeServer(path, "a")
    server.answer = lambda request: b"always the same"  # type: ignore[method-assign]
    try:
        server.start()
        assert "change nothing" in server.await_off()
    finally:
        server.close()


def test_a_server_whose_kv_is_another_is_found_by_its_canary_and_with_it_the_first(
    path: Path, holder: LiveHolders
) -> None:
    with fake_server(path, "a") as one:
        one.await_proven()
        with fake_server(path, "b", wrong=1) as other:
            assert "differs" in other.await_off() and "differs" in one.await_off()
        assert one.run(prompt(1)).num_loaded == 0


def test_what_is_sampled_finds_a_server_that_becomes_wrong(path: Path, holder: LiveHolders) -> None:
    with fake_server(path, "a") as one, fake_server(path, "b", check_every=1) as other:
        one.await_proven()
        other.await_proven()
        one.wrong = 1
        one.run(prompt(1))
        wait_until(lambda: not other.run(prompt(1)).num_loaded and bool(other.clients[Half.SCHEDULER].off_reason))
        assert "differs" in one.await_off()


# Ends.


def test_without_a_holder_a_server_computes_and_attaches_when_there_is_one(path: Path) -> None:
    with fake_server(path, "a") as server:
        assert server.run(prompt(1)).num_loaded == 0
        with live_holders(path):
            server.await_proven()
            wait_until(lambda: server.run(prompt(1)).num_loaded == 5 * SIZE)
        assert server.run(prompt(1)).answer == alone(path, prompt(1))
        with live_holders(path):
            server.await_proven()
            assert server.run(prompt(1)).num_loaded == 0, "the new holder has nothing"
            wait_until(lambda: server.run(prompt(1)).num_loaded == 5 * SIZE)


@pytest.mark.parametrize("is_seen", [True, False], ids=["seen", "not seen yet"])
def test_a_load_is_under_way_when_the_holder_ends(path: Path, *, is_seen: bool) -> None:
    with fake_server(path, "a") as server:
        right = alone(path, prompt(1))
        with live_holders(path) as holder:
            server.await_proven()
            wait_until(lambda: server.run(prompt(1)).num_loaded == 5 * SIZE)

            def end(plan: StepPlan) -> None:
                if plan.loads:
                    holder.end()
                    if is_seen:
                        wait_until(lambda: server.clients[Half.WORKER].welcome is None)

            server.on_plan = end
            assert server.run(prompt(1)).answer == right
            server.on_plan = lambda plan: None
        with live_holders(path):
            server.await_proven()
            wait_until(lambda: server.run(prompt(1)).num_loaded == 5 * SIZE)


def test_when_servers_are_gone_nothing_is_held(path: Path, holder: LiveHolders) -> None:
    with fake_server(path, "a") as server:
        server.await_proven()
        server.run(prompt(1))
        wait_until(lambda: holder.num_held > 0)
    wait_until(lambda: holder.num_held == 0)
