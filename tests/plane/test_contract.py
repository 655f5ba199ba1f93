"""What every carrier does, a simulated one too: the bytes arrive, in place, while they are still being computed."""

import asyncio
import functools
from collections.abc import Callable

import numpy as np
import pytest

from dataplane.blocks.layout import BlockTable, KVLayout, Segment
from dataplane.cards.ends import CudaHolder, NcclHolder
from dataplane.carriers.shm import SharedHolder
from dataplane.carriers.tcp import TcpHolder
from tests.plane.harness import (
    CARRIERS,
    DEADLINE_S,
    LAYOUT,
    ON_CARDS,
    ON_GPU,
    SIMULATED,
    STAGED,
    TARGET,
    Holder,
    Target,
    name_of,
    running,
    start_thread,
)


@pytest.fixture(params=[*CARRIERS, *(SIMULATED + carrier for carrier in CARRIERS), *STAGED, *ON_CARDS, *ON_GPU])
def carrier(request: pytest.FixtureRequest) -> str:
    return name_of(request.param)


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 300])
def test_streams_what_is_being_computed(carrier: str, holder: Holder, target: Target, chunk: int) -> None:
    def compute() -> None:
        holder.compute(chunk)
        holder.progress.complete(b"token 0")

    with running(compute):
        landed = target.read_from(holder, carrier)
    assert landed.trailer == b"token 0"
    assert landed.num_tokens == holder.num_tokens
    assert np.array_equal(target.landed(300), holder.kv)


def test_streams_what_was_computed_before(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    landed = target.read_from(holder, carrier)
    assert np.array_equal(target.landed(300), holder.kv)
    assert landed.stats.num_frames == 1, "layers that piled up go together"


def test_layers_arrive_in_any_order(carrier: str, holder: Holder, target: Target) -> None:
    def compute() -> None:
        for layer, start, end in [(2, 0, 33), (0, 0, 300), (2, 33, 300), (1, 0, 1), (1, 1, 300)]:
            holder.compute_layer(layer, start, end)
        holder.progress.complete(b"")

    with running(compute):
        landed = target.read_from(holder, carrier)
    assert landed.trailer == b""
    assert np.array_equal(target.landed(300), holder.kv)


@pytest.mark.parametrize("first_token", [1, 16, 37, 299, 300])
def test_sends_only_what_the_reader_lacks(carrier: str, holder: Holder, target: Target, first_token: int) -> None:
    target.memory.fill(0xAB)
    holder.compute_all()
    landed = target.read_from(holder, carrier, first_token=first_token)
    assert landed.stats.num_bytes == (300 - first_token) * 2 * LAYOUT.num_layers * LAYOUT.token_bytes
    assert np.array_equal(target.landed(300, first_token), holder.kv[:, :, first_token:])
    assert (target.landed(first_token) == 0xAB).all(), "what the reader holds is not written"


def test_writes_nothing_outside_its_blocks(carrier: str, holder: Holder, target: Target) -> None:
    target.memory.fill(0xAB)
    holder.compute_all()
    target.read_from(holder, carrier)
    num_slots = TARGET.end_block * LAYOUT.block_size
    written = np.count_nonzero(target.array != 0xAB)
    inside = np.count_nonzero(target.landed(num_slots) != 0xAB)
    assert written == inside == np.count_nonzero(holder.kv != 0xAB)


def test_frames_are_bounded_and_many(
    carrier: str, make_holder: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedHolder, "frame_bytes", 4 << 20)
    monkeypatch.setattr(NcclHolder, "frame_bytes", 4 << 20)
    monkeypatch.setattr(CudaHolder, "frame_bytes", 4 << 20)
    layout = KVLayout(weights="w", dtype="bfloat16", num_layers=5, num_kv_heads=8, head_dim=512, block_size=16)
    holder, target = make_holder((carrier,), 311, layout), Target(layout)  # 24 MiB
    holder.compute_all()
    landed = target.read_from(holder, carrier)
    assert landed.stats.num_frames > 5
    assert np.array_equal(target.landed(311), holder.kv)
    target.close()


@pytest.mark.parametrize("frame_bytes", [1, 1000, 4096])
def test_more_frames_than_may_be_under_way(
    carrier: str, holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch, frame_bytes: int
) -> None:
    monkeypatch.setattr(SharedHolder, "frame_bytes", frame_bytes)
    monkeypatch.setattr(TcpHolder, "frame_bytes", frame_bytes)
    monkeypatch.setattr(CudaHolder, "frame_bytes", frame_bytes)
    monkeypatch.setattr(NcclHolder, "frame_bytes", frame_bytes)
    with running(holder.compute_all):
        landed = target.read_from(holder, carrier)
    assert landed.stats.num_frames > 20
    assert np.array_equal(target.landed(300), holder.kv)


def test_stats_of_both_ends_agree(carrier: str, holder: Holder, target: Target) -> None:
    with running(holder.compute_all):
        landed = target.read_from(holder, carrier)
    served, error = holder.gate.wait_outcome()
    assert served is not None and not error
    num_bytes = 300 * 2 * LAYOUT.num_layers * LAYOUT.token_bytes
    for stats in (landed.stats, served):
        assert stats.carrier == carrier
        assert stats.num_bytes == num_bytes
        assert 0 < stats.opened_ns <= stats.first_byte_ns <= stats.last_byte_ns <= stats.landed_ns
        assert stats.wait_ns >= 0 and stats.verify_ns > 0 and stats.copy_ns > 0
        assert stats.wait_ns + stats.verify_ns + stats.copy_ns <= stats.landed_ns - stats.opened_ns + 1_000_000
    assert served.num_frames == landed.stats.num_frames
    assert holder.gate.num_started == 1


def test_digests_can_be_off(carrier: str, make_holder: Callable[..., Holder], target: Target) -> None:
    holder = make_holder((carrier,), digests=False, encryption="off")
    holder.compute_all()
    landed = target.read_from(holder, carrier)
    assert landed.stats.verify_ns == 0
    assert np.array_equal(target.landed(300), holder.kv)


@pytest.mark.parametrize("digests", [True, False])
def test_what_crosses_a_network_can_be_encrypted(
    carrier: str, make_holder: Callable[..., Holder], target: Target, digests: bool
) -> None:
    """Without digests too: its tag comes with the encryption. No other carrier leaves the host."""
    holder = make_holder((carrier,), encryption="on", digests=digests)
    holder.compute_all()
    landed = target.read_from(holder, carrier)
    assert (landed.stats.digest_kind == "aes256gcm") is (carrier == "tcp")
    assert np.array_equal(target.landed(300), holder.kv)


def test_many_reads_at_once(carrier: str, make_holder: Callable[..., Holder]) -> None:
    holder = make_holder((carrier,))
    targets = [Target(name=f"decode-{number}") for number in range(6)]
    threads = [start_thread(functools.partial(t.read_from, holder, carrier)) for t in targets]
    holder.compute_all()
    for thread, target in zip(threads, targets, strict=True):
        thread.join(DEADLINE_S)
        assert np.array_equal(target.landed(300), holder.kv)
        target.close()


def test_one_lease_may_be_read_twice(carrier: str, holder: Holder, target: Target) -> None:
    holder.compute_all()
    for _ in range(2):
        target.memory.fill(0)
        target.read_from(holder, carrier)
        assert np.array_equal(target.landed(300), holder.kv)


async def test_awaits_off_the_loop(carrier: str, holder: Holder, target: Target) -> None:
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(
        target.reader.read_kv(target.request(holder.endpoint, holder.ticket(), carrier, 300), started.set_result)
    )
    holder.compute(300, end=20)
    assert await started == carrier
    holder.compute(300, start=20)
    holder.progress.complete(b"t")
    landed = await task
    assert landed.trailer == b"t"
    assert np.array_equal(target.landed(300), holder.kv)


@pytest.mark.parametrize(("offered", "chosen"), [(("shm", "tcp"), "shm"), (("tcp",), "tcp")])
def test_auto_takes_the_best_that_leads_there(
    make_holder: Callable[..., Holder], target: Target, offered: tuple[str, ...], chosen: str
) -> None:
    holder = make_holder(offered)
    holder.compute_all()
    assert target.read_from(holder, "auto").stats.carrier == chosen


def test_too_small_a_target_is_the_callers_error(carrier: str, holder: Holder, target: Target) -> None:
    for table in (BlockTable((Segment(0, 1),)), BlockTable((Segment(0, 20),), first_block=1), BlockTable(())):
        with pytest.raises(ValueError, match="no slot for each of tokens 0 to 300"):
            target.read_from(holder, carrier, tables=(table,))
    with pytest.raises(ValueError, match="no such blocks"):
        target.read_from(holder, carrier, tables=(BlockTable((Segment(40, 20),)),))
