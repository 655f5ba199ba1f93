"""`kvmesh simulate`: runs simulations and prints their result."""

import json
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

MAX_SHOWN = 5


def simulate(
    seed: Annotated[int, typer.Option(min=0, help="The first seed; each simulation has one of its own.")] = 0,
    requests: Annotated[int, typer.Option(min=1, help="Requests in all, 24 to a simulation.")] = 240,
    workers: Annotated[int, typer.Option(min=0, max=64, help="Workers of each mesh; 0: as the seed says.")] = 0,
    faults: Annotated[str, typer.Option(help="all, none, or names with commas; `list` prints them.")] = "all",
    scenario: Annotated[Path | None, typer.Option(help="A scenario file in place of random faults.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes; 0: one a core.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Simulate a mesh under faults and check every promise. Exit code 1 where one was broken."""
    from services.sim.many import SimBatch, run_many, wall_clock
    from services.sim.scenario import FAULT_KINDS, fault_kinds, load_scenario
    from services.sim.world import SimOptions

    if faults == "list":
        sys.stdout.write("\n".join(FAULT_KINDS) + "\n")
        return
    options = SimOptions(
        num_workers=workers,
        kinds=fault_kinds(faults),
        scenario=load_scenario(scenario) if scenario is not None else None,
    )
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    started_s = wall_clock()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("requests", total=requests)

        def show(batch: SimBatch) -> None:
            progress.advance(bar, batch.verdict.num_requests)

        total = run_many(seed, requests, options, num_jobs=jobs, on_batch=show)
    wall_s = wall_clock() - started_s
    rest = " ".join(
        [f"--faults {shlex.quote(faults)}"]
        + ([f"--workers {workers}"] if workers else [])
        + ([f"--scenario {shlex.quote(str(scenario))}"] if scenario is not None else [])
    )
    if as_json:
        _print_json(total, rest, wall_s)
    else:
        _print_table(total, rest, wall_s)
    if total.failures:
        sys.exit(1)


def _replay(failure: "object", rest: str) -> str:
    from services.sim.many import Failure

    assert isinstance(failure, Failure)
    return f"kvmesh simulate --seed {failure.seed} --requests {failure.num_requests} {rest}"


def _print_json(total: "object", rest: str, wall_s: float) -> None:
    from services.sim.many import SimBatch

    assert isinstance(total, SimBatch)
    verdict = total.verdict
    document = {
        "requests": verdict.num_requests,
        "finished": verdict.num_finished,
        "cancelled": verdict.num_cancelled,
        "failed": sum(verdict.failed.values()),
        "failed_by_code": dict(sorted(verdict.failed.items())),
        "wrong": verdict.num_wrong,
        "unfinished": verdict.num_unfinished,
        "leaked_blocks": verdict.num_leaked_blocks,
        "faults": sum(verdict.faults.values()),
        "faults_by_kind": dict(sorted(verdict.faults.items())),
        "simulations": total.num_runs,
        "virtual_s": round(total.virtual_s, 3),
        "wall_s": round(wall_s, 3),
        "failures": [
            {"seed": f.seed, "problems": list(f.problems), "replay": _replay(f, rest)} for f in total.failures
        ],
    }
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


def _print_table(total: "object", rest: str, wall_s: float) -> None:
    from services.sim.many import SimBatch

    assert isinstance(total, SimBatch)
    console, verdict = Console(highlight=False), total.verdict
    table = Table(title=f"{total.num_runs} simulations, {total.virtual_s:.0f} s of virtual time in {wall_s:.0f} s")
    table.add_column("what")
    table.add_column("count", justify="right")
    for name, count in (
        ("requests", verdict.num_requests),
        ("finished", verdict.num_finished),
        ("cancelled by their clients", verdict.num_cancelled),
        (f"failed{_listed(verdict.failed)}", sum(verdict.failed.values())),
        (f"faults{_listed(verdict.faults)}", sum(verdict.faults.values())),
        ("wrong tokens", verdict.num_wrong),
        ("never ended", verdict.num_unfinished),
        ("leaked blocks", verdict.num_leaked_blocks),
    ):
        table.add_row(name, f"{count:,}")
    console.print(table)
    for failure in total.failures[:MAX_SHOWN]:
        console.print(f"[red]seed {failure.seed}[/red]")
        for problem in failure.problems[:MAX_SHOWN]:
            console.print(f"  {problem}", markup=False)
        console.print(f"  again: {_replay(failure, rest)}", markup=False)
    if len(total.failures) > MAX_SHOWN:
        console.print(f"and {len(total.failures) - MAX_SHOWN} more seeds")
    if not total.failures:
        console.print("[green]no promise was broken[/green]")


def _listed(counts: "Counter[str]") -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in sorted(counts.items()))})" if counts else ""
