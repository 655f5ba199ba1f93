"""The reader's side of the stream protocol: one read, from its Open to its End or whatever ends it early.

A frame is verified in three steps, all of them on this read's thread: before a byte is written `Landing.expect` checks
its header against what was asked for; the carrier's `take_frame` puts it in place and returns the digest of what
arrived; and `Landing.commit` checks that the holder's Commit proves this header and this digest. It confirms too that
the lease still held after the bytes had left. Only then do its tokens count (`Landing.num_landed_tokens`, in
`protocol/stream.py`).
"""

import contextlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dataplane import limits
from dataplane.blocks.layout import BlockTables
from dataplane.blocks.ticket import TicketRefusedError, TicketSecrets
from dataplane.carriers import tcp
from dataplane.carriers.carrier import CarrierBrokenError, ReaderEnd
from dataplane.ends.connections import Cancellation
from dataplane.memory.checksum import FrameHash
from dataplane.memory.codec import WireDtype
from dataplane.memory.content_macs import ExpectedContent
from dataplane.memory.extent import Extent
from dataplane.protocol.reasons import RefusalCode
from dataplane.protocol.stream import (
    HEADER_BYTES,
    Accepted,
    Header,
    Kind,
    Landing,
    Names,
    Open,
    ProtocolError,
    StreamFailed,
    StreamRefused,
    TransferFailedError,
    TransferStats,
    decode_body,
    encode_frame,
    encode_header,
    is_proved,
    new_nonce,
    seal_of,
)
from dataplane.protocol.wire import Wire, WireClosedError
from schemas.handoff import Endpoint
from schemas.kv import ReadEnd

_FRAME_KINDS = (Kind.DATA, Kind.COMMIT, Kind.END, Kind.FAIL)


@dataclass(slots=True, frozen=True)
class Landed:
    """All `num_tokens` tokens are in place and verified. `trailer` is what the holder sent behind them."""

    num_tokens: int
    trailer: bytes
    stats: TransferStats


@dataclass(slots=True, frozen=True)
class ReadRequest:
    """Tokens [first_token, num_tokens) of what `ticket` names, to be put where `tables` have these positions.

    `carrier`: "auto" or one by name. `deadline_s`: seconds from now to the end of it all. `wire_dtype`: how the bytes
    cross over tcp. `content`: of lent blocks, what each must be. `stats` are filled as the read goes on, however it
    ends; their `traceparent` is sent to the holder.
    """

    endpoint: Endpoint
    ticket: str
    carrier: str
    tables: BlockTables
    first_token: int
    num_tokens: int
    deadline_s: float
    wire_dtype: WireDtype = "same"
    content: ExpectedContent | None = None
    stats: TransferStats = field(default_factory=TransferStats)


class NotAnsweredError(WireClosedError):
    """The holder closed the connection without a word."""


class Read:
    """The state of one read: how far it has come, whatever ends it."""

    def __init__(
        self,
        request: ReadRequest,
        extent: Extent,
        secrets: TicketSecrets,
        cancellation: Cancellation,
        on_started: Callable[[str], None],
    ) -> None:
        self.request = request
        self.extent = extent
        """What is wanted, and once a carrier is chosen how it crosses."""
        self.cancellation = cancellation
        self.deadline = time.monotonic() + request.deadline_s
        self.stats = request.stats
        self.stats.opened_ns = time.monotonic_ns()
        self._secrets = secrets
        self._on_started = on_started
        self._landing: Landing | None = None
        self._content_macs = b""

    def failed(self, code: ReadEnd, detail: str) -> TransferFailedError:
        """Return the error with which the read ends, with what has landed so far."""
        landed = self.request.first_token if self._landing is None else self._believed(self._landing.num_landed_tokens)
        return TransferFailedError(code, detail, landed)

    def open(self, wire: Wire, carrier: str, names: Names | None, fingerprint: str) -> tuple[Accepted, FrameHash]:
        """Ask, and return the holder's answer, and with what its frames are digested. Raises TransferFailedError when
        it refuses, or is not who has granted the lease."""
        request = self.request
        if carrier == tcp.NAME:  # on one host nothing is gained by making less of it
            self.extent = self.extent.over_wire(request.wire_dtype)
        self.stats.carrier, self.stats.wire_dtype = carrier, self.extent.wire_dtype
        # The bytes of the Open, with a fresh nonce, go into the stream's key: an answer to another Open proves nothing.
        opening = Open(
            ticket=request.ticket,
            nonce=new_nonce(),
            fingerprint=fingerprint,
            carrier=carrier,
            first_token=request.first_token,
            num_tokens=request.num_tokens,
            wire_dtype=self.extent.wire_dtype,
            names=names,
            traceparent=self.stats.traceparent,
        )
        opening_frame = encode_frame(Kind.OPEN, opening)
        with contextlib.suppress(WireClosedError):  # a holder that is busy refuses and closes, without reading
            wire.send([opening_frame], self.deadline - time.monotonic())
        key = self._key_of(opening_frame[HEADER_BYTES:])  # while the holder looks for it
        # No answer at all may mean that a reused connection was closed just before: the caller then takes another one.
        try:
            header = wire.receive_header(self.deadline, Kind.ACCEPTED, Kind.REFUSED)
        except WireClosedError as error:
            self.cancellation.raise_if_cancelled()
            raise NotAnsweredError(str(error)) from error
        body = bytes(wire.receive(header.length, self.deadline))
        # A refused carrier lets the caller try the next one; any other refusal ends the read.
        if header.kind is Kind.REFUSED:
            refused = decode_body(body, StreamRefused)
            if refused.code is RefusalCode.CARRIER:
                raise CarrierBrokenError(carrier, refused.detail)
            raise TransferFailedError(ReadEnd(refused.code), refused.detail)
        # Trust nothing in the answer before its seal is proved: only who has the ticket's secret can make that seal.
        accepted = decode_body(body, Accepted)
        if key is None:
            raise TransferFailedError(
                ReadEnd.TICKET, "no ticket secret of this reader's signed it: are all holders' ticket_secrets the same?"
            )
        seal = seal_of(key, accepted.nonce)
        if not is_proved(header.tag, seal.of_body(header, body)):
            raise TransferFailedError(ReadEnd.DIGEST, "the holder's answer is not proved")
        if accepted.carrier != carrier:
            raise ProtocolError(f"asked for {carrier}, accepted as {accepted.carrier}")
        # Keep what the answer says for the stats, and for the checks of the frames that follow.
        self.stats.accepted_ns = time.monotonic_ns()
        self.stats.digest_kind = accepted.digest_kind
        self.stats.peer_traceparent = accepted.traceparent
        self._content_macs = accepted.content_macs
        frame_hash = FrameHash(accepted.digest_kind, seal.frame_key)
        self._landing = Landing(self.extent, seal, is_encrypted=frame_hash.encrypts)
        return accepted, frame_hash

    def _key_of(self, opening: bytes) -> hmac.HMAC | None:
        """Return what makes the seal of the stream; None: this reader has not the secret that signed the ticket."""
        with contextlib.suppress(TicketRefusedError):
            return self._secrets.signed(self.request.ticket).key_of(opening)

    def take_frames(self, wire: Wire, end: ReaderEnd) -> Landed:
        """Take frames until the end. Raises whatever ends it early."""
        landing, stats = self._landing, self.stats
        assert landing is not None, "not opened"
        num_acked = 0
        while True:
            if end.needs_ack and stats.num_frames > num_acked:
                num_acked = self._acknowledge(wire, num_acked)
            started = time.perf_counter_ns()
            header = wire.receive_header(self.deadline, *_FRAME_KINDS)
            stats.wait_ns += time.perf_counter_ns() - started
            if header.kind is Kind.DATA:
                landing.expect(header)
                landing.received(header, self._take(wire, end, header))
            elif header.kind is Kind.COMMIT:
                landing.commit(header)
            else:
                return self._finish(landing, header, bytes(wire.receive(header.length, self.deadline)))

    def _acknowledge(self, wire: Wire, num_acked: int) -> int:
        """Acknowledge the frames that are not needed any more, if it is time to; return how many are acknowledged.

        A word to the holder costs a switch of threads where cores are scarce: only where it would wait for it.
        """
        num_taken = self.stats.num_frames
        if num_taken - num_acked < limits.MAX_FRAMES_PER_ACK and wire.has_unread():
            return num_acked
        wire.send([encode_header(Header(Kind.ACK, num_taken))], self.deadline - time.monotonic())
        return num_taken

    def _take(self, wire: Wire, end: ReaderEnd, data: Header) -> int:
        """Let the carrier put the frame in place; return the digest of what arrived."""
        stats = self.stats
        if not stats.num_frames:
            stats.first_byte_ns = time.monotonic_ns()
            self._on_started(stats.carrier)
        self.cancellation.raise_if_cancelled()
        digest = end.take_frame(wire, data, stats, self.deadline)
        stats.num_frames += 1
        stats.num_bytes += self.extent.memory_bytes(data.num_layers, data.num_tokens)
        stats.num_wire_bytes += data.length
        stats.last_byte_ns = time.monotonic_ns()
        return digest

    def _finish(self, landing: Landing, header: Header, body: bytes) -> Landed:
        landing.check_last(header, body)
        if header.kind is Kind.FAIL:
            fail = decode_body(body, StreamFailed)
            raise TransferFailedError(ReadEnd(fail.code), fail.reason)
        landing.check_whole()
        if (believed := self._believed(self.request.num_tokens)) < self.request.num_tokens:
            detail = f"the block of token {believed} is not what its MAC says"
            raise TransferFailedError(ReadEnd.CONTENT, detail)
        self.stats.landed_ns = time.monotonic_ns()
        return Landed(self.request.num_tokens, body, self.stats)

    def _believed(self, num_landed_tokens: int) -> int:
        """Return how many of the tokens that have landed are what they are claimed to be; of lent blocks whole ones."""
        content, first_token = self.request.content, self.request.first_token
        if content is None or not self._content_macs:
            return num_landed_tokens
        started, block_size = time.perf_counter_ns(), self.extent.layout.block_size
        num_right = content.num_right(self._content_macs, (num_landed_tokens - first_token) // block_size)
        self.stats.verify_ns += time.perf_counter_ns() - started
        return first_token + num_right * block_size
