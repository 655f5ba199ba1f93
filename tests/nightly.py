"""`make nightly`: everything that `.ci/run` leaves out, part after part, with a table of what passed at its end.

`make nightly PART='sim vllm'` runs these parts. What passed on this commit before stays in the table: a night may
have several sittings. A part that cannot run on this machine says so in its row, and fails nothing.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.compose import docker, standins

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".kvmesh" / "nightly"
"""A log of each part, and a record of how it ended."""


def no_containers() -> str:
    """Say why there is no mesh in containers here; empty: there is."""
    return docker.why_not() or ("" if docker.has_image("python:3.11.14-slim-bookworm") else standins.why_not())


def no_card() -> str:
    return "" if shutil.which("nvidia-smi") else "there is no NVIDIA card"


@dataclass(frozen=True)
class Part:
    """Targets of the Makefile. `minutes`: what they take on two cores, once what they install is there."""

    name: str
    minutes: int
    targets: tuple[str, ...]
    what: str
    why_not: Callable[[], str] = str


PARTS = (
    Part("rest", 14, ("test-rest",), "every other case of the large matrices, and what starts many processes"),
    Part("debug", 5, ("test-debug",), "the services' tests under asyncio's debug mode"),
    Part("guard", 1, ("bench-guard",), "the data plane's ratios: fails below half of what docs/benchmarks.md states"),
    Part("sim", 25, ("sim",), "100,000 simulated requests under every fault; then every planted bug"),
    Part("faults", 60, ("faults",), "the same faults on real processes, and what surviving comes to"),
    Part("repeat", 60, ("test-repeat",), "the scenarios that kill real processes, 100 times"),
    Part("attack", 16, ("attack",), "what was once open, on a real mesh under load; fuzzed frames and messages"),
    Part("clients", 15, ("clients",), "stock clients on a real mesh; 5 GB the first time"),
    Part("otlp", 3, ("otlp-test",), "traces in a real Arize Phoenix"),
    Part("prometheus", 3, ("prometheus-test",), "a real Prometheus on a mesh under load"),
    Part("compose", 10, ("compose-test",), "the mesh of compose/ in real containers", no_containers),
    Part("bench", 60, ("bench",), "the benchmarks of docs/benchmarks.md"),
    Part("vllm", 25, ("vllm", "vllm-test"), "an environment with vLLM, 3.6 GB, and what needs it"),
    Part("vllm-bench", 35, ("vllm-bench",), "the mesh on vLLM beside vLLM itself"),
    Part("gpu", 20, ("gpu-test", "gpu-bench"), "what needs a graphics card", no_card),
)


class Row(msgspec.Struct):
    """How a part ended, on which commit."""

    part: str
    commit: str
    result: str
    minutes: float


def main(names: Sequence[str]) -> int:
    """Return the exit code: 0 where nothing failed."""
    console = Console(highlight=False, soft_wrap=True)
    known = [part.name for part in PARTS]
    if unknown := [name for name in names if name not in known]:
        console.print(f"There is no part {', '.join(unknown)}; the parts are {', '.join(known)}.")
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    rows = [run(part, commit, console) for part in PARTS if part.name in names or not names]
    console.print(table(commit))
    return int(any(row.result == "failed" for row in rows))


def run(part: Part, commit: str, console: Console) -> Row:
    """Run a part's targets, with all that they print in its log."""
    log, started_s = FOLDER / f"{part.name}.log", time.monotonic()
    if reason := part.why_not():
        result = f"not here: {reason}"
    else:
        console.print(f"{part.name}: {part.what} … some {part.minutes} min, log {log.relative_to(ROOT)}")
        with log.open("w") as file:
            done = subprocess.run(["make", *part.targets], cwd=ROOT, stdout=file, stderr=file, check=False)
        result = "failed" if done.returncode else "passed"
    row = Row(part.name, commit, result, (time.monotonic() - started_s) / 60)
    (FOLDER / f"{part.name}.json").write_bytes(msgspec.json.encode(row))
    console.print(f"{part.name}: {result} after {row.minutes:.1f} min")
    return row


def table(commit: str) -> Table:
    """Return the rows of every part; those of other commits are not counted."""
    found = Table("part", "result", "minutes", title=f"nightly on {commit}")
    for part in PARTS:
        path = FOLDER / f"{part.name}.json"
        row = msgspec.json.decode(path.read_bytes(), type=Row) if path.exists() else None
        if row is None or row.commit != commit:
            found.add_row(part.name, "not run on this commit", "")
        else:
            found.add_row(part.name, row.result, f"{row.minutes:.1f}")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
