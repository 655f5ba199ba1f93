"""Bytes that prove themselves: whoever stands between holder and reader, and has no holders' secret, is found out."""

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.blocks.ticket import TicketRefusedError, TicketSecrets
from dataplane.carriers.tcp import TcpHolder
from dataplane.ends import read, sender
from dataplane.memory.checksum import FrameHash
from dataplane.protocol.stream import (
    HEADER_BYTES,
    Accepted,
    Header,
    Kind,
    Seal,
    StreamFailed,
    TransferFailedError,
    TransferStats,
    decode_body,
    decode_header,
    encode_frame,
    encode_header,
    seal_of,
)
from dataplane.protocol.wire import Wire
from schemas.handoff import Endpoint
from tests.plane.harness import SECRET, SECRETS, Holder, Target, random_kv, running
from tests.plane.test_ticket import TICKET
from tests.plane.test_unauthenticated import knock, pump

Frame = tuple[Header, bytes]
Tamper = Callable[[list[Frame]], list[Frame]]

SCATTERED = BlockTable(tuple(Segment(block, 1) for block in range(0, 38, 2)))
CHANGES = (
    {"lease_id": "other"},
    {"epoch": 99},
    {"tenant": "other"},
    {"holder": "other"},
    {"incarnation": "other"},
    {"reader": "other"},
    {"nonce": "other"},
)


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TcpHolder, "frame_bytes", 4096)


# What a key is of.


def key_of(secrets: TicketSecrets, token: str, opening: bytes = b"opening", nonce: str = "nonce") -> bytes:
    return seal_of(secrets.signed(token).key_of(opening), nonce).frame_key


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_another_lease_has_another_key(change: dict[str, object]) -> None:
    other = msgspec.structs.replace(TICKET, **change)
    assert other != TICKET
    keys = {key_of(SECRETS, SECRETS.sign(ticket)) for ticket in (TICKET, other)}
    assert len(keys) == 2


def test_another_stream_of_a_lease_has_another_key() -> None:
    """The opening has the KV's format, what is wanted of it, and the reader's nonce."""
    token = SECRETS.sign(TICKET)
    said = [(b"opening", "nonce"), (b"opening2", "nonce"), (b"opening", "nonce2"), (b"openin", "gnonce")]
    assert len({key_of(SECRETS, token, *each) for each in said}) == len(said)
    assert key_of(SECRETS, token, *said[0]) == key_of(SECRETS, token, *said[0])


def test_the_secret_that_signed_the_ticket_makes_the_key() -> None:
    """Also once another one signs: a stream that is under way, and a lease that was granted before, go on."""
    token = SECRETS.sign(TICKET)
    rotated = TicketSecrets([b"new", SECRET])
    assert key_of(rotated, token) == key_of(SECRETS, token)
    assert key_of(rotated, rotated.sign(TICKET)) != key_of(SECRETS, token)
    with pytest.raises(TicketRefusedError):
        key_of(TicketSecrets([b"new"]), token)


HEADERS = st.builds(
    Header,
    kind=st.just(Kind.DATA),
    sequence=st.integers(0, 3),
    layer=st.integers(0, 3),
    num_layers=st.integers(0, 3),
    first_token=st.integers(0, 3),
    num_tokens=st.integers(0, 3),
    length=st.integers(0, 3),
    tag=st.just(0),
)
SAYINGS = st.tuples(st.binary(max_size=1), HEADERS, st.integers(0, 2**128 - 1))


@given(SAYINGS, SAYINGS)
def test_a_tag_is_of_one_frame_and_one_key(one: tuple[bytes, Header, int], other: tuple[bytes, Header, int]) -> None:
    tags = [Seal(b"key" + key).of_frame(data, digest) for key, data, digest in (one, other)]
    assert (tags[0] == tags[1]) is (one == other)


def test_a_digest_over_the_wire_is_of_its_key_and_frame() -> None:
    def digest(key: bytes, sequence: int, *pieces: bytes) -> int:
        hasher = FrameHash("gmac", key).new(sequence)
        assert hasher is not None
        for piece in pieces:
            hasher.update(memoryview(piece))
        return hasher.intdigest()

    right = digest(b"a" * 32, 1, b"some bytes")
    assert right == digest(b"a" * 32, 1, b"some", b" ", b"bytes")
    assert len({right, digest(b"b" * 32, 1, b"some bytes"), digest(b"a" * 32, 2, b"some bytes")}) == 3


# Who stands between the two.


class Between:
    """Passes on what reader and holder say, and does with the holder's frames what `tamper` does. `heard`: these."""

    def __init__(self, holder: Holder, tamper: Tamper) -> None:
        self.heard: list[Frame] = []
        self._holder = holder
        self._tamper = tamper

    @contextlib.contextmanager
    def endpoint(self) -> Iterator[Endpoint]:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve() -> None:
                reader, _ = listener.accept()
                with reader, knock(self._holder) as upstream, running(lambda: pump(reader, upstream)):
                    self._listen(upstream)
                    with contextlib.suppress(OSError):
                        for header, body in self._tamper(list(self.heard)):
                            reader.sendall(encode_header(header) + body)
                    for sock in (reader, upstream):
                        with contextlib.suppress(OSError):
                            sock.shutdown(socket.SHUT_RDWR)

            with running(serve):
                yield msgspec.structs.replace(self._holder.endpoint, port=listener.getsockname()[1])

    def _listen(self, upstream: socket.socket) -> None:
        """Hear all of a stream."""
        with upstream.makefile("rb") as said:
            while head := said.read(HEADER_BYTES):
                header = decode_header(head, *Kind)
                self.heard.append((header, said.read(header.length)))
                if header.kind in (Kind.END, Kind.FAIL, Kind.REFUSED):
                    return


def numbers(frames: list[Frame], kind: Kind) -> list[int]:
    return [index for index, (header, _) in enumerate(frames) if header.kind is kind]


def flip_a_bit(frames: list[Frame]) -> list[Frame]:
    index = numbers(frames, Kind.DATA)[1]
    header, body = frames[index]
    frames[index] = (header, bytes([body[0] ^ 1]) + body[1:])
    return frames


def swap_bodies(frames: list[Frame]) -> list[Frame]:
    """Two frames of one length."""
    one, other = numbers(frames, Kind.DATA)[:2]
    (header, body), (other_header, other_body) = frames[one], frames[other]
    assert len(body) == len(other_body)
    frames[one], frames[other] = (header, other_body), (other_header, body)
    return frames


def swap_commits(frames: list[Frame]) -> list[Frame]:
    one, other = numbers(frames, Kind.COMMIT)[:2]
    tags = frames[one][0].tag, frames[other][0].tag
    frames[one] = (frames[one][0]._replace(tag=tags[1]), b"")
    frames[other] = (frames[other][0]._replace(tag=tags[0]), b"")
    return frames


def rename(frames: list[Frame]) -> list[Frame]:
    """The first two frames, as if each were the other layer's."""
    one, other = numbers(frames, Kind.DATA)[:2]
    (header, body), (other_header, other_body) = frames[one], frames[other]
    frames[one], frames[other] = (
        (header._replace(layer=other_header.layer), body),
        (
            other_header._replace(layer=header.layer),
            other_body,
        ),
    )
    return frames


def sign_anew(frames: list[Frame]) -> list[Frame]:
    """Whole streams of other bytes, signed with a secret of one's own."""
    seal = Seal(b"mine")
    done: list[Frame] = []
    for header, body in frames:
        if header.kind is Kind.DATA:
            done.append((header, bytes(len(body))))
        elif header.kind is Kind.COMMIT:
            data = next(each for each, _ in frames if each.kind is Kind.DATA and each.sequence == header.sequence)
            done.append((header._replace(tag=seal.of_frame(data, 0)), b""))
        else:
            done.append((header._replace(tag=seal.of_body(header, body)), body))
    return done


def turn_digests_off(frames: list[Frame]) -> list[Frame]:
    header, body = frames[0]
    accepted = msgspec.json.decode(body)
    accepted["digest_kind"] = None
    body = msgspec.json.encode(accepted)
    frames[0] = (header._replace(length=len(body)), body)
    return frames


def change_the_trailer(frames: list[Frame]) -> list[Frame]:
    header, body = frames[-1]
    return [*frames[:-1], (header, body[:-1] + b"1")]


def end_early(frames: list[Frame]) -> list[Frame]:
    return [*frames[: numbers(frames, Kind.COMMIT)[0] + 1], frames[-1]]


def say_that_it_failed(frames: list[Frame]) -> list[Frame]:
    said = encode_frame(Kind.FAIL, StreamFailed(reason="no"))
    return [frames[0], (decode_header(said[:HEADER_BYTES], Kind.FAIL), said[HEADER_BYTES:])]


def cut(frames: list[Frame]) -> list[Frame]:
    return frames[:-1]


TAMPERINGS: tuple[tuple[Tamper, str], ...] = (
    (flip_a_bit, "digest"),
    (swap_bodies, "digest"),
    (swap_commits, "digest"),
    (rename, "digest protocol"),
    (sign_anew, "digest"),
    (turn_digests_off, "digest"),
    (change_the_trailer, "digest"),
    (end_early, "protocol"),
    (say_that_it_failed, "digest"),
    (cut, "closed"),
)


@pytest.mark.parametrize("encryption", ["on", "off"])
@pytest.mark.parametrize(("tamper", "codes"), TAMPERINGS, ids=[tamper.__name__ for tamper, _ in TAMPERINGS])
def test_who_stands_between_is_found_out(
    make_holder: Callable[..., Holder], target: Target, small_frames: None, tamper: Tamper, codes: str, encryption: str
) -> None:
    """And what counts as landed by then is right."""
    holder = make_holder(("tcp",), encryption=encryption)
    holder.compute_all()
    between = Between(holder, tamper)
    with between.endpoint() as endpoint, pytest.raises(TransferFailedError) as raised:
        target.reader.read_blocking(target.request(endpoint, holder.ticket(), "tcp", 300))
    assert raised.value.code in codes.split()
    landed = raised.value.num_landed_tokens
    assert np.array_equal(target.landed(landed), holder.kv[:, :, :landed])
    assert len(numbers(between.heard, Kind.DATA)) >= 4, "the frames were small"


def test_who_only_listens_changes_nothing(
    make_holder: Callable[..., Holder], target: Target, small_frames: None
) -> None:
    holder = make_holder(("tcp",))
    holder.compute_all()
    between = Between(holder, lambda frames: frames)
    with between.endpoint() as endpoint:
        landed = target.reader.read_blocking(target.request(endpoint, holder.ticket(), "tcp", 300))
    assert decode_body(between.heard[0][1], Accepted).digest_kind == "gmac", "xxh3 is not made to resist anybody"
    assert landed.num_tokens == 300 and np.array_equal(target.landed(300), holder.kv)


@pytest.mark.parametrize(
    "changes",
    [{}, {"tables": (SCATTERED,)}, {"wire_dtype": "int8"}],
    ids=["in one run", "scattered", "compressed"],
)
def test_who_listens_hears_nothing_of_what_is_encrypted(
    make_holder: Callable[..., Holder], target: Target, small_frames: None, changes: dict[str, object]
) -> None:
    """The same KV, twice: what crosses is another each time, and has no piece of it."""
    kv = np.full_like(random_kv(300), 7)
    holder = make_holder(("tcp",), encryption="on", kv=kv)
    holder.compute_all()
    heard: list[bytes] = []
    for _ in range(2):
        target.array[:] = 0
        between = Between(holder, lambda frames: frames)
        with between.endpoint() as endpoint:
            request = target.request(endpoint, holder.ticket(), "tcp", 300, **changes)
            landed = target.reader.read_blocking(request)
        assert landed.stats.digest_kind == "aes256gcm"
        assert landed.stats.wire_dtype != "same" or (target.array == 7).sum() == landed.stats.num_bytes
        heard.append(b"".join(body for header, body in between.heard if header.kind is Kind.DATA))
    assert heard[0] != heard[1]
    counts = np.bincount(np.frombuffer(heard[0], np.uint8), minlength=256)
    assert counts.max() < 3 * counts.mean(), "of a constant, each byte comes as often as any other"


@pytest.mark.parametrize(
    ("peer", "encryption", "is_encrypted"),
    [
        ("127.0.0.1", "auto", False),
        ("::1", "auto", False),
        ("10.0.0.5", "auto", True),
        ("fe80::1", "auto", True),
        ("no address", "auto", True),
        ("127.0.0.1", "on", True),
        ("10.0.0.5", "off", False),
    ],
)
def test_by_default_it_is_encrypted_for_any_address_but_loopback(
    make_holder: Callable[..., Holder],
    target: Target,
    monkeypatch: pytest.MonkeyPatch,
    peer: str,
    encryption: str,
    is_encrypted: bool,
) -> None:
    holder = make_holder(("tcp",), encryption=encryption)
    holder.compute_all()

    def dial(*_: object) -> Wire:
        ours, theirs = holder.server._pair()
        assert holder.server._admit(ours, peer)
        return theirs

    monkeypatch.setattr(target.reader, "_dial", dial)
    landed = target.read_from(holder, "tcp")
    assert landed.stats.digest_kind == ("aes256gcm" if is_encrypted else "gmac")
    assert np.array_equal(target.landed(300), holder.kv)


def replay(holder: Holder, target: Target, what: str) -> int:
    """Read, then read again and hear `what` was said the first time: another stream of the same lease, with the same
    ticket, over the same tokens. Return what landed. Raises TransferFailedError."""
    request = target.request(holder.endpoint, holder.ticket(), "tcp", 300)
    before = Between(holder, lambda frames: frames)
    with before.endpoint() as endpoint:
        target.reader.read_blocking(dataclasses.replace(request, endpoint=endpoint))

    def said_again(frames: list[Frame]) -> list[Frame]:
        if what == "all":
            return before.heard
        return [old if new[0].kind is Kind.COMMIT else new for new, old in zip(frames, before.heard, strict=True)]

    with Between(holder, said_again).endpoint() as endpoint:
        stats = TransferStats()
        return target.reader.read_blocking(dataclasses.replace(request, endpoint=endpoint, stats=stats)).num_tokens


@pytest.mark.parametrize("what", ["all", "commits"])
def test_what_was_heard_before_proves_nothing_now(
    make_holder: Callable[..., Holder], target: Target, small_frames: None, what: str
) -> None:
    holder = make_holder(("tcp",))
    holder.compute_all()
    with pytest.raises(TransferFailedError) as raised:
        replay(holder, target, what)
    assert (raised.value.code, raised.value.num_landed_tokens) == ("digest", 0)


@pytest.mark.parametrize("what", ["all", "commits"])
def test_a_key_that_is_used_again_would_be_found_so(
    make_holder: Callable[..., Holder],
    target: Target,
    small_frames: None,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """The planted bug of the test above: with one key for both streams the replay is believed."""
    for end in (read, sender):
        monkeypatch.setattr(end, "new_nonce", lambda: "0" * 32)
    holder = make_holder(("tcp",))
    holder.compute_all()
    assert replay(holder, target, what) == 300


def test_a_reader_without_the_secret_is_told_what_to_look_at(
    make_holder: Callable[..., Holder], target: Target
) -> None:
    holder = make_holder(("tcp",))
    holder.compute_all()
    target.reader._secrets = TicketSecrets([b"another mesh's"])
    with pytest.raises(TransferFailedError, match="ticket_secrets") as raised:
        target.reader.read_blocking(target.request(holder.endpoint, holder.ticket(), "tcp", 300))
    assert raised.value.code == "ticket"


def test_a_secret_that_changes_in_mid_stream_changes_nothing_there(
    make_holder: Callable[..., Holder], target: Target
) -> None:
    secrets = TicketSecrets([SECRET])
    holder = make_holder(("tcp",), secrets=secrets)
    target.reader._secrets = secrets
    ticket = holder.ticket()
    holder.compute(64, 0, 100)

    def rotate(_carrier: str) -> None:
        secrets.replace([b"new"])
        holder.compute(64, 100)
        holder.progress.complete(b"token 0")

    landed = target.reader.read_blocking(target.request(holder.endpoint, ticket, "tcp", 300), on_started=rotate)
    assert landed.num_tokens == 300 and np.array_equal(target.landed(300), holder.kv)
    with pytest.raises(TransferFailedError) as raised:
        target.reader.read_blocking(target.request(holder.endpoint, ticket, "tcp", 300))
    assert raised.value.code == "ticket"
