"""Reading KV from whoever holds it: ask the holder for a lease, then read on the data plane."""

import enum

from schemas.block import BLOCK_HASH_BYTES, split_hashes
from schemas.ids import LeaseId, WorkerId, is_subject_token, is_tenant
from schemas.message import Message, RequestMessage
from schemas.numbers import Number
from schemas.request import RefusalReason, Refused, refuse


class LeaseEnd(enum.StrEnum):
    """Why a lease has ended."""

    LANDED = "landed"
    """Its reader has all."""
    RETURNED = "returned"
    """Its reader has given it back."""
    UNNEEDED = "unneeded"
    """The answer that it was for is complete without it. Counted as cancelled."""
    CANCELLED = "cancelled"
    """Its attempt has ended, the read has failed, or the holder needs the blocks or stops."""
    READER_LEFT = "reader_left"
    SILENT = "silent"
    """Its stream is over, and its reader sent nothing more."""
    EXPIRED = "expired"
    DEADLINE = "deadline"
    """The request's deadline has passed."""

    @property
    def is_good(self) -> bool:
        """Nothing has failed."""
        return self in (LeaseEnd.LANDED, LeaseEnd.UNNEEDED)


class ReadEnd(enum.StrEnum):
    """How a read of KV has ended, for its reader: well, for want of a lease, or early, by the holder's word
    (`dataplane.protocol.reasons`) or by what the reader found. Metrics count by it."""

    LANDED = "landed"
    STOPPED = "stopped"
    """Its reader needs it no more."""
    REFUSED = "refused"
    """No lease: the holder does not lend, or does not answer."""
    IN_FLIGHT = "in_flight"
    """No lease yet: the holder is computing these blocks, and is asked again."""
    MALFORMED = "malformed"
    VERSION = "version"
    TICKET = "ticket"
    LEASE = "lease"
    FINGERPRINT = "fingerprint"
    CARRIER = "carrier"
    """The holder does not have it, none leads there, or what was to carry it cannot be opened here."""
    RANGE = "range"
    BUSY = "busy"
    CLOSING = "closing"
    INTERNAL = "internal"
    UNKNOWN = "unknown"
    """Neither this reader nor the scheduler knows this incarnation of the holder."""
    CONNECT = "connect"
    """Nobody can be connected to."""
    CLOSED = "closed"
    """The holder has gone."""
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    PROTOCOL = "protocol"
    """The holder sent what the protocol does not allow."""
    DIGEST = "digest"
    """What arrived is not what was sent."""
    CONTENT = "content"
    """What was sent is not what it is claimed to be."""
    HOLDER = "holder"
    CODEC = "codec"
    MEMORY = "device"
    """What the KV of one of the two ends lies in has failed."""
    OTHER = "other"
    """What nobody has foreseen; the text beside it says what."""


class RequestLease(RequestMessage, frozen=True, kw_only=True):
    """May `reader` read these blocks? `block_hashes` (joined) are the blocks `first_block`, `first_block` + 1, … of
    the reader's sequence; the holder grants as many from the first on as it has of this tenant's. Where it has none and
    computes the first just now, it answers once it has, or that they are in flight."""

    reader: WorkerId
    fingerprint: str
    first_block: Number
    block_hashes: bytes
    tenant: str = ""
    signature: bytes = b""
    """The gateway's signature of the request that they are read for; of a copy, the reader's MAC under the holders'
    secret (`services.trust.credentials`)."""
    is_copy: bool = False
    """They are to be kept elsewhere as well: there is no request that they are read for."""
    answer_within_ms: Number = 0
    """The reader waits for the answer no longer: what is granted later would be held for nobody. 0: unsaid."""


class ReturnLease(RequestMessage, frozen=True, kw_only=True):
    """The reader does not read under this lease, or no more."""

    reader: WorkerId
    lease_id: LeaseId


class LeaseGranted(RequestMessage, frozen=True, kw_only=True):
    """Tokens [first_token, num_tokens) of the reader's sequence may be read with this ticket, once, where this
    incarnation of the worker has announced that it serves.

    The lease ends with the read, however that ends, or after `lease_ms` without one. `has_more`: the holder is
    fetching or computing more of what was asked for; who asks for the rest after this read may get it.
    """

    worker_id: WorkerId
    lease_id: LeaseId
    epoch: Number
    lease_ms: Number
    ticket: str
    incarnation: str
    first_token: Number
    num_tokens: Number
    arena_nonce: str = ""
    has_more: bool = False


class EvictionCandidates(Message, frozen=True, kw_only=True):
    """The worker will soon evict these blocks of one tenant (joined hashes, the coldest first). A holder that wants
    them reads them under a lease; the worker does not wait."""

    worker_id: WorkerId
    incarnation: str
    block_hashes: bytes
    tenant: str = ""


class ReplicateBlocks(RequestMessage, frozen=True, kw_only=True):
    """`source` has just completed these blocks (joined hashes) of a running request: `first_block` is the first one's
    place in the sequence. Whoever is sent this reads them under a lease if it has room, so that they outlive the
    source; nobody waits for it. `leaving`: they are the hottest ones of a source that leaves, of any requests, the
    hottest in front; who is sent this may give up some of its own for them."""

    source: WorkerId
    fingerprint: str
    first_block: Number
    block_hashes: bytes
    tenant: str = ""
    leaving: bool = False


def refuse_lease(request: RequestLease, holder: WorkerId, fingerprint: str, now_ms: int) -> Refused | None:
    """Return why nobody could lend what this asks for, or None."""
    joined = request.block_hashes
    if request.fingerprint != fingerprint:
        return refuse(request, RefusalReason.FINGERPRINT, f"{holder} holds KV of {fingerprint}")
    if not (is_subject_token(request.reader) and is_subject_token(request.request_id) and is_tenant(request.tenant)):
        detail = "the reader, the request and the tenant need names of letters, digits, - and _"
        return refuse(request, RefusalReason.INVALID, detail)
    if request.first_block < 0 or len(joined) % BLOCK_HASH_BYTES or not joined:
        return refuse(request, RefusalReason.INVALID, "no blocks are named")
    if len(set(split_hashes(joined))) * BLOCK_HASH_BYTES < len(joined):
        return refuse(request, RefusalReason.INVALID, "a block is named twice")
    if request.deadline_ms <= now_ms:
        return refuse(request, RefusalReason.DEADLINE, "the deadline has passed")
    return None


def is_as_asked(request: RequestLease, granted: LeaseGranted, block_size: int) -> bool:
    """Return whether a lease is on whole blocks from the first asked one on, and on no more than was asked."""
    first_token = request.first_block * block_size
    most = first_token + len(request.block_hashes) // BLOCK_HASH_BYTES * block_size
    num_tokens = granted.num_tokens
    return granted.first_token == first_token and first_token < num_tokens <= most and not num_tokens % block_size


class PurgeBlocks(Message, frozen=True, kw_only=True):
    """Keep nothing of what was computed until now: forget the content of all blocks, or of one `tenant`'s. Requests
    that run go on; what they have in blocks of this holder now is not kept when they end."""

    tenant: str | None = None


class BlocksPurged(Message, frozen=True, kw_only=True):
    """`num_blocks`: that were known by their content, in memory and behind it. `failure`: why some that lie behind
    memory could not be deleted, for people; "": all are."""

    worker_id: WorkerId
    num_blocks: Number
    failure: str = ""
