"""A half's connection to its holder: made by a thread, and made anew once a second where there is none.

vLLM's threads only look at what has come, and put what they send in line: a holder that is slow, stopped or gone costs
them nothing but KV that is computed again.
"""

import contextlib
import logging
import os
import socket
import threading
import time

import msgspec

from schemas.attach import (
    FromScheduler,
    FromWorker,
    Have,
    Hello,
    HelloRefused,
    Off,
    Proven,
    SlotsGiven,
    ToHalf,
    Welcome,
)
from services.engine.channel import Channel, IpcError
from services.errors import UserError

log = logging.getLogger(__name__)

RETRY_S = 1.0
FIRST_ANSWER_S = 60.0
"""So long a server that starts waits for a holder's first answer: it takes and clears its memory before."""
MAX_ANSWERS = 4_096
"""That nobody has taken: of requests that have ended before they came."""


class HolderClient:
    """One half's. `start` it once. What has come is read under `changed`, which is notified of each message."""

    def __init__(self, path: str, hello: Hello) -> None:
        self._path = path
        self._hello = hello
        self.changed = threading.Condition()
        """Of what follows, up to the empty line."""
        self.welcome: Welcome | None = None
        """None: there is no holder now, or it has not answered yet."""
        self.is_proven = False
        self.off_reason = ""
        """Why nothing is shared in this life of the server."""
        self._answers: dict[int, Have] = {}
        self._slots: list[int] = []
        self._refill_s = 0.0
        """When slots may be asked for again, by the monotonic clock."""

        self._tried = threading.Event()
        self._closing = threading.Event()
        self._final = ""
        self._channel: Channel[ToHalf] | None = None
        self._socket: socket.socket | None = None
        """While there is a connection."""
        self._thread = threading.Thread(target=self._run, name="kvmesh holder", daemon=True)

    def start(self, *, required: bool) -> None:
        """Connect. Return once the holder has answered, or there is none. Raises UserError: it has refused this server,
        or one is `required`."""
        self._thread.start()
        self._tried.wait(FIRST_ANSWER_S)
        with self.changed:
            welcome = self.welcome
        if self._final:
            raise UserError(f"the holder at {self._path} does not take this server: {self._final}")
        if welcome is None and required:
            raise UserError(f'there is no holder at {self._path}: start `kvmesh attach`, or leave out "required"')
        if welcome is None:
            log.warning("kvmesh: there is no holder at %s yet: all is computed here", self._path)

    def send_holder(self, message: FromScheduler | FromWorker) -> None:
        """Put a message in line; without a holder it is forgotten."""
        with self.changed:
            if self._channel is not None:
                self._channel.send_message(message)

    def close(self) -> None:
        """End the connection, which the thread waits on."""
        self._closing.set()
        with self.changed, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join()

    # What has come, for the scheduler half: under `changed`.

    def take_answer(self, number: int) -> Have | None:
        return self._answers.pop(number, None)

    def take_slots(self, num_slots: int) -> list[int]:
        """Return empty slots, fewer where there are not so many."""
        taken, self._slots = self._slots[:num_slots], self._slots[num_slots:]
        return taken

    def num_slots(self) -> int:
        return len(self._slots)

    def may_refill(self) -> bool:
        """Return whether slots may be asked for now; once it has, not before the answer, or a second later."""
        if (now_s := time.monotonic()) < self._refill_s:
            return False
        self._refill_s = now_s + RETRY_S
        return True

    # The thread.

    def _run(self) -> None:
        while not self._closing.is_set() and not self._final:
            try:
                self._connect_once()
            except (OSError, EOFError, IpcError):
                pass  # there is none, or it has ended
            except Exception:
                log.exception("kvmesh: the connection to the holder has failed")
            self._lost()
            self._tried.set()
            self._closing.wait(RETRY_S)

    def _connect_once(self) -> None:
        """Serve one connection to its end. Raises OSError, EOFError, IpcError."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(RETRY_S)
            sock.connect(self._path)
            channel: Channel[ToHalf] = Channel(sock, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), ToHalf)
            channel.send_message(msgspec.structs.replace(self._hello, off=self.off_reason))
            with self.changed:
                self._socket = sock
            try:
                while not self._closing.is_set():
                    for message in channel.wait_messages():
                        self._take(channel, message)
            finally:
                with self.changed:
                    self._socket = None
                channel.close()

    def _take(self, channel: Channel[ToHalf], message: ToHalf) -> None:
        with self.changed:
            match message:
                case Welcome():
                    self.welcome, self._channel = message, channel
                    log.info("kvmesh: attached to the holder at %s", self._path)
                case HelloRefused(reason=reason, is_final=is_final):
                    self._final = reason if is_final else ""
                    log.warning("kvmesh: the holder does not take this server: %s", reason)
                case Have(number=number):
                    self._answers[number] = message
                    while len(self._answers) > MAX_ANSWERS:
                        del self._answers[next(iter(self._answers))]
                case SlotsGiven(slots=slots):
                    self._slots += slots
                    self._refill_s = 0.0 if slots else self._refill_s
                case Proven():
                    self.is_proven = not self.off_reason
                    log.info("kvmesh: the canary has proven this server: it shares from now on")
                case Off(reason=reason):
                    self.is_proven, self.off_reason = False, reason
                    log.error("kvmesh: this server shares no more: %s", reason)
            self.changed.notify_all()
        if isinstance(message, Welcome | HelloRefused):
            self._tried.set()

    def _lost(self) -> None:
        """What the holder gave is its own again."""
        with self.changed:
            was_there, self.welcome, self._channel = self.welcome is not None, None, None
            self.is_proven, self._refill_s = False, 0.0
            self._answers.clear()
            self._slots.clear()
            self.changed.notify_all()
        if was_there and not self._closing.is_set():
            log.warning("kvmesh: the holder at %s is gone: all is computed here until there is one", self._path)
