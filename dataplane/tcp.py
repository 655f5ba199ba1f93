"""The carrier between hosts: a frame's bytes follow its header on the socket, received straight into the arena."""

import time

import xxhash

from dataplane.arena import HEADER_BYTES, Arena
from dataplane.frames import SequenceMemory
from dataplane.stream import Header, TransferStats, encode_header
from dataplane.wire import Wire

NAME = "tcp"
FRAME_BYTES = 2 << 20
_MIN_UNCOPIED_BYTES = 64 << 10
"""Contiguous bytes from which a system call of their own costs less than copying them."""
_RECEIVE_BYTES = 1 << 20
"""At most this is received before it is digested: a part of the core's cache, and yet few system calls."""


class TcpHolder:
    """Sends frames, large ones without copying them: the kernel sends the arena's own pages. So the bytes have left
    this memory for certain only with the reader's Ack.
    """

    needs_ack = True
    frame_bytes = FRAME_BYTES

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def send(self, wire: Wire, head: bytes, data: Header, memory: SequenceMemory, timeout_s: float) -> None:
        """Send `head`, the frame's header and its bytes. Raises WireClosedError, WireTimeoutError."""
        head += encode_header(data)
        spans = memory.spans(data)
        if data.length >= _MIN_UNCOPIED_BYTES * len(spans):
            offset = HEADER_BYTES
            wire.send_file(head, self._arena.fileno(), [(offset + at, size) for at, size in spans], timeout_s)
        else:
            wire.send([head, *memory.views(data)], timeout_s)


class TcpReader:
    """Receives frames into the reader's arena."""

    needs_ack = True

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
