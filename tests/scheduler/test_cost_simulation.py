"""Policy `cost` beside `least_loaded` in virtual time: no worse without reuse, much better with it."""

import random
import statistics

import pytest

from schemas.ids import WorkerId
from schemas.worker import WorkerRole
from tests.scheduler.scheduler_simulation import BLOCK_SIZE, SimRequest, Simulation, SimWorker

SEEDS = range(4)
NOISE_ALLOWED = 1.05
Fleet = list[tuple[WorkerRole, float]]
"""Roles and speeds, 1 being 3,000 prompt tokens a second and 10 ms a step."""


def make_fleet(fleet: Fleet) -> list[SimWorker]:
    return [
        SimWorker(WorkerId(f"{role}-{at}"), role, tokens_per_s=3_000 * speed, step_ms=10 / speed)
        for at, (role, speed) in enumerate(fleet)
    ]


def split_fleet(prefill: list[float], decode: list[float]) -> Fleet:
    fleet: Fleet = [("prefill", speed) for speed in prefill]
    return [*fleet, *(("decode", speed) for speed in decode)]


def fresh_prompts(fleet: Fleet, utilisation: float, num_requests: int, seed: int) -> list[SimRequest]:
    """Arrivals at random whose prompts have nothing in common, to keep the prefill workers this busy."""
    numbers = random.Random(seed)
    lengths = [int(min(6_000, max(40, numbers.lognormvariate(6.5, 0.9)))) for _ in range(num_requests)]
    speed = 3_000 * sum(speed for role, speed in fleet if role != "decode")
    gap_ms = statistics.mean(lengths) / speed * 1e3 / utilisation
    requests, now_ms = list[SimRequest](), 0.0
    for number, length in enumerate(lengths):
        now_ms += numbers.expovariate(1 / gap_ms)
        content: list[object] = [(number, at) for at in range((length + 100) // BLOCK_SIZE)]
        requests.append(SimRequest(number, now_ms, content, length, numbers.randint(2, 60)))
    return requests


def ttfts(policy: str, fleet: Fleet, requests: list[SimRequest], seed: int) -> list[float]:
    simulation = Simulation(policy, make_fleet(fleet), seed)
    for request in requests:
        simulation.submit(request)
    finished = simulation.run()
    assert len(finished) == len(requests)
    return [request.ttft_ms for request in finished]


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * len(values))]


@pytest.mark.parametrize("utilisation", [0.3, 0.8, 1.5])
@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(split_fleet([1], [1]), id="1P1D"),
        pytest.param(split_fleet([1, 1], [1, 1]), id="2P2D"),
        pytest.param(split_fleet([1, 1, 1, 1], [1, 1, 1]), id="4P3D"),
        pytest.param(split_fleet([1, 2], [1, 1]), id="2P of unequal speed"),
        pytest.param(split_fleet([1, 1, 3, 0.5], [1, 2, 0.5]), id="4P3D of unequal speed"),
        pytest.param([("aggregated", 1.0), ("aggregated", 1.0)], id="2 aggregated"),
        pytest.param([("aggregated", 1.0), ("aggregated", 2.0), ("aggregated", 0.5)], id="3 aggregated, unequal"),
    ],
)
def test_without_reuse_it_is_no_worse_than_least_loaded(fleet: Fleet, utilisation: float) -> None:
    spent: dict[str, list[float]] = {}
    for policy in ("least_loaded", "cost"):
        spent[policy] = [
            ttft for seed in SEEDS for ttft in ttfts(policy, fleet, fresh_prompts(fleet, utilisation, 150, seed), seed)
        ]
    assert statistics.mean(spent["cost"]) <= NOISE_ALLOWED * statistics.mean(spent["least_loaded"])
    assert p95(spent["cost"]) <= NOISE_ALLOWED * p95(spent["least_loaded"])


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_a_burst_spreads_as_least_loaded_spreads_it(num_workers: int) -> None:
    """All at once, before any worker has said a word: the same numbers of tokens for each worker."""
    fleet = split_fleet([1] * num_workers, [1] * num_workers)
    counts: dict[str, list[tuple[int, int]]] = {}
    for policy in ("least_loaded", "cost"):
        simulation = Simulation(policy, make_fleet(fleet), 0)
        requests = fresh_prompts(fleet, 1.0, 60, 0)
        for request in requests:
            request.arrival_ms = 0.0
            simulation.submit(request)
        placements = [r.placement for r in sorted(simulation.run(), key=lambda r: r.number)]
        tokens: dict[str, int] = {}
        decodes: dict[str, int] = {}
        for request, placement in zip(requests, placements, strict=True):
            assert placement is not None and placement.decode_worker is not None
            tokens[placement.prefill_worker] = tokens.get(placement.prefill_worker, 0) + request.num_prompt_tokens
            decodes[placement.decode_worker] = decodes.get(placement.decode_worker, 0) + 1
        counts[policy] = [(max(tokens.values()), min(tokens.values())), (max(decodes.values()), min(decodes.values()))]
    (cost_most, _), cost_decodes = counts["cost"]
    (least_loaded_most, _), least_loaded_decodes = counts["least_loaded"]
    assert cost_most <= NOISE_ALLOWED * least_loaded_most
    assert cost_decodes == least_loaded_decodes


def converse(policy: str, fleet: Fleet, seed: int, num_conversations: int = 12, num_turns: int = 5) -> list[float]:
    """Conversations whose every turn repeats the ones before it; return the later turns' times to first token."""
    numbers = random.Random(seed)
    simulation = Simulation(policy, make_fleet(fleet), seed)
    count = iter(range(10**6))

    def turn(conversation: int, left: int, history: int, at_ms: float) -> None:
        length, answer = history + numbers.randint(60, 200), numbers.randint(30, 100)
        content: list[object] = [(conversation, at) for at in range((length + answer - 1) // BLOCK_SIZE)]
        think_ms = numbers.uniform(500, 3_000)
        request = SimRequest(next(count), at_ms, content, length, answer)
        if left:
            request.on_end = lambda now_ms: turn(conversation, left - 1, length + answer, now_ms + think_ms)
        simulation.submit(request)

    for conversation in range(num_conversations):
        turn(conversation, num_turns - 1, numbers.randint(1_000, 6_000), numbers.uniform(0, 20_000))
    finished = simulation.run()
    assert len(finished) == num_conversations * num_turns
    firsts = {min(r.num_prompt_tokens for r in finished if r.content[0] == (c, 0)) for c in range(num_conversations)}
    return [r.ttft_ms for r in finished if r.num_prompt_tokens not in firsts]


@pytest.mark.parametrize(
    "fleet",
    [
        pytest.param(split_fleet([1, 1], [1, 1]), id="2P2D"),
        pytest.param(split_fleet([1, 1, 1], [1, 1]), id="3P2D"),
        pytest.param([("aggregated", 1.0), ("aggregated", 1.0)], id="2 aggregated"),
    ],
)
def test_with_conversations_it_is_clearly_better(fleet: Fleet) -> None:
    """Prefix caches work under either policy; only `cost` knows where they are, and reads."""
    spent = {
        policy: [ttft for seed in SEEDS for ttft in converse(policy, fleet, seed)]
        for policy in ("least_loaded", "cost")
    }
    assert statistics.mean(spent["cost"]) <= 0.6 * statistics.mean(spent["least_loaded"])
    assert p95(spent["cost"]) <= 0.8 * p95(spent["least_loaded"])
