"""A connection on which a stream has ended well serves the next read; any other is closed."""

import socket
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from dataplane import limits
from dataplane.ends.connections import IdleConnections
from dataplane.ends.sender import HolderStream
from dataplane.protocol.stream import Accepted, Kind, TransferFailedError, encode_frame
from dataplane.protocol.wire import SocketWire
from dataplane.times import PlaneTimes
from schemas.handoff import Endpoint
from tests.plane.harness import DEADLINE_S, Holder, Target, running
from tests.plane.test_unauthenticated import END, commit, data, impostor


def serving() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kv-serve"]


def idle_in(target: Target) -> int:
    return len(target.reader._idle)


def test_reads_follow_each_other_on_one_connection(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    threads = set[threading.Thread]()
    for first_token in (0, 16, 299, 300):
        target.arena.array[:] = 0
        landed = target.read_from(holder, carrier, first_token=first_token)
        assert landed.trailer == b"token 0"
        assert np.array_equal(target.landed(300, first_token), holder.kv[:, :, first_token:])
        threads.update(serving())
    assert len(threads) == 1 and idle_in(target) == 1
    assert [holder.gate.wait_outcome()[1] for _ in range(4)] == [""] * 4
    assert holder.server.num_streams == 0, "it waits, but nothing is under way"
    target.reader.close()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not serving() and not holder.server.num_junk and not holder.server.num_refused


def test_each_read_needs_its_ticket(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    target.read_from(holder, carrier)
    with pytest.raises(TransferFailedError) as raised:
        target.read_from(holder, carrier, ticket=holder.ticket(secret=b"another secret"))
    assert raised.value.code == "ticket"
    assert idle_in(target) == 0, "who was refused is not served on"
    assert target.read_from(holder, carrier).num_tokens == 300


def test_broken_stream_is_the_connection_s_last(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    target.read_from(holder, carrier)
    holder.progress.fail("gone")
    with pytest.raises(TransferFailedError):
        target.read_from(holder, carrier)
    assert idle_in(target) == 0


def test_cancelled_stream_is_the_connection_s_last(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    target.read_from(holder, carrier)
    _, progress = lease = holder.grant("lease-1")
    with pytest.raises(TransferFailedError) as raised:
        target.read_from(holder, carrier, ticket=holder.ticket(lease[0]), deadline_s=0.2)
    assert raised.value.code == "deadline" and not progress.ready().failure
    assert idle_in(target) == 0


@pytest.mark.parametrize("noticed", [True, False])
def test_holder_has_closed_it_meanwhile(
    carrier: str, make_holder: Callable[..., Holder], target: Target, monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    """Seen before the next Open is said, or only then: either way the read is served, on another connection."""
    holder = make_holder((carrier,), times=PlaneTimes(holder_idle_s=0.05))
    holder.compute_all()
    for _ in range(2):
        target.read_from(holder, carrier)
        (thread,) = serving()
        thread.join(DEADLINE_S)
        assert idle_in(target) == 1
        if not noticed:
            monkeypatch.setattr(type(target.reader._idle._idle[0].wire), "is_silent", True)
    assert not holder.server.num_junk


def test_holder_has_started_again(carrier: str, make_holder: Callable[..., Holder], target: Target) -> None:
    holder = make_holder((carrier,))
    holder.compute_all()
    target.read_from(holder, carrier)
    port = holder.endpoint.port
    holder.close()
    again = make_holder((carrier,), ports=(port,))
    again.compute_all()
    target.arena.array[:] = 0
    target.read_from(again, carrier)
    assert np.array_equal(target.landed(300), again.kv)


def test_who_wants_nothing_makes_room(carrier: str, make_holder: Callable[..., Holder], target: Target) -> None:
    holder, other = make_holder((carrier,), max_streams=1), Target()
    holder.compute_all()
    for reader in (target, other, target, other):
        reader.arena.array[:] = 0
        reader.read_from(holder, carrier)
        assert np.array_equal(reader.landed(300), holder.kv)
        holder.gate.wait_outcome()  # the holder knows as well that this stream is over
    assert not holder.server.num_junk
    other.close()


def test_who_made_room_is_waited_for_at_the_end(
    make_holder: Callable[..., Holder], target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread is the last that could still read the arena."""
    run, begun, ended = HolderStream.run, list[HolderStream](), list[HolderStream]()

    def run_slowly(stream: HolderStream) -> None:
        begun.append(stream)
        run(stream)
        if stream is begun[0]:
            time.sleep(0.5)
        ended.append(stream)

    monkeypatch.setattr(HolderStream, "run", run_slowly)
    holder, other = make_holder(("tcp",), max_streams=1), Target()
    holder.compute_all()
    target.read_from(holder, "tcp")
    holder.gate.wait_outcome()
    other.read_from(holder, "tcp")
    holder.server.close()
    assert set(ended) == set(begun) and len(begun) == 2
    other.close()


def test_few_are_kept(carrier: str, holder: Holder, target: Target) -> None:
    started = [threading.Event() for _ in range(limits.MAX_IDLE_PER_HOLDER + 3)]
    threads = [
        threading.Thread(target=target.read_from, args=(holder, carrier, lambda _, event=event: event.set()))
        for event in started
    ]
    for thread in threads:
        thread.start()
    holder.compute(300, end=20)
    assert all(event.wait(DEADLINE_S) for event in started), "all are under way at once"
    holder.compute(300, start=20)
    holder.progress.complete(b"")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert idle_in(target) == limits.MAX_IDLE_PER_HOLDER


def test_old_ones_are_closed(carrier: str, holder: Holder) -> None:
    target = Target(times=PlaneTimes(max_idle_s=0.0))
    holder.compute_all()
    target.read_from(holder, carrier)
    (thread,) = serving()
    assert target.reader._idle.reuse(carrier, holder.endpoint) is None
    thread.join(DEADLINE_S)
    assert idle_in(target) == 0 and not serving()
    target.close()


def test_closed_while_a_read_is_under_way(carrier: str, holder: Holder, target: Target) -> None:
    started = threading.Event()
    with running(lambda: target.read_from(holder, carrier, lambda _: started.set())):
        holder.compute(300, end=20)
        assert started.wait(DEADLINE_S)
        target.reader.close()
        holder.compute(300, start=20)
        holder.progress.complete(b"")
    assert idle_in(target) == 0


@pytest.mark.parametrize("more", [b"x", encode_frame(Kind.ACCEPTED, Accepted(carrier="tcp", nonce="n"))])
def test_who_says_more_than_the_end_is_not_asked_again(
    make_holder: Callable[..., Holder], target: Target, more: bytes
) -> None:
    holder = make_holder(("tcp",))
    accepted = encode_frame(Kind.ACCEPTED, Accepted(carrier="tcp", nonce="n"))
    with impostor(accepted + data() + commit() + END + more) as endpoint:
        request = target.request(endpoint, holder.ticket(), "tcp", 300)
        assert target.reader.read_blocking(request).num_tokens == 300
        assert target.reader._idle.reuse("tcp", endpoint) is None
        target.reader.close()


@pytest.mark.parametrize("late", [b"x", b""])
def test_what_comes_later_is_no_answer(late: bytes) -> None:
    """Something that nobody asked for, or the end: that connection is closed, the one before it is used."""
    kept = IdleConnections(60.0)
    holder = Endpoint(host="host", port=1, carriers=("tcp",), arena="a", arena_nonce="nonce")
    ends = [socket.socketpair() for _ in range(2)]
    wires = [SocketWire(ours) for ours, _ in ends]
    for wire in wires:
        kept.keep_idle("tcp", holder, wire)
    ends[1][1].sendall(late)
    ends[1][1].close()
    assert kept.reuse("tcp", holder) is wires[0]
    assert ends[1][0].fileno() == -1 and len(kept) == 0
    assert kept.reuse("tcp", msgspec.structs.replace(holder, arena_nonce="another")) is None
    for ours, theirs in ends:
        ours.close()
        theirs.close()
