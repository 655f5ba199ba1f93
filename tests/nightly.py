"""`make nightly`: everything that `.ci/run` leaves out, part after part, with a table of what passed at its end.

`make nightly PART='sim vllm'` runs these parts, `PART=list` lists them all. What passed on this commit before stays in
the table: a night may have several sittings. A part that cannot run on this machine says so in its row, and fails
nothing.
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

from tests.compose import docker, fakes

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".kvmesh" / "nightly"
"""A log of each part, and a record of how it ended."""


def no_containers() -> str:
    """Say why there is no mesh in containers here; empty: there is."""
    return docker.why_not() or ("" if docker.has_image("python:3.11.14-slim-bookworm") else fakes.why_not())


def no_card() -> str:
    return "" if shutil.which("nvidia-smi") else "there is no NVIDIA card"


@dataclass(frozen=True)
class Part:
    """Files of tests, which `make test` leaves out, or else targets of the Makefile. `minutes`: what they take on two
    cores, once what they install is there."""

    name: str
    minutes: int
    what: str
    files: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()
    why_not: Callable[[], str] = str

    @property
    def command(self) -> list[str]:
        return ["make", "test-files", f"FILES={' '.join(self.files)}"] if self.files else ["make", *self.targets]


PARTS = (
    Part(
        "processes", 13, "real processes: the mesh as users meet it, its commands, traces, restarts",
        files=(
            "tests/attach/test_processes.py",
            "tests/cli/test_bus.py", "tests/cli/test_host.py", "tests/cli/test_meshes.py",
            "tests/mesh/test_both_engines.py", "tests/mesh/test_conversations.py", "tests/mesh/test_equality.py",
            "tests/mesh/test_logprobs.py", "tests/mesh/test_mesh.py", "tests/mesh/test_readable_bus.py",
            "tests/mesh/test_restarts.py", "tests/mesh/test_room.py", "tests/mesh/test_rotation.py",
            "tests/mesh/test_shaped_choices.py", "tests/mesh/test_inflight.py", "tests/mesh/test_wrong_clocks.py",
            "tests/mesh/test_zygote.py", "tests/plane/test_processes.py", "tests/telemetry/test_traces.py",
        ),
    ),
    Part("kills", 10, "every fault's scenario on real processes", files=("tests/mesh/attack", "tests/mesh/faults")),
    Part(
        "cards", 3, "cards' fakes",
        files=(
            "tests/engine/test_cuda.py", "tests/engine/test_fake_card.py", "tests/mesh/test_cards.py",
            "tests/mesh/test_gpu.py", "tests/plane/test_card.py",
        ),
    ),
    Part(
        "pages", 10, "the pages' commands and snippets, and their map of a request",
        files=("tests/cli/test_page_commands.py", "tests/clients", "tests/sim/test_life.py"),
    ),
    Part(
        "network", 4, "TLS, network namespaces",
        files=(
            "tests/bus/test_tls.py", "tests/gateway/test_tls.py", "tests/mesh/test_namespaces.py",
            "tests/mesh/test_addresses.py",
        ),
    ),
    Part("benches", 5, "the benchmarks' own tests", files=("tests/bench",)),
    Part("rest", 10, "every other case of the gate's matrices", targets=("test-rest",)),
    Part("debug", 10, "the services' tests in real time, under asyncio's debug mode", targets=("test-debug",)),
    Part("examples", 10, "new examples of Hypothesis: the seed is in the log", targets=("test-examples",)),
    Part(
        "guard", 1, "the data plane's ratios: fails below half of what docs/benchmarks.md states",
        targets=("bench-guard",),
    ),
    Part("sim", 25, "100,000 simulated requests under every fault; then every planted bug", targets=("sim",)),
    Part("faults", 60, "the faults on real processes, and what surviving comes to", targets=("faults",)),
    Part("repeat", 60, "the scenarios that kill real processes, 100 times", targets=("test-repeat",)),
    Part(
        "attack", 16, "what was once open, on a real mesh under load; fuzzed frames and messages", targets=("attack",)
    ),
    Part("vllm", 25, "an environment with vLLM, 3.6 GB, and what needs it", targets=("vllm", "vllm-test")),
    Part("clients", 15, "stock clients on a real mesh; 5 GB the first time", targets=("clients",)),
    Part("otlp", 3, "traces in a real Arize Phoenix", targets=("otlp-test",)),
    Part("prometheus", 3, "a real Prometheus on a mesh under load", targets=("prometheus-test",)),
    Part("compose", 10, "the mesh of compose/ in real containers", targets=("compose-test",), why_not=no_containers),
    Part("bench", 60, "the benchmarks of docs/benchmarks.md", targets=("bench",)),
    Part("vllm-bench", 35, "the mesh on vLLM beside vLLM itself", targets=("vllm-bench",)),
    Part("attach", 15, "stock vLLM servers that attach: their tests", targets=("vllm", "attach-test")),
    Part("attach-bench", 45, "stock vLLM servers that attach, beside others", targets=("attach-bench",)),
    Part("gpu", 20, "what needs a graphics card", targets=("gpu-test", "gpu-bench"), why_not=no_card),
)  # fmt: skip

BELONGS_TO_TARGETS = (
    "tests/telemetry/test_grafana.py", "tests/telemetry/test_phoenix.py", "tests/telemetry/test_prometheus.py",
)  # fmt: skip
"""Files that a part's targets run."""
FILES = frozenset(BELONGS_TO_TARGETS).union(*(part.files for part in PARTS))
"""What `make test` leaves out: files and folders. Whoever names one, or a folder within, runs it all the same."""


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
    if list(names) == ["list"]:
        console.print(listed())
        return 0
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
            done = subprocess.run(part.command, cwd=ROOT, stdout=file, stderr=file, check=False)
        result = "failed" if done.returncode else "passed"
    row = Row(part.name, commit, result, (time.monotonic() - started_s) / 60)
    (FOLDER / f"{part.name}.json").write_bytes(msgspec.json.encode(row))
    console.print(f"{part.name}: {result} after {row.minutes:.1f} min")
    return row


def listed() -> Table:
    found = Table("part", "minutes", "what")
    for part in PARTS:
        found.add_row(part.name, str(part.minutes), part.what)
    return found


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
