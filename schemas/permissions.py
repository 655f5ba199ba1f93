"""What each role may publish and subscribe to on the broker: generated from the table of subjects, least privilege.

Everybody awaits replies below REPLIES, their role and their own name; observers below INBOX, as stock NATS tools do.
Whom a question has reached may answer it there, once, and does so only where those await replies who may ask it
(`replies_to`): it may send what they may not. So are people's surveys answered. Else everybody publishes to their own
only, by which a client proves that its connection works.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from schemas.broker import DISCONNECTED
from schemas.subjects import SUBJECTS, Permit, Role, Subject

REPLIES = "_REPLY"
INBOX = "_INBOX"
ALL = "mesh.>"
"""What people subscribe to who want to receive all that they may."""
PEOPLE = (Role.OBSERVER, Role.OPERATOR)
GUESTS = (*PEOPLE, Role.INDEXER)
"""Who serves nothing, and comes with a stock client of NATS and credentials of its own."""
SURVEY = "$SRV"
"""Below this people ask which services there are, as the NATS Services API (ADR-32) has it."""
SERVICE_NAMES = {
    Role.GATEWAY: ("gateway",),
    Role.SCHEDULER: ("scheduler",),
    Role.DIRECTORY: ("directory",),
    Role.HOLDER: ("prefill", "decode", "aggregated", "store"),
}
"""What the members of a role are listed as among the services of that API."""


class Direction(StrEnum):
    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"


@dataclass(frozen=True)
class Permissions:
    """Patterns of subjects. `undelivered`: which of the messages of `subscribe` are not delivered. `may_answer`: it
    may publish to where the reply of a question that has reached it is awaited."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    undelivered: tuple[str, ...]
    may_answer: bool


def granted(subject: Subject[Any, Any], role: Role, direction: Direction, name: str) -> tuple[str, ...]:
    """Return the patterns of one cell of the table: what of this subject the member `name` of a role may publish or
    subscribe to. Empty: nothing."""
    grants = subject.published_by if direction is Direction.PUBLISH else subject.received_by
    return tuple(_pattern(subject, grant, name) for grant in grants if grant.role is role)


def permissions_of(role: Role, name: str) -> Permissions:
    """Return what the member `name` of a role may do. `name` may be a template's word for it."""
    publish = [p for subject in SUBJECTS for p in granted(subject, role, Direction.PUBLISH, name)]
    received = [p for subject in SUBJECTS for p in granted(subject, role, Direction.SUBSCRIBE, name)]
    own = f"{inbox_of(role, name)}.>"
    if role in GUESTS:
        undelivered = [
            _anybody(subject) for subject in SUBJECTS if role not in {grant.role for grant in subject.received_by}
        ]
        inboxes = f"{INBOX}.>" if role is Role.OBSERVER else own
        undelivered.append(f"{ALL} >")  # in no queue group: a member of one takes its questions away from the others
        surveys = (f"{SURVEY}.>",) if role in PEOPLE else ()
        return Permissions((*publish, *surveys, own), (ALL, inboxes), tuple(undelivered), may_answer=False)
    listed = [f"{SURVEY}.*.{service}{rest}" for service in SERVICE_NAMES[role] for rest in ("", ".*")]
    if role is Role.SCHEDULER:
        received.append(DISCONNECTED)
    return Permissions((*publish, own), (*received, f"{SURVEY}.*", *listed, own), (), may_answer=True)


def inbox_of(role: Role, name: str) -> str:
    """Return the prefix of the subjects on which this member awaits replies."""
    return f"{INBOX}.{name}" if role is Role.OBSERVER else f"{REPLIES}.{role}.{name}"


def replies_to(subject: Subject[Any, Any]) -> tuple[str, ...]:
    """Return what the subjects begin with on which those await replies who may ask this."""
    return inboxes_of(*(grant.role for grant in subject.published_by))


def inboxes_of(*roles: Role) -> tuple[str, ...]:
    """Return what the subjects begin with on which anybody of these roles awaits replies."""
    return tuple(dict.fromkeys(inbox_of(role, "") for role in roles))


def role_of(service: str) -> Role:
    """Return the role of a kind of service, e.g. "decode"."""
    return next(role for role, names in SERVICE_NAMES.items() if service in names)


def _pattern(subject: Subject[Any, Any], grant: Permit, name: str) -> str:
    return subject.of(*(name if own == grant.own else "*" for own in subject.ids))


def _anybody(subject: Subject[Any, Any]) -> str:
    return subject.of(*("*" for _ in subject.ids))
