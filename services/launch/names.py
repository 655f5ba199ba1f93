"""One name, one living service: who starts by a name that somebody lives by is refused, in a line that says where.

Whoever starts asks on the name's own subject before it answers there: nobody serves it where the one before has died,
so that a restart waits for nothing. Then it asks again, as another may have begun at the same moment, and after each
reconnection, as another may have begun meanwhile. Who has met none that keeps it for as long as an answer may take is
settled, and stays; of two that are not, or both are, the lower token stays. What decides crosses the bus with each
claim and does not change with the time a message takes, so that all who meet agree. Gateways need none of it: each has
another name in each of its lives.
"""

import asyncio
import contextlib
import os
import secrets
import socket
from collections.abc import AsyncGenerator
from functools import partial

import msgspec

from dataplane.lasting import lasting_task
from schemas import subjects
from schemas.message import UndecodableMessageError, decode, encode
from schemas.worker import ClaimName
from services.bus.base import Bus, BusError, Delivery, Subscription
from services.bus.typed import headers_of, is_led_elsewhere
from services.errors import UserError


def new_claim(name: str) -> ClaimName:
    """Return this process's claim to a name."""
    where = f"{socket.gethostname()}, process {os.getpid()}"
    return ClaimName(name=name, token=secrets.token_hex(8), where=where, settled=False)


def yields_to(claim: ClaimName, other: ClaimName) -> bool:
    """Return whether the other one keeps the name. It is an order: of any number of claims one yields to none."""
    return (not other.settled, other.token) < (not claim.settled, claim.token)


class NameHolder:
    """Answers for a name. `lost_to`: who keeps it in our place, upon which `stop` is set."""

    def __init__(self, bus: Bus, name: str, stop: asyncio.Event, within_s: float) -> None:
        self.lost_to: ClaimName | None = None
        self._bus = bus
        self._claim = new_claim(name)
        self._stop = stop
        self._within_s = within_s

    def confirm(self) -> None:
        """Raises UserError where somebody else keeps the name."""
        if self.lost_to is not None:
            raise UserError(
                f"{self._claim.name} is the name of a service that lives already ({self.lost_to.where}): "
                "choose another --id, or stop that one first"
            )

    async def ask(self) -> None:
        """Ask who else lives by the name. Where nobody answers, nobody does. Of several only the first answer is
        taken: if that one leaves us the name, we ask the others."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._within_s
        subject, headers = subjects.CLAIM.of(self._claim.name), headers_of(self._claim, "")
        with contextlib.suppress(BusError):
            while self.lost_to is None and (left_s := until_s - loop.time()) > 0:
                self._received(await self._bus.request(subject, encode(self._claim), headers, left_s))

    async def answer(self, subscription: Subscription) -> None:
        """Answer whoever else asks who keeps the name, and no more once it is not us."""
        async for delivery in subscription:
            if not is_led_elsewhere(subjects.CLAIM, delivery) and self._received(delivery):
                kept = self.lost_to or self._claim
                with contextlib.suppress(BusError):
                    await delivery.respond(encode(kept), headers_of(kept, ""))
            if self.lost_to is not None:
                await subscription.close()

    async def watch(self) -> None:
        """Ask again, now and whenever the bus has connected anew."""
        num_connects = 0
        while True:
            if num_connects != self._bus.num_connects:
                num_connects = self._bus.num_connects
                await self.ask()
                if self.lost_to is not None:
                    return
                self._claim = msgspec.structs.replace(self._claim, settled=True)
            await asyncio.sleep(self._within_s)

    def _received(self, delivery: Delivery) -> bool:
        """Return whether this is somebody else's claim. If that one keeps the name, ours ends."""
        try:
            other = decode(delivery.payload, ClaimName)
        except UndecodableMessageError:
            return False
        if other.token == self._claim.token:
            return False
        if self.lost_to is None and yields_to(self._claim, other):
            self.lost_to = other
            self._stop.set()
        return True


@contextlib.asynccontextmanager
async def holding(bus: Bus, name: str, stop: asyncio.Event, within_s: float) -> AsyncGenerator[None]:
    """Hold a name for as long as the block runs. Raises UserError where somebody lives by it: at once, or at the end of
    the block, for which `stop` is set."""
    holder = NameHolder(bus, name, stop, within_s)
    await holder.ask()
    holder.confirm()
    subscription = await bus.subscribe(subjects.CLAIM.of(name))
    tasks = [
        lasting_task(partial(holder.answer, subscription), "answer for the name"),
        lasting_task(holder.watch, "ask for the name"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await subscription.close()
    holder.confirm()
