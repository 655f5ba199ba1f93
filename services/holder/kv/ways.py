"""Tries the ways between this holder's data plane and those of other machines, both ways, before it joins.

A firewall that closes a port, or an address that the others cannot reach, is otherwise met by the first read.
"""

import asyncio
import logging
from functools import partial

from dataplane.blocks.ticket import TicketSecrets
from dataplane.carriers import tcp
from dataplane.ends.way import try_way
from dataplane.protocol.stream import TransferFailedError
from schemas import subjects
from schemas.handoff import Endpoint
from schemas.ids import WorkerId
from schemas.worker import TryWay, WayTried, WorkerInfo
from services.bus.base import BusError
from services.bus.fleet import ask_fleet
from services.bus.typed import Received, TypedBus
from services.holder.limits import MAX_WAYS_AT_ONCE
from services.times import Times

log = logging.getLogger(__name__)

MIB = 1 << 20


class Ways:
    """Those of one holder. `ports`: what the setting says of its own; empty: any."""

    def __init__(self, me: WorkerId, bus: TypedBus, secrets: TicketSecrets, times: Times, ports: str) -> None:
        self._me = me
        self._bus = bus
        self._secrets = secrets
        self._times = times
        self._ports = ports
        self._at_once = asyncio.Semaphore(MAX_WAYS_AT_ONCE)

    async def on_try(self, received: Received[TryWay]) -> WayTried:
        """Another holder asks whether it can be reached from here."""
        try:
            bytes_per_s = await self._try(received.message.endpoint)
        except TransferFailedError as error:
            return WayTried(error=error.detail or error.code)
        return WayTried(bytes_per_s=round(bytes_per_s))

    async def problems(self, own: Endpoint) -> list[str]:
        """Return a line for each way between here and another machine's holder on which no KV could be read."""
        try:
            fleet = await ask_fleet(self._bus, self._times.worker.fleet_answer_s)
        except BusError as error:
            log.info("no way to another machine is tried: no scheduler says who there is (%s)", error.reason)
            return []
        others = [load.worker for load in fleet.workers if load.worker.worker_id != self._me]
        trying = [self._both_ways(info, there, own) for info in others if (there := info.endpoint) is not None]
        return [problem for problems in await asyncio.gather(*trying) for problem in problems]

    async def _both_ways(self, other: WorkerInfo, there: Endpoint, own: Endpoint) -> list[str]:
        if there.host == own.host or not all(tcp.NAME in end.carriers for end in (there, own)):
            return []
        name, question = other.worker_id, TryWay(reader=self._me, endpoint=own.public)
        try:
            answer = await self._bus.ask(subjects.WAY, (name, self._me), question, 2 * self._times.plane.try_s)
        except BusError as error:  # it may have ended
            log.info("%s does not say whether it can read from here (%s)", name, error.reason)
            return []
        problems: list[str] = []
        if answer.error:
            ports = f"TCP ports {self._ports}" if self._ports else f"TCP port {own.port} (--plane-ports sets which)"
            problems.append(f"{name} cannot read from {self._me} ({answer.error}): open {ports} of this machine")
        try:
            bytes_per_s = await self._try(there)
        except TransferFailedError as error:
            detail = error.detail or error.code
            problems.append(
                f"{self._me} cannot read from {name} ({detail}): open TCP port {there.port} of {name}'s machine"
            )
        else:
            back = answer.bytes_per_s / MIB
            log.info("%s reads %.0f MiB/s from %s, and that one %.0f", self._me, bytes_per_s / MIB, name, back)
        return problems

    async def _try(self, endpoint: Endpoint) -> float:
        """Return how many bytes a second came. Raises TransferFailedError."""
        async with self._at_once:
            timeout_s = self._times.plane.try_s
            return await asyncio.to_thread(partial(try_way, endpoint, self._me, self._secrets, timeout_s))
