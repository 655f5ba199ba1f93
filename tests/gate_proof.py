"""`make gate-proof`: the gate ten times in a row beside four busy processes, and a line for each.

What passes only where nothing else runs is judged by the clock. `GATE_PROOF_FLAGS='--rounds 3'`: so many; the lines of
one commit stay in `.kvmesh/gate-proof.md`, so that ten may have several sittings.
"""

import argparse
import contextlib
import multiprocessing
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / ".kvmesh" / "gate-proof.md"
HEAD = "| commit | minutes | passed | failed | flaky |\n|---|--:|--:|--:|---|\n"
NUM_BUSY = 4


def main() -> int:
    """Return the exit code: 0 where nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    TABLE.parent.mkdir(exist_ok=True)
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip()
    known = TABLE.read_text() if TABLE.exists() else HEAD
    rows = [line for line in known.removeprefix(HEAD).splitlines() if line.startswith(f"| {commit} |")]
    has_failed = False
    with busy():
        for _ in range(rounds):
            row, failed = one_round(commit)
            has_failed |= failed
            rows.append(row)
            TABLE.write_text(HEAD + "".join(f"{line}\n" for line in rows))
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()
    return int(has_failed)


def one_round(commit: str) -> tuple[str, bool]:
    """Run the gate once; return its line, and whether it failed. All that it printed stays beside the table."""
    begun_s = time.monotonic()
    log = TABLE.with_suffix(".log")
    with log.open("w") as file:
        code = subprocess.run([ROOT / ".ci" / "run"], cwd=ROOT, stdout=file, stderr=file, check=False).returncode
    text = log.read_text()
    counts = dict[str, int]()
    for number, what in re.findall(r"(\d+) (passed|failed|errors?)\b", text):
        counts[what] = int(number)
    num_failed = sum(number for what, number in counts.items() if what != "passed")
    flaky = ", ".join(re.findall(r"^flaky: (\S+?):? ", text, re.MULTILINE)) or "none"
    minutes = (time.monotonic() - begun_s) / 60
    return f"| {commit} | {minutes:.1f} | {counts.get('passed', 0):,} | {num_failed or code} | {flaky} |", code != 0


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Let so many processes do nothing but compute meanwhile."""
    processes = [multiprocessing.Process(target=_compute, daemon=True) for _ in range(NUM_BUSY)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _compute() -> None:
    while True:
        sum(range(100_000))


if __name__ == "__main__":
    sys.exit(main())
