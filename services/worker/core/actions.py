"""What a worker's cores decide, for its shell to carry out in order."""

from dataclasses import dataclass
from typing import Any

from dataplane.blocks.layout import BlockTables
from schemas.handoff import FirstToken, KVOffered
from schemas.ids import BlockHash, GatewayId, HandoffId, RequestId, WorkerId
from schemas.message import Message
from schemas.request import RequestTokens, RunPrefill
from schemas.subjects import Subject
from services.engine.interface import Sequence
from services.worker.core.content import SequenceContent
from services.worker.kv.leases import Grant

AttemptKey = tuple[RequestId, int]
"""One attempt at one request."""


@dataclass(slots=True, frozen=True)
class Submit:
    """Give the sequence to the engine. What of it is in place already, and what it computes, is taken in as `content`;
    with a lease it is also served to the reader."""

    sequence: Sequence
    content: SequenceContent
    lease: Grant | None = None


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
    subject: Subject[Any, None]
    ids: tuple[str, ...]
    message: Message
    key: AttemptKey | None = None
    """Whose trace it belongs to."""


@dataclass(slots=True, frozen=True)
class Offer:
    """Sign a ticket for the lease and publish KVOffered."""

    lease: Grant
    request: RunPrefill


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
    """Read what is offered from `first_token` on."""

    offer: KVOffered
    tables: BlockTables
    first_token: int


@dataclass(slots=True, frozen=True)
class StopRead:
    """End the read; `read_failed` says when its blocks are no longer written."""

    handoff_id: HandoffId


@dataclass(slots=True, frozen=True)
class Fetch:
    """Ask `source` for a lease on the blocks from `first_block` on, and read them; `fetched` says what came of it."""

    key: AttemptKey
    source: WorkerId
    first_block: int
    block_hashes: tuple[BlockHash, ...]
    tables: BlockTables
    deadline_ms: int
    tenant: str = ""
    traceparent: str = ""
    """Whose trace it belongs to, where that is not the attempt's."""


@dataclass(slots=True, frozen=True)
class StopFetch:
    """End the fetch; `fetched` says when its blocks are no longer written."""

    key: AttemptKey


Action = (
    Fetch | StopFetch | Submit | Withdraw | Emit | Publish | Offer | FinishLease | CloseLease | StartRead | StopRead
)
