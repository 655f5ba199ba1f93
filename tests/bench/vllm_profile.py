"""Where a decoded token's time goes: CPU time by thread and process of a mesh on vLLM and of vLLM's own server (Linux).

vLLM's step is one thread on both sides, in a process that does little else: a worker has its event loop in another one,
and a server speaks HTTP in another one.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from services.bench.drive.http_client import Client
from services.bench.drive.meshes import rotated
from services.bench.drive.workload import random_tokens
from tests.bench import vllm_load
from tests.bench.gpu_report import Row

NUM_PROMPT = 16
NS_PER_MS = 1e6
Thread = tuple[int, int]
"""A process and one of its threads."""


class TokenTimes(NamedTuple):
    """CPU milliseconds a token: of the thread that steps, of its process's other threads, of all other processes; and
    the time that passed."""

    stepping_ms: float
    beside_ms: float
    elsewhere_ms: float
    elapsed_ms: float


def cpu_ns(pids: Sequence[int]) -> dict[Thread, int]:
    """Return what each thread of these processes has computed so far."""
    found: dict[Thread, int] = {}
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found[pid, int(task.name)] = int((task / "schedstat").read_text().split()[0])
    return found


def token_times(
    before: Mapping[Thread, int], after: Mapping[Thread, int], elapsed_ms: float, num_tokens: int
) -> TokenTimes:
    """Return what one answer came to. The thread that steps is the one that computed most."""
    spent = {thread: total - before.get(thread, 0) for thread, total in after.items()}
    stepping = max(spent, key=spent.__getitem__)
    in_process = sum(ns for (pid, _), ns in spent.items() if pid == stepping[0]) - spent[stepping]
    elsewhere = sum(ns for (pid, _), ns in spent.items() if pid != stepping[0])
    scale = NS_PER_MS * num_tokens
    return TokenTimes(spent[stepping] / scale, in_process / scale, elsewhere / scale, elapsed_ms / num_tokens)


def group_pids(leader: int) -> list[int]:
    """Return the processes of a process group."""
    pids = [int(place.name) for place in Path("/proc").iterdir() if place.name.isdecimal()]
    return [pid for pid in pids if _group_of(pid) == leader]


async def decoded(
    clients: Mapping[str, Client],
    pids: Mapping[str, Sequence[int]],
    num_tokens: int,
    num_rounds: int,
    vocab_size: int,
    on_answer: Callable[[], object],
) -> dict[str, list[TokenTimes]]:
    """Return each side's rounds: one answer of `num_tokens` behind a short prompt, with nothing else under way."""
    rng = Random(20261123)
    found: dict[str, list[TokenTimes]] = {name: [] for name in clients}
    for number in range(-1, num_rounds):  # the first is to warm up
        for name in rotated(clients, max(0, number)):
            await asyncio.sleep(vllm_load.SETTLE_S)
            prompt, before = random_tokens(rng, NUM_PROMPT, vocab_size), cpu_ns(pids[name])
            answer = await clients[name].complete(prompt, num_tokens)
            times = token_times(before, cpu_ns(pids[name]), answer.total_ms, answer.usage.completion_tokens)
            if number >= 0:
                found[name].append(times)
            on_answer()
    return found


def rows_of(found: Mapping[str, Sequence[TokenTimes]]) -> list[Row]:
    names = list(found)

    def row(what: str, of: Callable[[TokenTimes], float]) -> Row:
        return vllm_load.compared(what, names, [list(map(of, side)) for side in found.values()], "ms", digits=2)

    return [
        row("a token, time that passes", lambda one: one.elapsed_ms),
        row("CPU of the thread that steps", lambda one: one.stepping_ms),
        row("CPU of its process's other threads", lambda one: one.beside_ms),
        row("CPU of all other processes", lambda one: one.elsewhere_ms),
    ]


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0
