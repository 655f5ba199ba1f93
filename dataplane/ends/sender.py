"""The holder's side of the stream protocol: one connection, on one thread. It carries stream after stream; each begins
with the reader's Open, and is over with End, with Fail, or when the reader has gone."""

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from dataplane import limits
from dataplane.addresses import is_loopback
from dataplane.blocks.layout import ArenaShape
from dataplane.blocks.ticket import TicketRefusedError, TicketSecrets
from dataplane.carriers import tcp
from dataplane.carriers.carrier import CarrierBrokenError, HolderEnd, KVArena, MemoryFailedError
from dataplane.ends.way import tried
from dataplane.memory.checksum import DigestKind, FrameHash
from dataplane.memory.codec import KVNotFiniteError
from dataplane.memory.extent import Extent
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.gate import LeasedKV, LeaseGate, LeaseRefusedError, OpenLease
from dataplane.protocol.reasons import FailCode, RefusalCode
from dataplane.protocol.stream import (
    VERSION,
    Accepted,
    FramePlanner,
    Header,
    Kind,
    Open,
    ProtocolError,
    Seal,
    StreamFailed,
    StreamRefused,
    TransferStats,
    decode_body,
    encode_frame,
    encode_header,
    new_nonce,
    seal_of,
)
from dataplane.protocol.wire import Waker, Wire, WireClosedError, WireTimeoutError

PlaneEncryption = Literal["auto", "on", "off"]
"""Whether what crosses tcp is encrypted; `auto`: to any address but loopback."""
DIGESTS: dict[str, DigestKind] = {tcp.NAME: "gmac", "cuda": "sum64", "nccl": "sum64"}
"""By carrier; `xxh3` where the bytes stay on the host. Cards sum in any order."""


class JunkError(Exception):
    """What came is no Open of ours: a stranger, a scanner, or a peer that never asks for anything."""


class _RefusedError(Exception):
    """What an Open asks for is not to be had here."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


_Refusal = _RefusedError | TicketRefusedError | LeaseRefusedError | CarrierBrokenError
_REFUSALS = get_args(_Refusal)
"""Why a stream is not served. The `reason` of each is for the reader."""


class _EndedError(Exception):
    """The stream cannot go on. `reader_waits`: the reader is still there to receive the reason."""

    def __init__(self, reason: str, *, reader_waits: bool, code: FailCode = FailCode.HOLDER) -> None:
        super().__init__(reason)
        self.reason = reason
        self.reader_waits = reader_waits
        self.code: FailCode = code


@dataclass(slots=True, frozen=True)
class HolderContext:
    """What all streams of a server share. Timeouts in seconds."""

    arena: KVArena
    shape: ArenaShape
    gate: LeaseGate
    secrets: TicketSecrets
    carriers: tuple[str, ...]
    digests: bool
    encryption: PlaneEncryption
    open_timeout_s: float
    idle_timeout_s: float


class HolderStream:
    """Serves one reader on `wire`, which stays the caller's to close. `peer`: the address at its other end."""

    def __init__(self, context: HolderContext, wire: Wire, peer: str) -> None:
        self._context = context
        self._wire = wire
        self._peer = peer
        self.is_opened = False
        """A stream is under way: a valid ticket was shown. Else its reader wants nothing, or has not asked yet."""
        self.refused: RefusalCode | None = None

    def run(self) -> None:
        """Serve until a stream is refused or broken, or none is opened any more. Raises JunkError when the peer did not
        speak the protocol at all."""
        try:
            kind, asked = self._receive(self._context.open_timeout_s, Kind.OPEN, Kind.TRY)
        except (WireClosedError, WireTimeoutError) as error:
            raise JunkError(str(error)) from error
        try:
            if kind is Kind.TRY:
                return self._answer_try(asked)
            while self._serve(asked):
                try:
                    _, asked = self._receive(self._context.idle_timeout_s, Kind.OPEN)
                except (WireClosedError, WireTimeoutError):
                    return None  # the reader needs no more
        except ProtocolError as error:
            raise JunkError(str(error)) from error
        except _REFUSALS as refusal:
            self._refuse(refusal)

    def _receive(self, timeout_s: float, *allowed: Kind) -> tuple[Kind, bytes]:
        """Return what is asked, and its bytes. Raises JunkError, WireClosedError, WireTimeoutError."""
        try:
            header = self._wire.receive_header(time.monotonic() + timeout_s, *allowed)
            deadline = time.monotonic() + self._context.open_timeout_s
            return header.kind, bytes(self._wire.receive(header.length, deadline))
        except ProtocolError as error:
            raise JunkError(str(error)) from error

    def _answer_try(self, asked: bytes) -> None:
        """Send what tries the way here. Raises ProtocolError, and a refusal."""
        answer = tried(asked, self._context.arena.name, self._context.secrets)
        if isinstance(answer, str):
            raise _RefusedError(RefusalCode.TICKET, answer)
        with contextlib.suppress(WireClosedError, WireTimeoutError):
            self._wire.send(answer, self._context.open_timeout_s)
            self._wire.finish_sending()

    def _serve(self, opening: bytes) -> bool:
        """Serve one stream; return whether it ended well, so that another may follow. Raises a refusal, and
        ProtocolError for what is no Open."""
        service = self._open(decode_body(opening, Open), opening)
        error = "the plane failed"
        try:
            error = service.serve_frames()
        finally:
            self.is_opened = False
            if error and not service.num_gone:
                service.lease.give_back()
            service.lease.served(service.stats, error)
        return not error

    def _refuse(self, refusal: _Refusal) -> None:
        """Send the reader its refusal, and note what is to be counted."""
        self.refused = _code_of(refusal)
        refused = StreamRefused(code=self.refused, detail=refusal.reason)
        with contextlib.suppress(WireClosedError, WireTimeoutError):
            self._wire.send([encode_frame(Kind.REFUSED, refused)], self._context.open_timeout_s)
            self._wire.finish_sending()

    def _open(self, wanted: Open, opening: bytes) -> "_Service":
        """Return what serves the stream that is asked for. Raises a refusal."""
        context = self._context
        if wanted.version != VERSION:
            raise _RefusedError(RefusalCode.VERSION, f"this holder speaks version {VERSION}")
        # Check the ticket first: the refusals below name this holder's layout and carriers, for valid readers only.
        signed = context.secrets.signed(wanted.ticket)
        ticket = signed.ticket(time.monotonic_ns() // 1_000_000)
        self.is_opened = True  # from here on nobody else's need makes room of it
        # Refuse what cannot be served before the lease is opened: its one stream stays free for another carrier.
        if wanted.fingerprint != context.shape.layout.fingerprint:
            raise _RefusedError(RefusalCode.FINGERPRINT, f"this holder's KV is {context.shape.layout.fingerprint}")
        if wanted.carrier not in context.carriers:
            raise _RefusedError(RefusalCode.CARRIER, f"this holder offers {', '.join(context.carriers)}")
        if wanted.carrier != tcp.NAME and wanted.wire_dtype != "same":
            raise _RefusedError(RefusalCode.MALFORMED, f"nothing is compressed over {wanted.carrier}")
        # Derive the stream's keys from the ticket's secret, the reader's Open and a fresh nonce of this end.
        nonce = new_nonce()
        seal = seal_of(signed.key_of(opening), nonce)
        frame_hash = FrameHash(self._digest_kind(wanted), seal.frame_key)
        # Give the lease back when the stream cannot begin: nothing was sent, and the ticket may open another stream.
        lease = context.gate.open(ticket)
        try:
            source, extent = self._in_range(wanted, lease.kv)
            end = context.arena.holder_end(wanted, ticket.reader, source, extent, frame_hash)
        except BaseException:
            lease.give_back()
            raise
        proof = _Proof(seal, nonce, frame_hash.kind)
        return _Service(context, self._wire, wanted, lease, extent, end, proof)

    def _in_range(self, wanted: Open, kv: LeasedKV) -> tuple[SequenceRuns, Extent]:
        """Return where it lies and what is to be sent: all that is wanted. Raises a refusal."""
        shape = self._context.shape
        if not 0 <= kv.first_token <= wanted.first_token <= wanted.num_tokens <= kv.num_tokens:
            reason = f"the lease is on tokens {kv.first_token} to {kv.num_tokens}"
            raise _RefusedError(RefusalCode.RANGE, reason)
        extent = Extent(shape.layout, wanted.first_token, wanted.num_tokens, wanted.wire_dtype)
        if reason := extent.refusal():
            raise _RefusedError(RefusalCode.RANGE, reason)
        source = SequenceRuns(shape, kv.tables)
        if not source.covers(extent, kv.num_tokens):
            raise _RefusedError(RefusalCode.RANGE, f"not all that {wanted.num_tokens} tokens need is held any more")
        return source, extent

    def _digest_kind(self, wanted: Open) -> DigestKind | None:
        """Return what hides or proves the bytes that cross a network, and else what whoever copies them is quick at.
        None: digests are off."""
        if self._encrypts(wanted):
            return "aes256gcm"
        if not self._context.digests:
            return None
        return DIGESTS.get(wanted.carrier, "xxh3")

    def _encrypts(self, wanted: Open) -> bool:
        if wanted.carrier != tcp.NAME or self._context.encryption == "off":
            return False
        return self._context.encryption == "on" or not is_loopback(self._peer)


def _code_of(refusal: _Refusal) -> RefusalCode:
    match refusal:
        case _RefusedError():
            return refusal.code
        case TicketRefusedError():
            return RefusalCode.TICKET
        case LeaseRefusedError():
            return RefusalCode.LEASE
        case CarrierBrokenError():
            return RefusalCode.CARRIER


class _Proof(NamedTuple):
    """What proves a stream to its reader, and what the reader is sent of it."""

    seal: Seal
    nonce: str
    digest_kind: DigestKind | None


class _Service:
    """Serves one stream: sends what is ready, commits what has left, waits for the engine and the reader at once."""

    def __init__(
        self,
        context: HolderContext,
        wire: Wire,
        wanted: Open,
        lease: OpenLease,
        extent: Extent,
        end: HolderEnd,
        proof: _Proof,
    ) -> None:
        self.lease = lease
        self.stats = TransferStats(
            wanted.carrier,
            extent.wire_dtype,
            proof.digest_kind,
            opened_ns=time.monotonic_ns(),
            traceparent=lease.traceparent,
            peer_traceparent=wanted.traceparent,
        )
        self._context = context
        self._wire = wire
        self._kv = lease.kv
        self._extent = extent
        self._proof = proof
        self._end = end
        # Each carrier's end names the frame size that suits it.
        self._planner = FramePlanner(extent, end.frame_bytes)
        self._uncommitted: deque[tuple[int, bytes]] = deque()
        """Frames that were sent, by number, each with its Commit, which goes out if the lease is good then."""
        self._num_acked = 0
        self._unsent = b""
        """What goes out with the next frame, or before the next wait."""

    @property
    def num_gone(self) -> int:
        """How many frames have left this memory."""
        return self._num_acked if self._end.needs_ack else self.stats.num_frames

    def serve_frames(self) -> str:
        """Serve; return "" or why it ended early. The reader has been notified where it could be."""
        waker = self._wire.waker()
        self._kv.progress.subscribe(waker.wake)  # under its lock, and never after `unsubscribe`
        try:
            self._accept()
            self._send_all(waker)
        except _EndedError as end:
            if end.reader_waits:
                self._send_fail(end)
            return end.reason
        except MemoryFailedError as error:
            self._send_fail(_EndedError(str(error), reader_waits=True, code=FailCode.MEMORY))
            return str(error)
        except (WireClosedError, WireTimeoutError, ProtocolError) as error:
            return f"the reader has gone: {error}"
        finally:
            self._kv.progress.unsubscribe(waker.wake)
            self._end.close()
        self.stats.landed_ns = time.monotonic_ns()
        return ""

    def _send_fail(self, end: _EndedError) -> None:
        with contextlib.suppress(WireClosedError, WireTimeoutError):
            failed = StreamFailed(reason=end.reason[: limits.MAX_REASON_CHARS], code=end.code)
            self._unsent += encode_frame(Kind.FAIL, failed, self._proof.seal)
            self._flush()
            self._wire.finish_sending()

    def _accept(self) -> None:
        by_tables, crosses_whole = self._end.needs_ack, self._extent.wire_dtype == "same"
        accepted = Accepted(
            carrier=self.stats.carrier,
            nonce=self._proof.nonce,
            digest_kind=self._proof.digest_kind,
            names=self._end.names,
            num_blocks=self._context.shape.num_blocks if by_tables else (),
            tables=self._kv.tables if by_tables else (),
            content_macs=self.lease.content_macs() if crosses_whole else b"",
            traceparent=self.stats.traceparent,
        )
        self._unsent = encode_frame(Kind.ACCEPTED, accepted, self._proof.seal)

    def _send_all(self, waker: Waker) -> None:
        """Send the frames as they become ready, and the End. Raises whatever ends it early."""
        while True:
            waker.rearm()
            ready = self._kv.progress.ready()
            if ready.failure is not None:
                raise _EndedError(ready.failure, reader_waits=True)
            # 1. What has left this memory is committed, before asking for room: it must not hold up what is next.
            self._take_acks()
            self._commit()
            # 2. One frame of what is ready, where the reader is not too far behind.
            has_room = len(self._uncommitted) < limits.MAX_UNACKED_FRAMES
            data = self._planner.next(ready.num_tokens) if has_room else None
            if data is not None:
                self._send(data, max(ready.marks[data.layer : data.layer + data.num_layers]))
            # 3. The trailer, behind the last Commit.
            elif self._planner.all_sent and not self._uncommitted and ready.trailer is not None:
                return self._finish(ready.trailer)
            # 4. Or the engine, or a word of the reader.
            else:
                self._flush()
                self._wait(waker)

    def _send(self, data: Header, mark: int) -> None:
        stats = self.stats
        if not stats.num_frames:
            stats.first_byte_ns = time.monotonic_ns()
            self.lease.started()
        if mark:
            self._wait_written(mark)
        try:
            digest = self._end.send_frame(self._wire, self._unsent, data, stats, self._context.idle_timeout_s)
        except KVNotFiniteError as error:
            raise _EndedError(
                f"layer {data.layer}, token {data.first_token}: {error}", reader_waits=True, code=FailCode.CODEC
            ) from error
        self._unsent = b""
        stats.num_frames += 1
        stats.num_bytes += self._extent.memory_bytes(data.num_layers, data.num_tokens)
        stats.num_wire_bytes += data.length
        stats.last_byte_ns = time.monotonic_ns()
        commit = Header(Kind.COMMIT, data.sequence, tag=self._proof.seal.of_frame(data, digest))
        self._uncommitted.append((data.sequence, encode_header(commit)))

    def _wait_written(self, mark: int) -> None:
        """Wait until the card has written what the engine has announced."""
        self._flush()
        started = time.perf_counter_ns()
        is_written = self._context.arena.wait_written(mark, lambda: self._wire.has_ended, self._context.idle_timeout_s)
        self.stats.wait_ns += time.perf_counter_ns() - started
        if not is_written:
            raise _EndedError("the card has not written a frame in time", reader_waits=True, code=FailCode.MEMORY)

    def _take_acks(self) -> None:
        """Read the Acks that have arrived. Raises WireClosedError when the reader has gone, ProtocolError."""
        while self._wire.has_unread():
            ack = self._wire.receive_header(time.monotonic() + self._context.idle_timeout_s, Kind.ACK)
            if not self._end.needs_ack or not self._num_acked < ack.sequence <= self.stats.num_frames:
                raise ProtocolError(f"ack of frame {ack.sequence} after {self._num_acked}")
            self._num_acked = ack.sequence

    def _commit(self) -> None:
        """Commit the frames that have left this memory, if the lease is good *now*."""
        num_gone = self.num_gone
        if not self._uncommitted or self._uncommitted[0][0] > num_gone:
            return
        if not self.lease.still_valid():
            raise _EndedError(self._kv.progress.ready().failure or "the lease has ended", reader_waits=True)
        while self._uncommitted and self._uncommitted[0][0] <= num_gone:
            self._unsent += self._uncommitted.popleft()[1]

    def _flush(self) -> None:
        if self._unsent:
            self._wire.send([self._unsent], self._context.idle_timeout_s)
            self._unsent = b""

    def _finish(self, trailer: bytes) -> None:
        if len(trailer) > limits.MAX_TRAILER_BYTES:
            raise _EndedError(f"the trailer has {len(trailer)} bytes", reader_waits=True)
        if not self.lease.still_valid():
            raise _EndedError("the lease has ended", reader_waits=True)
        self._unsent += encode_frame(Kind.END, trailer, self._proof.seal)
        self._flush()

    def _wait(self, waker: Waker) -> None:
        """Wait for the engine, or a word of the reader."""
        started = time.perf_counter_ns()
        moved = waker.wait_readable(self._context.idle_timeout_s)
        self.stats.wait_ns += time.perf_counter_ns() - started
        if not moved:
            if self._uncommitted:
                raise _EndedError("the reader copies nothing", reader_waits=False)
            if not self.lease.still_valid():
                raise _EndedError("the lease has ended", reader_waits=True)
