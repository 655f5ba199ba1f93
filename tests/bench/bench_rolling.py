"""What a rolling restart costs conversations: `python -m tests.bench.bench_rolling`.

The same conversations are held in two meshes of two prefill and two decode workers each, one mesh after the other. In
one of them all workers are started again one after another, and again from the first, as `kvmesh restart --rolling`
does, until the last conversation has ended. Compared are the tokens of each answer, how much of the prompts was reused
in the turns from the second on, and the longest gaps between two tokens.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from services.bench.drive.http_client import Client, Completion
from services.bench.drive.meshes import serving
from services.bench.drive.progress_bar import progress
from services.bench.drive.sources import SourceShares, shares_of
from services.bench.drive.stats import percentile
from services.bench.multiturn import SEED, Conversation, converse, make_conversations
from services.cli.drain import run_restart
from services.cli.running import BusOptions
from services.config import MeshConfig, SchedulerConfig
from services.launch.options import Launch
from services.launch.supervisor import Supervisor

QUIET, ROLLING = "undisturbed", "restarted"
NUM_TURNS, OUTPUT = 6, (24, 40)
Held = list[list[Completion]]


async def hold(client: Client, talks: Sequence[Conversation], width: int, think_ms: int, done: object) -> Held:
    """Hold all conversations, so many at a time; call `done` after each."""
    gate = asyncio.Semaphore(width)

    async def one(talk: Conversation) -> list[Completion]:
        async with gate:
            held = await converse(client, talk, think_ms)
        assert callable(done)
        done()
        return held

    return await asyncio.gather(*(one(talk) for talk in talks))


async def restart_until(mesh: Supervisor, holding: "asyncio.Task[Held]") -> int:
    """Have all workers start again, over and over; return how many have."""
    options = BusOptions(mesh.nats_url, str(mesh.keys_dir / "operator.creds"), operator=True)
    num_restarted = 0
    while not holding.done():
        with contextlib.redirect_stdout(sys.stderr):
            await asyncio.to_thread(run_restart, options, forced=False)
        num_restarted += sum(child.role in ("prefill", "decode") for child in mesh.children)
    return num_restarted


async def measure(num_talks: int, history: int, width: int, think_ms: int) -> dict[str, object]:
    options = Launch(num_prefill=2, num_decode=2, config=MeshConfig(scheduler=SchedulerConfig(policy="cost")))
    async with serving(lambda each: {QUIET: each, ROLLING: each}, options) as served:
        talks = make_conversations(
            SEED, history, num_turns=NUM_TURNS, count=num_talks, output=OUTPUT, vocab_size=served.vocab_size
        )
        warm_up = make_conversations(
            SEED + 1, history, num_turns=2, count=width, output=OUTPUT, vocab_size=served.vocab_size
        )
        with progress("conversations", 2 * num_talks) as done:
            for client in served.clients.values():
                await hold(client, warm_up, width, 0, lambda: None)
            quiet = await hold(served.clients[QUIET], talks, width, think_ms, done)
            holding = asyncio.create_task(hold(served.clients[ROLLING], talks, width, think_ms, done))
            num_restarted = await restart_until(served.supervisors[ROLLING], holding)
            rolling = await holding
    shares = {mode: _later(held) for mode, held in ((QUIET, quiet), (ROLLING, rolling))}
    pairs = [pair for both in zip(quiet, rolling, strict=True) for pair in zip(*both, strict=True)]
    return {
        "answers": len(pairs),
        "workers_restarted": num_restarted,
        "answers_that_differ": sum(one.token_ids != other.token_ids for one, other in pairs),
        "reused": {mode: round(share.reused_share, 4) for mode, share in shares.items()},
        "reuse_kept": round(shares[ROLLING].reused_share / shares[QUIET].reused_share, 4),
        "ttft_p50_ms": {mode: _times(held, 50)[0] for mode, held in ((QUIET, quiet), (ROLLING, rolling))},
        "gap_p99_ms": {mode: _times(held, 99)[1] for mode, held in ((QUIET, quiet), (ROLLING, rolling))},
        "longest_gap_ms": {mode: _times(held, 100)[1] for mode, held in ((QUIET, quiet), (ROLLING, rolling))},
    }


def _later(held: Held) -> SourceShares:
    return shares_of([turn.usage for turns in held for turn in turns[1:]])


def _times(held: Held, share: float) -> tuple[float, float]:
    """Return a percentile of the later turns' times to first token, and of all gaps between tokens."""
    first = percentile([turn.ttft_ms for turns in held for turn in turns[1:]], share) or 0.0
    gaps = percentile([gap for turns in held for turn in turns for gap in turn.gaps_ms], share) or 0.0
    return round(first, 1), round(gaps, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=24, help="how many are held in each mesh")
    parser.add_argument("--history", type=int, default=1_000, help="tokens of their first messages")
    parser.add_argument("--concurrency", type=int, default=3, help="how many are held at a time")
    parser.add_argument("--think-ms", type=int, default=500, help="pause before each turn but the first")
    parser.add_argument("--json", action="store_true", help="print all of it for programs")
    asked = parser.parse_args()
    report = asyncio.run(measure(asked.conversations, asked.history, asked.concurrency, asked.think_ms))
    if asked.json:
        print(json.dumps(report))
        return
    table = Table("what", "figure", title="conversations while all workers are started again, one after another")
    for name, value in report.items():
        said = " · ".join(f"{mode} {figure}" for mode, figure in value.items()) if isinstance(value, dict) else value
        table.add_row(name.replace("_", " "), str(said))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()
