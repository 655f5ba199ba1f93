"""The data plane of a simulation: the real holder and reader in cooperative threads, over a network with faults.

A process is named by its host: `name`, or `name.2` when it was started again. Carriers as on one machine: "loopback"
and "shm" copy from the holder's arena at the reader's own pace; over "tcp" the bytes cross.
"""

import contextvars
import functools
import mmap
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np

from dataplane.blocks.layout import ArenaShape
from dataplane.blocks.ticket import TicketSecrets
from dataplane.carriers import loopback, shm, tcp
from dataplane.carriers.carrier import AUTO, KVArena, ReaderEnd
from dataplane.carriers.host import HostArena
from dataplane.carriers.shm import SharedReader, holder_memory
from dataplane.ends.choice import CarrierChoice, CarrierImpossibleError
from dataplane.ends.connections import Cancellation
from dataplane.ends.reader import PlaneReader
from dataplane.ends.server import LeaseGate, PlaneServer, ServerOptions
from dataplane.memory import frames
from dataplane.memory.arena import HEADER_BYTES, ArenaMissingError
from dataplane.memory.checksum import FrameHash
from dataplane.memory.extent import Extent
from dataplane.memory.frames import Rows, SequenceMemory
from dataplane.memory.rows import SequenceRuns
from dataplane.protocol.stream import Accepted, Header, TransferFailedError, TransferStats
from dataplane.protocol.wire import Thread, Wire
from dataplane.times import PlaneTimes
from schemas.handoff import Endpoint
from schemas.kv import ReadEnd
from services.holder.platform import Platform
from services.sim.platform.connection import Connection, SimWire, StreamFault, StreamFaultKind
from services.sim.platform.threads import CoThread, current, now_s, pause, spawn

_STREAM_FAULTS: tuple[StreamFaultKind, ...] = ("truncation", "corruption", "stall", "slowness")
_CARRIERS = (loopback.NAME, shm.NAME, tcp.NAME)
_FIRST_PORT = 1024
_PAUSES_PER_FRAME = 3
_MIN_COPIED_BYTES = 1024


class StreamFaults(Protocol):
    """Decides which fault a stream gets, as it is opened."""

    def refuses(self, reader_host: str, holder_host: str) -> bool:
        """Return whether a new connection is refused."""
        ...

    def on_stream(self, reader_host: str, holder_host: str) -> StreamFault | None: ...


class ChanceFaults:
    """Each kind of fault happens to its share of the streams."""

    def __init__(self, rng: random.Random) -> None:
        self.shares: dict[str, float] = {}
        """By kind: a StreamFaultKind, or "refusal"."""
        self._rng = rng

    def refuses(self, reader_host: str, holder_host: str) -> bool:
        return self._strikes("refusal")

    def on_stream(self, reader_host: str, holder_host: str) -> StreamFault | None:
        for kind in _STREAM_FAULTS:
            if self._strikes(kind):
                at_byte = int(2 ** self._rng.uniform(0.0, 14.0))  # among the first words as often as in the KV
                return StreamFault(kind, at_byte, self._rng.uniform(0.02, 3.0))
        return None

    def _strikes(self, kind: str) -> bool:
        share = self.shares.get(kind, 0.0)
        return share > 0.0 and self._rng.random() < share


class SimNetwork:
    """The listening servers and the connections between them. One for each simulation."""

    def __init__(
        self,
        rng: random.Random,
        *,
        latency_s: tuple[float, float] = (0.0001, 0.0006),
        bytes_per_s: float = 5e6,
        faults: StreamFaults | None = None,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self._chance_faults = ChanceFaults(random.Random(rng.getrandbits(64)))
        self._faults = self._chance_faults if faults is None else faults
        self._rng = rng
        self._latency_s = latency_s
        self._servers: dict[tuple[str, int], SimPlaneServer] = {}
        self._next_port = _FIRST_PORT
        self._connections: dict[Connection, None] = {}
        self._held_until: dict[tuple[str, str], float] = {}
        self._dialling: dict[CoThread, None] = {}
        self._dead: set[str] = set()

    @property
    def num_connections(self) -> int:
        """Connections that at least one end has open."""
        return len(self._connections)

    # What goes wrong.

    def kill(self, host: str) -> None:
        """A process has died: its connections break, and neither its server nor its memory can be reached."""
        self._dead.add(host)
        for address in [address for address in self._servers if address[0] == host]:
            del self._servers[address]
        for connection in [
            connection for connection in self._connections if host in (connection.reader_host, connection.holder_host)
        ]:
            connection.reset()
            del self._connections[connection]

    def partition(self, name: str, until_s: float, other: str = "") -> None:
        """Hold back everything between the process of this name and `other`, or all others, until this time. Nobody
        gets an error."""
        self._held_until[(name, other)] = until_s
        self._notify_all()

    def set_fault(self, kind: str, share: float) -> None:
        """Give this fault to such a share of the streams that are opened from now on."""
        self._chance_faults.shares[kind] = share

    def heal(self) -> None:
        """End all faults and partitions. Dead processes stay dead."""
        self._chance_faults.shares.clear()
        self._held_until.clear()
        self._notify_all()

    # What the plane's ends do.

    def latency_s(self) -> float:
        """Return how long a new connection's messages take."""
        return self._rng.uniform(*self._latency_s)

    def listen(self, host: str, server: "SimPlaneServer") -> int:
        """Make this server reachable; return its port. Raises OSError when its process has been killed."""
        if host in self._dead:
            raise OSError(f"{host} is dead")
        self._next_port += 1
        self._servers[(host, self._next_port)] = server
        return self._next_port

    def unlisten(self, server: "SimPlaneServer") -> None:
        for address in [address for address, found in self._servers.items() if found is server]:
            del self._servers[address]

    def server(self, endpoint: Endpoint) -> "SimPlaneServer | None":
        """Return who listens there."""
        return self._servers.get((endpoint.host, endpoint.port))

    def arena(self, nonce: str) -> HostArena | None:
        """Return the arena of a process that lives and serves."""
        return next((s.arena for s in self._servers.values() if s.arena.nonce == nonce), None)

    def connect(self, reader_host: str, endpoint: Endpoint, timeout_s: float, cancellation: Cancellation) -> SimWire:
        """Return the reader's end of a new connection. Raises TransferFailedError."""
        latency_s = self.latency_s()
        self._pass(reader_host, endpoint.host, 2 * latency_s, timeout_s, cancellation)
        server = self.server(endpoint)
        if server is None or reader_host in self._dead or self._faults.refuses(reader_host, endpoint.host):
            raise TransferFailedError(ReadEnd.CONNECT, f"{endpoint.host}:{endpoint.port}: connection refused")
        connection = Connection(reader_host, endpoint.host, latency_s=latency_s, bytes_per_s=self.bytes_per_s)
        connection.held_until = functools.partial(self._held, reader_host, endpoint.host)
        connection.on_closed = lambda: self._connections.pop(connection, None)
        self._connections[connection] = None
        ours, theirs = connection.ends()
        if not server.admit(ours, reader_host):
            theirs.close()
            raise TransferFailedError(ReadEnd.CONNECT, f"{endpoint.host}:{endpoint.port}: connection refused")
        return theirs

    def begin_stream(self, wire: SimWire) -> None:
        """A read begins on this connection: decide which fault it gets."""
        connection = wire.connection
        connection.to_reader.begin_stream(self._faults.on_stream(connection.reader_host, connection.holder_host))

    def _pass(self, source: str, target: str, takes_s: float, timeout_s: float, cancellation: Cancellation) -> None:
        """Wait as long as the handshake takes. Raises TransferFailedError."""
        deadline, done_at = now_s() + timeout_s, now_s() + takes_s
        dialling = _SimDialling(current())
        cancellation.watch(dialling)
        self._dialling[dialling.thread] = None
        try:
            while (now := now_s()) < (ready_at := max(done_at, self._held(source, target))):
                if now >= deadline:
                    raise TransferFailedError(ReadEnd.CONNECT, f"{target}: timed out")
                pause(min(deadline, ready_at) - now)
                cancellation.raise_if_cancelled()
        finally:
            del self._dialling[dialling.thread]
            cancellation.unwatch(dialling)

    def _held(self, a: str, b: str) -> float:
        """Return until when nothing passes between these two, 0 where nothing is held back."""
        if not self._held_until:
            return 0.0
        names = (_name_of(a), _name_of(b))
        held = (until for (one, other), until in self._held_until.items() if one in names and other in ("", *names))
        return max(held, default=0.0)

    def _notify_all(self) -> None:
        for connection in self._connections:
            connection.notify_readers()
        for thread in self._dialling:
            thread.wake()


class _SimDialling:
    """A thread that waits to be connected."""

    def __init__(self, thread: CoThread) -> None:
        self.thread = thread

    def cut(self) -> None:
        self.thread.wake()


class SimPlaneServer(PlaneServer):
    """A plane server on the simulated network. On the loop `close` does not wait: the streams end as the loop goes
    on."""

    def __init__(
        self,
        network: SimNetwork,
        host: str,
        arena: KVArena,
        shape: ArenaShape,
        gate: LeaseGate,
        secrets: TicketSecrets,
        options: ServerOptions | None = None,
    ) -> None:
        self.arena: HostArena = host_arena(arena)
        self.gate = gate
        super().__init__(self.arena, shape, gate, secrets, options)
        self._network = network
        self._host = host
        self._home = contextvars.copy_context()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            host=self._host,
            port=self._port,
            carriers=self.options.carriers,
            arena=self.arena.name,
            arena_nonce=self.arena.nonce,
        )

    def admit(self, wire: SimWire, reader_host: str) -> bool:
        """Serve a new connection. False: it is refused."""
        return self._admit(wire, reader_host)

    def _listen(self) -> None:
        self._port = self._network.listen(self._host, self)

    def _stop_listening(self) -> None:
        self._network.unlisten(self)

    def _new_thread(self, run: Callable[[], None], name: str) -> Thread:
        return CoThread(run, name, self._home)


class SimPlaneReader(PlaneReader):
    """A plane reader on the simulated network."""

    def __init__(
        self,
        network: SimNetwork,
        host: str,
        arena: KVArena,
        shape: ArenaShape,
        secrets: TicketSecrets,
        times: PlaneTimes | None = None,
    ) -> None:
        super().__init__(arena, shape, secrets, times)
        self._memory = host_arena(arena)
        self._network = network
        self._host = host

    def _start_thread(self, run: Callable[[], None]) -> Thread:
        return spawn(run, "kv-read")

    def _choices(self, wanted: str, endpoint: Endpoint) -> list[CarrierChoice]:
        for carrier in _CARRIERS if wanted == AUTO else (wanted,):
            is_near = carrier == tcp.NAME or self._network.arena(endpoint.arena_nonce) is not None
            if carrier in endpoint.carriers and is_near:
                return [CarrierChoice(carrier, "one simulation")]
        raise CarrierImpossibleError(wanted, endpoint.carriers)

    def _dial(self, carrier: str, endpoint: Endpoint, timeout_s: float, cancellation: Cancellation) -> Wire:
        return self._network.connect(self._host, endpoint, timeout_s, cancellation)

    def _begin(self, wire: Wire) -> None:
        assert isinstance(wire, SimWire)
        self._network.begin_stream(wire)

    def _end(
        self, endpoint: Endpoint, accepted: Accepted, target: SequenceRuns, extent: Extent, frame_hash: FrameHash
    ) -> ReaderEnd:
        if accepted.carrier == tcp.NAME:
            return super()._end(endpoint, accepted, target, extent, frame_hash)
        arena = self._network.arena(endpoint.arena_nonce)
        if arena is None:
            raise ArenaMissingError(endpoint.arena, "the holder has gone")
        source = holder_memory(arena.array, accepted, self._shape, extent)
        return _PacedReader(source, SequenceMemory(self._memory.array, target), frame_hash)


class _PacedReader(SharedReader):
    """Copies from the holder's memory piece by piece, so that other threads run in between."""

    def take_frame(self, wire: Wire, data: Header, stats: TransferStats, deadline: float) -> int:
        assert isinstance(wire, SimWire)
        source, target = self._source.rows(data), self._target.rows(data)
        arrived = np.concatenate([piece.flatten() for piece in _paced(wire, source.views())])
        rows = frames.packed_rows(arrived, source.row_bytes, len(source.parts))
        return frames.copy(rows, target, stats, self._hash.new(data.sequence))


def _paced(wire: SimWire, views: Sequence[Rows]) -> Iterator[Rows]:
    total = sum(rows.nbytes for rows in views)
    step = max(_MIN_COPIED_BYTES, -(-total // _PAUSES_PER_FRAME))
    room = 0
    for rows in views:
        num_rows = max(1, step // rows.shape[1])
        for at in range(0, len(rows), num_rows):
            piece = rows[at : at + num_rows]
            if room <= 0:
                pause(wire.connection.transfer_s(min(step, total)))
                room = step
            room -= piece.nbytes
            total -= piece.nbytes
            yield wire.copied(piece)


def _name_of(host: str) -> str:
    return host.partition(".")[0]


def host_arena(arena: KVArena) -> HostArena:
    """Return the arena, which is in host memory as all of a simulation are."""
    assert isinstance(arena, HostArena)
    return arena


def memory_arena(shape: ArenaShape, host: str) -> HostArena:
    """Return an arena in memory of its own, with no name on this machine."""
    return HostArena(host, f"nonce-{host}", mmap.mmap(-1, HEADER_BYTES + shape.arena_bytes), owned=False)


def sim_platform(
    network: SimNetwork,
    host: str,
    on_gate: Callable[[LeaseGate], None] = lambda _: None,
    make_reader: Callable[..., SimPlaneReader] = SimPlaneReader,
) -> Platform:
    """Return the platform of one simulated process. `on_gate` is called with each lease gate that a server is made
    with."""

    def make_server(
        arena: KVArena, shape: ArenaShape, gate: LeaseGate, secrets: TicketSecrets, options: ServerOptions
    ) -> PlaneServer:
        on_gate(gate)
        return SimPlaneServer(network, host, arena, shape, gate, secrets, options)

    return Platform(
        make_arena=functools.partial(memory_arena, host=host),
        make_server=make_server,
        make_reader=functools.partial(make_reader, network, host),
    )
