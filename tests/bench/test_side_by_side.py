"""Meshes side by side: whose turn it is, and what their times come to. The meshes are none, and answer at once."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from services.bench.drive.http_client import Client, Completion
from tests.bench.bench_proof import TIMES
from tests.bench.side_by_side import WARM_UP_ROUNDS, Row, compare, num_rounds, table, timed
from tests.bench.test_bench import completion


class Mesh(Client):
    """A client of nothing that takes so long for a first token, and as long again for the second."""

    def __init__(self, name: str, ttft_ms: float, asked: list[str]) -> None:
        self.name, self.ttft_ms, self.asked = name, ttft_ms, asked

    async def complete(self, prompt: Sequence[int], num_tokens: int, *, return_token_ids: bool = False) -> Completion:
        self.asked.append(f"{self.name} {len(prompt)}")
        return completion(self.ttft_ms, gaps_ms=[self.ttft_ms] * (num_tokens - 1))


async def test_each_mesh_is_asked_in_turn_and_compared_with_the_last() -> None:
    asked: list[str] = []
    rounds: list[None] = []

    @asynccontextmanager
    async def start() -> AsyncGenerator[dict[str, Client]]:
        yield {"slow": Mesh("slow", 30.0, asked), "quick": Mesh("quick", 20.0, asked)}

    rows = await compare(start, TIMES, [4, 7], 2, 3, lambda: rounds.append(None))
    assert len(rounds) == num_rounds([4, 7], 2, 3) == 3 * 2 * (2 + WARM_UP_ROUNDS)
    assert asked[:4] == ["slow 4", "quick 4", "quick 4", "slow 4"]
    assert [(row.num_tokens, row.mesh) for row in rows] == [(4, "slow"), (4, "quick"), (7, "slow"), (7, "quick")]
    assert rows[0].times["first"].median_ms == 30.0 and rows[0].times["second"].median_ms == 60.0
    assert rows[0].times["second"].ratios_by_start == (1.5, 1.5, 1.5) and rows[1].times["first"].ratio == 1.0
    assert table(rows, "times").row_count == 4


def test_each_start_has_a_ratio_of_its_own() -> None:
    found = timed([[10, 11, 12], [20, 20, 20], [9, 9, 9]], [[10, 10, 10], [10, 10, 10], [10, 10, 10]])
    assert found.ratios_by_start == (1.1, 2.0, 0.9) and found.ratio == 1.1 and found.median_ms == 11
    assert Row(num_tokens=1, mesh="m", times={"first": found}).times["first"] is found
