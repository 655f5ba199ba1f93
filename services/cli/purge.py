"""`kvmesh purge`: holders forget what they keep."""

import asyncio
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table

from schemas import subjects
from schemas.ids import WorkerId
from schemas.kv import PurgeBlocks
from schemas.worker import WorkerRole
from services.bus.base import BusError
from services.bus.nats import NatsBus
from services.bus.typed import TypedBus
from services.cli.limits import PURGE_TIMEOUT_S
from services.cli.running import BusOptions, access_of
from services.errors import UserError
from services.launch.known_workers import describe_fleet
from services.trust.keys import BusAccess

NUM_ROUNDS = 2
"""What one holder reads from another that has not been asked yet is forgotten in the next round."""


class Purge(NamedTuple):
    """What is to be forgotten, exactly one of these: by the stores, by one `holder`, of one `tenant`, or all."""

    stores: bool = False
    holder: str = ""
    tenant: str | None = None
    everything: bool = False


def run_purge(options: BusOptions, purge: Purge) -> None:
    """Ask the holders, and print what each has forgotten. Raises UserError where what to forget is not named, or not
    all of it is forgotten."""
    if sum((purge.stores, bool(purge.holder), purge.tenant is not None, purge.everything)) != 1:
        raise UserError("say what to forget: --store, --holder ID, --tenant NAME or --all, one of them")
    access = access_of(options)
    with Console(stderr=True).status("waiting until all is forgotten"):
        forgotten, failures = asyncio.run(_purge(access, purge))
    table = Table("holder", Column("blocks forgotten", justify="right"), box=None, padding=(0, 1, 0, 0))
    for worker_id, num_blocks in sorted(forgotten.items()):
        table.add_row(worker_id, str(num_blocks))
    Console(highlight=False).print(table)
    if failures:
        raise UserError("not all is forgotten: " + "; ".join(failures))


async def _purge(access: BusAccess, purge: Purge) -> tuple[dict[WorkerId, int], list[str]]:
    """Return how many blocks each holder has forgotten, and what went wrong in the last round. Raises UserError."""
    fleet = await describe_fleet(access)
    holders = [
        load.worker.worker_id
        for load in fleet.workers
        if (not purge.stores or load.worker.role == WorkerRole.STORE) and purge.holder in ("", load.worker.worker_id)
    ]
    if not holders:
        wanted = f"holder called {purge.holder!r}" if purge.holder else "store" if purge.stores else "holder"
        raise UserError(f"there is no {wanted}: `kvmesh status` shows who there is")
    connection = await NatsBus.connect(access, "kvmesh-purge")
    bus, forgotten, failures = TypedBus(connection, "purge"), dict.fromkeys(holders, 0), list[str]()
    try:
        for _ in range(NUM_ROUNDS):
            answers = await asyncio.gather(*(_ask(bus, holder, purge.tenant) for holder in holders))
            failures = [failure for _, failure in answers if failure]
            for holder, (num_blocks, _) in zip(holders, answers, strict=True):
                forgotten[holder] += num_blocks
    finally:
        await connection.close()
    return forgotten, failures


async def _ask(bus: TypedBus, holder: WorkerId, tenant: str | None) -> tuple[int, str]:
    """Return how many blocks this holder has forgotten, and what went wrong there; "": nothing."""
    try:
        answer = await bus.ask(subjects.PURGE, (holder,), PurgeBlocks(tenant=tenant), timeout_s=PURGE_TIMEOUT_S)
    except BusError as error:
        return 0, f"{holder} does not answer ({error.reason})"
    return answer.num_blocks, f"{holder}: {answer.failure}" if answer.failure else ""
