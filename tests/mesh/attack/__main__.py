"""`make attack`: what was found to be open, tried on a real mesh under load, and every test that holds it shut."""

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from services.settings import changed
from tests.mesh.attack import bus, http, ports
from tests.mesh.attack.findings import FINDINGS, Tested, tests_of
from tests.mesh.attack.mesh import WIDTH, Attack, Row, Target, attacked, under_load
from tests.mesh.faults.harness import OPTIONS, make_truth
from tests.mesh.faults.times import BROKER_PAUSES_S
from tests.mesh.zygote import Zygote


def attacks(num_frames: int, num_messages: int, num_repeated: int, health_s: float) -> dict[str, Attack]:
    """Return every attack by its name, for the table. `health_s`: a gateway may let `/health` wait for so long."""
    return {
        "a stranger at the broker": partial(bus.strangers, num_rounds=10),
        "each cell of the permissions": bus.cells,
        "what is heard, said again by others": partial(bus.repeat_everything, num_messages=num_repeated),
        "lies of a holder that nobody knows": partial(bus.lie_under_own_name, num_messages=num_repeated),
        "blocks of a holder that nobody knows": partial(bus.blocks_of_nobody, num_tries=num_repeated),
        "other tenants' blocks": partial(bus.foreign_leases, num_tries=max(100, num_repeated // 4)),
        "fuzzed messages": partial(bus.fuzzed_messages, num_messages=num_messages),
        "fuzzed frames": partial(ports.frames, num_frames=num_frames),
        "other roles' replies, under any name": bus.replies_of_others,
        "replies led elsewhere": bus.replies_led_elsewhere,
        "in the queues of services": bus.queues,
        "strangers at the gateway": http.strangers,
        "bodies of 20 MB": partial(http.large_bodies, health_s=health_s),
        "fields of 23 MB": partial(http.large_fields, health_s=health_s),
        "endless trailers, chunks and heads": partial(http.endless_parts, health_s=health_s),
        "grammars": partial(http.grammars, slower=http.SLOWER if health_s < math.inf else math.inf),
        "a tenant's backlog": partial(http.backlog, num_streams=150, num_tokens=200),
        "replies that nobody reads": partial(http.unread_replies, num_clients=60, health_s=health_s),
        "one grammar for many answers": partial(http.many_answers_of_one_grammar, num_bodies=10, health_s=health_s),
        "1,024 open bodies": partial(http.open_bodies, health_s=health_s),
        "files of every kind in the store": ports.files_in_the_store,
        "another user of the machine": ports.another_user,
    }


TIMED = frozenset(
    {
        "bodies of 20 MB", "fields of 23 MB", "endless trailers, chunks and heads", "grammars", "a tenant's backlog",
        "replies that nobody reads", "one grammar for many answers", "1,024 open bodies",
    }
)  # fmt: skip
"""What `/health` may take is said for a machine that does nothing else: no clients ask meanwhile, but those of these
attacks themselves. `test_attack.py` has them with clients, and no limit of time."""


async def run_attacks(chosen: dict[str, Attack], pauses_s: tuple[float, ...], done: Callable[[Row], None]) -> None:
    """Carry out attacks, one after another, on one mesh; then stop the brokers of two more, with one scheduler and with
    two. `done` is called with each row."""
    zygote, truth = Zygote(), make_truth()
    try:
        if chosen:
            async with attacked(truth, zygote) as mesh:
                for name, attack in chosen.items():
                    done(await under_load(Target(mesh), name, attack, 0 if name in TIMED else WIDTH))
                    await mesh.settle()
        for num_schedulers in (1, 2) if pauses_s else ():
            async with attacked(truth, zygote, changed(OPTIONS, {"num_schedulers": num_schedulers})) as mesh:
                found = await ports.paused_broker(Target(mesh), pauses_s)
            name = f"a broker that stands still, schedulers: {num_schedulers}"
            done(Row(found.num_tries, found.got, found.note, name, num_answers=found.num_tries))
    finally:
        await zygote.stop()


def table_of(rows: Iterable[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="on a real mesh under load")
    table.add_column("attack", no_wrap=True)
    for heading in ("tries", "got\nthrough", "answers", "wrong", "failed", "not\nended", "said\ndead"):
        table.add_column(heading, justify="right")
    for row in rows:
        counts = (row.got, row.wrong, row.failed, row.unended, row.declared)
        got, *others = (f"[red]{len(found)}[/red]" if found else "0" for found in counts)
        table.add_row(row.name, f"{row.num_tries:,}", got, str(row.num_answers), *others)
    return table


def table_of_tests(findings: dict[str, Tested]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="each finding's tests")
    for heading in ("finding", "passed", "skipped", "failed"):
        table.add_column(heading, justify="left" if heading == "finding" else "right")
    for name, tested in findings.items():
        failed = f"[red]{len(tested.failed)}[/red]" if tested.failed else "0"
        table.add_row(name, str(tested.num_passed), str(tested.num_skipped), failed)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="make attack", description=__doc__)
    parser.add_argument("--frames", type=int, default=500_000)
    parser.add_argument("--messages", type=int, default=500_000)
    parser.add_argument("--repeated", type=int, default=3_000, help="heard messages that others say again")
    parser.add_argument("--only", default="", help="attacks with this in their name; no tests, no pauses")
    options = parser.parse_args()
    chosen = attacks(options.frames, options.messages, options.repeated, http.HEALTH_S)
    chosen = {name: attack for name, attack in chosen.items() if options.only in name}
    pauses_s = () if options.only else BROKER_PAUSES_S
    console, rows = Console(highlight=False), list[Row]()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), transient=True,
        console=Console(stderr=True),
    ) as progress:  # fmt: skip
        bar = progress.add_task("attacks", total=len(chosen) + (2 if pauses_s else 0))

        def done(row: Row) -> None:
            rows.append(row)
            progress.advance(bar)
            progress.console.print(f"{row.name}: {row.num_tries:,} tries, {len(row.complaints)} complaints")
            for what in row.complaints[:5]:
                progress.console.print(f"  {what}", markup=False)

        asyncio.run(run_attacks(chosen, pauses_s, done))
    console.print(table_of(rows))
    for row in rows:
        if row.note:
            console.print(f"{row.name}: {row.note}", markup=False)
    complaints = [what for row in rows for what in row.complaints]
    if not options.only:
        tested = tests_of(FINDINGS)
        console.print(table_of_tests(tested))
        complaints += [name for each in tested.values() for name in each.failed]
        complaints += [f"{name}: no test ran" for name, each in tested.items() if not each.num_passed]
    for what in complaints[:50]:
        console.print(what, markup=False)
    console.print(f"{len(complaints)} complaints")
    sys.exit(bool(complaints))


if __name__ == "__main__":
    main()
