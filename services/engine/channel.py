"""Messages between two processes of one machine over a connected pair of sockets.

Each side trusts the other's intent, not its state: what does not decode ends the connection.
"""

import contextlib
import os
import select
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

MAX_MESSAGE_BYTES = 64 << 20
"""Longer ones are nonsense: the longest prompt that a gateway takes has a few MiB."""
READ_BYTES = 256 << 10
LAST_WORDS_S = 2.0
"""So long a side that ends waits for the other to take what it has to send."""
LENGTH = struct.Struct("<I")
"""Stands before each message."""

ReceivedT = TypeVar("ReceivedT")


class IpcError(Exception):
    """The other process sends what is no message, or none that makes sense now."""


class Channel(Generic[ReceivedT]):
    """One side's end. `send_message` may be called from any thread and waits for nobody: what the socket does not take
    at once goes out while one thread is in `wait_messages`. `bell`: an eventfd that ends this wait too; it is closed
    with the channel."""

    def __init__(self, sock: socket.socket, bell: int, receives: Any) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._bell = bell
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ReceivedT] = msgspec.msgpack.Decoder(receives)
        self._lock = threading.Lock()
        self._is_closed = False
        self._unsent = bytearray()
        self._unread = bytearray()
        self._poll = select.poll()
        self._poll.register(bell, select.POLLIN)

    def send_message(self, message: msgspec.Struct) -> None:
        """Put a message in line. Where nobody is there any more, `wait_messages` raises."""
        with self._lock:
            if self._is_closed:
                return
            data = self._encoder.encode(message)
            self._unsent += LENGTH.pack(len(data))
            self._unsent += data
            if len(self._unsent) == len(data) + LENGTH.size:
                self._send_on()
            if self._unsent:
                os.eventfd_write(self._bell, 1)

    def wait_messages(self, timeout_s: float | None = None) -> list[ReceivedT]:
        """Wait until a message has come, the bell has rung or the time is over; return the messages. Raises
        EOFError, IpcError."""
        with self._lock:
            wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
        self._poll.register(self._socket, wanted)
        ready = dict(self._poll.poll(None if timeout_s is None else timeout_s * 1000))
        if self._bell in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
        events = ready.get(self._socket.fileno(), 0)
        if events & select.POLLOUT:
            with self._lock:
                self._send_on()
        return self._read() if events & ~select.POLLOUT else []

    def close(self) -> None:
        """Send what waits, for a moment at most, and end: nothing is sent or received any more. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._socket.settimeout(LAST_WORDS_S)
                self._socket.sendall(self._unsent)
            self._socket.close()
            os.close(self._bell)

    def _send_on(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:  # nobody reads any more
            sent = len(self._unsent)
        del self._unsent[:sent]

    def _read(self) -> list[ReceivedT]:
        # A connection that is reset is an end like one that is closed: the other process is gone in both cases.
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError(str(error)) from error
        if not data:
            raise EOFError("the other side has ended")
        self._unread += data
        # Decode all whole messages; the beginning of a further one waits in `_unread` for the next call.
        received: list[ReceivedT] = []
        at = 0
        while len(self._unread) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._unread, at)
            # Check the length before waiting for the rest: a broken prefix could claim 4 GiB.
            if length > MAX_MESSAGE_BYTES:
                raise IpcError(f"a message of {length} bytes")
            end = at + LENGTH.size + length
            if len(self._unread) < end:
                break
            try:
                received.append(self._decoder.decode(memoryview(self._unread)[at + LENGTH.size : end]))
            except msgspec.MsgspecError as error:
                raise IpcError(str(error)) from error
            at = end
        del self._unread[:at]
        return received
