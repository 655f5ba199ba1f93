"""Meshes side by side: requests go to each in turn, one at a time, each with a fresh prompt.

What start a mesh has had, where its processes and its memory lie, moves all of its times by a few percent: so the
meshes are started several times, and each start gives a ratio of its own.
"""

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from statistics import median

import msgspec
from rich import box
from rich.table import Table

from services.bench.drive.http_client import Client, Completion
from services.bench.drive.meshes import rotated
from services.bench.drive.random_model import SHAPE
from services.bench.drive.workload import random_tokens

NUM_TOKENS, WARM_UP_ROUNDS = 8, 3

Start = Callable[[], AbstractAsyncContextManager[Mapping[str, Client]]]
"""Starts the meshes; gives a client of each by its name, the one that the others are compared with last."""
Times = Mapping[str, Callable[[Completion], float]]
"""What is timed of a request, in milliseconds, by its name."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """`median_ms`: of all requests. `ratio`: to the mesh that is compared with, the median of the starts."""

    median_ms: float
    ratio: float
    ratios_by_start: tuple[float, ...]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One mesh at one prompt length; its times by their names."""

    num_tokens: int
    mesh: str
    times: dict[str, Timed]


def num_rounds(lengths: Sequence[int], num_requests: int, num_starts: int) -> int:
    """Return how many rounds `compare` has; in each all meshes are asked."""
    return num_starts * len(lengths) * (num_requests + WARM_UP_ROUNDS)


async def compare(
    start: Start,
    times: Times,
    lengths: Sequence[int],
    num_requests: int,
    num_starts: int,
    on_round: Callable[[], object] = lambda: None,
) -> list[Row]:
    """Return a row for each mesh and length. Which mesh is asked first changes every round."""
    found: defaultdict[tuple[int, str, str], list[list[float]]] = defaultdict(list)
    rng, names = random.Random(20261122), list[str]()
    for _ in range(num_starts):
        async with start() as clients:
            names = list(clients)
            for length in lengths:
                answers: dict[str, list[Completion]] = {name: [] for name in names}
                for number in range(num_requests + WARM_UP_ROUNDS):
                    for name in rotated(names, number):
                        answer = await clients[name].complete(random_tokens(rng, length, SHAPE["vocab"]), NUM_TOKENS)
                        if number >= WARM_UP_ROUNDS:
                            answers[name].append(answer)
                    on_round()
                for name in names:
                    for what, time_of in times.items():
                        found[length, name, what].append([time_of(answer) for answer in answers[name]])
    return [
        Row(
            num_tokens=length,
            mesh=name,
            times={what: timed(found[length, name, what], found[length, names[-1], what]) for what in times},
        )
        for length in lengths
        for name in names
    ]


def timed(times: Sequence[Sequence[float]], others: Sequence[Sequence[float]]) -> Timed:
    """Return what the times of each start come to, beside those of the mesh that is compared with."""
    ratios = [round(median(one) / median(other), 3) for one, other in zip(times, others, strict=True)]
    return Timed(median_ms=median([*chain(*times)]), ratio=median(ratios), ratios_by_start=tuple(ratios))


def table(rows: Sequence[Row], title: str) -> Table:
    last = rows[-1]
    shown = Table(box=box.SIMPLE_HEAD, title=title)
    for heading in (
        "tokens",
        "mesh",
        *chain(*((f"{what}\nms", f"of\n{last.mesh}", "by start") for what in last.times)),
    ):
        shown.add_column(heading, justify="right")
    for row in rows:
        cells = (
            (f"{of.median_ms:.2f}", f"{of.ratio:.3f}", f"{min(of.ratios_by_start):.3f}–{max(of.ratios_by_start):.3f}")
            for of in row.times.values()
        )
        shown.add_row(str(row.num_tokens), row.mesh, *chain(*cells))
    return shown
