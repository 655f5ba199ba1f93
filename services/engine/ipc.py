"""Between a worker and its engine's process: messages over a pair of sockets, and, for each layer of a prompt that is
handed over, a number in memory that both have.

Each side trusts the other's intent, not its state: what does not decode ends the engine's process.
"""

import contextlib
import mmap
import os
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import ArenaShape
from services.config import EngineConfig, WorkerConfig
from services.engine.checkpoint import Checkpoint
from services.engine.limits import LAYER_ROWS
from services.engine.messages import EngineMessage, ToEngine, ToWorker

MAX_MESSAGE_BYTES = 64 << 20
"""Longer ones are nonsense: the longest prompt that a gateway takes has a few MiB."""
READ_BYTES = 256 << 10
MAX_IN_STEP = 1_024
"""Sequences of one step that are named: an engine computes no more at once."""
LAST_WORDS_S = 2.0
"""So long a side that ends waits for the other to take what it has to send."""
_LENGTH = struct.Struct("<I")


class LoadEngine(EngineMessage, frozen=True):
    """The first: make this engine, in this arena."""

    checkpoint: Checkpoint
    shape: ArenaShape
    arena: str
    nonce: str
    worker: WorkerConfig
    engine: EngineConfig


class EngineReady(EngineMessage, frozen=True):
    """`device`: what is reported of where it runs. `eos_token_ids`: what ends an answer."""

    device: str
    eos_token_ids: tuple[int, ...]


class EngineRefused(EngineMessage, frozen=True):
    """It cannot be made: a line for the user."""

    reason: str


ToProcess = LoadEngine | ToEngine
FromProcess = EngineReady | EngineRefused | ToWorker
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

    def send_message(self, message: EngineMessage) -> None:
        """Put a message in line. Where nobody is there any more, `wait_messages` raises."""
        with self._lock:
            if self._is_closed:
                return
            data = self._encoder.encode(message)
            self._unsent += _LENGTH.pack(len(data))
            self._unsent += data
            if len(self._unsent) == len(data) + _LENGTH.size:
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
        while len(self._unread) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._unread, at)
            # Check the length before waiting for the rest: a broken prefix could claim 4 GiB.
            if length > MAX_MESSAGE_BYTES:
                raise IpcError(f"a message of {length} bytes")
            end = at + _LENGTH.size + length
            if len(self._unread) < end:
                break
            try:
                received.append(self._decoder.decode(memoryview(self._unread)[at + _LENGTH.size : end]))
            except msgspec.MsgspecError as error:
                raise IpcError(str(error)) from error
            at = end
        del self._unread[:at]
        return received


class StepTable:
    """What the worker is to see of a step while it runs, in memory that both have; the engine's process writes.

    `rows`: how far each layer of each sequence that is handed over is written, [rows, layers]. Each process has a table
    of its own: what a dead one may have reported of its last step is nobody's.
    """

    def __init__(self, fd: int, num_layers: int) -> None:
        numbers = np.frombuffer(mmap.mmap(fd, 0), np.int64)
        self._step = numbers[: 1 + MAX_IN_STEP]
        self.rows: npt.NDArray[np.int64] = numbers[1 + MAX_IN_STEP :].reshape(-1, num_layers)

    def begin_step(self, numbers: Sequence[int]) -> None:
        """Note whom the step computes that begins now; none: it has ended."""
        shown = numbers[:MAX_IN_STEP]
        self._step[1 : 1 + len(shown)] = shown
        self._step[0] = len(shown)

    def in_step(self) -> list[int]:
        """Return whom the step computes that runs."""
        return self._step[1 : 1 + int(self._step[0])].tolist()


def table_memory(num_layers: int) -> int:
    """Return the file descriptor of a new table's memory, all zeros; pages are taken as rows are used."""
    fd = os.memfd_create("kvmesh-step", os.MFD_CLOEXEC)
    os.ftruncate(fd, (1 + MAX_IN_STEP + LAYER_ROWS * num_layers) * 8)
    return fd


class TableListener:
    """Announces the layers of one sequence by a row of the table (`LayerListener`)."""

    def __init__(self, row: npt.NDArray[np.int64], bell: int) -> None:
        self._row = row
        self._bell = bell
        self._fence = threading.Lock()

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        # Two lock cycles keep any processor from showing the number before the KV that it speaks of.
        with self._fence:
            pass
        with self._fence:
            self._row[layer] = num_tokens
        os.eventfd_write(self._bell, 1)
