"""Many simulations, spread over the machine's cores."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from dataplane.machine import usable_cores
from services.sim.verdict.answers import Verdict
from services.sim.world import SimOptions, simulate

REQUESTS_PER_RUN = 24
RUNS_PER_TASK = 8
TASKS_PER_CHILD = 64
"""A worker process of the pool ends after so many tasks: killed coroutines of a simulation stay in memory until
then."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One simulation that broke a promise, and what is needed to run it again."""

    seed: int
    num_requests: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SimBatch:
    """The sum of several simulations. `digests`: one for each; of several processes in the order in which they end."""

    verdict: Verdict
    failures: tuple[Failure, ...]
    num_runs: int
    virtual_s: float
    digests: tuple[str, ...]


def run_many(
    seed: int,
    num_requests: int,
    options: SimOptions,
    *,
    num_jobs: int = 0,
    on_batch: Callable[[SimBatch], None] = lambda _: None,
) -> SimBatch:
    """Simulate `num_requests` requests, `REQUESTS_PER_RUN` for each seed, starting with `seed`. Return the sum.

    `num_jobs` 0: one process for each core. `on_batch` is called with each part as it is done.
    """
    # Use no more processes than there are tasks; a single one needs no pool.
    tasks = list(_tasks(seed, num_requests))
    jobs = min(num_jobs or usable_cores(), len(tasks))
    if jobs <= 1:
        return _sum(_each(tasks, options, on_batch))
    # Run in waves of `TASKS_PER_CHILD` tasks per process: the end of each pool frees its processes' memory.
    context = multiprocessing.get_context("spawn")
    done: list[SimBatch] = []
    wave = jobs * TASKS_PER_CHILD
    for start in range(0, len(tasks), wave):
        # A pool a wave, and no `max_tasks_per_child`: with that Python 3.11's pool may wait for ever
        # (github.com/python/cpython/issues/115634).
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            waiting = [pool.submit(run_task, task, options) for task in tasks[start : start + wave]]
            # Report each batch as it ends: batches end in no fixed order.
            for finished in as_completed(waiting):
                done.append(finished.result())
                on_batch(done[-1])
    return _sum(done)


def run_task(runs: list[tuple[int, int]], options: SimOptions) -> SimBatch:
    """Simulate each pair of seed and number of requests."""
    verdict, failures, digests, virtual_s = Verdict(), list[Failure](), list[str](), 0.0
    for seed, num_requests in runs:
        report = simulate(seed, replace(options, num_requests=num_requests))
        verdict.merge(report.verdict)
        virtual_s += report.virtual_s
        digests.append(report.digest)
        if report.verdict.problems:
            failures.append(Failure(seed, num_requests, tuple(report.verdict.problems)))
    return SimBatch(verdict, tuple(failures), len(runs), virtual_s, tuple(digests))


def _tasks(seed: int, num_requests: int) -> Iterator[list[tuple[int, int]]]:
    runs: list[tuple[int, int]] = []
    while num_requests > 0:
        runs.append((seed, min(REQUESTS_PER_RUN, num_requests)))
        seed, num_requests = seed + 1, num_requests - REQUESTS_PER_RUN
        if len(runs) == RUNS_PER_TASK:
            yield runs
            runs = []
    if runs:
        yield runs


def _each(
    tasks: list[list[tuple[int, int]]], options: SimOptions, on_batch: Callable[[SimBatch], None]
) -> list[SimBatch]:
    done: list[SimBatch] = []
    for task in tasks:
        done.append(run_task(task, options))
        on_batch(done[-1])
    return done


def _sum(batches: list[SimBatch]) -> SimBatch:
    verdict = Verdict()
    for batch in batches:
        verdict.merge(batch.verdict)
    failures = sorted((f for batch in batches for f in batch.failures), key=lambda f: f.seed)
    return SimBatch(
        verdict,
        tuple(failures),
        sum(batch.num_runs for batch in batches),
        sum(batch.virtual_s for batch in batches),
        tuple(digest for batch in batches for digest in batch.digests),
    )


def wall_clock() -> float:
    """Return real monotonic seconds. Simulations replace `time.monotonic` while they run; call this outside them."""
    return time.monotonic()
