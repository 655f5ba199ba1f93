"""The holder's socket, spoken to by hand: each message wrong, cut, late, doubled; whoever may not connect."""

import os
import socket
import struct
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from dataplane.blocks.layout import KEY, VALUE, uniform_shape
from dataplane.memory.arena import Arena
from schemas.attach import (
    MAX_ATTACH_BYTES,
    PROTOCOL,
    Ask,
    Counted,
    Half,
    Have,
    HelloRefused,
    Off,
    Release,
    Saved,
    SlotsGiven,
    ToHalf,
    Use,
    WantSlots,
    WeightsChanged,
    Welcome,
)
from schemas.block import join_hashes
from services.attach.connector.identity import layout_of
from services.attach.door import MAX_PATH_BYTES, bound_socket
from services.errors import UserError
from tests.attach.core_rig import IDENTITY, hello
from tests.attach.live_holders import LiveHolders, live_holders
from tests.store.rig import hashes_of
from tests.waiting import wait_until

LENGTH = struct.Struct("<I")
NUM_BLOCKS = 64


class Raw:
    """A connection whose bytes the test chooses."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(str(path))

    def send(self, message: Any) -> None:
        data = msgspec.msgpack.encode(message)
        self.socket.sendall(LENGTH.pack(len(data)) + data)

    def receive(self) -> ToHalf:
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        return msgspec.msgpack.decode(self._exactly(length), type=ToHalf)

    def is_ended(self) -> bool:
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            assert part, "the connection has ended"
            data += part
        return data


@contextmanager
def raw(path: Path) -> Generator[Raw]:
    connection = Raw(path)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def half(path: Path, which: Half = Half.SCHEDULER, server: str = "a", **changes: object) -> Generator[Raw]:
    with raw(path) as connection:
        connection.send(hello(server, which, **changes))
        assert isinstance(connection.receive(), Welcome)
        yield connection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "attach.sock"


@pytest.fixture
def holder(path: Path) -> Generator[LiveHolders]:
    with live_holders(path, num_blocks=NUM_BLOCKS) as running:
        yield running


# Who connects.


def test_the_socket_is_its_user_s_alone_and_goes_with_the_holder(path: Path) -> None:
    with live_holders(path):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    with live_holders(path), half(path):
        pass


def test_a_second_holder_does_not_take_the_socket(path: Path, holder: LiveHolders) -> None:
    with pytest.raises(UserError, match="another holder has the socket"), bound_socket(path):
        pass
    with half(path):
        pass


def test_a_socket_that_was_left_behind_is_taken(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with live_holders(path), half(path):
        pass


def test_where_no_socket_can_be_a_line_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at most"), bound_socket(tmp_path / ("x" * MAX_PATH_BYTES)):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="no socket can be made"), bound_socket(tmp_path / "file" / "attach.sock"):
        pass


def test_a_connection_of_another_user_is_closed(
    path: Path, holder: LiveHolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.geteuid() + 1
    monkeypatch.setattr("services.attach.door.os.geteuid", lambda: uid)
    with raw(path) as connection:
        assert connection.is_ended()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, "version"),
        ({"tenant": "other"}, "tenant"),
        ({"identity": msgspec.structs.replace(IDENTITY, weights="other")}, "weights"),
        ({"identity": msgspec.structs.replace(IDENTITY, num_layers=7)}, "layers"),
    ],
)
def test_a_server_of_another_model_is_refused_with_a_line(
    path: Path, holder: LiveHolders, changes: dict[str, object], reason: str
) -> None:
    with half(path), raw(path) as connection:
        connection.send(hello("b", Half.SCHEDULER, **changes))
        refused = connection.receive()
        assert isinstance(refused, HelloRefused) and refused.is_final and reason in refused.reason
        assert connection.is_ended()


def test_the_first_server_says_which_kv_is_held(path: Path, holder: LiveHolders) -> None:
    with half(path), raw(path) as connection:
        other = msgspec.structs.replace(IDENTITY, kv_format="vllm1/other")
        connection.send(hello("b", Half.SCHEDULER, identity=other))
        refused = connection.receive()
        assert isinstance(refused, HelloRefused) and refused.is_final and "kv_format" in refused.reason


# What they send.

WRONG = {
    "nothing of ours": b"GET / HTTP/1.1\r\n\r\n",
    "too long": LENGTH.pack(MAX_ATTACH_BYTES + 1),
    "no msgpack": LENGTH.pack(3) + b"\xc1\xc1\xc1",
    "no message": LENGTH.pack(1) + b"\x01",
    "another's message": LENGTH.pack(len(data := msgspec.msgpack.encode(Welcome("h", "a", "n", 1, "c", 1.0)))) + data,
    "the worker's message": LENGTH.pack(len(data := msgspec.msgpack.encode(Saved(1, (0,), bytes(16))))) + data,
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_makes_no_sense_ends_the_connection_and_nothing_else(
    path: Path, holder: LiveHolders, data: bytes, is_first: bool
) -> None:
    with half(path, server="sound") as sound:
        with raw(path) as connection:
            if not is_first:
                connection.send(hello("a", Half.SCHEDULER))
                assert isinstance(connection.receive(), Welcome)
            connection.socket.sendall(data)
            connection.socket.shutdown(socket.SHUT_WR)
            assert connection.is_ended()
        sound.send(WantSlots(1))
        given = sound.receive()
        assert isinstance(given, SlotsGiven) and len(given.slots) == 1


def test_a_message_that_is_cut_off_is_none(path: Path, holder: LiveHolders) -> None:
    with half(path) as connection:
        connection.socket.sendall(LENGTH.pack(100) + b"x" * 50)
    with half(path, server="b"):
        wait_until(lambda: holder.num_held == 0)


def test_a_message_may_come_byte_by_byte(path: Path, holder: LiveHolders) -> None:
    with half(path) as connection:
        data = msgspec.msgpack.encode(WantSlots(1))
        for byte in LENGTH.pack(len(data)) + data:
            connection.socket.sendall(bytes([byte]))
        assert isinstance(connection.receive(), SlotsGiven)


@pytest.mark.parametrize("slots", [(-1,), (NUM_BLOCKS,), (1 << 40,), (0, 0)])
def test_slots_that_are_not_its_own_end_a_worker(path: Path, holder: LiveHolders, slots: tuple[int, ...]) -> None:
    with half(path), half(path, Half.WORKER) as worker:
        worker.send(Saved(1, slots, join_hashes(hashes_of(*range(len(slots))))))
        assert worker.is_ended()


def test_hashes_of_no_whole_number_end_a_connection(path: Path, holder: LiveHolders) -> None:
    with half(path) as connection:
        connection.send(Ask(1, b"short", Use.LOAD))
        assert connection.is_ended()


def test_a_server_that_takes_no_answers_is_given_up(
    path: Path, holder: LiveHolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.attach.door.MAX_UNSENT_BYTES", 1)
    with half(path) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        ended = threading.Event()

        def ask_on() -> None:
            try:
                while True:
                    connection.send(Ask(1, b"", Use.LOAD))
            except OSError:
                ended.set()

        threading.Thread(target=ask_on, daemon=True).start()
        assert ended.wait(60)


# What is saved is what is loaded.


def bytes_of(arena: Arena, slot: int, fill: int | None = None) -> bytes:
    """Return a block's bytes, layer by layer, keys before values; with `fill` they are this from now on."""
    shape = uniform_shape(layout_of(IDENTITY), NUM_BLOCKS)
    size = IDENTITY.block_size * shape.layout.token_bytes
    parts: list[bytes] = []
    for layer in range(IDENTITY.num_layers):
        for part in (KEY, VALUE):
            at = shape.offset(layer, part, slot * IDENTITY.block_size)
            if fill is not None:
                arena.array[at : at + size] = np.full(size, fill + layer + part, np.uint8)
            parts.append(arena.array[at : at + size].tobytes())
    return b"".join(parts)


def test_what_is_saved_is_found_with_its_digest(path: Path, holder: LiveHolders) -> None:
    with raw(path) as scheduler, half(path, Half.WORKER) as worker:
        scheduler.send(hello("a", Half.SCHEDULER))
        welcome = scheduler.receive()
        assert isinstance(welcome, Welcome) and welcome.num_blocks == NUM_BLOCKS
        arena = Arena.attach(welcome.arena, welcome.nonce, writes=True)
        scheduler.send(WantSlots(2))
        given = scheduler.receive()
        assert isinstance(given, SlotsGiven)
        blocks = [bytes_of(arena, slot, fill) for slot, fill in zip(given.slots, (10, 20), strict=True)]
        worker.send(Saved(1, given.slots, join_hashes(hashes_of(1, 2))))

        def found() -> Have:
            scheduler.send(Ask(7, join_hashes(hashes_of(1, 2, 3)), Use.LOAD))
            answer = scheduler.receive()
            assert isinstance(answer, Have) and answer.number == 7
            return answer

        wait_until(lambda: len(found().slots) == 2)
        have = found()
        assert have.slots == given.slots
        assert have.digests == b"".join(xxhash.xxh3_128(block).digest() for block in blocks)
        assert holder.num_held == 2
        scheduler.send(Release(7))
        wait_until(lambda: holder.num_held == 0)
        arena.close()


def test_a_server_with_new_weights_is_off_on_both_connections(path: Path, holder: LiveHolders) -> None:
    with half(path) as scheduler, half(path, Half.WORKER) as worker:
        scheduler.send(Counted(1, 1, {}))
        scheduler.send(WeightsChanged())
        assert isinstance(scheduler.receive(), Off) and isinstance(worker.receive(), Off)


def test_a_holder_that_ends_ends_its_connections(path: Path) -> None:
    with live_holders(path) as running, half(path) as connection:
        running.end()
        assert connection.is_ended()
