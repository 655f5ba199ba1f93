"""What a holder and the connector of an attached server send each other, over the holder's socket.

msgpack arrays: both ends are of one version (`PROTOCOL`), on one machine. The connector is a class in two processes of
the server: its *scheduler half* plans, its *worker half* copies pages to and from the holder's arena. Each has a
connection, and begins it with `Hello`.
"""

import enum
from typing import Annotated

import msgspec

from schemas.ids import BlockHash

PROTOCOL = 1
MAX_RUN = 32_768
"""Blocks that one message is about at most."""
MAX_ATTACH_BYTES = 1 << 20
"""Of one message, at most."""

Text = Annotated[str, msgspec.Meta(max_length=4_096)]
"""People read it; a path has no more."""
Amount = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class Half(enum.StrEnum):
    """Of a connector."""

    SCHEDULER = "scheduler"
    WORKER = "worker"


class Use(enum.StrEnum):
    """What blocks are asked for. `LOAD`: to be loaded in place of computing them. `COMPARE`: they are computed all the
    same, and compared. `CONFUSED`: to be loaded, but the third has the first one's bytes: a canary sees the
    difference."""

    LOAD = "load"
    COMPARE = "compare"
    CONFUSED = "confused"


class NotSaved(enum.StrEnum):
    """Why computed blocks, or a whole request, were not shared. `NO_ROOM`: the holder had given no empty slots. `LATE`:
    it had not answered in time."""

    NO_ROOM = "no_room"
    LATE = "late"
    NO_HOLDER = "no_holder"
    OFF = "off"
    IMAGES = "images"
    EMBEDDINGS = "embeddings"
    PROMPT_LOGPROBS = "prompt_logprobs"
    ADAPTER = "adapter"


class AttachMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all of them."""


class KVIdentity(msgspec.Struct, frozen=True, array_like=True):
    """What the KV of a server is (`KVLayout`): servers share only what is equal in all of it.

    `weights`: of weight files and configuration. `kv_format`: what a page's bytes mean beside that: the server's
    version, attention backend, layout, packing, dtype, rank, and a digest of its further arguments.
    """

    weights: str
    kv_format: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int


class Hello(AttachMessage, frozen=True):
    """The first message of each half. `server`: of this life of the server. `url`: of its API, and `api_key` for it.
    `tenant`: whose its blocks are. `off`: why this life of the server shares no more, where a holder has said so."""

    protocol: int
    half: Half
    server: Text
    identity: KVIdentity
    tenant: Text
    url: Text
    model: Text
    api_key: Text
    off: Text = ""


class Welcome(AttachMessage, frozen=True):
    """Map this arena, of `num_blocks` blocks, which `holder` has. `attachment`: a word that both halves get, another
    one whenever they attach anew: slots and pins are of one attachment, and requests of the holder's own are known by
    it. `fetch_s`: what the holder brings for a question is there within so long, or not at all."""

    holder: str
    arena: str
    nonce: str
    num_blocks: int
    attachment: str
    fetch_s: float


class HelloRefused(AttachMessage, frozen=True):
    """A line for the user. `is_final`: it will never be otherwise, so the server is not to start."""

    reason: str
    is_final: bool


# The scheduler half sends.


class Ask(AttachMessage, frozen=True):
    """What is there of this run of blocks? Answered by `Have` with the same number. `hashes`: joined. `hint`: a holder
    that is said to have them, by whoever sent the request. `wait_ms`: so long they may be on their way here."""

    number: int
    hashes: bytes
    use: Use
    hint: Text = ""
    wait_ms: Amount = 0
    traceparent: Text = ""


class Release(AttachMessage, frozen=True):
    """What was found for this number is no longer needed."""

    number: int


class WantSlots(AttachMessage, frozen=True):
    """Empty slots to save into, in advance. Answered by `SlotsGiven`."""

    num_slots: Amount


class WeightsChanged(AttachMessage, frozen=True):
    """The server may have other weights from now on: nothing of it is shared any more."""


class Counted(AttachMessage, frozen=True):
    """Since the last one: tokens that were asked for, tokens that were loaded, and blocks or requests that were not
    shared, by the reason."""

    asked_tokens: Amount
    loaded_tokens: Amount
    not_saved: dict[NotSaved, Amount]


# The worker half sends.


class Saved(AttachMessage, frozen=True):
    """The bytes of these blocks are in these slots. `number`: of this message, from 1 on in each attachment: one that
    came twice would be about slots that are others' by then. `hashes`: joined, one for each slot. `seconds`: of the
    step that computed them."""

    number: int
    slots: tuple[int, ...]
    hashes: bytes
    seconds: Seconds = 0.0


class BlockRefused(AttachMessage, frozen=True):
    """What was loaded from this slot has not the digest that the holder named."""

    slot: int
    block_hash: BlockHash


class Compared(AttachMessage, frozen=True):
    """A block was computed anew. `difference`: the largest, as a share of the values' spread; `is_same`: rounding
    explains it."""

    block_hash: BlockHash
    difference: float
    is_same: bool


class Loaded(AttachMessage, frozen=True):
    """A load has ended. `num_loaded`: blocks, none where one was refused."""

    number: int
    num_loaded: Amount
    seconds: Seconds


# The holder sends.


class Have(AttachMessage, frozen=True):
    """What was asked for lies in these slots, the leading run of it that is here, pinned until `Release`. `digests`:
    joined, 16 bytes each. `has_more`: another answer follows, which takes the place of this one."""

    number: int
    slots: tuple[int, ...]
    digests: bytes
    has_more: bool = False


class SlotsGiven(AttachMessage, frozen=True):
    """Empty slots; none: there is no room now."""

    slots: tuple[int, ...]


class Proven(AttachMessage, frozen=True):
    """Requests are shared from now on."""


class Off(AttachMessage, frozen=True):
    """Nothing is shared (any more), until the server is started again. `reason`: for people."""

    reason: str


FromScheduler = Ask | Release | WantSlots | WeightsChanged | Counted
FromWorker = Saved | BlockRefused | Compared | Loaded
ToHalf = Welcome | HelloRefused | Have | SlotsGiven | Proven | Off
