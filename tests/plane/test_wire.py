"""What a stream crosses on one machine, and how its ends wait for each other."""

import select
import socket
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from dataplane.carriers import shm
from dataplane.ends import reader
from dataplane.protocol import wire
from dataplane.protocol.wire import SocketWire
from tests.plane.harness import DEADLINE_S, Holder, Target

NOWHERE = "192.0.2.1"
"""Of no machine (RFC 5737)."""
NEVER, ALWAYS = 0, 10**15
"""Nanoseconds: no answer comes within the one, any within the other."""


@pytest.fixture
def holder(make_holder: Callable[..., Holder]) -> Holder:
    return make_holder((shm.NAME,))


def test_shm_needs_no_network(holder: Holder, target: Target) -> None:
    holder.compute_all()
    ticket = holder.ticket()
    endpoint = msgspec.structs.replace(holder.endpoint, host=NOWHERE)
    for _ in range(2):
        target.reader.read_blocking(target.request(endpoint, ticket, "shm", 300))
    assert np.array_equal(target.landed(300), holder.kv)


def test_where_the_machine_s_socket_is_not_seen_shm_crosses_the_network(
    holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another container that has the same memory."""
    holder.compute_all()
    monkeypatch.setattr(reader, "connect_near", lambda address: None)
    target.read_from(holder, "shm")
    assert np.array_equal(target.landed(300), holder.kv)


def test_a_stranger_on_the_machine_s_socket_is_one_as_on_a_port(holder: Holder) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(shm.address_of(holder.endpoint.arena_nonce, holder.endpoint.port))
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        stranger.settimeout(DEADLINE_S)
        assert stranger.recv(1) == b""
    holder.close()
    assert holder.server.num_junk == 1


def test_a_holder_that_has_closed_has_no_socket_any_more(holder: Holder) -> None:
    endpoint = holder.endpoint
    holder.close()
    assert reader.connect_near(shm.address_of(endpoint.arena_nonce, endpoint.port)) is None


@pytest.mark.parametrize(("prompt_ns", "watches"), [(ALWAYS, [False, True, True]), (NEVER, [False, False, False])])
@pytest.mark.parametrize("way", ["receive", "wait"])
def test_only_who_answered_at_once_is_watched_for(
    way: str, prompt_ns: int, watches: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[bool] = []

    def watch(poll: select.poll, started_ns: int) -> None:
        watched[-1] = True

    monkeypatch.setattr(wire, "_PROMPT_NS", prompt_ns)
    monkeypatch.setattr(wire, "_THERE_NS", NEVER)
    monkeypatch.setattr(wire, "_watch", watch)
    ours, theirs = socket.socketpair()
    end = SocketWire(ours)
    for _ in range(3):
        watched.append(False)
        theirs.sendall(b"x")
        if way == "wait":
            assert end.waker().wait_readable(DEADLINE_S)
        assert end.receive(1, time.monotonic() + DEADLINE_S) == b"x" if way == "receive" else ours.recv(1) == b"x"
    end.close()
    theirs.close()
    assert watched == watches


def test_one_thread_of_a_process_watches_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    wire._watch(poll, time.perf_counter_ns())
    with wire._watching:
        monkeypatch.setattr(wire, "_PROMPT_NS", ALWAYS)
        wire._watch(poll, time.perf_counter_ns())
    theirs.sendall(b"x")
    wire._watch(poll, time.perf_counter_ns())
    assert not wire._watching.locked() and ours.recv(1) == b"x"
    ours.close()
    theirs.close()


def test_what_came_with_a_header_is_received_first() -> None:
    ours, theirs = socket.socketpair()
    end, deadline = SocketWire(ours), time.monotonic() + DEADLINE_S
    theirs.sendall(b"header" + b"payload")
    assert end.receive(6, deadline) == b"header" and not end.is_silent
    theirs.sendall(bytes(10_000))
    target = bytearray(10_007)
    view = memoryview(target)
    while view:
        view = view[end.receive_into(view, deadline) :]
    assert target == b"payload" + bytes(10_000) and end.is_silent
    theirs.sendall(bytes(100_000))
    assert end.receive(100_000, deadline) == bytes(100_000)
    end.close()
    theirs.close()
