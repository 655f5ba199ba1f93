"""What a graphics card gives, beside its limits, in one run: `make gpu-bench`, `python -m tests.bench.bench_gpu`.

Each section runs in a process of its own, which a card's error or a limit of time ends without the others:

    carriers   `cuda` between two processes on the card against a copy on it; `tcp` and `shm` through host memory
               against the host link's own copies; NCCL to itself
    split      time to the first and the second token with and without the split, and what of a hand-over is exposed

`--quick` takes the small model alone and fewer rounds: under nine minutes. Rows are printed as they come, and written
as Markdown with `--out`. With no card: one line, and exit code 2.
"""

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread, Timer

import msgspec

from services.engine.devices import Cards, has_driver, usable_cards
from tests.bench.gpu_report import Row, markdown, plain

MODELS = ("qwen3-0.6b", "qwen3-8b")
QUICK_BUDGET_S, BUDGET_S = 520.0, 3600.0
SHARES = {"carriers": 0.3, "split": 0.7}
"""Of what time is left a section may take so much, the sections after it counted."""
STDERR_LINES = 3


def main() -> None:
    arguments = parse(sys.argv[1:])
    if arguments.section:
        run_section(arguments)
        return
    if reason := why_no_card():
        sys.stderr.write(f"no figures: {reason}\n")
        sys.exit(2)
    heading = describe_card() + f"; `{command(arguments)}`"
    print(heading, flush=True)
    rows: list[Row] = []
    for row in all_rows(arguments):
        rows.append(row)
        print(plain(row), flush=True)
    if arguments.out:
        arguments.out.write_text(markdown(heading, rows))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the small model, fewer rounds: under nine minutes")
    parser.add_argument("--model", action="append", choices=(*MODELS, "tiny"), help="only this one; may be repeated")
    parser.add_argument("--only", choices=list(SHARES), help="one section")
    parser.add_argument("--out", type=Path, help="write the table as Markdown")
    parser.add_argument("--device", default="cuda:0", help=argparse.SUPPRESS)
    parser.add_argument("--section", choices=list(SHARES), help=argparse.SUPPRESS)
    return parser.parse_args(words)


def models_of(arguments: argparse.Namespace) -> tuple[str, ...]:
    return tuple(arguments.model or (MODELS[:1] if arguments.quick else MODELS))


def command(arguments: argparse.Namespace) -> str:
    """Return how to ask for the same again."""
    flags = ["--quick"] * arguments.quick + [f"--model {model}" for model in arguments.model or ()]
    flags += [f"--only {arguments.only}"] if arguments.only else []
    return " ".join(["python -m tests.bench.bench_gpu", *flags])


def why_no_card() -> str:
    cards = usable_cards() if has_driver() else Cards(reason="this machine has no driver for a graphics card")
    return "" if cards.num_cards else cards.reason


def describe_card() -> str:
    import torch
    import transformers

    today = datetime.datetime.now(tz=datetime.UTC).date()
    versions = f"CUDA {torch.version.cuda}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{torch.cuda.get_device_name(0)}, {versions}, {today}"


def all_rows(arguments: argparse.Namespace) -> Iterator[Row]:
    """Run the sections one after another within the budget."""
    deadline = time.monotonic() + (QUICK_BUDGET_S if arguments.quick else BUDGET_S)
    sections = [arguments.only] if arguments.only else list(SHARES)
    while sections:
        section = sections[0]
        share = SHARES[section] / sum(SHARES[name] for name in sections)
        yield from section_rows(section, arguments, (deadline - time.monotonic()) * share)
        del sections[0]


def section_rows(section: str, arguments: argparse.Namespace, limit_s: float) -> Iterator[Row]:
    """Run one section as a process, and yield its rows as it prints them; what ends it otherwise is a row, too."""
    words = [sys.executable, "-m", "tests.bench.bench_gpu", "--section", section, "--device", arguments.device]
    words += ["--quick"] * arguments.quick + [f"--model={model}" for model in models_of(arguments)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None and process.stderr is not None
    timer = Timer(max(1.0, limit_s), process.kill)
    timer.start()
    errors: list[str] = []
    collector = Thread(target=lambda: errors.extend(filter(str.strip, process.stderr)), daemon=True)
    collector.start()
    try:
        for line in process.stdout:
            if (row := parse_row(line)) is not None:
                yield row
    finally:
        is_late = not timer.is_alive()
        timer.cancel()
        process.kill()
        code = process.wait()
        collector.join()
        process.stdout.close()
        process.stderr.close()
    if code:
        last = " / ".join(line.strip() for line in errors[-STDERR_LINES:])
        why = f"over its {limit_s:.0f} s" if is_late else f"code {code}"
        yield Row(what=f"section {section}", error=f"ended early, {why}: {last}")


def parse_row(line: str) -> Row | None:
    """Return the row of a section's line; None: a library has printed it."""
    try:
        return msgspec.json.decode(line, type=Row)
    except msgspec.DecodeError:
        return None


def run_section(arguments: argparse.Namespace) -> None:
    """The child: print a JSON line per row."""
    from tests.bench import gpu_carriers, gpu_split

    run = {"carriers": gpu_carriers.rows, "split": gpu_split.rows}[arguments.section]
    for row in run(arguments.device, models_of(arguments), quick=arguments.quick):
        sys.stdout.write(json.dumps(msgspec.to_builtins(row)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
