"""Tries every cell of the table of permissions on a real nats-server, with stock clients."""

import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import nats.errors
from nats.aio.client import Client, RawCredentials
from nats.aio.subscription import Subscription

from schemas.permissions import Direction, granted, inbox_of
from schemas.subjects import SUBJECTS, Role, Subject
from services.trust.keys import Identity, RoleKey
from services.trust.nats_jwt import pair_of, user_credentials

ME, OTHER = "me", "other"
Identities = Callable[[Role, str], Identity]
"""Makes the member of a role that has this name; people have names of their own."""
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
    async def join(cls, url: str, identity: Identity) -> "AsyncGenerator[Member]":
        member = cls()
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

    async def _hears(self, subscription: Subscription, said: bytes) -> bool:
        """Say whether this is among what has come: services may be talking there too."""
        await self.settle()
        heard = [(await subscription.next_msg()).data for _ in range(subscription.pending_msgs)]
        await subscription.unsubscribe()
        return said in heard

    async def may_publish(self, subject: str, listener: "Member") -> bool:
        """Publish, and say whether somebody heard it who hears everything. Asserts that the broker said so."""
        said, subscription = secrets.token_hex().encode(), await listener.client.subscribe(subject)
        await listener.settle()
        self.denied.clear()
        await self.client.publish(subject, said)
        await self.settle()
        is_heard = await listener._hears(subscription, said)
        assert is_heard != bool(self.denied), (subject, self.denied)
        return is_heard

    async def may_hear(self, subject: str, pattern: str, speaker: "Member") -> bool:
        """Subscribe to a pattern, and say whether what is published there comes."""
        self.denied.clear()
        said, subscription = secrets.token_hex().encode(), await self.client.subscribe(pattern)
        await self.settle()
        await speaker.client.publish(subject, said)
        await speaker.settle()
        is_heard = await self._hears(subscription, said)
        assert not (is_heard and self.denied), (pattern, self.denied)
        return is_heard


def concrete(subject: Subject[Any, Any], name: str) -> str:
    return subject.of(*(name for _ in subject.ids))


async def every_cell(url: str, identity: Identities) -> dict[Cell, bool]:
    """Return whether each cell works, whether it should or not."""
    found: dict[Cell, bool] = {}
    async with Member.join(url, identity(Role.OPERATOR, "listener")) as listener:
        for role in Role:
            async with Member.join(url, identity(role, ME)) as member:
                for subject in SUBJECTS:
                    for own in (True, False):
                        name = ME if own else OTHER
                        told = await member.may_publish(concrete(subject, name), listener)
                        found[Cell(role, subject, Direction.PUBLISH, own)] = told
                        speaker_role = subject.published_by[0].role
                        async with Member.join(url, identity(speaker_role, name)) as speaker:
                            exact = concrete(subject, name)
                            heard = await member.may_hear(exact, exact, speaker)
                        found[Cell(role, subject, Direction.SUBSCRIBE, own)] = heard
    return found


NAMES = ("x", "*", ">", "other.x", "*.gateway.x")
"""Whoever has a role's key may call itself anything, also what is no name: a pattern."""


async def foreign_replies(url: str, keys: Mapping[Role, RoleKey]) -> tuple[int, list[str]]:
    """Try to hear and to say something where the members of other roles await replies, with each of these keys and
    under every name. Return how often that was tried, and what went through."""
    num_tries, got = 0, list[str]()
    for (role, key), name in itertools.product(keys.items(), NAMES):
        credentials = user_credentials(pair_of(key.seed), key.account, name)
        with contextlib.suppress(nats.errors.Error):  # a name of which the broker can make no subject
            async with Member.join(url, Identity(role=role, name="x", credentials=credentials)) as forger:
                for other, theirs in itertools.product(set(Role) - {role}, ("x", "*")):
                    if (role, other) == (Role.OPERATOR, Role.OBSERVER):
                        continue  # whose replies concern nobody
                    pattern = f"{inbox_of(other, theirs)}.>"
                    forger.denied.clear()
                    await forger.client.subscribe(pattern)
                    await forger.client.publish(pattern.replace("*", "x").replace(">", "y"), b"")
                    await forger.settle()
                    num_tries += 2
                    if len(forger.denied) != 2:
                        got.append(f"{role} as {name!r} at {pattern}: denied {forger.denied}")
    return num_tries, got
