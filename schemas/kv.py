"""Reading KV from whoever holds it: ask the holder for a lease, then read on the data plane."""

from schemas.handoff import Endpoint
from schemas.ids import LeaseId, WorkerId
from schemas.message import Message, RequestMessage


class RequestLease(RequestMessage, frozen=True, kw_only=True):
    """May `reader` read these blocks? `block_hashes` (joined) are the blocks `first_block`, `first_block` + 1, … of
    the reader's sequence; the holder grants as many from the first on as it has."""

    reader: WorkerId
    fingerprint: str
    first_block: int
    block_hashes: bytes


class LeaseGranted(RequestMessage, frozen=True, kw_only=True):
    """Tokens [first_token, num_tokens) of the reader's sequence may be read with this ticket, once.

    The lease ends with the read, however that ends, or after `lease_ms` without one.
    """

    worker_id: WorkerId
    lease_id: LeaseId
    epoch: int
    lease_ms: int
    ticket: str
    endpoint: Endpoint
    first_token: int
    num_tokens: int


class BlocksCooling(Message, frozen=True, kw_only=True):
    """The worker will soon evict these blocks (joined hashes, the coldest first). Whoever wants them reads them under
    a lease, like anybody; the worker does not wait."""

    worker_id: WorkerId
    incarnation: str
    block_hashes: bytes
