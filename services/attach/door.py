"""The socket of a holder, by which attached servers bring blocks and take them: connections, framing, digests, and the
canaries that `AttachCore` wants run.

Whoever may connect may read the KV of prompts whose tokens it knows: the socket is this user's alone, and a connection
of anybody else is closed.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from dataplane.blocks.kept import Content
from dataplane.memory.content_macs import BlockContents
from schemas.attach import (
    MAX_ATTACH_BYTES,
    Ask,
    FromScheduler,
    FromWorker,
    Half,
    Have,
    Hello,
    HelloRefused,
    Loaded,
    Saved,
    ToHalf,
    Welcome,
)
from schemas.block import split_hashes
from services.attach.bringing import Bringer
from services.attach.canary import Verdict, run_canary
from services.attach.core import (
    AttachCore,
    BlocksCame,
    Bring,
    BringEnded,
    CanaryEnded,
    EndHalf,
    GiveBlocks,
    HalfJoined,
    HalfLeft,
    HalfSent,
    Proof,
    Refuse,
    RunCanary,
    SendHalf,
    TurnedOff,
    Welcomed,
)
from services.attach.limits import MAX_SERVERS, MAX_UNSENT_BYTES
from services.attach.observe import AskSpans, AttachMetrics
from services.bus.base import BusError
from services.engine.channel import LENGTH
from services.errors import UserError
from services.files import PRIVATE_FILE, private_folder
from services.holder.core.actions import OwnersAction
from services.store.service import Guests, Store
from services.times import AttachTimes

log = logging.getLogger(__name__)

MAX_PATH_BYTES = 107
"""Of a Unix socket (`unix(7)`)."""
_PEER = struct.Struct("3i")  # pid, uid, gid
_HELLO: "msgspec.msgpack.Decoder[Hello]" = msgspec.msgpack.Decoder(Hello)
_FROM: "dict[Half, msgspec.msgpack.Decoder[FromScheduler | FromWorker]]" = {
    Half.SCHEDULER: msgspec.msgpack.Decoder(FromScheduler),
    Half.WORKER: msgspec.msgpack.Decoder(FromWorker),
}
_ENCODER = msgspec.msgpack.Encoder()

T = TypeVar("T")


class WrongMessageError(Exception):
    """What a half has sent is no message, or makes no sense."""


class Key(NamedTuple):
    """Of a half."""

    server: str
    half: Half


class Digest(NamedTuple):
    """Of a block's bytes, as long as it has this tag."""

    tag: bytes
    digest: bytes


class Listener:
    """The socket, from before the holder knows which KV it is to hold: the first server's says that.

    `check`: why a server cannot be attached here whatever is held; "": it can.
    """

    def __init__(self, check: Callable[[Hello], str], times: AttachTimes) -> None:
        self._check = check
        self._times = times
        self.first: Hello
        """The first server's, once `first_server` has returned."""
        self._has_first = asyncio.Event()
        self._door: asyncio.Future[Door] = asyncio.get_running_loop().create_future()
        self._connections: set[asyncio.Task[None]] = set()

    async def first_server(self) -> None:
        """Wait for it."""
        await self._has_first.wait()

    def open_door(self, door: "Door") -> None:
        """Let the servers in, also those that wait already."""
        self._door.set_result(door)

    async def serve_half(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        task = asyncio.current_task()
        assert task is not None, "a connection has a task"
        self._connections.add(task)
        try:
            if _is_ours(writer) and len(self._connections) <= len(Half) * MAX_SERVERS:
                await self._serve(reader, writer)
        except (WrongMessageError, ValueError) as error:
            log.warning("a connection is ended: %s", error)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            pass  # it has ended, or `close` ends it
        finally:
            self._connections.discard(task)
            writer.close()

    async def close(self) -> None:
        """End all connections."""
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(self._times.hello_s):
            hello = _decoded(_HELLO, await _read(reader))
        if reason := self._check(hello):
            await _send(writer, HelloRefused(reason, is_final=True))
            return
        if not self._has_first.is_set():
            self.first = hello
            self._has_first.set()
        # The server's end of the connection may go while the holder's memory is being made.
        door = await asyncio.shield(self._door)
        await door.serve_half(hello, reader, writer)


class Door:
    """What the listener, once the store is there, has the servers' halves served by."""

    def __init__(
        self,
        listener: Listener,
        core: AttachCore,
        store: Store,
        contents: BlockContents,
        bringer: Bringer,
        times: AttachTimes,
    ) -> None:
        self._listener = listener
        self._core = core
        self._store = store
        self._contents = contents
        self._times = times
        self._arena = store.holder.parts.arena
        (self._num_blocks,) = contents.shape.num_blocks
        self._digests: dict[int, Digest] = {}
        self._bringer = bringer
        self._writers: dict[Key, asyncio.StreamWriter] = {}
        self._measured = AttachMetrics(store.holder.measured.metrics, core)
        self._spans = AskSpans(store.holder.blocks.telemetry)
        self._joining: asyncio.StreamWriter
        """Of the connection whose `HalfJoined` is being decided on."""
        self._attachments: dict[str, str] = {}
        """By server, of those that are here: see `Welcome`."""
        self._tasks: asyncio.TaskGroup
        """The store's, from `let_in` on."""
        self._working: set[asyncio.Task[None]] = set()

    @property
    def guests(self) -> Guests:
        """The servers, as the store has them."""
        return Guests(self._core.rules(), self._carry_out, self._let_in, self._send_away, self._measured.servers)

    def _let_in(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._listener.open_door(self)

    async def _send_away(self) -> None:
        """End all connections: the servers go on by themselves."""
        for task in self._working:
            task.cancel()
        await self._listener.close()

    async def serve_half(self, hello: Hello, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a half that has said who it is."""
        key = Key(hello.server, hello.half)
        self._joining = writer
        self._store.step(HalfJoined(hello), "attach")
        if self._writers.get(key) is not writer:
            await writer.drain()  # it was refused
            return
        try:
            while True:
                message = _decoded(_FROM[key.half], await _read(reader))
                tags: tuple[bytes, ...] = ()
                if isinstance(message, Saved):
                    # Digests of what a step has saved take milliseconds: nobody else waits for them.
                    tags = await asyncio.to_thread(self._tags_of, message, hello.tenant)
                elif isinstance(message, Ask):
                    self._spans.asked(key.server, message)
                elif isinstance(message, Loaded):
                    self._spans.loaded(key.server, message)
                self._store.step(HalfSent(key.server, key.half, message, tags), "attach")
                self._measured.received(message)
        finally:
            if self._writers.get(key) is writer:
                del self._writers[key]
                self._store.step(HalfLeft(key.server, key.half), "attach")
                if key.server not in self._core.servers:
                    self._attachments.pop(key.server, None)

    def _carry_out(self, action: OwnersAction) -> None:
        match action:
            case Welcomed(server=server, half=half):
                self._writers[Key(server, half)] = self._joining
                word = self._attachments.setdefault(server, secrets.token_hex(16))
                arena = self._arena
                holder, fetch_s = self._store.holder.parts.worker_id, self._times.fetch_s
                welcome = Welcome(holder, arena.name, arena.nonce, self._num_blocks, word, fetch_s)
                self._send(Key(server, half), welcome)
            case Refuse(answer=answer):
                _put(self._joining, answer)
            case SendHalf(server=server, half=half, message=message):
                self._send(Key(server, half), message)
            case GiveBlocks():
                self._give(action)
            case Bring():
                self._start(self._bring(action))
            case BlocksCame():
                self._bringer.changed.set()
            case EndHalf(server=server, half=half, reason=reason):
                if reason:
                    log.warning("server %s: its %s half is ended: %s", server, half, reason)
                self._end(Key(server, half))
            case RunCanary(server=server):
                self._start(self._run_canary(server))
            case TurnedOff(server=server, reason=reason, num_dropped=num_dropped):
                self._measured.turned_off()
                log.error("server %s shares no more: %s; %d blocks of its are given up", server, reason, num_dropped)
            case _:
                raise AssertionError(f"{type(action).__name__} is nobody's")

    # Answers.

    def _give(self, action: GiveBlocks) -> None:
        """Answer at once where all digests are known, as they are of blocks that servers have saved."""
        known = [self._known_digest(block) for block in action.blocks]
        if all(known):
            self._have(action, b"".join(known))
        else:
            self._start(self._give_later(action))

    async def _give_later(self, action: GiveBlocks) -> None:
        """Digest in a thread: the blocks are pinned meanwhile."""
        digests = await asyncio.to_thread(lambda: [self._digest(block) for block in action.blocks])
        self._have(action, b"".join(digests))

    def _have(self, action: GiveBlocks, digests: bytes) -> None:
        self._spans.answered(action)
        have = Have(action.number, action.blocks, digests, has_more=action.has_more)
        self._send(Key(action.server, Half.SCHEDULER), have)

    async def _bring(self, action: Bring) -> None:
        span, failure = self._spans.fetch_begun(action), ""
        try:
            await self._bringer.bring(action, self._core, span.traceparent)
        except (TimeoutError, BusError) as error:
            failure = str(error) or "it took too long"
            log.info("blocks for server %s were not brought: %s", action.server, failure)
        num_blocks = self._bringer.num_here(action)
        self._spans.fetch_ended(span, num_blocks, failure)
        self._measured.brought(num_blocks)
        self._store.step(BringEnded(action.server, action.number, num_blocks), "attach")

    def _known_digest(self, block: int) -> bytes:
        known = self._digests.get(block)
        return known.digest if known is not None and known.tag == self._core.tag(block) else b""

    def _digest(self, block: int) -> bytes:
        if known := self._known_digest(block):
            return known
        digest, tag = self._contents.digest(block), self._core.tag(block)
        if tag is not None:
            self._digests[block] = Digest(tag, digest)
        return digest

    def _tags_of(self, saved: Saved, tenant: str) -> tuple[bytes, ...]:
        """Digest what was saved. Raises WrongMessageError."""
        hashes = split_hashes(saved.hashes)
        if len(hashes) != len(saved.slots) or not all(0 <= slot < self._num_blocks for slot in saved.slots):
            raise WrongMessageError("it has saved into slots that there are not")
        tags: list[bytes] = []
        for slot, block_hash in zip(saved.slots, hashes, strict=True):
            digest = self._contents.digest(slot)
            tags.append(self._contents.tag_of(Content(tenant, block_hash), digest))
            self._digests[slot] = Digest(tags[-1], digest)
        return tuple(tags)

    # Canaries.

    async def _run_canary(self, server: str) -> None:
        """Run it on a thread that a process which ends does not wait for: a server may take minutes to answer."""
        hello, word = self._core.servers[server].hello, self._attachments[server]
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Verdict] = loop.create_future()

        def run() -> None:
            verdict = run_canary(hello, word, self._times)
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(lambda: done.done() or done.set_result(verdict))

        threading.Thread(target=run, name="canary", daemon=True).start()
        proof, detail = await done
        log.log(logging.INFO if proof is Proof.RIGHT else logging.WARNING, "server %s: %s", server, detail)
        self._store.step(CanaryEnded(server, proof, detail), "canary")

    # Connections.

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def _send(self, key: Key, message: ToHalf) -> None:
        """Send to a half, if it is there. One that takes nothing any more is given up."""
        if (writer := self._writers.get(key)) is None:
            return
        _put(writer, message)
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("server %s: its %s half takes nothing any more", key.server, key.half)
            self._end(key)

    def _end(self, key: Key) -> None:
        if (writer := self._writers.get(key)) is not None:
            writer.transport.abort()


@contextlib.contextmanager
def bound_socket(path: Path) -> Generator[socket.socket]:
    """Hold a socket that listens at this path, for this user alone. Raises UserError: another holder has it, or there
    can be none."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise UserError(f"a socket's path has at most {MAX_PATH_BYTES} bytes: choose a shorter --socket than {path}")
    with contextlib.ExitStack() as held:
        try:
            private_folder(path.parent)
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE)
            held.callback(os.close, lock)
            # Whoever has the lock owns the path: what lies there is of a holder that has ended.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            sock = held.enter_context(socket.socket(socket.AF_UNIX))
            mask = os.umask(0o777 & ~PRIVATE_FILE)
            try:
                sock.bind(os.fspath(path))
            finally:
                os.umask(mask)
            held.callback(path.unlink, missing_ok=True)
            sock.listen()
        except BlockingIOError as error:
            raise UserError(f"another holder has the socket {path}: stop it, or choose another --socket") from error
        except OSError as error:
            raise UserError(f"no socket can be made at {path}: {error.strerror}") from error
        yield sock


def _is_ours(writer: asyncio.StreamWriter) -> bool:
    """Return whether this user is at the other end."""
    sock = writer.get_extra_info("socket")
    _, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid():
        log.warning("a connection of user %d is closed", uid)
    return uid == os.geteuid()


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Return the next message. Raises WrongMessageError, EOFError."""
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > MAX_ATTACH_BYTES:
        raise WrongMessageError(f"a message of {length} bytes")
    return await reader.readexactly(length)


def _decoded(decoder: "msgspec.msgpack.Decoder[T]", data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WrongMessageError(str(error)) from error


def _put(writer: asyncio.StreamWriter, message: ToHalf) -> None:
    data = _ENCODER.encode(message)
    writer.write(LENGTH.pack(len(data)) + data)


async def _send(writer: asyncio.StreamWriter, message: ToHalf) -> None:
    _put(writer, message)
    await writer.drain()
