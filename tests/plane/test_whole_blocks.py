"""KV whose blocks are only whole of use: whatever is computed, asked for, sent or broken off, no block is ever cut."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.cards import limits
from dataplane.cards.ends import CudaHolder, NcclHolder
from dataplane.carriers.shm import SharedHolder
from dataplane.carriers.tcp import TcpHolder
from dataplane.protocol.stream import FramePlanner, Header
from tests.plane import harness
from tests.plane.harness import (
    CARRIERS,
    SIMULATED,
    Holder,
    Target,
    fails,
    name_of,
    running,
)
from tests.plane.test_unauthenticated import ACCEPTED, END, commit, data, hears, impostor, knock, opening, proxy

LAYOUT = msgspec.structs.replace(harness.LAYOUT, whole_blocks=True)
SIZE = LAYOUT.block_size
NUM_TOKENS = LAYOUT.padded(300)
"""A prompt of 300 tokens, and what its last block has behind them."""
BLOCK_BYTES = LAYOUT.layer_block_bytes
"""Of one layer: no frame is smaller."""


ON_CARDS = ("card>host:tcp", "host>card:tcp", "card>card:cuda", "apart>apart:nccl")


@pytest.fixture(params=[*CARRIERS, *(SIMULATED + carrier for carrier in CARRIERS), *ON_CARDS])
def carrier(request: pytest.FixtureRequest) -> str:
    return name_of(request.param)


@pytest.fixture
def holder(carrier: str, make_holder: Callable[..., Holder]) -> Holder:
    return make_holder((carrier,), NUM_TOKENS, LAYOUT)


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target(LAYOUT)
    yield made
    made.close()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Header]:
    """The frames that holders send, each at most two blocks of a layer."""
    frames: list[Header] = []
    plan = FramePlanner.next

    def noted(planner: FramePlanner, ready: tuple[int, ...]) -> Header | None:
        frame = plan(planner, ready)
        frames.extend([frame] if frame else [])
        return frame

    monkeypatch.setattr(FramePlanner, "next", noted)
    for carrier in (SharedHolder, TcpHolder, CudaHolder, NcclHolder):
        monkeypatch.setattr(carrier, "frame_bytes", 2 * BLOCK_BYTES + 1)
    return frames


def are_whole(frames: list[Header]) -> bool:
    return all(frame.first_token % SIZE == frame.num_tokens % SIZE == 0 for frame in frames)


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 304])
def test_blocks_cross_whole_while_they_are_computed(
    carrier: str, holder: Holder, target: Target, planned: list[Header], chunk: int
) -> None:
    """An engine may announce any number of tokens: a block that is begun waits for its rest."""

    def compute() -> None:
        holder.compute(chunk)
        holder.progress.complete(b"token 0")

    with running(compute):
        landed = target.read_from(holder, carrier)
    assert (landed.trailer, landed.num_tokens) == (b"token 0", NUM_TOKENS)
    assert np.array_equal(target.landed(NUM_TOKENS), holder.kv)
    assert len(planned) >= NUM_TOKENS / SIZE / 2 and are_whole(planned)


@pytest.mark.parametrize("frame_bytes", [1, BLOCK_BYTES - 1, BLOCK_BYTES])
def test_a_block_that_is_larger_than_a_frame_goes_whole(
    carrier: str,
    holder: Holder,
    target: Target,
    planned: list[Header],
    monkeypatch: pytest.MonkeyPatch,
    frame_bytes: int,
) -> None:
    """What a carrier would rather have is no bound that its memory sets."""
    monkeypatch.setattr(SharedHolder, "frame_bytes", frame_bytes)
    monkeypatch.setattr(TcpHolder, "frame_bytes", frame_bytes)
    holder.compute_all()
    target.read_from(holder, carrier, first_token=NUM_TOKENS - 2 * SIZE)
    assert np.array_equal(target.landed(NUM_TOKENS, NUM_TOKENS - 2 * SIZE), holder.kv[:, :, NUM_TOKENS - 2 * SIZE :])
    assert are_whole(planned)


@pytest.mark.parametrize("carrier", ["apart>apart:nccl"])
def test_a_block_that_a_pair_s_buffer_does_not_hold_is_refused(
    carrier: str, make_holder: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "NCCL_FRAME_BYTES", BLOCK_BYTES - 1)
    holder, target = make_holder(("nccl",), NUM_TOKENS, LAYOUT), Target(LAYOUT)
    assert fails(lambda: target.read_from(holder, "nccl")).code == "carrier"
    target.close()


@pytest.mark.parametrize("first_token", [0, SIZE, NUM_TOKENS - SIZE, NUM_TOKENS])
def test_what_the_reader_lacks_is_whole_blocks(carrier: str, holder: Holder, target: Target, first_token: int) -> None:
    target.memory.fill(0xAB)
    holder.compute_all()
    landed = target.read_from(holder, carrier, first_token=first_token)
    assert landed.stats.num_bytes == (NUM_TOKENS - first_token) // SIZE * LAYOUT.block_bytes
    assert np.array_equal(target.landed(NUM_TOKENS, first_token), holder.kv[:, :, first_token:])
    assert (target.landed(first_token) == 0xAB).all()


@pytest.mark.parametrize("num_frames", [1, 2, 3, 4, 7, 12, 20, 28])
def test_a_lease_that_ends_at_any_frame_leaves_whole_blocks(
    carrier: str,
    holder: Holder,
    target: Target,
    planned: list[Header],
    monkeypatch: pytest.MonkeyPatch,
    num_frames: int,
) -> None:
    """The memory is used again from then on."""
    plan = FramePlanner.next

    def reuse(planner: FramePlanner, ready: tuple[int, ...]) -> Header | None:
        frame = plan(planner, ready)
        if len(planned) >= num_frames and holder.lease.end is None:
            holder.end_lease()
            if holder.card is None:
                holder.array[:] = 0xEE
        return frame

    monkeypatch.setattr(FramePlanner, "next", reuse)
    holder.compute_all()
    error = fails(lambda: target.read_from(holder, carrier))
    landed = error.num_landed_tokens
    assert error.code in ("holder", "closed") and landed % SIZE == 0 and are_whole(planned)
    assert np.array_equal(target.landed(landed), holder.kv[:, :, :landed])


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40, 303])
def test_an_engine_that_fails_inside_a_block_has_given_the_blocks_before(
    carrier: str, holder: Holder, target: Target, planned: list[Header], num_tokens: int
) -> None:
    holder.compute(300, end=num_tokens)
    if num_tokens < SIZE:
        holder.progress.fail("the engine has failed")
    error = fails(lambda: target.read_from(holder, carrier, lambda _: holder.progress.fail("the engine has failed")))
    landed = error.num_landed_tokens
    assert error.code in ("holder", "closed") and are_whole(planned)
    assert landed % SIZE == 0 and landed <= num_tokens
    assert np.array_equal(target.landed(landed), holder.kv[:, :, :landed])


# Over tcp, where a connection can be cut at any byte and anybody may say anything.

over_tcp = pytest.mark.parametrize("carrier", ["tcp"])


@over_tcp
@pytest.mark.parametrize("at", [*range(600, 100_000, 9_973)])
@pytest.mark.parametrize("fault", ["flip", "cut"])
def test_a_connection_that_breaks_anywhere_leaves_whole_blocks(
    holder: Holder, target: Target, planned: list[Header], at: int, fault: str
) -> None:
    holder.compute_all()
    with proxy(holder, at, fault) as endpoint:
        request = target.request(endpoint, holder.ticket(), "tcp", NUM_TOKENS)
        landed = fails(lambda: target.reader.read_blocking(request)).num_landed_tokens
    assert landed % SIZE == 0
    assert np.array_equal(target.landed(landed), holder.kv[:, :, :landed])


@over_tcp
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_token": 5}, "tokens 5 to 304"),
        ({"num_tokens": 300}, "tokens 0 to 300"),
        ({"wire_dtype": "int8"}, "wire_dtype int8"),
    ],
)
def test_a_reader_that_asks_for_a_part_of_a_block_is_refused(
    holder: Holder, changes: dict[str, Any], said: str
) -> None:
    holder.compute_all()
    with knock(holder) as sock:
        sock.sendall(opening(holder, "tcp", **({"num_tokens": NUM_TOKENS} | changes)))
        heard = hears(sock)
    assert b'"range"' in heard and said.encode() in heard
    holder.server.close()
    assert holder.server.num_refused == 1 and not holder.gate.num_started


@over_tcp
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"first_token": 5}, "tokens 5 to 304"),
        ({"num_tokens": 300}, "tokens 0 to 300"),
        ({"wire_dtype": "fp8"}, "wire_dtype fp8"),
    ],
)
def test_a_part_of_a_block_is_the_callers_error(
    carrier: str, holder: Holder, target: Target, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        target.read_from(holder, carrier, **changes)


@over_tcp
@pytest.mark.parametrize("num_whole_tokens", [0, SIZE, 5 * SIZE])
@pytest.mark.parametrize("num_more", [1, 15, 17])
def test_a_holder_that_cuts_a_block_is_not_believed(
    holder: Holder, target: Target, num_whole_tokens: int, num_more: int
) -> None:
    """Not one byte of the frame that cuts is written."""
    target.array[:] = 0xAB
    said = data(num_tokens=num_whole_tokens) + commit() if num_whole_tokens else b""
    cut = data(sequence=2 if said else 1, first_token=num_whole_tokens, num_tokens=num_more)
    with impostor(ACCEPTED + said + cut + commit(2 if said else 1) + END) as endpoint:
        request = target.request(endpoint, holder.ticket(), "tcp", NUM_TOKENS)
        error = fails(lambda: target.reader.read_blocking(request))
    assert (error.code, error.num_landed_tokens) == ("protocol", num_whole_tokens)
    assert "cuts a block" in error.detail
    assert (target.landed(NUM_TOKENS, num_whole_tokens) == 0xAB).all()


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
def test_a_holder_that_knows_nothing_of_whole_blocks_is_not_believed(
    carrier: str, make_holder: Callable[..., Holder], target: Target
) -> None:
    """Its fingerprint is the same: only what it does shows it."""
    holder = make_holder((carrier,), NUM_TOKENS, harness.LAYOUT)
    holder.compute(NUM_TOKENS, end=20)
    error = fails(lambda: target.read_from(holder, carrier))
    assert (error.code, error.num_landed_tokens) == ("protocol", 0)
