"""One name, one living service: who starts by a name that somebody lives by is refused, in a line that says where.

Whoever starts asks on the name's own subject before it answers there: nobody serves it where the one before has died,
so that a restart waits for nothing. Then it asks again, as another may have begun at the same moment, and after each
reconnection, as another may have begun meanwhile: of two the older stays. Gateways need none of it: each has another
name in each of its lives.
"""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from schemas import subjects
from schemas.message import UndecodableMessageError, decode, encode
from schemas.worker import ClaimName
from services.bus.base import Bus, BusError, Subscription
from services.bus.typed import headers_of
from services.errors import UserError

TOGETHER_MS = 1_000
"""Of two claims whose ages differ by less than this the tokens decide: ages are told with the delay of a message."""


@dataclass(frozen=True)
class Claim:
    """This process's own. `began_s`: by its monotonic clock."""

    name: str
    began_s: float
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    where: str = field(default_factory=lambda: f"{socket.gethostname()}, process {os.getpid()}")

    def said(self, now_s: float) -> ClaimName:
        age_ms = round(1000 * (now_s - self.began_s))
        return ClaimName(name=self.name, token=self.token, where=self.where, age_ms=age_ms)

    def yields_to(self, other: ClaimName, now_s: float) -> bool:
        """Say whether the other one keeps the name: the two decide alike."""
        ahead_ms = other.age_ms - self.said(now_s).age_ms
        if abs(ahead_ms) < TOGETHER_MS:
            return other.token < self.token
        return ahead_ms > 0


class NameHolder:
    """Answers for a name. `lost_to`: who keeps it in our place, upon which `stop` is set."""

    def __init__(self, bus: Bus, claim: Claim, stop: asyncio.Event, within_s: float) -> None:
        self.lost_to: ClaimName | None = None
        self._bus = bus
        self._claim = claim
        self._stop = stop
        self._within_s = within_s

    def check(self) -> None:
        """Raises UserError where somebody else keeps the name."""
        if self.lost_to is not None:
            raise UserError(
                f"{self._claim.name} is the name of a service that lives already ({self.lost_to.where}): "
                "choose another --id, or stop that one first"
            )

    async def ask(self) -> None:
        """Ask who else lives by the name. Where nobody answers, nobody does."""
        question = self._claim.said(time.monotonic())
        subject, headers = subjects.CLAIM.of(self._claim.name), headers_of(question, "")
        with contextlib.suppress(BusError):
            delivery = await self._bus.request(subject, encode(question), headers, self._within_s)
            self._is_of_another(delivery.payload)

    async def answer(self, subscription: Subscription) -> None:
        """Tell whoever else asks of this claim: who keeps the name and who does not know at once."""
        async for delivery in subscription:
            said = self._claim.said(time.monotonic())
            if self._is_of_another(delivery.payload):
                with contextlib.suppress(BusError):
                    await delivery.respond(encode(said), headers_of(said, ""))

    async def watch(self) -> None:
        """Ask again, now and whenever the bus has connected anew."""
        num_connects = 0
        while True:
            if num_connects != self._bus.num_connects:
                num_connects = self._bus.num_connects
                await self.ask()
            await asyncio.sleep(self._within_s)

    def _is_of_another(self, payload: bytes) -> bool:
        """Say whether this is somebody else's claim. If that one keeps the name, ours ends."""
        try:
            other = decode(payload, ClaimName)
        except UndecodableMessageError:
            return False
        if other.token == self._claim.token:
            return False
        if self._claim.yields_to(other, time.monotonic()):
            self.lost_to = other
            self._stop.set()
        return True


@contextlib.asynccontextmanager
async def holding(bus: Bus, name: str, stop: asyncio.Event, within_s: float) -> AsyncGenerator[None]:
    """Hold a name for as long as the block runs. Raises UserError where somebody lives by it: at once, or at the end of
    the block, for which `stop` is set."""
    holder = NameHolder(bus, Claim(name, time.monotonic()), stop, within_s)
    await holder.ask()
    holder.check()
    subscription = await bus.subscribe(subjects.CLAIM.of(name))
    tasks = [
        asyncio.create_task(holder.answer(subscription), name="answer for the name"),
        asyncio.create_task(holder.watch(), name="ask for the name"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await subscription.close()
    holder.check()
