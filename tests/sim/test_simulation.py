"""A slice of `make sim`: the whole mesh under every fault, checked against every promise."""

import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from services.sim import many
from services.sim.many import run_task
from services.sim.scenario import FAULT_KINDS, FaultKind
from services.sim.world import SimOptions, SimReport, random_shape, simulate
from tests.cli.commands import run_here

NUM_REQUESTS = 16


def run(seed: int, kinds: tuple[FaultKind, ...], num_requests: int = NUM_REQUESTS, **options: object) -> SimReport:
    report = simulate(seed, replace(SimOptions(num_requests=num_requests, kinds=kinds), **options))  # type: ignore[arg-type]
    again = f"kvmesh simulate --seed {seed} --requests {num_requests} --faults {','.join(kinds) or 'none'}"
    assert not report.verdict.problems, "\n".join([again, *report.log, *report.verdict.problems])
    return report


@pytest.mark.parametrize("seed", range(6))
def test_without_faults_every_request_is_answered(seed: int) -> None:
    verdict = run(seed, (), check_spans=True).verdict
    assert verdict.num_finished == verdict.num_requests == NUM_REQUESTS
    assert not verdict.faults


@pytest.mark.parametrize("kind", FAULT_KINDS)
@pytest.mark.parametrize("num_times", [1, 3])
def test_each_fault_by_itself(num_times: int, kind: FaultKind) -> None:
    num_struck = 0
    for seed in range(100, 110):
        num_struck += run(seed, (kind,), 8).verdict.faults[kind] > 0
        if num_struck == num_times:
            return
    raise AssertionError(f"it struck in {num_struck} simulations")


@pytest.mark.parametrize("seed", range(1_000, 1_020))
def test_faults_together(seed: int) -> None:
    run(seed, FAULT_KINDS)


@pytest.mark.parametrize("seed", range(40))
def test_whole_blocks(seed: int) -> None:
    """The same mesh with an engine whose blocks are only whole of use, every fourth time without faults."""
    shape = replace(random_shape(random.Random(seed)), windows=(), whole_blocks=True)
    run(seed, FAULT_KINDS if seed % 4 else (), shape=shape)


def test_logs_are_as_before_afterwards() -> None:
    levels = [logging.getLogger(name).level for name in ("services", "dataplane")]
    run(0, (), num_requests=1)
    assert [logging.getLogger(name).level for name in ("services", "dataplane")] == levels


def test_a_seed_is_a_whole_simulation() -> None:
    """Another process, with another hash seed, runs the same simulation, message by message."""
    code = (
        "from services.sim.many import run_task\n"
        "from services.sim.world import SimOptions\n"
        "from services.sim.scenario import FAULT_KINDS\n"
        "batch = run_task([(seed, 16) for seed in range(2_000, 2_001)], SimOptions(kinds=FAULT_KINDS))\n"
        "print(' '.join(batch.digests))\n"
    )
    env = {**os.environ, "PYTHONHASHSEED": "1"}
    other = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True, timeout=300
    )
    here = run_task([(seed, 16) for seed in range(2_000, 2_001)], SimOptions(kinds=FAULT_KINDS))
    assert other.stdout.split() == [str(digest) for digest in here.digests]


@pytest.mark.slow
def test_many_simulations_end_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than the first processes take on."""
    monkeypatch.setattr(many, "REQUESTS_PER_RUN", 4)
    monkeypatch.setattr(many, "RUNS_PER_TASK", 1)
    monkeypatch.setattr(many, "TASKS_PER_CHILD", 1)
    heard: list[int] = []
    total = many.run_many(
        0, 5 * many.REQUESTS_PER_RUN, SimOptions(), num_jobs=2, on_batch=lambda batch: heard.append(batch.num_runs)
    )
    assert total.num_runs == sum(heard) == len(heard) == 5
    assert total.verdict.num_finished == 5 * many.REQUESTS_PER_RUN


def test_the_command_counts_and_says_how_to_see_it_again(tmp_path: Path) -> None:
    finished = run_here(tmp_path, "simulate", "--requests", "30", "--faults", "none", "--json")
    counts = msgspec.json.decode(finished.stdout)
    assert counts["requests"] == counts["finished"] == 30
    for name in ("wrong", "unfinished", "leaked_blocks", "failed", "faults"):
        assert counts[name] == 0


def test_runs_do_not_touch_each_other() -> None:
    """A simulation that follows another in one process is the same as one alone."""
    options = SimOptions(kinds=FAULT_KINDS)
    together = run_task([(7, 12), (8, 12)], options).digests
    assert run_task([(8, 12)], options).digests == together[1:]
