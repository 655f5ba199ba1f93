"""Serves reads of one arena: a listening socket for all carriers, a thread per stream, bounded."""

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dataplane import limits
from dataplane.addresses import listen_near, listen_on_any
from dataplane.blocks.layout import ArenaShape
from dataplane.blocks.ticket import TicketSecrets
from dataplane.carriers import loopback, shm, tcp
from dataplane.carriers.carrier import KVArena
from dataplane.ends.sender import HolderContext, HolderStream, JunkError, PlaneEncryption
from dataplane.lasting import lasting_thread
from dataplane.protocol.gate import LeaseGate
from dataplane.protocol.reasons import RefusalCode
from dataplane.protocol.stream import Kind, StreamRefused, encode_frame
from dataplane.protocol.wire import SocketWire, Thread, Wire, WireClosedError, WireTimeoutError
from dataplane.times import PlaneTimes
from schemas.handoff import Endpoint

__all__ = ["LeaseGate", "PlaneServer", "ServerOptions"]

log = logging.getLogger(__name__)

_WRONG = frozenset(
    {
        RefusalCode.MALFORMED,
        RefusalCode.VERSION,
        RefusalCode.TICKET,
        RefusalCode.FINGERPRINT,
        RefusalCode.CARRIER,
        RefusalCode.RANGE,
    }
)
"""What no reader of ours asks for. A lease that has ended meanwhile is none of these: its reader was only late."""


@dataclass(slots=True, frozen=True)
class ServerOptions:
    """`carriers`: what is offered, of those of the arena. `advertise_host`: what is announced for readers
    to connect to, `host` unless given. `ports`: it listens on the first that is free."""

    carriers: tuple[str, ...] = (shm.NAME, tcp.NAME)
    host: str = "127.0.0.1"
    ports: Sequence[int] = (0,)
    advertise_host: str = ""
    digests: bool = True
    encryption: PlaneEncryption = "auto"
    max_streams: int = limits.MAX_STREAMS
    times: PlaneTimes = field(default_factory=PlaneTimes)


@dataclass(slots=True, eq=False)
class _Live:
    """A connection, and who serves its streams."""

    wire: Wire
    peer: str
    stream: HolderStream
    thread: Thread | None = None
    has_made_room: bool = False
    """It is cut, and its thread about to end: it takes up no place any more."""


class PlaneServer:
    """Streams what `gate` allows out of `arena`. `num_junk` counts peers that did not speak the protocol,
    `num_refused` readers that asked for what is not theirs."""

    def __init__(
        self,
        arena: KVArena,
        shape: ArenaShape,
        gate: LeaseGate,
        secrets: TicketSecrets,
        options: ServerOptions | None = None,
    ) -> None:
        self.arena = arena
        self.options = options or ServerOptions()
        self.num_junk = 0
        self.num_refused = 0
        # What all streams share is frozen: each stream runs on a thread of its own.
        self._context = HolderContext(
            arena=arena,
            shape=shape,
            gate=gate,
            secrets=secrets,
            carriers=self.options.carriers,
            digests=self.options.digests,
            encryption=self.options.encryption,
            open_timeout_s=self.options.times.open_s,
            idle_timeout_s=self.options.times.holder_idle_s,
        )
        # The lock guards the counters, the connections and the log times: acceptors and streams change them.
        self._lock = threading.Lock()
        self._streams: list[_Live] = []
        self._closing = False
        self._listeners: list[socket.socket] = []
        self._port = 0
        self._acceptors: list[Thread] = []
        self._logged_at: dict[str, float] = {}

    @property
    def endpoint(self) -> Endpoint:
        """Where readers find this server. Only after `serve_streams`."""
        endpoint = Endpoint(
            host=self.options.advertise_host or self.options.host,
            port=self._port,
            carriers=self.options.carriers,
            arena=self.arena.name,
            arena_nonce=self.arena.nonce,
        )
        return self.arena.describe(endpoint)

    @property
    def num_streams(self) -> int:
        """The streams under way, not the connections that wait for a next one."""
        with self._lock:
            return sum(live.stream.is_opened for live in self._streams)

    def serve_streams(self) -> None:
        """Listen and serve. Raises OSError when the address cannot be bound."""
        assert not self._acceptors and not self._closing, "a server is started once"
        self._listen()

    def connect_locally(self) -> Wire:
        """Return the reader's end of a new stream inside this process. Raises ConnectionError when closing."""
        ours, theirs = self._pair()
        if not self._admit(ours, "this process"):
            theirs.close()
            raise ConnectionRefusedError("the plane server is closing")
        return theirs

    def close(self) -> None:
        """Cut all streams and wait for their threads: when it returns, nothing reads the arena. Idempotent."""
        with self._lock:
            self._closing = True
            live = list(self._streams)
        self._stop_listening()
        for stream in live:
            stream.wire.cut()
        for stream in live:
            if stream.thread is not None:
                stream.thread.join()

    # What the simulator does in its own way.

    def _listen(self) -> None:
        if set(self.options.carriers) - {loopback.NAME}:
            self._listeners = [listen_on_any(self.options.host, self.options.ports, limits.BACKLOG)]
            self._port = self._listeners[0].getsockname()[1]
            if shm.NAME in self.options.carriers:
                self._listeners.append(listen_near(shm.address_of(self.arena.nonce, self._port), limits.BACKLOG))
        for listener in self._listeners:
            accept = functools.partial(self._accept, listener)
            acceptor = lasting_thread(accept, "kv-accept", lambda: self._closing)
            self._acceptors.append(acceptor)
            acceptor.start()
        loopback.register(loopback.LocalServer(self.arena, self.connect_locally))

    def _stop_listening(self) -> None:
        loopback.unregister(self.arena)
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for acceptor in self._acceptors:
            acceptor.join()
        for listener in self._listeners:
            listener.close()

    def _pair(self) -> tuple[Wire, Wire]:
        """Return the holder's and the reader's end of a new wire."""
        ours, theirs = socket.socketpair()
        return SocketWire(ours), SocketWire(theirs)

    def _new_thread(self, run: Callable[[], None], name: str) -> Thread:
        return threading.Thread(target=run, name=name, daemon=True)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                self._log_peer("accept", f"cannot accept: {error}")
                time.sleep(
                    limits.ACCEPT_PAUSE_S
                )  # out of descriptors: a moment for streams to end; connections wait in the backlog
                continue
            peer, wire = address[0] if sock.family != socket.AF_UNIX else "this host", SocketWire(sock)
            try:
                self._admit(wire, peer)
            except Exception as error:  # noqa: BLE001  (there is no thread to be had, say: the next one is served)
                wire.close()
                self._log_peer(peer, f"cannot serve: {type(error).__name__}: {error}")

    def _admit(self, wire: Wire, peer: str) -> bool:
        """Start a thread that serves `wire`, or refuse it. Returns whether the wire was taken at all."""
        live = _Live(wire, peer, HolderStream(self._context, wire, peer))
        with self._lock:
            # `close` sets the flag and copies the list under this lock: no stream starts that `close` does not see.
            if self._closing:
                wire.close()
                return False
            # A connection that was cut for another one takes no place, though its thread may not have ended yet.
            places = [live for live in self._streams if not live.has_made_room]
            full = len(places) >= self.options.max_streams
            if full and (silent := next((live for live in places if not live.stream.is_opened), None)) is not None:
                silent.wire.cut()  # one that wants nothing, or has not asked yet, makes room
                silent.has_made_room = True
                full = False
            if not full:
                # Start the thread under the lock: `close` joins each listed stream, which needs a started thread.
                live.thread = self._new_thread(lambda: self._serve(live), "kv-serve")
                self._streams.append(live)
                try:
                    live.thread.start()
                except BaseException:
                    self._streams.remove(live)
                    raise
        # Refuse outside the lock, as sending may block: streams need the lock to end.
        if full:
            refused = StreamRefused(code=RefusalCode.BUSY, detail=f"{self.options.max_streams} streams are open")
            with contextlib.suppress(WireClosedError, WireTimeoutError):
                wire.send([encode_frame(Kind.REFUSED, refused)], self.options.times.busy_send_s)
            wire.close()
        return True

    def _serve(self, live: _Live) -> None:
        try:
            live.stream.run()
            if live.stream.refused in _WRONG:
                with self._lock:
                    self.num_refused += 1
        except JunkError as junk:
            if not self._closing:
                with self._lock:
                    self.num_junk += 1
                self._log_peer(live.peer, f"dropped what is no KV reader: {junk}")
        except Exception:
            log.exception("serving a KV stream to %s failed", live.peer)
        finally:
            with self._lock:
                self._streams.remove(live)
            live.wire.close()

    def _log_peer(self, peer: str, text: str) -> None:
        """Log a line, at most one per peer and second: anybody may knock as often as he likes."""
        now = time.monotonic()
        with self._lock:
            if now - self._logged_at.get(peer, -limits.LOG_INTERVAL_S) < limits.LOG_INTERVAL_S:
                return
            if len(self._logged_at) >= limits.MAX_LOGGED_PEERS:
                self._logged_at.clear()
            self._logged_at[peer] = now
        log.warning("peer %s: %s", peer, text)
