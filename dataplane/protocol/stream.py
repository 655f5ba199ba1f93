"""The one stream protocol of every carrier, without I/O: what is sent, its limits, what comes next, what to believe.

    reader → Open                     the ticket, the layout's fingerprint, which tokens are wanted
    holder → Accepted | Refused
    holder → Data, Commit, …          Data: some tokens of some layers; its bytes cross as the carrier has it
    reader → Ack, …                   only where it copies from the holder's memory: it has finished with all up to this
    holder → End | Fail               End: all is committed; carries the holder's trailer
    reader → Open …                   another stream on the same connection, only after an End

or a Try, and its answer, on a connection of its own (`ends/way.py`).

A Commit confirms that the lease was still good *after* a frame's bytes had left the holder's memory, and its tag proves
what they were there. A frame is believed once its Commit is in and its digest is right; nothing waits for a round trip
but the last frame. Every frame starts with one header of fixed size, which ends in its CRC-32: nobody waits for the
bytes of a length that was damaged on its way. All numbers are little-endian; every size has a limit.

Accepted, Commit, End and Fail are sealed: their `tag` is a MAC (`Seal`) under a key that both ends derive from the
secret that signed the ticket and from the nonces of Open and Accepted. So it is of this lease, epoch, tenant and KV
format, of this very stream, and of nobody who has no holders' secret. Over tcp the payloads of Data may be encrypted.
"""

import enum
import hashlib
import hmac
import secrets
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from dataplane import limits
from dataplane.blocks.layout import BlockTables
from dataplane.blocks.ticket import MAC_BYTES
from dataplane.memory.checksum import DigestKind
from dataplane.memory.codec import WireDtype
from dataplane.memory.extent import Extent
from dataplane.protocol.reasons import FailCode, RefusalCode
from schemas.kv import ReadEnd

VERSION = 7

_MAGIC = b"KV"
_HEADER = struct.Struct("<2sBBIHHIII16s")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
TAG_BYTES = 16
_NONCE_BYTES = 16

Names = dict[str, object]
"""What one end of a carrier sends the other, which alone understands it: how its memory is reached."""


class Kind(enum.IntEnum):
    OPEN = 1
    ACCEPTED = 2
    REFUSED = 3
    DATA = 4
    ACK = 5
    COMMIT = 6
    END = 7
    FAIL = 8
    TRY = 9
    TRIED = 10


_KINDS = {int(kind): kind for kind in Kind}
_MAX_BODY = {
    Kind.OPEN: limits.MAX_CONTROL_BYTES,
    Kind.ACCEPTED: limits.MAX_ACCEPTED_BYTES,
    Kind.REFUSED: limits.MAX_CONTROL_BYTES,
    Kind.DATA: limits.MAX_FRAME_BYTES,
    Kind.ACK: 0,
    Kind.COMMIT: 0,
    Kind.END: limits.MAX_TRAILER_BYTES,
    Kind.FAIL: limits.MAX_CONTROL_BYTES,
    Kind.TRY: limits.MAX_CONTROL_BYTES,
    Kind.TRIED: limits.WAY_BYTES + MAC_BYTES,
}


class ProtocolError(Exception):
    """The peer sent what the protocol does not allow here."""


class TransferFailedError(Exception):
    """A read ended early. Tokens from its first up to `num_landed_tokens` are in place, verified and committed."""

    def __init__(self, code: ReadEnd, detail: str, num_landed_tokens: int = 0) -> None:
        super().__init__(f"{code}: {detail}")
        self.code: ReadEnd = code
        self.detail = detail
        self.num_landed_tokens = num_landed_tokens


class Header(NamedTuple):
    """The start of every frame. `length`: bytes of body, or of payload. `tag`: what proves a sealed frame, or the bytes
    of one that is encrypted, 128 bits. Fields that a kind does not use are 0."""

    kind: Kind
    sequence: int = 0
    layer: int = 0
    num_layers: int = 0
    first_token: int = 0
    num_tokens: int = 0
    length: int = 0
    tag: int = 0


class Seal:
    """What one stream's holder proves with, and its reader checks, that nobody else has sent it: keyed BLAKE2b
    (RFC 7693), 128 bits. For any thread."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._mac = hashlib.blake2b(digest_size=TAG_BYTES, key=key, person=b"kvmesh tag")

    def of_frame(self, data: Header, digest: int) -> int:
        """Return the tag of a frame's Commit."""
        return self._tag(data, digest.to_bytes(TAG_BYTES, "little"))

    def of_body(self, header: Header, body: bytes) -> int:
        """Return the tag of a frame that has a body."""
        return self._tag(header, body)

    def _tag(self, header: Header, what: bytes) -> int:
        mac = self._mac.copy()
        mac.update(encode_header(header, tag=0) + what)
        return int.from_bytes(mac.digest(), "little")

    @property
    def frame_key(self) -> bytes:
        """The key of what digests the frames' bytes."""
        return hashlib.blake2b(digest_size=32, key=self._key, person=b"kvmesh frames").digest()


def is_proved(tag: int, right: int) -> bool:
    """Return whether the tag that came is the right one; its bytes do not change how long that takes."""
    return hmac.compare_digest(tag.to_bytes(TAG_BYTES, "little"), right.to_bytes(TAG_BYTES, "little"))


def new_nonce() -> str:
    """Return what makes a stream's key one that was never used before."""
    return secrets.token_hex(_NONCE_BYTES)


def seal_of(key: hmac.HMAC, nonce: str) -> Seal:
    """Return the seal of the stream whose Open gave this key (`Signed.key_of`) and whose Accepted has this `nonce`."""
    key.update(nonce.encode())
    return Seal(key.digest())


BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def decoded_by_threads(cls: type[BodyT]) -> type[BodyT]:
    """Class decorator for what several threads decode.

    msgspec prepares a class when it is decoded for the first time. Another thread that decodes the same class meanwhile
    reads what is not there yet, and the process ends with a segmentation fault (msgspec 0.22). So it is prepared here,
    before there are threads.
    """
    msgspec.json.Decoder(cls)
    return cls


@decoded_by_threads
class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for tokens [first_token, num_tokens) of what the ticket names.

    `nonce`: of this stream alone. `names`: what this carrier's holder needs to know, where it needs anything.
    """

    ticket: str
    nonce: str
    fingerprint: str
    carrier: str
    first_token: int
    num_tokens: int
    wire_dtype: WireDtype = "same"
    names: Names | None = None
    version: int = VERSION
    traceparent: str = ""
    """What the reader's end of the transfer is called in its trace. Nothing depends on it."""


@decoded_by_threads
class Accepted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`nonce`: of this stream alone. `digest_kind`: of the frames' bytes; None: there are no digests. `num_blocks` and
    `tables` tell a reader that copies from the holder's arena where the tokens lie in it; to others they are not sent.
    `names`: by which that memory is opened, where its carrier needs any. `content_macs`: of blocks that are lent
    (`memory/content_macs.py`), joined; none where it is not whole blocks that arrive."""

    carrier: str
    nonce: str
    digest_kind: DigestKind | None = None
    names: Names | None = None
    num_blocks: tuple[int, ...] = ()
    tables: BlockTables = ()
    content_macs: bytes = b""
    traceparent: str = ""
    """The same of the holder's end."""


@decoded_by_threads
class StreamRefused(msgspec.Struct, frozen=True, kw_only=True):
    code: RefusalCode
    detail: str


@decoded_by_threads
class StreamFailed(msgspec.Struct, frozen=True, kw_only=True):
    reason: str
    code: FailCode = FailCode.HOLDER


@dataclass(slots=True)
class TransferStats:
    """What one stream did, as one end saw it. Points are `time.monotonic_ns()` (0: never), durations nanoseconds.

    `reason`: why this carrier was taken. `num_bytes`: of KV in the arena. `num_wire_bytes`: of payload as it crossed,
    which is less where it was compressed. `wait_ns`: blocked, with nothing to do. `copy_ns`: moving bytes (over TCP
    this includes waiting for them). `codec_ns`: packing or unpacking. `accepted_ns`: the holder has accepted.
    `traceparent`: of this end's span, as its owner has named it; `peer_traceparent`: of the other's, as it has sent it.
    """

    carrier: str = ""
    wire_dtype: WireDtype = "same"
    digest_kind: DigestKind | None = None
    num_bytes: int = 0
    num_wire_bytes: int = 0
    num_frames: int = 0
    opened_ns: int = 0
    accepted_ns: int = 0
    first_byte_ns: int = 0
    last_byte_ns: int = 0
    landed_ns: int = 0
    wait_ns: int = 0
    verify_ns: int = 0
    copy_ns: int = 0
    codec_ns: int = 0
    traceparent: str = ""
    peer_traceparent: str = ""
    reason: str = ""


def encode_header(header: Header, tag: int | None = None) -> bytes:
    """Return the header's bytes; with this `tag`, where one is given."""
    *fields, own_tag = header
    packed = _HEADER.pack(_MAGIC, VERSION, *fields, (own_tag if tag is None else tag).to_bytes(TAG_BYTES, "little"))
    return packed + _CHECKSUM.pack(zlib.crc32(packed))


def encode_frame(kind: Kind, body: msgspec.Struct | bytes, seal: Seal | None = None) -> bytes:
    """Return a whole frame, with a JSON body or these bytes. Asserts its limit."""
    text = body if isinstance(body, bytes) else msgspec.json.encode(body)
    assert len(text) <= _MAX_BODY[kind], f"{kind.name} of {len(text)} bytes"
    header = Header(kind, length=len(text))
    return encode_header(header, None if seal is None else seal.of_body(header, text)) + text


def decode_header(data: bytes | bytearray | memoryview, *allowed: Kind) -> Header:
    """Return the header of one of the `allowed` kinds. Raises ProtocolError, for an oversized length too."""
    magic, version, kind, *fields, tag = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != VERSION:
        raise ProtocolError("not a KV stream of this version")
    if _CHECKSUM.unpack_from(data, _HEADER.size)[0] != zlib.crc32(data[: _HEADER.size]):
        raise ProtocolError("a header was damaged on its way")
    if kind not in allowed:
        raise ProtocolError(f"frame of kind {kind} where {', '.join(k.name for k in allowed)} may come")
    header = Header(_KINDS[kind], *fields, tag=int.from_bytes(tag, "little"))
    if header.length > _MAX_BODY[kind]:
        raise ProtocolError(f"{header.kind.name} of {header.length} bytes")
    return header


def decode_body(body: bytes | bytearray | memoryview, expected: type[BodyT]) -> BodyT:
    """Return the JSON body. Raises ProtocolError."""
    try:
        return msgspec.json.decode(body, type=expected)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{expected.__name__}: {error}") from error


class FramePlanner:
    """The holder's side: which frame to send next, so that the tokens that land grow as a prefix over all layers."""

    def __init__(self, extent: Extent, frame_bytes: int) -> None:
        assert 0 < frame_bytes <= limits.MAX_FRAME_BYTES
        self.sent = list(extent.layer_starts)
        self._extent = extent
        self._num_tokens = extent.num_tokens
        self._max_rows = max(extent.least_tokens, frame_bytes // extent.memory_bytes(1, 1))
        self._num_frames = 0

    @property
    def all_sent(self) -> bool:
        return min(self.sent) >= self._num_tokens

    def next(self, ready: Sequence[int]) -> Header | None:
        """Return the next Data frame of what is `ready`, or None; it counts as sent.

        The layer that is furthest behind comes first; with it go those layers after it that stand at the same tokens,
        while they fit, so that what piled up for a slow reader costs few frames.
        """
        # What has landed counts only as far as every layer has it, so the layer with the fewest tokens sent is worth
        # most; of equals the first, as layers are computed in this order.
        sent, extent = self.sent, self._extent
        ends = [self._end(tokens) for tokens in ready]
        behind = [(sent[i], i) for i in range(len(sent)) if sent[i] < ends[i]]
        if not behind:
            return None
        first, layer = min(behind)
        end = self._cut(first, min(ends[layer], first + self._max_rows))
        # A frame is a rectangle of layers by tokens: a layer joins if it begins where the first one does and has as
        # much ready. A frame has room for `_max_rows` tokens of one layer, or fewer of several.
        num_layers = 1
        max_layers = min(self._max_rows // (end - first), len(sent) - layer)
        while num_layers < max_layers:
            other = layer + num_layers
            if sent[other] != first or ends[other] < end:
                break
            num_layers += 1
        sent[layer : layer + num_layers] = [end] * num_layers
        self._num_frames += 1
        length = extent.payload_bytes(num_layers, first, end - first)
        return Header(Kind.DATA, self._num_frames, layer, num_layers, first, end - first, length)

    def _end(self, ready: int) -> int:
        """Return how far what is ready may be sent: a block that is begun waits for its rest."""
        return self._num_tokens if ready >= self._num_tokens else ready - ready % self._extent.cut_tokens

    def _cut(self, first: int, end: int) -> int:
        """Return where a frame that could go to `end` ends."""
        border = end - end % self._extent.cut_tokens
        return border if first < border and end < self._num_tokens else end


class Landing:
    """The reader's side: which frames may come, and how much of what came may be believed."""

    def __init__(self, extent: Extent, seal: Seal, *, is_encrypted: bool = False) -> None:
        self._received = list(extent.layer_starts)
        self._committed = list(extent.layer_starts)
        self._extent = extent
        self._num_tokens = extent.num_tokens
        self._seal = seal
        self._is_encrypted = is_encrypted
        self._last_sequence = 0
        self._pending: deque[tuple[Header, int]] = deque()

    @property
    def num_landed_tokens(self) -> int:
        """Tokens from the sequence's start that are in place over all layers, verified and committed.

        With windows all or nothing: what the last token's window sees is not what an earlier token's does.
        """
        landed = min(self._committed)
        if self._extent.layout.is_windowed and landed < self._num_tokens:
            return self._extent.first_token
        return landed

    def expect(self, data: Header) -> None:
        """Check a Data header before any of its bytes is written. Raises ProtocolError."""
        layers = self._received[data.layer : data.layer + data.num_layers]
        end = data.first_token + data.num_tokens
        if data.sequence != self._last_sequence + 1 or len(self._pending) >= limits.MAX_OUTSTANDING_FRAMES:
            raise ProtocolError(f"frame {data.sequence} after {self._last_sequence}, {len(self._pending)} uncommitted")
        if not data.num_tokens or not data.num_layers or len(layers) != data.num_layers or end > self._num_tokens:
            raise ProtocolError(f"no such layers and tokens: {data}")
        if any(received != data.first_token for received in layers):
            raise ProtocolError(f"frame {data.sequence} leaves a gap or comes twice: {data}")
        if end % self._extent.least_tokens:
            raise ProtocolError(f"frame {data.sequence} cuts a block: {data}")
        if data.tag and not self._is_encrypted:
            raise ProtocolError(f"frame {data.sequence} has its tag too early: {data}")
        if data.length != self._extent.payload_bytes(data.num_layers, data.first_token, data.num_tokens):
            raise ProtocolError(f"frame {data.sequence} has a wrong length: {data}")

    def received(self, data: Header, digest: int) -> None:
        """The bytes of the expected frame are in place and have this digest."""
        self._last_sequence = data.sequence
        end = data.first_token + data.num_tokens
        self._received[data.layer : data.layer + data.num_layers] = [end] * data.num_layers
        self._pending.append((data, digest))

    def commit(self, commit: Header) -> None:
        """Believe the oldest pending frame. Raises ProtocolError, and TransferFailedError when its tag is not right."""
        if not self._pending or self._pending[0][0].sequence != commit.sequence:
            raise ProtocolError(f"commit of frame {commit.sequence}, which is not the next one")
        data, digest = self._pending.popleft()
        if not is_proved(commit.tag, self._seal.of_frame(data, digest)):
            raise TransferFailedError(
                ReadEnd.DIGEST, f"frame {data.sequence} (layer {data.layer}, token {data.first_token})"
            )
        end = data.first_token + data.num_tokens
        self._committed[data.layer : data.layer + data.num_layers] = [end] * data.num_layers

    def check_last(self, last: Header, body: bytes) -> None:
        """Check that End or Fail is what the holder sent. Raises TransferFailedError."""
        if not is_proved(last.tag, self._seal.of_body(last, body)):
            raise TransferFailedError(ReadEnd.DIGEST, f"{last.kind.name.lower()} is not proved")

    def check_whole(self) -> None:
        """Check that nothing is missing. Raises ProtocolError."""
        if self._pending or self.num_landed_tokens < self._num_tokens:
            raise ProtocolError(f"ended after {self.num_landed_tokens} of {self._num_tokens} tokens")
