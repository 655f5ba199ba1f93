"""`make test-repeat`: what may be done to real processes, over and over. What is broken once in a hundred times is
broken."""

import argparse
import asyncio
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from services.sim.scenario import load_scenario
from tests.mesh.faults.harness import SCENARIOS, FaultMesh, fault_mesh, make_truth
from tests.mesh.faults.kills import Killing
from tests.mesh.faults.test_scenarios import NUM_DEATHS, NUM_KILLS
from tests.mesh.faults.times import death_to_free
from tests.mesh.zygote import Zygote

REPEATED = (
    "broker_away", "broker_pause", "corruption", "disconnects", "drain_decode", "gateway_cut", "hang_engine",
    "kill_decode_at_offered", "kill_directory", "kill_engine_twice", "kill_gateway", "kill_prefill_at_streaming",
    "kill_scheduler", "pause_decode_long", "refusal", "stall", "truncation",
)  # fmt: skip
KILLS, DEATHS = "kills over and over", "a dead reader's lease"


async def complaints_of(mesh: FaultMesh, name: str) -> list[str]:
    """Carry out one of the scenarios, and return what must not be."""
    match name:
        case _ if name == KILLS:
            return (await Killing(mesh, NUM_KILLS, lambda: None).run()).complaints
        case _ if name == DEATHS:
            await death_to_free(mesh, NUM_DEATHS, lambda: None)
            return []
        case _:
            return (await mesh.run(load_scenario(SCENARIOS / f"{name}.toml"))).complaints


async def rounds(numbers: Iterable[int], names: list[str], told: Callable[[int, str, list[str]], None]) -> None:
    """Carry out every scenario in each round, on a mesh that is the round's own."""
    truth, zygote = make_truth(), Zygote()
    try:
        for number in numbers:
            name = "the mesh"
            with tempfile.TemporaryDirectory(prefix="kvmesh-repeat-") as folder:
                try:
                    async with fault_mesh(Path(folder), truth, zygote, seed=number) as mesh:
                        for name in names:
                            told(number, name, await complaints_of(mesh, name))
                except Exception:  # noqa: BLE001 -- it is reported, and the other rounds are carried out
                    told(number, name, [traceback.format_exc()])
    finally:
        await zygote.stop()


async def run_all(num_rounds: int, num_jobs: int, names: list[str]) -> list[str]:
    """Carry out all rounds, `num_jobs` meshes at a time; return what must not be."""
    failures: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        bar = progress.add_task("scenarios", total=num_rounds * len(names))

        def told(number: int, name: str, found: list[str]) -> None:
            progress.advance(bar)
            failures.extend(f"round {number}, {name}: {what}" for what in found)
            progress.update(bar, description=f"scenarios, {len(failures)} complaints")
            for what in found:
                console.print(f"round {number}, {name}: {what}", markup=False)
            if name == names[-1] and not console.is_terminal:  # a log shows no bar
                console.print(f"round {number} is over, {len(failures)} complaints so far", markup=False)

        remaining = iter(range(num_rounds))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_jobs):
                tasks.create_task(rounds(remaining, names, told))
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(prog="make test-repeat", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2, help="meshes at a time")
    parser.add_argument("--only", default="", help="names of scenarios, with commas")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name] or [*REPEATED, KILLS, DEATHS]
    started_s = time.monotonic()
    failures = asyncio.run(run_all(options.rounds, options.jobs, names))
    minutes = (time.monotonic() - started_s) / 60
    print(f"{options.rounds} rounds of {len(names)} scenarios in {minutes:.1f} minutes: {len(failures)} complaints")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
