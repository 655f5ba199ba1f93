"""What a worker's shell is given of a role: its core, and which messages are events to that; and all cores together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import BlockTables
from schemas.ids import GatewayId
from schemas.observe import HeldRequest
from schemas.subjects import Subject
from services.bus.typed import Received
from services.worker.core.attempts import AnyAttempt, SentAnswer
from services.worker.core.checks import WorkerLimits
from services.worker.core.content import AttemptKey
from services.worker.core.events import Event
from services.worker.core.leases import LeaseTable
from services.worker.core.replicas import ReplicaCore
from services.worker.core.role import RoleCore


class RoleSubject(NamedTuple):
    """The messages of one subject are events to a role's core. A subject that is answered gets the core's `SendReply`;
    `refused_as`: under what its refusals are counted."""

    subject: Subject[Any, Any]
    ids: tuple[str, ...]
    event: Callable[[Received[Any]], Event]
    refused_as: str = ""


@dataclass(frozen=True, slots=True)
class Role:
    """One role of one worker."""

    core: RoleCore[Any]
    subscriptions: tuple[RoleSubject, ...]


MakeRole = Callable[[WorkerLimits, BlockCache, LeaseTable], Role]
"""Makes a role that shares the worker's blocks and leases with the others."""


def message_of(received: Received[Any]) -> Event:
    """Return the event of a message that is one as it is."""
    return received.message


@dataclass(frozen=True, slots=True)
class Cores:
    """The roles of one worker, and the copies that it takes in of others' blocks."""

    roles: tuple[Role, ...]
    replicas: ReplicaCore

    def __iter__(self) -> Iterator[RoleCore[Any] | ReplicaCore]:
        yield from (role.core for role in self.roles)
        yield self.replicas

    @property
    def num_running(self) -> int:
        """Attempts and reads of copies, those that wait for blocks among them."""
        return sum(len(role.core.attempts) for role in self.roles) + len(self.replicas.reading)

    def attempts(self) -> Iterator[AnyAttempt]:
        """Yield the records of all that is known here."""
        return (attempt for role in self.roles for attempt in role.core.attempts.values())

    def find(self, key: AttemptKey) -> AnyAttempt | None:
        """Return the record of an attempt, whatever its role."""
        for role in self.roles:
            if (attempt := role.core.attempts.get(key)) is not None:
                return attempt
        return None

    def is_elsewhere(self, key: AttemptKey, role: Role) -> bool:
        """Say whether another role than this one has an attempt: the engine could not tell the two apart."""
        return any(key in other.core.attempts for other in self.roles if other is not role)

    def answer_of(self, key: AttemptKey) -> SentAnswer | None:
        """Return what an attempt has sent so far; None: it is not known here (any more)."""
        answers = (role.core.answer_of(key) for role in self.roles)
        return next((answer for answer in answers if answer is not None), None)

    def wanted_by(self) -> dict[AttemptKey, GatewayId]:
        """Return the attempts that go on here, and whose they are."""
        return {key: gateway_id for role in self.roles for key, gateway_id in role.core.wanted_by().items()}

    def held(self, now_ms: int) -> Iterator[HeldRequest]:
        """Yield what goes on here, for people."""
        yield from (attempt.held(now_ms) for attempt in self.attempts())
        yield from self.replicas.held(now_ms)

    def tables(self) -> Iterator[BlockTables]:
        """Yield the tables whose blocks somebody here holds references to. Those of leases are the lease table's."""
        yield from (attempt.tables for attempt in self.attempts() if attempt.tables)
        yield from (copy.tables for copy in self.replicas.reading.values())
