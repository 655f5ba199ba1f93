"""Stock `vllm serve` processes that attach to a holder: the tokens of servers that do not, whoever is killed."""

import os
import random
import signal
import threading
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.attach.servers import BLOCK_SIZE, Holder, VllmServer, arenas_of_the_dead, attached, running
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_200)]

VOCABULARY = 250


def prompt(seed: int, num_tokens: int = 700) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=num_tokens)


def whole(num_tokens: int) -> int:
    """Return how many tokens of a prompt can be loaded."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class Pair:
    """Two servers of one holder."""

    def __init__(self, folder: Path) -> None:
        self.holder = Holder(folder)
        self.holder.start()
        self.one, self.other = (attached(self.holder, name) for name in ("one", "other"))

    def is_proven(self) -> bool:
        return [each["sharing"] for each in self.holder.servers()] == ["on", "on"]

    def await_saved(self) -> None:
        """Wait until all that was computed is the holder's: the worker half's messages have been taken in."""
        last = -1
        while (now := sum(each["num_saved_blocks"] for each in self.holder.servers())) != last:
            last = now

    def nothing_is_held(self) -> bool:
        """Return whether nothing is pinned: what is held is in purses."""
        blocks = self.holder.status()["load"]["blocks"]
        return blocks["free"] + blocks["cached"] + blocks["running"] + blocks["leased"] == blocks["total"]


@pytest.fixture(scope="module", autouse=True)
def needs_vllm() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make attach-test")


@pytest.fixture(scope="module")
def pair(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Generator[Pair]:
    both = Pair(tmp_path_factory.mktemp("a"))
    try:
        with running(both.one, both.other):
            wait_until(both.is_proven)
            yield both
    finally:
        both.holder.stop()


def load_on(pair: Pair, tokens: list[int], num_tokens: int = 16, **fields: object) -> list[int]:
    """Have `one` compute a prompt and `other` load it; return the answer of `other`."""
    pair.one.ask(tokens, num_tokens, **fields)
    pair.await_saved()
    before = pair.other.num_loaded()
    answer = pair.other.ask(tokens, num_tokens, **fields).tokens
    assert pair.other.num_loaded() - before == whole(len(tokens))
    return answer


def test_greedy_answers_are_those_of_computing(pair: Pair) -> None:
    for seed in range(13):
        tokens = prompt(seed, 200 + 90 * seed)
        assert load_on(pair, tokens) == pair.other.computed(tokens)


def test_seeded_answers_are_those_of_computing(pair: Pair) -> None:
    for seed in range(6):
        # vLLM 0.32 on the CPU ends with a seed whose prompt takes several steps: these take one.
        tokens, fields = prompt(100 + seed, 300), {"temperature": 1.0, "seed": seed}
        assert load_on(pair, tokens, **fields) == pair.other.computed(tokens, **fields)


def test_the_next_turn_on_the_other_server_loads_the_answer_too(pair: Pair) -> None:
    first = prompt(200, 300)
    answer = pair.one.ask(first, 100).tokens
    pair.await_saved()
    second = [*first, *answer, *prompt(201, 50)]
    before = pair.other.num_loaded()
    assert pair.other.ask(second).tokens == pair.other.computed(second)
    assert pair.other.num_loaded() - before >= whole(len(first) + len(answer)) - BLOCK_SIZE


def test_four_at_once_for_which_there_is_no_room(pair: Pair) -> None:
    prompts = [prompt(300 + number, 1_500) for number in range(4)]
    for each in prompts:
        pair.one.ask(each, 1)
    pair.await_saved()
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: pair.other.ask(each, 200).tokens, prompts))
    assert answers == [pair.other.computed(each, 200) for each in prompts]


def test_what_a_client_sends_in_kv_transfer_params_changes_nothing(pair: Pair) -> None:
    tokens = prompt(400)
    lies = {
        "kvmesh": {"canary": "x", "use": "confused"}, "do_remote_prefill": True, "remote_block_ids": [1],
        "remote_engine_id": "e", "remote_host": "h", "remote_port": 1,
    }  # fmt: skip
    assert load_on(pair, tokens) == pair.other.ask(tokens, kv_transfer_params=lies).tokens


@pytest.mark.parametrize("which", [0, 10, 20])
def test_a_flipped_bit_is_found_and_the_answer_is_right(pair: Pair, which: int) -> None:
    tokens = prompt(500 + which, 700)
    right = pair.one.computed(tokens)
    pair.one.ask(tokens)
    pair.await_saved()
    (path,) = pair.holder.arenas()
    # The block is found by its bytes: no other process is told where it lies.
    arena = np.memmap(path, np.uint8, "r+")
    before = arena.copy()
    salted = {"cache_salt": f"flip {which}"}
    pair.one.ask(tokens, **salted)
    pair.await_saved()
    changed = np.flatnonzero(arena != before)
    assert changed.size, "what was computed with this salt lies somewhere new"
    arena[changed[changed.size * (which + 1) // 22]] ^= 1
    assert pair.other.ask(tokens, **salted).tokens == right
    pair.other.await_log("is damaged: its request is computed")


def test_a_client_that_hangs_up_while_its_load_runs_leaves_nothing(pair: Pair) -> None:
    tokens = prompt(600, 1_500)
    pair.one.ask(tokens, 1)
    pair.await_saved()

    def hang_up() -> None:
        import socket

        body = b'{"model":"m","prompt":%s,"max_tokens":50}' % str(tokens).encode()
        with socket.create_connection(("127.0.0.1", pair.other.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    for _ in range(10):
        hang_up()
    assert pair.other.ask(tokens).tokens == pair.other.computed(tokens)
    wait_until(pair.nothing_is_held)


# Whoever is killed. Each of these leaves the pair as it was.


def test_the_holder_is_killed_under_a_running_answer_and_another_one_comes(pair: Pair) -> None:
    tokens = prompt(700)
    right = pair.one.computed(tokens, 400)
    answers: list[list[int]] = []
    asking = threading.Thread(target=lambda: answers.append(pair.one.ask(tokens, 400).tokens))
    asking.start()
    os.kill(pair.holder.pid, signal.SIGKILL)
    asking.join()
    assert answers == [right]
    assert pair.other.ask(prompt(701)).tokens == pair.other.computed(prompt(701))
    wait_until(pair.is_proven)  # the supervisor has started another one, and both have attached to it
    assert load_on(pair, prompt(702)) == pair.other.computed(prompt(702))
    assert len(pair.holder.arenas()) == 1 and not arenas_of_the_dead()


def test_a_holder_that_stands_still_costs_each_prompt_a_moment(pair: Pair) -> None:
    right = {seed: pair.one.computed(prompt(seed)) for seed in range(800, 804)}
    os.kill(pair.holder.pid, signal.SIGSTOP)
    try:
        assert {seed: pair.one.ask(prompt(seed)).tokens for seed in right} == right
    finally:
        os.kill(pair.holder.pid, signal.SIGCONT)
    wait_until(lambda: bool(pair.holder.status()))
    wait_until(pair.is_proven)


def test_a_server_that_is_killed_and_started_again_loads_at_once(pair: Pair) -> None:
    tokens = prompt(900, 1_500)
    right = pair.one.ask(tokens).tokens
    pair.await_saved()
    pair.one.kill()
    wait_until(lambda: len(pair.holder.servers()) == 1)
    pair.one.start()
    pair.one.await_health()
    wait_until(pair.is_proven)
    before = pair.one.num_loaded()
    assert pair.one.ask(tokens).tokens == right
    assert pair.one.num_loaded() - before == whole(1_500)


def test_a_hundred_requests_with_shared_prefixes_while_the_holder_is_killed(pair: Pair) -> None:
    rng = random.Random(1_000)
    prefixes = [prompt(1_000 + number, 400) for number in range(8)]
    asked = [prefixes[rng.randrange(8)][: rng.randrange(100, 400)] + prompt(2_000 + at, 40) for at in range(100)]
    servers: list[VllmServer] = [rng.choice((pair.one, pair.other)) for _ in asked]
    killed = threading.Event()

    def ask(at: int) -> list[int]:
        if at == 50:
            os.kill(pair.holder.pid, signal.SIGKILL)
            killed.set()
        return servers[at].ask(asked[at]).tokens

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(100)))
    assert killed.is_set()
    assert answers == [pair.one.computed(each) for each in asked]
    wait_until(pair.is_proven)
    wait_until(pair.nothing_is_held)


def test_samples_of_a_server_that_is_right_change_nothing(pair: Pair) -> None:
    sampled = attached(pair.holder, "sampled", check_every=1)
    with running(sampled):
        wait_until(lambda: [each["sharing"] for each in pair.holder.servers()] == ["on"] * 3)
        before = sampled.num_loaded()  # by the canary
        for seed in range(1_100, 1_104):
            pair.one.ask(prompt(seed))
            pair.await_saved()
            assert sampled.ask(prompt(seed)).tokens == pair.one.computed(prompt(seed))
        assert sampled.num_loaded() == before
        assert sum(each["num_compared"] for each in pair.holder.servers()) >= 4 * whole(700) // BLOCK_SIZE
        assert [each["sharing"] for each in pair.holder.servers()] == ["on"] * 3
    wait_until(pair.is_proven)


def test_weights_that_may_have_changed_end_sharing(pair: Pair) -> None:
    """The last: this server shares no more."""
    request = urllib.request.Request(f"{pair.one.url}/reset_prefix_cache?reset_external=true", b"")
    with urllib.request.urlopen(request):
        pass
    wait_until(lambda: sorted(each["sharing"] for each in pair.holder.servers()) == ["off", "on"])


# Planted mistakes, and what does not start.


@pytest.fixture(scope="module")
def holder(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Generator[Holder]:
    made = Holder(tmp_path_factory.mktemp("h"))
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("planted", ["SwapsHalves", "SavesNeighbours", "LoadsNothing"])
def test_a_server_that_copies_wrongly_never_shares(holder: Holder, planted: str) -> None:
    server = attached(holder, planted, module="tests.attach.planted")
    assert server.config is not None
    server.config = {**server.config, "kv_connector": f"{planted}Connector"}
    with running(server):
        wait_until(lambda: "shares no more" in server.log or "proven" in server.log)
        assert "has proven this server" not in server.log
        for _ in range(2):
            assert server.ask(prompt(1)).tokens == server.computed(prompt(1))


@pytest.fixture(scope="module")
def sound(holder: Holder) -> Generator[VllmServer]:
    """Return a server that this holder takes."""
    server = attached(holder, "sound")
    with running(server):
        yield server


@pytest.mark.parametrize(
    ("arguments", "changes", "text"),
    [
        ((), {"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
        (("--enable-lora",), {}, "--enable-lora"),
        (("--block-size", "64"), {}, "its block_size is 64"),
        (("--load-format", "dummy"), {}, "load_format dummy"),
    ],
)
def test_what_is_not_shared_does_not_start(
    holder: Holder, sound: VllmServer, arguments: tuple[str, ...], changes: dict[str, str], text: str
) -> None:
    wrong = attached(holder, "wrong", arguments=arguments)
    assert wrong.config is not None
    wrong.config = {**wrong.config, **changes}
    (wrong.folder / "wrong.log").unlink(missing_ok=True)
    wrong.start()
    try:
        assert text in wrong.await_end()
    finally:
        wrong.kill()
    assert sound.ask(prompt(1)).tokens, "the other one goes on"


def test_without_a_holder_a_server_that_requires_one_does_not_start(tmp_path: Path) -> None:
    server = attached(Holder(tmp_path), "alone", required=True)
    server.start()
    try:
        assert "there is no holder at" in server.await_end()
    finally:
        server.kill()
