"""How tokens come to clients under load: the gaps between a stream's events, and how many tokens an event brings.

    python -m tests.bench.bench_gaps [--streams 1,16,32] [--tokens 64] [--answers 3] [--prompt 128] [--text] [--url URL]

So many streams are under way at a time, on a mesh of one prefill and one decode worker, each with a fresh prompt.
`--text`: prompts are text, and the model is so small (one layer) that what is measured is the mesh.

What a socket gives is only marked with its time, and understood at the end: a client that is slow to read would find
tokens together that came one after another. An event that was in one read with the event before it came together with
it. Of each process it says for which part of the time it was ready to run and had no processor (the kernel's
`schedstat`): who waits for one finds several steps' messages when it gets it; and what a request takes of one.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from services.bench.drive.arguments import parse_lengths
from services.bench.drive.http_client import base_url, model_of, open_http
from services.bench.drive.make_checkpoint import make_random_checkpoint
from services.bench.drive.stats import percentile, rounded
from services.bench.drive.workload import random_tokens
from services.config import GatewayConfig, MeshConfig
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from services.settings import changed

OPTIONS = Launch(num_prefill=1, num_decode=1, config=MeshConfig(gateway=GatewayConfig(port=0)))
VOCABULARY = 200
WORDS = ("the", "red", "green", "blue", "stone", "river", "box", "lives", "has", "seven", "nine", "city", "of", "two")
SMALL: dict[str, Any] = {
    "hidden": 32, "num_layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 64, "vocab": 1336,
    "context_length": 16_384,
}  # fmt: skip
MakePrompt = Callable[[random.Random], str | list[int]]


class Arrival(NamedTuple):
    """An event with tokens: when its read came, in seconds by one clock, and the number of that read."""

    at_s: float
    read: int
    num_tokens: int


class Figures(NamedTuple):
    streams: int
    tokens_per_s: float
    first_token_p50_ms: float | None
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    gap_max_ms: float | None
    several_tokens: float
    """The share of the events that bring more than one token."""
    together: float
    """The share of the events that came in one read with the event before them."""
    waited: dict[str, float] = {}
    """By process: its threads' time without a processor that they were ready for, in shares of the time."""
    request_ms: dict[str, float] = {}
    """By process: its threads' time on a processor, for each request."""


class Answer(NamedTuple):
    asked_s: float
    arrivals: Sequence[Arrival]


class Scheduled(NamedTuple):
    """For how long the threads of a process that are there now have had a processor, and been ready for one."""

    ran_s: float
    waited_s: float


class Reads(asyncio.Protocol):
    """What a connection has given, and when."""

    def __init__(self) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.ended = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()


def arrivals_of(parts: Sequence[tuple[float, bytes]]) -> list[Arrival]:
    """Return the events with tokens of an answer. One whose end came with a later read came then."""
    found: list[Arrival] = []
    text = b""
    for read, (at_s, data) in enumerate(parts):
        text += data
        *lines, text = text.split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
            assert "error" not in event, event
            if num_tokens := sum(len(choice["token_ids"]) for choice in event["choices"]):
                found.append(Arrival(at_s, read, num_tokens))
    return found


def figures_of(num_streams: int, answers: Sequence[Answer], tokens_per_s: float) -> Figures:
    pairs = [pair for answer in answers for pair in pairwise(answer.arrivals)]
    gaps_ms = [1e3 * (after.at_s - before.at_s) for before, after in pairs]
    events = [arrival for answer in answers for arrival in answer.arrivals]
    first_ms = [1e3 * (answer.arrivals[0].at_s - answer.asked_s) for answer in answers]
    return Figures(
        streams=num_streams,
        tokens_per_s=round(tokens_per_s, 1),
        first_token_p50_ms=rounded(percentile(first_ms, 50)),
        gap_p50_ms=rounded(percentile(gaps_ms, 50)),
        gap_p99_ms=rounded(percentile(gaps_ms, 99)),
        gap_max_ms=rounded(percentile(gaps_ms, 100)),
        several_tokens=round(sum(event.num_tokens > 1 for event in events) / len(events), 4),
        together=round(sum(before.read == after.read for before, after in pairs) / max(1, len(pairs)), 4),
    )


async def ask(url: str, body: dict[str, Any]) -> Answer:
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 80
    transport, reads = await asyncio.get_running_loop().create_connection(Reads, host, port)
    payload = json.dumps(body).encode()
    asked_s = time.perf_counter()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    transport.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    await reads.ended.wait()
    arrivals = arrivals_of(reads.parts)
    assert sum(arrival.num_tokens for arrival in arrivals) == body["max_tokens"], reads.parts[:1]
    return Answer(asked_s, arrivals)


def scheduled(pid: int) -> Scheduled:
    times = [task.read_text().split() for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return Scheduled(sum(int(ran) for ran, _, _ in times) / 1e9, sum(int(waited) for _, waited, _ in times) / 1e9)


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for children in tasks for child in children.read_text().split()]


def process_ids(supervisor: Supervisor) -> dict[str, int]:
    """Return the processes that take part: ours, the broker, each service and the engine's of each worker."""
    brokers = (pid for pid in children_of(os.getpid()) if "nats" in Path(f"/proc/{pid}/comm").read_text())
    found = {"client": os.getpid(), "broker": next(brokers)}
    for child in supervisor.children:
        found[child.name] = child.process.pid
        found |= {f"{child.name}'s child": pid for pid in children_of(child.process.pid)}
    return found


def write_text(rng: random.Random, tokenizer: Tokenizer, num_tokens: int) -> str:
    """Return a text of about so many tokens."""
    ids = tokenizer.encode(" ".join(rng.choices(WORDS, k=2 * num_tokens)), add_special_tokens=False).ids
    return tokenizer.decode(ids[:num_tokens])


async def load(
    url: str, model: str, pids: Mapping[str, int], num_streams: int, make: MakePrompt, options: argparse.Namespace
) -> Figures:
    rng = random.Random(num_streams)
    num_answers = num_streams * (1 + options.answers)
    prompts = iter([make(rng) for _ in range(num_answers)])
    answers: list[Answer] = []

    async def client() -> None:
        for number in range(1 + options.answers):
            body = {
                "model": model,
                "prompt": next(prompts),
                "max_tokens": options.tokens,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            answer = await ask(url, body)
            if number:
                answers.append(answer)

    before = {name: scheduled(pid) for name, pid in pids.items()}
    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_streams)))
    took_s = time.perf_counter() - started_s
    after = {name: scheduled(pid) for name, pid in pids.items()}
    figures = figures_of(num_streams, answers, num_answers * options.tokens / took_s)
    return figures._replace(
        waited={name: round(max(0.0, after[name].waited_s - before[name].waited_s) / took_s, 3) for name in pids},
        request_ms={name: round(1e3 * (after[name].ran_s - before[name].ran_s) / num_answers, 2) for name in pids},
    )


async def measure(url: str, pids: Mapping[str, int], options: argparse.Namespace) -> list[Figures]:
    streams = parse_lengths(options.streams, "--streams", 1000)
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))

    def make_prompt(rng: random.Random) -> str | list[int]:
        if options.text:
            return write_text(rng, tokenizer, options.prompt)
        return random_tokens(rng, options.prompt, VOCABULARY)

    rows: list[Figures] = []
    async with open_http() as http:
        model = (await model_of(http, url)).id
    for number, num_streams in enumerate(streams, 1):
        sys.stderr.write(f"\r{num_streams} streams, {number} of {len(streams)} ")
        rows.append(await load(url, model, pids, num_streams, make_prompt, options))
    sys.stderr.write("\n")
    return rows


async def run(options: argparse.Namespace) -> list[Figures]:
    if options.url:
        return await measure(base_url(options.url), {}, options)
    with tempfile.TemporaryDirectory() as folder:
        up = (
            changed(OPTIONS, {"config.model.path": str(make_random_checkpoint(f"{folder}/model", **SMALL))})
            if options.text
            else OPTIONS
        )
        supervisor = Supervisor(up, Path(folder) / "run")
        try:
            await supervisor.start_all()
            return await measure(supervisor.url, process_ids(supervisor), options)
        finally:
            await supervisor.stop_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", default="1,16,32", help="under way at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--answers", type=int, default=3, help="of each stream, in turn, behind one to warm up")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--text", action="store_true", help="prompts of text, for a model of one small layer")
    parser.add_argument("--url", default="", help="a running gateway's")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = asyncio.run(run(options))
    if options.json:
        print(json.dumps([row._asdict() for row in rows]))
        return
    for row in rows:
        print(
            f"{row.streams:3} streams: {row.tokens_per_s:7.1f} tokens/s; first token p50 {row.first_token_p50_ms} ms;",
            f"gap p50 {row.gap_p50_ms} ms,",
            f"p99 {row.gap_p99_ms} ms, longest {row.gap_max_ms} ms;",
            f"{row.several_tokens:.1%} of the events bring several tokens, {row.together:.1%} came with another",
        )
        if row.waited:
            print("     without a processor:", ", ".join(f"{name} {share:.0%}" for name, share in row.waited.items()))
            print("     a request:", ", ".join(f"{name} {ms:.1f} ms" for name, ms in row.request_ms.items()))


if __name__ == "__main__":
    main()
