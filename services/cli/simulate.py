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

from services.cli.bench import check_installed
from services.cli.limits import MAX_FAULTY_WORKERS, MAX_PROBLEMS_SHOWN
from services.errors import UserError


def simulate(
    seed: Annotated[int, typer.Option(min=0, help="The first seed; each simulation has one of its own.")] = 0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="In all, 24 to a simulation (240); of a measurement: for each size.")
    ] = None,
    workers: Annotated[
        str, typer.Option(help="Measure a mesh of so many workers, or several; with --faults: workers of each mesh.")
    ] = "",
    sweep: Annotated[bool, typer.Option("--sweep", help="Measure meshes of 1, 2, 4 … 512, 1,000 workers.")] = False,
    charge: Annotated[
        bool, typer.Option("--charge", help="What a measured control plane takes of the CPU passes in virtual time.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Plot a measurement here.")] = None,
    faults: Annotated[str | None, typer.Option(help="all (default), none, or with commas; `list` prints them.")] = None,
    scenario: Annotated[Path | None, typer.Option(help="A scenario file in place of random faults.")] = None,
    jobs: Annotated[int | None, typer.Option(min=0, help="Processes; 0 (default): one a core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Simulate a mesh under faults and check every promise; or with --workers or --sweep measure how it does at a size.
    Exit code 1 where a promise was broken."""
    # The simulator is an optional part: report that it is missing before the imports below fail.
    check_installed()
    from services.bench.drive.arguments import parse_lengths
    from services.sim.many import SimBatch, run_many, wall_clock
    from services.sim.scenario import FAULT_KINDS, fault_kinds, load_scenario
    from services.sim.world import SimOptions

    if faults == "list":
        sys.stdout.write("\n".join(FAULT_KINDS) + "\n")
        return
    # `--workers` alone asks for a measurement; with --faults or --scenario it is the size of each simulated mesh.
    if sweep or (workers and faults is None and scenario is None):
        from services.cli.scale import run_scale
        from services.sim.scale import MAX_WORKERS, SIZES

        _refuse("--workers or --sweep measure a mesh without faults, one size after another",
                {"--faults": faults, "--scenario": scenario, "--jobs": jobs})  # fmt: skip
        if sweep and workers:
            raise UserError("--sweep has sizes of its own: leave out --workers")
        sizes = SIZES if sweep else parse_lengths(workers, "--workers", MAX_WORKERS)
        run_scale(sizes, seed, requests or 0, charge=charge, plot=plot, as_json=as_json)
        return
    # Else simulate faults. Defaults are filled in only here: above, None means that an option was not given.
    _refuse("a simulation of faults measures nothing", {"--plot": plot, "--charge": charge or None})
    num_workers = _num_workers(workers)
    faults, requests = faults or "all", requests or 240
    options = SimOptions(
        num_workers=num_workers,
        kinds=fault_kinds(faults),
        scenario=load_scenario(scenario) if scenario is not None else None,
    )
    # Progress goes to standard error: standard output has the result alone.
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeRemainingColumn(),
    )
    # Measure real time out here: simulations replace the process's clock while they run.
    started_s = wall_clock()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("requests", total=requests)

        def show(batch: SimBatch) -> None:
            progress.advance(bar, batch.verdict.num_requests)

        total = run_many(seed, requests, options, num_jobs=jobs or 0, on_batch=show)
    wall_s = wall_clock() - started_s
    # Collect the options with which a failed seed can be run again.
    rest = " ".join(
        [f"--faults {shlex.quote(faults)}"]
        + ([f"--workers {num_workers}"] if num_workers else [])
        + ([f"--scenario {shlex.quote(str(scenario))}"] if scenario is not None else [])
    )
    if as_json:
        _print_json(total, rest, wall_s)
    else:
        _print_table(total, rest, wall_s)
    if total.failures:
        sys.exit(1)


def _refuse(why: str, options: dict[str, object]) -> None:
    """Raise UserError for options that were given and do not go with what is asked for."""
    if given := [name for name, value in options.items() if value is not None]:
        raise UserError(f"{why}: leave out {' and '.join(given)}")


def _num_workers(text: str) -> int:
    """Return the workers of each mesh under faults; 0: as the seed says. Raises UserError."""
    if not text:
        return 0
    try:
        number = int(text)
    except ValueError as error:
        raise UserError(f"--workers {text!r}: with faults all meshes have one size: give a number") from error
    if not 0 <= number <= MAX_FAULTY_WORKERS:
        raise UserError(f"--workers {number}: with faults a mesh has at most {MAX_FAULTY_WORKERS} workers, 0: any")
    return number


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
    # Show the first failures in full, each with the command that repeats it; of the others the seeds only.
    for failure in total.failures[:MAX_PROBLEMS_SHOWN]:
        console.print(f"[red]seed {failure.seed}[/red]")
        for problem in failure.problems[:MAX_PROBLEMS_SHOWN]:
            console.print(f"  {problem}", markup=False)
        console.print(f"  again: {_replay(failure, rest)}", markup=False)
    if len(total.failures) > MAX_PROBLEMS_SHOWN:
        others = ", ".join(str(failure.seed) for failure in total.failures[MAX_PROBLEMS_SHOWN:])
        console.print(f"and seeds {others}")
    if not total.failures:
        console.print("[green]no promise was broken[/green]")


def _listed(counts: "Counter[str]") -> str:
    return f" ({', '.join(f'{name} {count}' for name, count in sorted(counts.items()))})" if counts else ""
