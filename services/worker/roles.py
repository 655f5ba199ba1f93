"""What a worker's shell is given of a role: its core, and which messages are events to that."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.lease import LeaseTable
from schemas.subjects import Subject
from services.bus.typed import Received
from services.worker.core.checks import WorkerLimits
from services.worker.core.events import Event
from services.worker.core.role import RoleCore


class RoleSubject(NamedTuple):
    """The messages of one subject are events to a role's core. A subject that is answered gets the core's `SendReply`;
    `refused_as`: under what its refusals are counted."""

    subject: Subject
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
