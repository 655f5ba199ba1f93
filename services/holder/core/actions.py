"""What a worker's cores decide, for its shell to carry out in order."""

from dataclasses import dataclass
from typing import Any

from schemas.handoff import FirstToken
from schemas.ids import GatewayId, WorkerId
from schemas.kv import RequestLease
from schemas.message import Message
from schemas.request import RequestTokens
from schemas.subjects import Subject
from services.engine.messages import SubmitSequence
from services.holder.core.attempt import Attempt, KVRead
from services.holder.core.content import AttemptKey
from services.holder.core.leases import Grant


@dataclass(slots=True, frozen=True)
class SendReply:
    """Answer the question that this event was."""

    message: Message


@dataclass(slots=True, frozen=True)
class Submit:
    """Give the sequence to the engine. What of it is in place already, and what it computes, is stored as the
    attempt's content; with a lease it is also served to the reader."""

    sequence: SubmitSequence
    attempt: Attempt
    lease: Grant | None = None


@dataclass(slots=True, frozen=True)
class Withdraw:
    """Take the sequence back from the engine; `SequenceRemoved` reports when its blocks are no longer written."""

    key: AttemptKey


@dataclass(slots=True, frozen=True)
class Emit:
    """Send tokens, an end or a failure to the request's gateway."""

    gateway_id: GatewayId
    tokens: RequestTokens


@dataclass(slots=True, frozen=True)
class Publish:
    subject: Subject[Any, None]
    ids: tuple[str, ...]
    message: Message
    traceparent: str = ""
    """The trace of the request that it belongs to."""


@dataclass(slots=True, frozen=True)
class Offer:
    """Sign a ticket for the lease and publish KVOffered."""

    lease: Grant
    attempt: Attempt


@dataclass(slots=True, frozen=True)
class Lend:
    """Sign a ticket for the lease, and answer the question for it."""

    lease: Grant
    request: RequestLease
    traceparent: str


@dataclass(slots=True, frozen=True)
class FinishLease:
    """All is computed: the stream may end with this."""

    lease: Grant
    first_token: FirstToken


@dataclass(slots=True, frozen=True)
class CloseLease:
    """The lease has ended, and its blocks are given back: fail a stream that is still open on it."""

    lease: Grant


@dataclass(slots=True, frozen=True)
class StartRead:
    """Read this; `ReadEnded` reports how it ended."""

    read: KVRead


@dataclass(slots=True, frozen=True)
class StopRead:
    """End the read; `ReadEnded` reports when its blocks are no longer written."""

    read: KVRead


@dataclass(slots=True, frozen=True)
class AttemptEnded:
    """The attempt goes on here no more, and its blocks are given back: what is to be recorded of it can be."""

    attempt: Attempt


@dataclass(slots=True, frozen=True)
class NotTaken:
    """So many of the blocks that this holder has offered are not read, and nobody else has offered them. `reason`: for
    people."""

    worker_id: WorkerId
    num_blocks: int
    reason: str


class OwnersAction:
    """Base of actions that only the owner of a holder decides and carries out."""

    __slots__ = ()


Action = (
    SendReply
    | Submit
    | Withdraw
    | Emit
    | Publish
    | Offer
    | Lend
    | FinishLease
    | CloseLease
    | StartRead
    | StopRead
    | AttemptEnded
    | NotTaken
    | OwnersAction
)
