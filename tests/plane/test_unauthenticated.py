"""Whoever knocks on the port, and whatever he says: counted, dropped, and no transfer is disturbed."""

import contextlib
import logging
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.limits import MAX_CONTROL_BYTES
from dataplane.memory.extent import first_kept_block
from dataplane.protocol.stream import (
    HEADER_BYTES,
    VERSION,
    Accepted,
    Header,
    Kind,
    Open,
    ProtocolError,
    Seal,
    StreamFailed,
    TransferFailedError,
    decode_body,
    decode_header,
    encode_frame,
    encode_header,
    seal_of,
)
from dataplane.times import PlaneTimes
from schemas.handoff import Endpoint
from tests.plane.harness import DEADLINE_S, LAYOUT, SECRETS, Holder, Target, running
from tests.share import examples

JUNK = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 100,
    b"\x16\x03\x01" + bytes(300),
    bytes(4096),
    encode_header(Header(Kind.DATA, 1, 0, 1, 0, 1, 64)) + bytes(64),
    encode_header(Header(Kind.OPEN, length=0)),
    encode_header(Header(Kind.OPEN, length=20)) + b'{"type":"something"}',
    encode_header(Header(Kind.OPEN, length=5)) + b"\xff\xfe\x00[[",
    encode_header(Header(Kind.OPEN, length=MAX_CONTROL_BYTES + 1)) + bytes(MAX_CONTROL_BYTES + 1),
    encode_header(Header(Kind.OPEN, length=2**32 - 1)),
    encode_header(Header(Kind.OPEN, length=2000)) + b"[" * 2000,
    b"KV\x01\x01" + bytes(28),
]


@contextlib.contextmanager
def transfer_beside(holder: Holder, target: Target) -> Iterator[None]:
    """Run the block while a read stands in mid-stream; then the read completes, with the right bytes."""
    started = threading.Event()
    with running(lambda: target.read_from(holder, "tcp", lambda _: started.set())):
        holder.compute(300, end=20)
        assert started.wait(DEADLINE_S)
        try:
            yield
        finally:
            holder.compute(300, start=20)
            holder.progress.complete(b"")
    assert np.array_equal(target.landed(300), holder.kv)


def knock(holder: Holder) -> socket.socket:
    sock = socket.create_connection((holder.endpoint.host, holder.endpoint.port), timeout=DEADLINE_S)
    sock.settimeout(DEADLINE_S)
    return sock


def hears(sock: socket.socket) -> bytes:
    """Return all that comes until the other end has closed."""
    heard = b""
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(4096):
            heard += chunk
    return heard


def test_junk_is_dropped(make_holder: Callable[..., Holder], target: Target, caplog: pytest.LogCaptureFixture) -> None:
    holder = make_holder(("tcp",))
    with transfer_beside(holder, target), caplog.at_level(logging.WARNING):
        for junk in JUNK:
            with knock(holder) as sock:
                with contextlib.suppress(OSError):  # it may be cut before it has said all
                    sock.sendall(junk)
                    sock.shutdown(socket.SHUT_WR)
                assert hears(sock) == b"", "junk gets no answer"
    assert holder.server.num_junk == len(JUNK)
    assert len(caplog.records) < len(JUNK), "a peer does not fill the log"


def test_silent_and_slow_peers_are_cut(make_holder: Callable[..., Holder]) -> None:
    holder = make_holder(("tcp",), times=PlaneTimes(open_s=0.2))
    with knock(holder) as silent, knock(holder) as slow:
        slow.sendall(encode_header(Header(Kind.OPEN, length=1000)) + b"{")
        assert hears(silent) == hears(slow) == b""
    assert holder.server.num_junk == 2


def test_silent_peers_do_not_hold_the_places(make_holder: Callable[..., Holder], target: Target) -> None:
    holder = make_holder(("tcp",), max_streams=3, times=PlaneTimes(open_s=DEADLINE_S))
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(knock(holder)) for _ in range(8)]
        with transfer_beside(holder, target):
            assert hears(silent[0]) == b"", "the first to be silent makes room"


def test_where_no_thread_is_to_be_had_the_next_one_is_served(
    make_holder: Callable[..., Holder],
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    holder, start, refused = make_holder(("tcp",)), threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kv-serve" and len(refused) < 3:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(3):
        with knock(holder) as sock:
            assert hears(sock) == b"", "it is told at once that nobody serves it"
    with transfer_beside(holder, target):
        assert len(refused) == 3 and "cannot serve: RuntimeError: can't start new thread" in caplog.text
    assert holder.server.num_streams == 0


def test_half_open_peer(make_holder: Callable[..., Holder], target: Target) -> None:
    """It goes without a word, by reset, in the middle of its Open."""
    holder = make_holder(("tcp",))
    with transfer_beside(holder, target):
        sock = knock(holder)
        sock.sendall(b"KV\x02")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()


def test_reader_that_takes_nothing(make_holder: Callable[..., Holder], target: Target) -> None:
    """It holds a good ticket and does not acknowledge: it is cut, its lease's end is told."""
    holder = make_holder(("shm",), times=PlaneTimes(holder_idle_s=0.2))
    holder.compute_all()
    with knock(holder) as sock:
        sock.sendall(opening(holder, "shm"))
        assert hears(sock)
        assert "copies nothing" in holder.gate.wait_outcome()[1]


@pytest.mark.parametrize("sequence", [0, 2, 2**32 - 1])
def test_ack_of_what_was_not_sent(make_holder: Callable[..., Holder], sequence: int) -> None:
    holder = make_holder(("shm",))
    holder.compute_all()
    with knock(holder) as sock:
        sock.sendall(opening(holder, "shm") + encode_header(Header(Kind.ACK, sequence)))
        hears(sock)
    assert "ack" in holder.gate.wait_outcome()[1]


def test_chatter_after_open(make_holder: Callable[..., Holder]) -> None:
    holder = make_holder(("tcp",))
    with knock(holder) as sock:
        sock.sendall(opening(holder, "tcp") + b"and another thing" * 10)
        hears(sock)
    assert holder.gate.wait_outcome()[1]


def test_other_version_is_told(make_holder: Callable[..., Holder]) -> None:
    holder = make_holder(("tcp",))
    with knock(holder) as sock:
        sock.sendall(opening(holder, "tcp", version=VERSION + 1))
        assert b'"version"' in hears(sock)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(junk=st.binary(max_size=200), real=st.booleans())
def test_any_bytes(shared_holder: Holder, junk: bytes, real: bool) -> None:
    with knock(shared_holder) as sock:
        with contextlib.suppress(OSError):
            sock.sendall((opening(shared_holder, "tcp")[:-20] if real else b"") + junk)
            sock.shutdown(socket.SHUT_WR)
        assert hears(sock) == b""


@pytest.fixture
def shared_holder(make_holder: Callable[..., Holder]) -> Holder:
    logging.getLogger("dataplane.ends.server").setLevel(logging.ERROR)
    return make_holder(("tcp",))


def opening(holder: Holder, carrier: str, **changes) -> bytes:
    fields = {
        "ticket": holder.ticket(),
        "nonce": "n",
        "fingerprint": LAYOUT.fingerprint,
        "carrier": carrier,
        "first_token": 0,
        "num_tokens": 300,
    }
    return encode_frame(Kind.OPEN, Open(**(fields | changes)))


# And a holder that is a stranger to the reader.

ROW = 2 * LAYOUT.token_bytes


def data(sequence=1, layer=0, num_layers=3, first_token=0, num_tokens=300, length=None, payload=None) -> bytes:
    length = num_layers * num_tokens * ROW if length is None else length
    head = encode_header(Header(Kind.DATA, sequence, layer, num_layers, first_token, num_tokens, length))
    return head + (bytes(min(length, 1 << 20)) if payload is None else payload)


def commit(sequence=1, tag=0) -> bytes:
    return encode_header(Header(Kind.COMMIT, sequence, tag=tag))


END = encode_frame(Kind.END, b"")
ACCEPTED = encode_frame(Kind.ACCEPTED, Accepted(carrier="tcp", nonce="n"))
VERIFIED = encode_frame(Kind.ACCEPTED, Accepted(carrier="tcp", nonce="n", digest_kind="gmac"))


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"", "closed"),
        (b"KV", "closed"),
        (b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" * 2, "protocol"),
        (encode_header(Header(Kind.ACCEPTED, length=2**31)), "protocol"),
        (encode_header(Header(Kind.ACCEPTED, length=4)) + b"null", "protocol"),
        (encode_frame(Kind.ACCEPTED, Accepted(carrier="shm", nonce="n", digest_kind="xxh3")), "protocol"),
        (ACCEPTED + data()[:-1], "closed"),
        (ACCEPTED + data(), "closed"),
        (ACCEPTED + data() + END, "protocol"),
        (ACCEPTED + END, "protocol"),
        (ACCEPTED + commit(), "protocol"),
        (ACCEPTED + data() + commit(2), "protocol"),
        (ACCEPTED + data() + commit() + commit(), "protocol"),
        (ACCEPTED + data(sequence=2), "protocol"),
        (ACCEPTED + data(first_token=1, num_tokens=299), "protocol"),
        (ACCEPTED + data(num_tokens=301), "protocol"),
        (ACCEPTED + data(num_layers=4), "protocol"),
        (ACCEPTED + data(layer=3, num_layers=1), "protocol"),
        (ACCEPTED + data(num_layers=0), "protocol"),
        (ACCEPTED + data(num_tokens=0), "protocol"),
        (ACCEPTED + data(length=2**31), "protocol"),
        (ACCEPTED + data(length=300 * ROW * 3 - 1), "protocol"),
        (ACCEPTED + data() + commit() + data(sequence=2), "protocol"),
        (ACCEPTED + b"".join(data(i + 1, first_token=i, num_tokens=1) for i in range(20)), "protocol"),
        (VERIFIED + data() + commit(), "digest"),
        (ACCEPTED + data() + encode_frame(Kind.FAIL, StreamFailed(reason="no")), "holder"),
        (ACCEPTED + data() + encode_header(Header(Kind.END, length=2**20)), "protocol"),
        (ACCEPTED + data() + commit(tag=1), "digest"),
        (ACCEPTED + data() + commit() + encode_header(Header(Kind.END, tag=1)), "digest"),
        (ACCEPTED + data() + commit() + encode_header(Header(Kind.FAIL, tag=1)), "digest"),
    ],
)
def test_what_a_holder_may_not_say(target: Target, make_holder: Callable[..., Holder], said: bytes, code: str) -> None:
    holder = make_holder(("tcp",))
    with impostor(said) as endpoint, pytest.raises(TransferFailedError) as raised:
        target.reader.read_blocking(target.request(endpoint, holder.ticket(), "tcp", 300))
    assert raised.value.code == code
    assert raised.value.num_landed_tokens in (0, 300)
    assert raised.value.num_landed_tokens == 0 or commit() in said


@pytest.mark.parametrize("said", [ACCEPTED, VERIFIED, ACCEPTED + data() + commit() + END])
def test_who_has_no_secret_is_not_believed_to_be_the_holder(
    target: Target, make_holder: Callable[..., Holder], said: bytes
) -> None:
    """Whoever answers where the holder should: not one byte that it sends is written."""
    target.array[:] = 0xAB
    holder = make_holder(("tcp",))
    with impostor(said, has_secret=False) as endpoint, pytest.raises(TransferFailedError, match="not proved") as raised:
        target.reader.read_blocking(target.request(endpoint, holder.ticket(), "tcp", 300))
    assert (raised.value.code, raised.value.num_landed_tokens) == ("digest", 0)
    assert (target.array == 0xAB).all()


@pytest.mark.parametrize("at", [40, 100, 5000, 30_000, 60_000])
@pytest.mark.parametrize("fault", ["flip", "cut"])
def test_network_that_damages(make_holder: Callable[..., Holder], target: Target, at: int, fault: str) -> None:
    """A flipped byte in a payload or a header, or the end in the middle: what was believed is right."""
    holder = make_holder(("tcp",))
    holder.compute_all()
    with proxy(holder, at, fault) as endpoint, pytest.raises(TransferFailedError) as raised:
        target.reader.read_blocking(target.request(endpoint, holder.ticket(), "tcp", 300))
    assert raised.value.code in ("digest", "protocol", "closed")
    assert raised.value.num_landed_tokens == 0


@contextlib.contextmanager
def proxy(holder: Holder, at: int, fault: str) -> Iterator[Endpoint]:
    """Stand between reader and holder, and damage byte `at` of what the holder says, or end there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            reader, _ = listener.accept()
            with reader, knock(holder) as upstream, running(lambda: pump(reader, upstream)):
                said = 0
                with contextlib.suppress(OSError):
                    while chunk := bytearray(upstream.recv(4096)):
                        if said <= at < said + len(chunk):
                            chunk[at - said] ^= 1
                            if fault == "cut":
                                break
                        said += len(chunk)
                        reader.sendall(chunk)
                for sock in (reader, upstream):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)

        with running(serve):
            yield msgspec.structs.replace(holder.endpoint, port=listener.getsockname()[1])


def pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass on until the source ends, and let the sink know."""
    with contextlib.suppress(OSError):
        while chunk := source.recv(4096):
            sink.sendall(chunk)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def sealed(said: bytes, opening: bytes) -> bytes:
    """Return it with the tags that a holder would give it that lies, and has the secret; those that are there already
    stay. Of frames without digests."""
    seal, last, done = Seal(b""), Header(Kind.DATA), b""
    while len(said) >= HEADER_BYTES:
        try:
            header = decode_header(said[:HEADER_BYTES], *Kind)
        except ProtocolError:
            break
        body = said[HEADER_BYTES : HEADER_BYTES + header.length]
        if header.kind is Kind.ACCEPTED:
            with contextlib.suppress(ProtocolError):
                ticket = SECRETS.signed(decode_body(opening, Open).ticket)
                seal = seal_of(ticket.key_of(opening), decode_body(body, Accepted).nonce)
        if header.kind is Kind.DATA:
            last = header
        elif header.kind is Kind.COMMIT:
            header = header._replace(tag=header.tag or seal.of_frame(last, 0))
        else:
            header = header._replace(tag=header.tag or seal.of_body(header, body))
        done += encode_header(header) + body
        said = said[HEADER_BYTES + len(body) :]
    return done + said


@contextlib.contextmanager
def impostor(said: bytes, *, has_secret: bool = True) -> Iterator[Endpoint]:
    """Listen as a holder, take one Open, and say this."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                opening = b""
                while (
                    len(opening) < HEADER_BYTES
                    or len(opening) < HEADER_BYTES + decode_header(opening[:HEADER_BYTES], Kind.OPEN).length
                ):
                    opening += sock.recv(8192)
                sock.sendall(sealed(said, opening[HEADER_BYTES:]) if has_secret else said)
                sock.shutdown(socket.SHUT_WR)
                hears(sock)

        with running(serve):
            port = listener.getsockname()[1]
            yield Endpoint(host="127.0.0.1", port=port, carriers=("tcp",), arena="", arena_nonce="")


@pytest.mark.parametrize("num_blocks", [1 << 20, 1 << 62, -1])
def test_absurd_runs_are_not_listed(make_holder: Callable[..., Holder], num_blocks: int) -> None:
    """The holder says that it has so many blocks, and that the sequence lies in all of them: that is checked before
    anything is made of it."""
    layout = msgspec.structs.replace(LAYOUT, windows=(0, 32, 0))
    holder, target = make_holder(("shm",), layout=layout), Target(layout)
    tables = (BlockTable((Segment(0, abs(num_blocks)),)),) * 2
    accepted = Accepted(carrier="shm", nonce="n", num_blocks=(num_blocks,) * 2, tables=tables)
    with impostor(encode_frame(Kind.ACCEPTED, accepted)) as endpoint:
        request = target.request(
            msgspec.structs.replace(holder.endpoint, port=endpoint.port), holder.ticket(), "shm", 300
        )
        tracemalloc.start()
        try:
            with pytest.raises(TransferFailedError) as raised:
                target.reader.read_blocking(request)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert raised.value.code == "protocol" and "the holder names" in raised.value.detail
    assert peak < 4 << 20, "bytes: a list of the blocks would take more"
    target.close()


def test_a_table_is_listed_only_as_far_as_it_is_wanted() -> None:
    tracemalloc.start()
    try:
        assert first_kept_block(BlockTable((Segment(0, 1 << 20),)), 19) == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
