"""What a worker's cores decide, for its shell to carry out in order."""

from dataclasses import dataclass

from dataplane.layout import Segment
from dataplane.lease import Lease
from schemas.handoff import FirstToken, KVOffered
from schemas.ids import GatewayId, HandoffId, LeaseId, RequestId
from schemas.message import Message
from schemas.request import RequestTokens, RunPrefill
from schemas.subjects import Subject
from services.engine.base import Sequence

AttemptKey = tuple[RequestId, int]
"""One attempt at one request."""


@dataclass(slots=True, frozen=True)
class Submit:
    """Give the sequence to the engine. With a lease, its layers are served to the reader as they are computed."""

    sequence: Sequence
    lease: Lease | None = None


@dataclass(slots=True, frozen=True)
class Withdraw:
    """Take the sequence back from the engine; `removed` says when its blocks are no longer written."""

    key: AttemptKey


@dataclass(slots=True, frozen=True)
class Emit:
    """Send tokens, an end or a failure to the request's gateway."""

    gateway_id: GatewayId
    tokens: RequestTokens


@dataclass(slots=True, frozen=True)
class Publish:
    subject: Subject
    ids: tuple[str, ...]
    message: Message
    key: AttemptKey | None = None
    """Whose trace it belongs to."""


@dataclass(slots=True, frozen=True)
class Offer:
    """Sign a ticket for the lease and publish KVOffered."""

    lease: Lease
    request: RunPrefill


@dataclass(slots=True, frozen=True)
class FinishLease:
    """All is computed: the stream may end with this."""

    lease_id: LeaseId
    first_token: FirstToken


@dataclass(slots=True, frozen=True)
class CloseLease:
    """The lease has ended. A stream still open on it is failed with `reason`."""

    lease_id: LeaseId
    reason: str


@dataclass(slots=True, frozen=True)
class StartRead:
    offer: KVOffered
    segments: tuple[Segment, ...]


@dataclass(slots=True, frozen=True)
class StopRead:
    """End the read; `read_failed` says when its blocks are no longer written."""

    handoff_id: HandoffId


Action = Submit | Withdraw | Emit | Publish | Offer | FinishLease | CloseLease | StartRead | StopRead
