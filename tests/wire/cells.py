"""Tries every cell of the table of permissions on a real nats-server, with stock clients."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client, RawCredentials

from schemas.permissions import Direction, granted
from schemas.subjects import SUBJECTS, Role, Subject
from services.trust.keys import MeshKeys

ME, OTHER = "me", "other"
HEARD_WITHIN_S = 20.0


@dataclass(frozen=True)
class Cell:
    """One role, one subject, one direction. `own`: whether it was tried as oneself or as somebody else of the role."""

    role: Role
    subject: Subject[Any, Any]
    direction: Direction
    own: bool

    @property
    def is_allowed(self) -> bool:
        """What the table says. Somebody else's is allowed only where the name does not matter."""
        patterns = granted(self.subject, self.role, self.direction, ME)
        return bool(patterns) and (self.own or any(pattern == concrete(self.subject, "*") for pattern in patterns))

    def __str__(self) -> str:
        whose = "as oneself" if self.own else "as another"
        return f"{self.role} {self.direction}es {self.subject.pattern} {whose}"


class Member:
    """A stock client of one role, and what the broker has denied it."""

    def __init__(self) -> None:
        self.client = Client()
        self.denied: list[str] = []

    async def _on_error(self, error: Exception) -> None:
        self.denied.append(str(error))

    @classmethod
    @asynccontextmanager
    async def join(cls, url: str, keys: MeshKeys, role: Role, name: str) -> "AsyncGenerator[Member]":
        member, identity = cls(), keys.roles[role].identity(name)
        await member.client.connect(
            url, user_credentials=RawCredentials(identity.credentials), inbox_prefix=identity.inbox,
            error_cb=member._on_error, allow_reconnect=False,
        )  # fmt: skip
        try:
            yield member
        finally:
            await member.client.close()

    async def settle(self) -> None:
        """Return when the broker has done all that was asked of it. The library's ping overtakes what still lies in its
        send buffer, which the first round trip empties."""
        await self.client.flush()
        await self.client.flush()

    async def may_publish(self, subject: str, listener: "Member") -> bool:
        """Publish, and say whether somebody heard it who hears everything. Asserts that the broker said so."""
        heard = await listener.client.subscribe(subject)
        await listener.settle()
        self.denied.clear()
        await self.client.publish(subject, b"tried")
        await self.settle()
        await listener.settle()
        is_heard = heard.pending_msgs > 0
        await heard.unsubscribe()
        assert is_heard != bool(self.denied), (subject, self.denied)
        return is_heard

    async def may_hear(self, subject: str, pattern: str, speaker: "Member") -> bool:
        """Subscribe to a pattern, and say whether what is published there comes."""
        self.denied.clear()
        subscription = await self.client.subscribe(pattern)
        await self.settle()
        await speaker.client.publish(subject, b"tried")
        await speaker.settle()
        await self.settle()
        is_heard = subscription.pending_msgs > 0
        await subscription.unsubscribe()
        assert not (is_heard and self.denied), (pattern, self.denied)
        return is_heard


def concrete(subject: Subject[Any, Any], name: str) -> str:
    return subject.of(*(name for _ in subject.ids))


async def every_cell(url: str, keys: MeshKeys) -> dict[Cell, bool]:
    """Return whether each cell works, whether it should or not."""
    found: dict[Cell, bool] = {}
    async with Member.join(url, keys, Role.OPERATOR, "listener") as listener:
        for role in Role:
            async with Member.join(url, keys, role, ME) as member:
                for subject in SUBJECTS:
                    for own in (True, False):
                        name = ME if own else OTHER
                        told = await member.may_publish(concrete(subject, name), listener)
                        found[Cell(role, subject, Direction.PUBLISH, own)] = told
                        speaker_role = subject.said_by[0].role
                        async with Member.join(url, keys, speaker_role, name) as speaker:
                            exact = concrete(subject, name)
                            heard = await member.may_hear(exact, exact, speaker)
                        found[Cell(role, subject, Direction.SUBSCRIBE, own)] = heard
    return found
