"""A bench of this checkout beside the same of an earlier commit, in turn, in one run:

    python -m tests.bench.against COMMIT [--rounds 3] -- services.cli.main bench ttft --lengths 100,1000 --json

The commit is checked out into a temporary folder, and uses this environment's packages. Both run the module with these
arguments, and must print one JSON object. Every number in it is a row: its medians over the rounds, and of the ratio
(here / there) of each round the median and the spread. What only one of them prints is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from services.bench.drive.progress_bar import progress

ROOT = Path(__file__).parents[2]
NAMES = ("tokens", "length", "workers", "name", "mode", "mesh")
"""An object of a list is named by the first of these that it has; else by its place."""


def leaves(found: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Return the numbers of a JSON value, with the path to each."""
    if isinstance(found, bool):
        return
    if isinstance(found, int | float):
        yield path, found
    elif isinstance(found, dict):
        for key, value in found.items():
            yield from leaves(value, f"{path}.{key}".lstrip("."))
    elif isinstance(found, list):
        for at, value in enumerate(found):
            known = next((f"{n}={value[n]}" for n in NAMES if n in value), str(at)) if isinstance(value, dict) else at
            yield from leaves(value, f"{path}[{known}]")


def compared(here: list[Mapping[str, float]], there: list[Mapping[str, float]]) -> Iterator[str]:
    """Return a line for each number that every round has."""
    rounds = list(zip(here, there, strict=True))
    for name in here[0]:
        if not all(name in one and name in other for one, other in rounds):
            continue
        ours, theirs = ([each[name] for each in side] for side in (here, there))
        ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True) if other)
        told = f"{median(ratios):>6.2f}  ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else f"{'-':>6}"
        yield f"{name:<60}  {median(ours):>12.3f}  {median(theirs):>12.3f}  {told}"


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """Give a folder with that commit."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-") as folder:
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def run(folder: Path, command: list[str]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return dict(leaves(json.loads(done.stdout)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("command", nargs="+", help="a module, and its arguments")
    options = parser.parse_args()
    found: dict[Path, list[Mapping[str, float]]] = defaultdict(list)
    with checked_out(options.commit) as there, progress("measuring", 2 * options.rounds) as advance:
        for number in range(options.rounds):
            for folder in (ROOT, there)[:: 1 - 2 * (number % 2)]:  # each is first in every second round
                found[folder].append(run(folder, options.command))
                advance()
    print(f"{'':<60}  {'here':>12}  {options.commit[:12]:>12}  {'ratio':>6}")
    for line in compared(found[ROOT], found[there]):
        print(line)


if __name__ == "__main__":
    main()
