"""Reads whose bytes cross a wire compressed: what arrives is close, what is damaged is refused."""

from collections.abc import Callable, Iterator

import ml_dtypes
import msgspec
import numpy as np
import pytest

from dataplane.blocks.layout import KVLayout
from dataplane.carriers.tcp import TcpHolder
from dataplane.memory.codec import WireDtype
from dataplane.memory.extent import Extent
from dataplane.protocol.stream import (
    Accepted,
    FramePlanner,
    Header,
    Kind,
    Landing,
    ProtocolError,
    Seal,
    TransferFailedError,
    encode_frame,
    encode_header,
)
from tests.plane.harness import KV, Holder, Target, running, use_cards
from tests.plane.test_unauthenticated import END, commit, hears, impostor, knock, opening, proxy

LAYOUT = KVLayout(weights="w", dtype="bfloat16", num_layers=3, num_kv_heads=2, head_dim=32, block_size=16)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
PACKED = ("int8", "fp8")
SMALL = Extent(layout=LAYOUT, first_token=0, num_tokens=100, wire_dtype="int8")


def normal_kv(layout: KVLayout, num_tokens: int = 300) -> KV:
    shape = (layout.num_layers, 2, num_tokens, layout.num_kv_heads * layout.head_dim)
    numbers = np.random.default_rng(3).standard_normal(shape).astype(DTYPES[layout.dtype])
    return numbers.view(np.uint8)  # pyright: ignore[reportReturnType]


def as_numbers(kv: np.ndarray, layout: KVLayout) -> np.ndarray:
    return np.ascontiguousarray(kv).view(DTYPES[layout.dtype]).astype(np.float64)


@pytest.fixture(params=["host>host", "card>card", "card>host", "host>card"])
def ends(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where the holder and the target have their KV."""
    source, _, target = request.param.partition(">")
    use_cards(holder=source == "card", target=target == "card")
    yield
    use_cards(holder=False, target=False)


anywhere = pytest.mark.usefixtures("ends")


@pytest.fixture
def holder(make_holder: Callable[..., Holder]) -> Holder:
    return make_holder(("loopback", "shm", "tcp"), layout=LAYOUT, kv=normal_kv(LAYOUT))


@pytest.fixture
def target():
    made = Target(LAYOUT)
    yield made
    made.close()


@anywhere
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire_dtype", PACKED)
@pytest.mark.parametrize("chunk", [5, 16, 300])
@pytest.mark.parametrize("first_token", [0, 37])
def test_arrives_close_to_what_it_was(
    make_holder: Callable[..., Holder], dtype: str, wire_dtype: str, chunk: int, first_token: int
) -> None:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)
    holder, target = make_holder(("tcp",), layout=layout, kv=normal_kv(layout)), Target(layout)

    def compute() -> None:
        holder.compute(chunk)
        holder.progress.complete(b"token 0")

    with running(compute):
        landed = target.read_from(holder, "tcp", wire_dtype=wire_dtype, first_token=first_token)
    exact = as_numbers(holder.kv, layout)[:, :, first_token:]
    error = abs(as_numbers(target.landed(300, first_token), layout) - exact)
    bound = 0.03 if wire_dtype == "int8" else abs(exact) * 0.07 + 0.01
    assert (error <= bound).all() and error.max() > 0
    stats, (served, _) = landed.stats, holder.gate.wait_outcome()
    assert served is not None
    num_tokens = 300 - first_token
    num_blocks = 19 - first_token // 16
    for end in (stats, served):
        assert end.wire_dtype == wire_dtype and end.codec_ns > 0
        assert end.num_bytes == num_tokens * 2 * layout.num_layers * layout.token_bytes
        assert end.num_wire_bytes == 2 * 3 * (num_tokens * 64 + num_blocks * 2 * 4), "a scale per block and head"
    target.close()


@pytest.mark.parametrize("carrier", ["loopback", "shm", "auto"])
@pytest.mark.parametrize("wire_dtype", PACKED)
def test_nothing_is_compressed_on_one_host(holder: Holder, target: Target, carrier: str, wire_dtype: str) -> None:
    holder.compute_all()
    stats = target.read_from(holder, carrier, wire_dtype=wire_dtype).stats
    assert stats.wire_dtype == "same" and stats.codec_ns == 0
    assert stats.num_wire_bytes == stats.num_bytes
    assert np.array_equal(target.landed(300), holder.kv)


@pytest.mark.parametrize("wire_dtype", PACKED)
def test_frames_are_cut_at_block_borders(
    holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch, wire_dtype: str
) -> None:
    planned: list[Header] = []
    plan = FramePlanner.next

    def noted(self, ready):
        frame = plan(self, ready)
        planned.extend([frame] if frame else [])
        return frame

    monkeypatch.setattr(FramePlanner, "next", noted)
    monkeypatch.setattr(TcpHolder, "frame_bytes", 40 * 2 * LAYOUT.token_bytes)
    with running(lambda: holder.compute_all()):
        target.read_from(holder, "tcp", wire_dtype=wire_dtype, first_token=5)
    assert len(planned) > 20
    for frame in planned:
        end = frame.first_token + frame.num_tokens
        assert frame.first_token == 5 or frame.first_token % 16 == 0
        assert end == 300 or end % 16 == 0


@anywhere
def test_block_that_does_not_fit_a_frame_is_cut(
    holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TcpHolder, "frame_bytes", 7 * 2 * LAYOUT.token_bytes)
    holder.compute_all()
    landed = target.read_from(holder, "tcp", wire_dtype="int8")
    assert landed.stats.num_frames > 3 * 300 / 7
    assert (abs(as_numbers(target.landed(300), LAYOUT) - as_numbers(holder.kv, LAYOUT)) < 0.03).all()


@anywhere
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("wire_dtype", PACKED)
def test_what_is_not_finite_fails_and_can_be_read_as_it_is(
    holder: Holder, target: Target, number: float, wire_dtype: str
) -> None:
    numbers = holder.kv.view(DTYPES[LAYOUT.dtype])
    numbers[1, 0, 250, 3] = number
    target.array[:] = 0xAB
    holder.compute_all()
    with pytest.raises(TransferFailedError, match="not finite") as raised:
        target.read_from(holder, "tcp", wire_dtype=wire_dtype)
    assert (raised.value.code, raised.value.num_landed_tokens) == ("codec", 0)
    assert (target.array == 0xAB).all()
    assert "not finite" in holder.gate.wait_outcome()[1]
    target.read_from(holder, "tcp")
    assert np.array_equal(target.landed(300), holder.kv)


@anywhere
@pytest.mark.parametrize("wire_dtype", PACKED)
@pytest.mark.parametrize("at", [70, 97, 100, 5000, 20_000, 100_000])
@pytest.mark.parametrize("fault", ["flip", "cut"])
def test_network_that_damages(holder: Holder, target: Target, wire_dtype: str, at: int, fault: str) -> None:
    holder.compute_all()
    with proxy(holder, at, fault) as endpoint, pytest.raises(TransferFailedError) as raised:
        request = target.request(endpoint, holder.ticket(), "tcp", 300, wire_dtype=wire_dtype)
        target.reader.read_blocking(request)
    assert raised.value.code in ("digest", "protocol", "closed")
    assert raised.value.num_landed_tokens == 0


@anywhere
@pytest.mark.parametrize("wire_dtype", PACKED)
def test_length_is_checked_before_anything_is_written(holder: Holder, target: Target, wire_dtype: WireDtype) -> None:
    target.array[:] = 0xAB
    right = Extent(layout=LAYOUT, first_token=0, num_tokens=300, wire_dtype=wire_dtype).payload_bytes(3, 0, 300)
    for length in (right - 1, right + 1, 300 * 3 * 2 * LAYOUT.token_bytes, 0):
        head = encode_header(Header(Kind.DATA, 1, 0, 3, 0, 300, length))
        accepted = encode_frame(Kind.ACCEPTED, Accepted(carrier="tcp", nonce="n"))
        with impostor(accepted + head + bytes(length) + commit() + END) as endpoint:
            request = target.request(endpoint, holder.ticket(), "tcp", 300, wire_dtype=wire_dtype)
            with pytest.raises(TransferFailedError) as raised:
                target.reader.read_blocking(request)
        assert raised.value.code == "protocol"
        assert (target.array == 0xAB).all()


@anywhere
def test_scale_that_cannot_be_is_refused_where_nobody_digests(holder: Holder, target: Target) -> None:
    extent = Extent(layout=LAYOUT, first_token=0, num_tokens=300, wire_dtype="int8")
    payload = bytearray(extent.payload_bytes(3, 0, 300))
    payload[:4] = np.array([np.nan], "<f4").tobytes()
    head = encode_header(Header(Kind.DATA, 1, 0, 3, 0, 300, len(payload)))
    accepted = encode_frame(Kind.ACCEPTED, Accepted(carrier="tcp", nonce="n"))
    with impostor(accepted + head + bytes(payload) + commit() + END) as endpoint:
        request = target.request(endpoint, holder.ticket(), "tcp", 300, wire_dtype="int8")
        with pytest.raises(TransferFailedError, match="scale") as raised:
            target.reader.read_blocking(request)
    assert raised.value.code == "protocol"


def test_a_block_that_is_begun_waits_for_its_rest() -> None:
    planner, landing = FramePlanner(SMALL, 1 << 20), Landing(SMALL, Seal(b""))
    assert planner.next([15] * 3) is None
    frame = planner.next([40, 40, 20])
    assert frame is not None and (frame.layer, frame.num_layers, frame.num_tokens) == (0, 2, 32)
    landing.expect(frame)
    landing.received(frame, 0)
    frame = planner.next([100, 40, 31])
    assert frame is not None and (frame.layer, frame.num_tokens) == (2, 16)
    with pytest.raises(ProtocolError, match="wrong length"):
        landing.expect(frame._replace(length=frame.length - 1))


def test_compression_where_it_is_not_is_refused(holder: Holder) -> None:
    with knock(holder) as sock:
        sock.sendall(opening(holder, "shm", wire_dtype="int8", fingerprint=LAYOUT.fingerprint))
        assert b'"malformed"' in hears(sock)


def test_unknown_compression_is_no_open_of_ours(holder: Holder) -> None:
    with knock(holder) as sock:
        sock.sendall(opening(holder, "tcp", wire_dtype="int4", fingerprint=LAYOUT.fingerprint))
        assert hears(sock) == b""
    holder.server.close()
    assert holder.server.num_junk == 1


@anywhere
async def test_read_takes_the_dtype(holder: Holder, target: Target) -> None:
    holder.compute_all()
    request = target.request(holder.endpoint, holder.ticket(), "tcp", 300, wire_dtype="int8")
    landed = await target.reader.read_kv(request)
    assert landed.stats.wire_dtype == "int8"
    assert landed.stats.num_bytes == 300 * 2 * 3 * LAYOUT.token_bytes
    numbers, exact = (as_numbers(kv, LAYOUT) for kv in (target.landed(300), holder.kv))
    assert (abs(numbers - exact) < 0.03).all()
