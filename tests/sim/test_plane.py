"""The simulated plane: the real holder and reader under virtual time, and each thing that can befall a stream."""

import asyncio
import random
from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.protocol.stream import TransferFailedError
from services.sim.platform.connection import StreamFault
from services.sim.platform.plane import SimNetwork
from services.sim.platform.threads import now_s
from tests.plane.harness import Holder, Target, use_network
from tests.sim.rig import CARRIERS, NUM_BYTES, NUM_TOKENS, Plane
from tests.virtual import OneFault, virtually


@pytest.fixture(params=CARRIERS)
def carrier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def real_network_after() -> Iterator[None]:
    yield
    use_network(None)


def test_a_read_takes_virtual_time_only(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier) as plane:
            plane.compute()
            landed = await plane.read()
            assert landed.trailer == b"token 0" and plane.is_right()
            assert landed.stats.num_frames >= 6, "it came as it was computed"
            assert now_s() >= 0.06 + NUM_BYTES / 6 / plane.network.bytes_per_s, "the last chunk takes its time"

    virtually(live)


@pytest.mark.parametrize("at_byte", [0, 30, 2_000, NUM_BYTES // 2])
def test_truncation_keeps_what_has_landed(carrier: str, at_byte: int) -> None:
    async def live() -> None:
        with Plane(carrier, OneFault(StreamFault("truncation", at_byte))) as plane:
            plane.compute()
            error = await plane.failure()
            assert error.code == "closed"
            assert (error.num_landed_tokens > 0) == (at_byte == NUM_BYTES // 2)
            await asyncio.sleep(0.1)
            assert plane.holder.gate.outcomes or at_byte == 0, "the holder was told"
            assert plane.network.num_connections == 0
            await plane.read()
            assert plane.is_right(), "the next read is as good as any"

    virtually(live)


def test_a_flipped_bit_is_never_believed(carrier: str) -> None:
    async def live(at_byte: int) -> str:
        with Plane(carrier, OneFault(StreamFault("corruption", at_byte))) as plane:
            plane.compute(100)
            try:
                await plane.read()
            except TransferFailedError as error:
                landed = plane.target.landed(error.num_landed_tokens)
                assert np.array_equal(landed, plane.holder.kv[:, :, : error.num_landed_tokens])
                return error.code
            assert plane.is_right()
            return ""

    codes = [virtually(lambda at=at: live(at)) for at in [*range(0, 400, 7), *range(400, NUM_BYTES, 1_499)]]
    assert codes.count("digest") > len(range(400, NUM_BYTES, 1_499)) // 2, "most bytes are KV"
    assert "protocol" in codes


def test_a_stall_ends_at_the_deadline_or_passes(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier, OneFault(StreamFault("stall", NUM_BYTES // 2, 60.0))) as plane:
            plane.compute()
            error = await plane.failure(2.0)
            assert error.code == "deadline" and round(now_s(), 3) >= 2.0
        with Plane(carrier, OneFault(StreamFault("stall", NUM_BYTES // 2, 1.0))) as plane:
            plane.compute()
            await plane.read()
            assert plane.is_right()

    virtually(live)


def test_a_slow_stream_takes_its_time(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier, OneFault(StreamFault("slowness", NUM_BYTES // 2, 0.1))) as plane:
            plane.compute()
            await plane.read(30.0)
            assert plane.is_right()
            slow_s = NUM_BYTES / 2 / 1024 * 0.1
            assert slow_s * 0.5 < now_s() < slow_s * 1.2
            await plane.read(1.0)  # the next one on the same connection is as quick as any

    virtually(live)


def test_a_refused_connection(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier, OneFault(refused=True)) as plane:
            assert (await plane.failure()).code == "connect"

    virtually(live)


def test_a_killed_holder_is_gone_at_once(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier) as plane:
            plane.compute()
            loop = asyncio.get_running_loop()
            loop.call_later(0.035, plane.network.kill, plane.holder.host)
            error = await plane.failure()
            assert error.code == "closed" and 100 <= error.num_landed_tokens < 200
            assert now_s() < 0.04
            assert (await plane.failure()).code == ("carrier" if carrier == "loopback" else "connect")

    virtually(live)


def test_a_killed_reader_is_noticed(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier) as plane:
            plane.compute()
            reading = asyncio.ensure_future(plane.read())
            await asyncio.sleep(0.035)
            plane.network.kill(plane.target.host)
            await asyncio.sleep(0.01)
            assert plane.holder.gate.outcomes[0][1].startswith("the reader has gone")
            with pytest.raises(TransferFailedError):
                await reading

    virtually(live)


def test_a_partition_holds_everything_up(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier) as plane:
            plane.compute()
            plane.network.partition(plane.holder.host, 1.0)
            error = await plane.failure(0.5)
            assert error.code in ("deadline", "connect") and 0.5 <= now_s() < 0.51
            reading = asyncio.ensure_future(plane.read(5.0))
            await asyncio.sleep(0.2)
            assert not reading.done()
            await reading
            assert plane.is_right() and now_s() > 1.0

    virtually(live)


def test_a_partition_in_mid_stream_ends_when_it_is_healed(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier) as plane:
            plane.compute()
            reading = asyncio.ensure_future(plane.read(50.0))
            await asyncio.sleep(0.035)
            plane.network.partition(plane.target.host, 1e9, other=plane.holder.host)
            await asyncio.sleep(10.0)
            assert not reading.done()
            plane.network.heal()
            await reading
            assert plane.is_right() and now_s() < 10.1

    virtually(live)


def test_a_cancelled_read_has_ended_when_it_says_so(carrier: str) -> None:
    async def live() -> None:
        with Plane(carrier) as plane:
            plane.compute()
            reading = asyncio.ensure_future(plane.read())
            await asyncio.sleep(0.035)
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            before = plane.target.arena.array.copy()
            await asyncio.sleep(1.0)
            assert np.array_equal(before, plane.target.arena.array), "nothing is written any more"
            assert plane.holder.gate.outcomes[0][1].startswith("the reader has gone")

    virtually(live)


def test_memory_reused_while_it_is_copied_is_not_believed(carrier: str) -> None:
    """Stale reuse at every moment of a transfer: either all is right or the end of the lease is told."""

    async def live(after_s: float) -> str:
        with Plane(carrier) as plane:
            plane.holder.compute(NUM_TOKENS)
            plane.holder.progress.complete(b"")
            reading = asyncio.ensure_future(plane.read())
            await asyncio.sleep(after_s)
            plane.holder.end_lease()
            plane.holder.arena.array[:] = 0xEE
            try:
                await reading
            except TransferFailedError as error:
                assert error.num_landed_tokens == 0
                return error.detail
            assert plane.is_right()
            return "landed"

    ends = [virtually(lambda at=at: live(at)) for at in np.linspace(0.0, 0.04, 40)]
    assert "the lease has ended" in ends and "landed" in ends


def test_the_same_seed_is_the_same_run(carrier: str) -> None:
    async def live() -> list[float]:
        times: list[float] = []
        network = SimNetwork(random.Random(3))
        use_network(network)
        network.set_fault("truncation", 0.3)
        network.set_fault("corruption", 0.3)
        network.set_fault("refusal", 0.1)
        holder, target = Holder((carrier,), NUM_TOKENS), Target()
        holder.compute_all()
        for _ in range(20):
            request = target.request(holder.endpoint, holder.ticket(), carrier, NUM_TOKENS, deadline_s=5.0)
            try:
                await target.reader.read_kv(request)
            except TransferFailedError:
                times.append(-now_s())
            else:
                times.append(now_s())
        network.heal()
        holder.close()
        target.close()
        return times

    first = virtually(live)
    assert first == virtually(live)
    assert any(at < 0 for at in first) and any(at > 0 for at in first)
