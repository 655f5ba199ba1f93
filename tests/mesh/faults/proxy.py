"""What lies between workers on their data plane, and between a gateway and the broker: a TCP proxy that damages, cuts,
holds or refuses what crosses.

Everybody listens on 127.0.0.1 and is reached at another address of this host, where the proxy listens on the same port.
"""

import asyncio
import contextlib
import random
import socket
from collections import Counter
from pathlib import Path

from services.sim.scenario import FaultKind

CHUNK_BYTES = 1 << 16
SLOW_S = 0.05
WIRE_FAULTS: frozenset[FaultKind] = frozenset({"truncation", "corruption", "stall", "slowness", "refusal"})
_LISTEN = "0A"


TABLE_READS = 3


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports on which a process listens. Empty where it has ended."""
    fds: list[str] = []
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile: the others count all the same
                fds.append(path.readlink().name)
    inodes = {name.removeprefix("socket:[").removesuffix("]") for name in fds if name.startswith("socket:[")}
    # The kernel hands the table out in pages: a row may be missing where sockets come and go meanwhile.
    lines = {line for _ in range(TABLE_READS) for line in Path("/proc/net/tcp").read_text().splitlines()[1:]}
    rows = [line.split() for line in lines]
    return sorted({int(row[1].rsplit(":", 1)[1], 16) for row in rows if row[3] == _LISTEN and row[9] in inodes})


class TcpProxy:
    """`num_struck` counts what was damaged, cut, held or refused, by kind. All of it belongs to one event loop."""

    def __init__(self, host: str, rng: random.Random) -> None:
        self.num_struck: Counter[str] = Counter()
        self._host = host
        self._rng = rng
        self._servers: dict[int, asyncio.Server] = {}
        self._opening = asyncio.Lock()
        self._kinds: dict[FaultKind, float] = {}
        self._cut: set[int] = set()
        self._healed = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()

    async def lead_to(self, ports: set[int]) -> None:
        """Lead to these ports of 127.0.0.1 from now on, and to no others."""
        async with self._opening:
            for port in self._servers.keys() - ports:
                self._servers.pop(port).close()
            for port in ports - self._servers.keys():
                self._servers[port] = await asyncio.start_server(
                    lambda reader, writer, port=port: self._carry(reader, writer, port), self._host, port
                )

    def strike(self, kind: FaultKind, share: float) -> None:
        """Let a fault befall this share of what crosses from now on. A refusal ends the connections that there are."""
        self._kinds[kind] = share
        if kind == "refusal":
            for writer in self._writers:
                _reset(writer)

    def cut(self, port: int) -> None:
        """Hold everything from and to this port."""
        self._cut.add(port)

    def heal(self, kind: FaultKind | None = None) -> None:
        """End one kind of fault, or all; what was held goes on."""
        if kind is None:
            self._kinds.clear()
        else:
            self._kinds.pop(kind, None)
        if kind in (None, "plane_cut"):
            self._cut.clear()
        self._healed.set()
        self._healed = asyncio.Event()

    async def close(self) -> None:
        """Listen no more, and end all connections."""
        self.heal()
        for server in self._servers.values():
            server.close()
        self._servers.clear()
        for writer in self._writers:
            _reset(writer)
        if self._carrying:
            await asyncio.wait(self._carrying)

    def _strikes(self, kind: FaultKind) -> bool:
        share = self._kinds.get(kind)
        if share is None or self._rng.random() >= share:
            return False
        self.num_struck[kind] += 1
        return True

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        if self._strikes("refusal"):
            _reset(writer)
            return
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        try:
            from_holder, to_holder = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            _reset(writer)
            return
        asking = asyncio.create_task(self._pump(reader, to_holder, port, is_answer=False))
        answering = asyncio.create_task(self._pump(from_holder, writer, port, is_answer=True))
        self._writers.add(writer)
        try:
            await asyncio.wait((asking, answering), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._writers.discard(writer)
            for task in (asking, answering):
                task.cancel()
            for end in (to_holder, writer):
                _reset(end)

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, port: int, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                while port in self._cut:
                    self.num_struck["plane_cut"] += 1
                    await self._healed.wait()
                if is_answer and self._kinds:
                    damaged = await self._befall(data)
                    if len(damaged) < len(data):
                        target.write(damaged)
                        return
                    data = damaged
                target.write(data)
                await target.drain()

    async def _befall(self, data: bytes) -> bytes:
        """Return what goes on of a chunk; fewer bytes: the connection ends there."""
        if self._strikes("stall"):
            await self._healed.wait()
        if self._strikes("slowness"):
            await asyncio.sleep(SLOW_S)
        if self._strikes("truncation"):
            return data[: self._rng.randrange(len(data))]
        if self._strikes("corruption"):
            bit = self._rng.randrange(len(data) * 8)
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            return bytes(damaged)
        return data


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection; what was written to it still goes out, in good time."""
    with contextlib.suppress(OSError, RuntimeError):
        writer.close()


def hold_port(host: str, port: int) -> socket.socket:
    """Take a port so that nobody can listen on it, and nobody is answered there, until the socket is closed. Raises
    OSError."""
    with contextlib.ExitStack() as unless_taken:
        sock = unless_taken.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last owner may linger
        sock.bind((host, port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        unless_taken.pop_all()
    return sock
