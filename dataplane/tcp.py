"""The carrier between hosts: a frame's bytes follow its header on the socket, received straight into the arena."""

import time
from collections.abc import Sequence

import xxhash

from dataplane.arena import ByteArray
from dataplane.frames import SequenceMemory
from dataplane.stream import Header, TransferStats, encode_header
from dataplane.wire import Wire

NAME = "tcp"
FRAME_BYTES = 4 << 20
_RECEIVE_BYTES = 1 << 20
"""At most this is received before it is digested: a part of the core's cache, and yet few system calls."""


class TcpHolder:
    """Sends frames. When `send` returns the bytes have left the arena: there is no Ack to wait for."""

    needs_ack = False
    frame_bytes = FRAME_BYTES

    def send(self, wire: Wire, head: bytes, data: Header, views: Sequence[ByteArray], timeout_s: float) -> None:
        """Send `head`, the frame's header and its bytes. Raises WireClosedError, WireTimeoutError."""
        wire.send([head + encode_header(data), *views], timeout_s)


class TcpReader:
    """Receives frames into the reader's arena."""

    needs_ack = False

    def __init__(self, target: SequenceMemory, *, digests: bool) -> None:
        self._target = target
        self._digests = digests

    def land(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        """Receive the frame's bytes and return their digest. Raises WireClosedError, WireTimeoutError."""
        hasher = xxhash.xxh3_64()
        clock = time.perf_counter_ns
        for target in self._target.views(data):
            view = target.data
            while view:
                started = clock()
                received = wire.receive_into(view[:_RECEIVE_BYTES], deadline)
                arrived = clock()
                stats.copy_ns += arrived - started
                if self._digests:  # now, while it is in the cache
                    hasher.update(view[:received])
                    stats.verify_ns += clock() - arrived
                view = view[received:]
        return hasher.intdigest() if self._digests else 0
