"""Load on two sides that are up at once, of which one is busy at a time, and what it comes to as ratios.

Each round sends the same arrivals to one side and then to the other, with fresh prompts; a round gives a ratio of its
own, so that a slow moment of the machine is one round's and not one side's. Before the other side's turn there is a
pause: vLLM's processes spin for a second after their last step.
"""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from services.bench.drive.http_client import Client, Completion
from services.bench.drive.meshes import rotated
from services.bench.drive.stats import percentile
from services.bench.drive.workload import random_tokens
from tests.bench.gpu_report import Better, Row

SETTLE_S = 1.5
WARM_UP_REQUESTS = 3


class Load(NamedTuple):
    """`per_s`: requests arrive at random times (Poisson) at this rate; 0: `at_once` are always under way."""

    per_s: float
    num_requests: int
    num_tokens: int
    """Of a prompt."""
    num_answer: int
    at_once: int = 0

    @property
    def words(self) -> str:
        return f"{self.per_s:g}/s" if self.per_s else f"{self.at_once} at a time"


class Period(NamedTuple):
    """What one load on one side came to. `ms_per_token`: from the first token to the end, for each further token."""

    ttft_ms: float
    ttft_p99_ms: float
    ms_per_token: float
    tokens_per_s: float


def arrivals_s(rng: random.Random, load: Load) -> list[float]:
    """Return when requests are sent, in seconds from the first; all at once where there is no rate."""
    at_s, times = 0.0, list[float]()
    for _ in range(load.num_requests):
        times.append(at_s)
        at_s += rng.expovariate(load.per_s) if load.per_s else 0.0
    return times


def period_of(answers: Sequence[Completion], duration_s: float) -> Period:
    further = [(one.total_ms - one.ttft_ms) / max(1, one.usage.completion_tokens - 1) for one in answers]
    return Period(
        ttft_ms=fmean(one.ttft_ms for one in answers),
        ttft_p99_ms=percentile([one.ttft_ms for one in answers], 99) or 0.0,
        ms_per_token=fmean(further),
        tokens_per_s=sum(one.usage.completion_tokens for one in answers) / duration_s,
    )


def compared(
    what: str,
    names: Sequence[str],
    sides: Sequence[Sequence[float]],
    unit: str,
    aim: float | None = None,
    better: Better = "less",
    digits: int = 1,
) -> Row:
    """Return the row of the first side's figures beside the second's, round by round."""
    if not all(sides) or not all(sides[1]):
        return Row(what=what, aim=aim, better=better, error="nothing was measured")
    ratios = [one / other for one, other in zip(*sides, strict=True)]
    shown = ", ".join(f"{name} {median(side):,.{digits}f}" for name, side in zip(names, sides, strict=True))
    rounds = f"; by round {min(ratios):.2f}–{max(ratios):.2f}" if len(ratios) > 1 else ""
    return Row(what=what, result=f"{shown} {unit}{rounds}", ratio=median(ratios), aim=aim, better=better)


async def send(client: Client, rng: random.Random, load: Load, at_s: Sequence[float], vocab_size: int) -> Period:
    """Send one period's requests, each at its time. Raises RequestFailedError."""
    prompts = [random_tokens(rng, load.num_tokens, vocab_size) for _ in at_s]
    gate = asyncio.Semaphore(load.at_once or load.num_requests)
    started = time.perf_counter()

    async def one(prompt: list[int], at_s: float) -> Completion:
        await asyncio.sleep(started + at_s - time.perf_counter())
        async with gate:
            return await client.complete(prompt, load.num_answer)

    answers = await asyncio.gather(*map(one, prompts, at_s))
    return period_of(answers, time.perf_counter() - started)


async def in_turn(
    clients: Mapping[str, Client],
    loads: Sequence[Load],
    num_rounds: int,
    vocab_size: int,
    on_period: Callable[[], object],
    seed: int = 20261123,
) -> dict[Load, dict[str, list[Period]]]:
    """Return the periods of each load and side, round by round. Who is first changes every round. `seed`: of the
    prompts."""
    rng = random.Random(seed)
    found: defaultdict[Load, dict[str, list[Period]]] = defaultdict(lambda: {name: [] for name in clients})
    for client in clients.values():
        for _ in range(WARM_UP_REQUESTS):
            await client.complete(random_tokens(rng, loads[0].num_tokens, vocab_size), loads[0].num_answer)
    for number in range(num_rounds):
        for load in loads:
            at_s = arrivals_s(rng, load)
            for name in rotated(clients, number):
                await asyncio.sleep(SETTLE_S)
                found[load][name].append(await send(clients[name], rng, load, at_s, vocab_size))
                on_period()
    return found
