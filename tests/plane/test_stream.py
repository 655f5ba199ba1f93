"""The protocol without I/O: the holder's plan against the reader's checks."""

import subprocess
import sys

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from dataplane.blocks.layout import KVLayout
from dataplane.limits import MAX_FRAME_BYTES, MAX_OUTSTANDING_FRAMES
from dataplane.memory.extent import Extent
from dataplane.protocol.stream import (
    HEADER_BYTES,
    VERSION,
    FramePlanner,
    Header,
    Kind,
    Landing,
    Open,
    ProtocolError,
    Seal,
    decode_body,
    decode_header,
    encode_frame,
    encode_header,
)

LAYOUT = KVLayout(weights="w", dtype="float32", num_layers=4, num_kv_heads=1, head_dim=1, block_size=4)
ROW = 2 * LAYOUT.token_bytes
SEAL = Seal(b"a key")


def extent(num_tokens: int, first_token: int = 0, layout: KVLayout = LAYOUT, **changes) -> Extent:
    return Extent(layout=layout, first_token=first_token, num_tokens=num_tokens, **changes)


@given(data=st.data(), num_tokens=st.integers(0, 60), frame_rows=st.integers(1, 100))
def test_every_plan_lands_each_token_of_each_layer_once(data: st.DataObject, num_tokens: int, frame_rows: int) -> None:
    """Whatever becomes ready in whatever order, and whenever the holder looks."""
    first_token = data.draw(st.integers(0, num_tokens))
    planner = FramePlanner(extent(num_tokens, first_token), frame_rows * ROW)
    landing = Landing(extent(num_tokens, first_token), SEAL)
    ready = [data.draw(st.integers(0, num_tokens)) for _ in range(LAYOUT.num_layers)]
    seen: set[tuple[int, int]] = set()
    while not planner.all_sent:
        while (frame := planner.next(ready)) is not None:
            assert frame.length <= frame_rows * ROW
            for layer in range(frame.layer, frame.layer + frame.num_layers):
                assert frame.first_token + frame.num_tokens <= ready[layer], "not computed yet"
                tokens = {(layer, frame.first_token + i) for i in range(frame.num_tokens)}
                assert not tokens & seen
                seen |= tokens
            frame = decode_header(encode_header(frame), Kind.DATA)
            landing.expect(frame)
            landing.received(frame, frame.sequence)
            before = landing.num_landed_tokens
            assert all((layer, t) in seen for layer in range(4) for t in range(first_token, before))
            landing.commit(Header(Kind.COMMIT, frame.sequence, tag=SEAL.of_frame(frame, frame.sequence)))
        ready = [data.draw(st.integers(n, num_tokens)) for n in ready]
        slowest = ready.index(min(ready))
        ready[slowest] = min(num_tokens, ready[slowest] + 1)
    assert len(seen) == LAYOUT.num_layers * (num_tokens - first_token)
    assert landing.num_landed_tokens == num_tokens
    landing.check_whole()


def test_prefix_over_all_layers_grows_while_layers_are_large() -> None:
    planner = FramePlanner(extent(100), 10 * ROW)
    ready = [100] * 4
    frames = [planner.next(ready) for _ in range(8)]
    assert [(f.layer, f.first_token) for f in frames if f] == [(i, at) for at in (0, 10) for i in range(4)]


def test_layers_that_piled_up_go_together() -> None:
    planner = FramePlanner(extent(100), 1000 * ROW)
    assert planner.next([0] * 4) is None
    frame = planner.next([50, 50, 50, 20])
    assert frame is not None and (frame.layer, frame.num_layers, frame.num_tokens) == (0, 3, 50)
    frame = planner.next([50, 50, 50, 50])
    assert frame is not None and (frame.layer, frame.num_layers, frame.num_tokens) == (3, 1, 50)
    frame = planner.next([100] * 4)
    assert frame is not None and (frame.layer, frame.num_layers, frame.first_token) == (0, 4, 50)


def test_one_token_goes_however_large() -> None:
    layout = msgspec.structs.replace(LAYOUT, head_dim=1 << 16)
    frame = FramePlanner(extent(2, layout=layout), 1 << 10).next([2] * 4)
    assert frame is not None and frame.num_tokens == 1 and frame.length <= MAX_FRAME_BYTES


WHOLE = msgspec.structs.replace(LAYOUT, whole_blocks=True)


@given(data=st.data(), num_blocks=st.integers(0, 12), frame_rows=st.integers(1, 30))
def test_whole_blocks_are_sent_and_believed_whole(data: st.DataObject, num_blocks: int, frame_rows: int) -> None:
    """Whatever the engine announces, however small frames are meant to be, and wherever it ends."""
    size = WHOLE.block_size
    wanted = extent(num_blocks * size, data.draw(st.integers(0, num_blocks)) * size, WHOLE)
    planner, landing = FramePlanner(wanted, frame_rows * ROW), Landing(wanted, SEAL)
    ready = [data.draw(st.integers(0, wanted.num_tokens)) for _ in range(WHOLE.num_layers)]
    while not planner.all_sent:
        while (frame := planner.next(ready)) is not None:
            end = frame.first_token + frame.num_tokens
            assert frame.first_token % size == end % size == 0
            assert end <= min(ready[frame.layer : frame.layer + frame.num_layers]), "not computed yet"
            landing.expect(frame)
            landing.received(frame, frame.sequence)
            landing.commit(Header(Kind.COMMIT, frame.sequence, tag=SEAL.of_frame(frame, frame.sequence)))
            assert landing.num_landed_tokens % size == 0
        ready = [data.draw(st.integers(n, wanted.num_tokens)) for n in ready]
        slowest = ready.index(min(ready))
        ready[slowest] = min(wanted.num_tokens, ready[slowest] + 1)
    landing.check_whole()


@pytest.mark.parametrize("num_tokens", [1, 3, 5, 7, 9, 19])
def test_a_frame_that_cuts_a_block_is_refused(num_tokens: int) -> None:
    frame = Header(Kind.DATA, 1, 0, 4, 0, num_tokens, num_tokens * 4 * ROW)
    Landing(extent(20), SEAL).expect(frame)
    with pytest.raises(ProtocolError, match="cuts a block"):
        Landing(extent(20, layout=WHOLE), SEAL).expect(frame)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (extent(16, 3, WHOLE), "tokens 3 to 16 are no whole blocks of 4"),
        (extent(15, 4, WHOLE), "tokens 4 to 15 are no whole blocks of 4"),
        (extent(16, layout=WHOLE, wire_dtype="int8"), "wire_dtype int8"),
        (extent(16, 4, WHOLE), ""),
        (extent(15, 3, wire_dtype="int8"), ""),
    ],
)
def test_what_would_cut_a_block_is_named(wanted: Extent, said: str) -> None:
    assert wanted.refusal().startswith(said) and bool(wanted.refusal()) == bool(said)


def test_uncommitted_frames_are_bounded() -> None:
    landing = Landing(extent(100), SEAL)
    for i in range(MAX_OUTSTANDING_FRAMES):
        frame = Header(Kind.DATA, i + 1, 0, 4, i, 1, 4 * ROW)
        landing.expect(frame)
        landing.received(frame, 0)
    with pytest.raises(ProtocolError):
        landing.expect(Header(Kind.DATA, MAX_OUTSTANDING_FRAMES + 1, 0, 4, MAX_OUTSTANDING_FRAMES, 1, 4 * ROW))


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_header_is_a_header_or_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_header(data, *Kind)


@given(kind=st.sampled_from(Kind), rest=st.binary(min_size=HEADER_BYTES - 4, max_size=HEADER_BYTES - 4))
def test_any_header_with_our_magic(kind: Kind, rest: bytes) -> None:
    try:
        header = decode_header(b"KV" + bytes([VERSION, kind]) + rest, *Kind)
    except ProtocolError:
        return
    assert header.kind is kind and header.length <= MAX_FRAME_BYTES
    landing = Landing(extent(50), SEAL)
    with pytest.raises(ProtocolError):
        landing.expect(header)


def test_kinds_that_may_not_come_are_refused() -> None:
    with pytest.raises(ProtocolError, match="OPEN"):
        decode_header(encode_header(Header(Kind.DATA)), Kind.OPEN)


@given(st.binary(max_size=100))
def test_any_body_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_body(body, Open)


def test_body_survives() -> None:
    opening = Open(ticket="t", nonce="n", fingerprint="f", carrier="shm", first_token=1, num_tokens=2)
    frame = encode_frame(Kind.OPEN, opening)
    header = decode_header(frame[:HEADER_BYTES], Kind.OPEN)
    assert header.length == len(frame) - HEADER_BYTES
    assert decode_body(frame[HEADER_BYTES:], Open) == opening


_DECODE_AT_ONCE = """
import sys, threading
from dataplane.protocol import stream
bodies = [
    stream.Open(ticket="t", nonce="n", fingerprint="x", carrier="tcp", first_token=0, num_tokens=16),
    stream.Accepted(carrier="tcp", nonce="n"),
    stream.StreamRefused(code=list(stream.RefusalCode)[0], detail="d"), stream.StreamFailed(reason="r"),
]
structs = {each for each in vars(stream).values() if isinstance(each, type) and issubclass(each, stream.msgspec.Struct)}
assert {type(body) for body in bodies} == structs, "a body that is not tried here"
def decode(text, kind, barrier):
    barrier.wait()
    stream.decode_body(text, kind)
sys.setswitchinterval(1e-6)
for body in bodies:
    barrier = threading.Barrier(16)
    text = stream.msgspec.json.encode(body)
    threads = [threading.Thread(target=decode, args=(text, type(body), barrier)) for _ in range(16)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
"""


def test_many_threads_may_decode_the_first_bodies_at_once() -> None:
    """Two reads that were the first of a worker's life, at once, have ended its process by a segmentation fault."""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", _DECODE_AT_ONCE], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr.decode()


def test_every_flipped_bit_of_a_header_is_found_in_it() -> None:
    """A damaged length would have the peer wait for bytes that never come."""
    header = encode_header(Header(Kind.DATA, 7, 1, 2, 16, 32, 4_096, tag=2**127 + 5))
    for bit in range(8 * len(header)):
        damaged = bytearray(header)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            decode_header(damaged, *Kind)
    assert decode_header(header, *Kind).length == 4_096
