"""Stock `vllm serve` processes that attach to a holder: the tokens of servers that do not, whoever is killed.

The pair of servers has the connector's wheel and nothing else of ours."""

import os
import random
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.attach.servers import (
    BLOCK_SIZE,
    Holder,
    Pair,
    VllmServer,
    arenas_of_the_dead,
    attached,
    prompt,
    running,
    whole,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_200)]


def load_on(pair: Pair, tokens: list[int], num_tokens: int = 16, **fields: object) -> list[int]:
    """Have `one` compute a prompt and `other` load it; return the answer of `other`."""
    pair.one.ask(tokens, num_tokens, **fields)
    pair.await_held(tokens)
    before = pair.other.num_loaded()
    answer = pair.other.ask(tokens, num_tokens, **fields).tokens
    assert pair.other.num_loaded() - before == whole(len(tokens))
    return answer


def test_nothing_else_of_ours_is_in_its_environment(wheel_python: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ours = subprocess.run([wheel_python, "-c", "import services"], cwd=tmp_path, env=environment, capture_output=True)
    assert b"No module named 'services'" in ours.stderr


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
    first = [*first, *answer]
    pair.await_held(first[: whole(len(first)) - BLOCK_SIZE + 1])  # its last block may be missed
    second = [*first, *prompt(201, 50)]
    before = pair.other.num_loaded()
    assert pair.other.ask(second).tokens == pair.other.computed(second)
    assert pair.other.num_loaded() - before >= whole(len(first)) - BLOCK_SIZE


def test_four_at_once_for_which_there_is_no_room(pair: Pair) -> None:
    prompts = [prompt(300 + number, 1_500) for number in range(4)]
    for each in prompts:
        pair.one.ask(each, 1)
        pair.await_held(each)
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
    pair.await_held(tokens)
    (path,) = pair.holder.arenas()
    # The block is found by its bytes: no other process is told where it lies.
    arena = np.memmap(path, np.uint8, "r+")
    before = arena.copy()
    salted = {"cache_salt": f"flip {which}"}
    pair.one.ask(tokens, **salted)
    pair.await_held(tokens, **salted)
    changed = np.flatnonzero(arena != before)
    assert changed.size, "what was computed with this salt lies somewhere new"
    arena[changed[changed.size * (which + 1) // 22]] ^= 1
    assert pair.other.ask(tokens, **salted).tokens == right
    pair.other.await_log("is damaged: its request is computed")


def test_a_client_that_hangs_up_while_its_load_runs_leaves_nothing(pair: Pair) -> None:
    tokens = prompt(600, 1_500)
    pair.one.ask(tokens, 1)
    pair.await_held(tokens)

    def hang_up() -> None:
        import socket

        body = b'{"model":"m","prompt":%s,"max_tokens":50}' % str(tokens).encode()
        with socket.create_connection(("127.0.0.1", pair.other.port)) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
            client.sendall(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))

    for _ in range(10):
        hang_up()
    assert pair.other.ask(tokens).tokens == pair.other.computed(tokens)
    wait_until(pair.is_at_rest)


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


def test_the_holder_is_killed_while_loads_are_under_way(pair: Pair) -> None:
    prompts = [prompt(750 + number, 1_500) for number in range(8)]
    for each in prompts:
        pair.one.ask(each, 1)
        pair.await_held(each)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(pair.other.ask, each) for each in prompts]
        wait_until(lambda: pair.other.num_loaded() > 0)
        os.kill(pair.holder.pid, signal.SIGKILL)
        found = [answer.result().tokens for answer in answers]
    assert found == [pair.one.computed(each) for each in prompts]
    wait_until(pair.is_proven)
    wait_until(pair.is_at_rest)


def test_a_holder_that_stands_still_costs_each_prompt_a_moment(pair: Pair) -> None:
    right = {seed: pair.one.computed(prompt(seed)) for seed in range(800, 804)}
    os.kill(pair.holder.pid, signal.SIGSTOP)
    try:
        assert {seed: pair.one.ask(prompt(seed)).tokens for seed in right} == right
    finally:
        os.kill(pair.holder.pid, signal.SIGCONT)
    wait_until(lambda: bool(pair.holder.status()))
    wait_until(pair.is_proven)
    wait_until(lambda: any("late" in reason for each in pair.holder.servers() for reason in each["not_saved"]))


def test_a_server_that_is_killed_and_started_again_loads_at_once(pair: Pair) -> None:
    tokens = prompt(900, 1_500)
    right = pair.one.ask(tokens).tokens
    pair.await_held(tokens)
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
    wait_until(pair.is_at_rest)


@pytest.fixture(scope="module")
def sampled(pair: Pair) -> Generator[VllmServer]:
    """Return a third server, of which each request is compared."""
    server = attached(pair.holder, "sampled", check_every=1)
    with running(server):
        wait_until(lambda: [each["sharing"] for each in pair.holder.servers()] == ["on"] * 3)
        yield server
    wait_until(pair.is_proven)


def test_samples_of_a_server_that_is_right_change_nothing(pair: Pair, sampled: VllmServer) -> None:
    before = sampled.num_loaded()  # by the canary
    for seed in range(1_100, 1_104):
        pair.one.ask(prompt(seed))
        pair.await_held(prompt(seed))
        assert sampled.ask(prompt(seed)).tokens == pair.one.computed(prompt(seed))
    assert sampled.num_loaded() == before
    assert sum(each["num_compared"] for each in pair.holder.servers()) >= 4 * whole(700) // BLOCK_SIZE
    assert [each["sharing"] for each in pair.holder.servers()] == ["on"] * 3


def test_weights_that_may_have_changed_end_sharing(pair: Pair, sampled: VllmServer) -> None:
    """The last of this server: it shares no more."""
    request = urllib.request.Request(f"{sampled.url}/reset_prefix_cache?reset_external=true", b"")
    with urllib.request.urlopen(request):
        pass
    wait_until(lambda: sorted(each["sharing"] for each in pair.holder.servers()) == ["off", "on", "on"])


# Planted mistakes, and what does not start. Of each group all start at once.

PLANTED = ("SwapsHalves", "SavesNeighbours", "LoadsNothing")
REFUSED: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "policy": ((), {"kv_load_failure_policy": "fail"}, '"kv_load_failure_policy": "recompute"'),
    "adapters": (("--enable-lora",), {}, "--enable-lora"),
    "block size": (("--block-size", "64"), {}, "its block_size is 64"),
    "no weights": (("--load-format", "dummy"), {}, "load_format dummy"),
}
NO_HOLDER = "no holder"


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Generator[dict[str, VllmServer]]:
    """Return these servers, each at a holder of its own, where no other one can find it."""
    pytest.importorskip("vllm", reason="vLLM is not installed here: make attach-test")
    holders = [Holder(tmp_path_factory.mktemp("h")) for _ in PLANTED]
    servers: dict[str, VllmServer] = {}
    try:
        for name, holder in zip(PLANTED, holders, strict=True):
            holder.start()
            servers[name] = attached(holder, name, module="tests.attach.planted")
            servers[name].config = {**(servers[name].config or {}), "kv_connector": f"{name}Connector"}
        with running(*servers.values()):
            yield servers
    finally:
        for holder in holders:
            holder.stop()


@pytest.mark.parametrize("name", PLANTED)
def test_a_server_that_copies_wrongly_never_shares(planted: dict[str, VllmServer], name: str) -> None:
    server = planted[name]
    wait_until(lambda: "shares no more" in server.log or "proven" in server.log)
    assert "has proven this server" not in server.log
    for _ in range(2):
        assert server.ask(prompt(1)).tokens == server.computed(prompt(1))


@pytest.fixture(scope="module")
def refused(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the logs of servers that have ended."""
    servers = {NO_HOLDER: attached(Holder(tmp_path_factory.mktemp("n")), NO_HOLDER, required=True)}
    for name, (arguments, changes, _) in REFUSED.items():
        servers[name] = attached(pair.holder, name, arguments=arguments)
        servers[name].config = {**(servers[name].config or {}), **changes}
    try:
        for server in servers.values():
            server.start()
        return {name: server.await_end() for name, server in servers.items()}
    finally:
        for server in servers.values():
            server.kill()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_shared_does_not_start(pair: Pair, refused: dict[str, str], name: str) -> None:
    assert REFUSED[name][2] in refused[name]
    assert pair.one.ask(prompt(1)).tokens, "the others go on"


def test_without_a_holder_a_server_that_requires_one_does_not_start(refused: dict[str, str]) -> None:
    assert "there is no holder at" in refused[NO_HOLDER]
