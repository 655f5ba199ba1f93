"""A tier that is down, full, slow or holds damage costs a miss and a line of the log, nothing else."""

import asyncio
import shutil
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from schemas.ids import BlockHash
from schemas.kv import LeaseGranted
from services.store import backing as backing_module
from services.store.tiers import TierError, TierFullError, Value
from services.times import StoreTimes, Times, WorkerTimes
from tests.store.dict_tier import DictTier
from tests.store.fleet import Fleet, config_of, files_in, fleet, store
from tests.store.rig import hashes_of, key_at, running_server
from tests.waiting import until, wait_until

pytestmark = pytest.mark.virtual_time


class Mischief(DictTier):
    """A tier that does not always do what it should."""

    def __init__(self) -> None:
        super().__init__()
        self.error: TierError | None = None
        self.room = 1_000_000
        self.go = threading.Event()
        self.go.set()
        self.num_reads = 0
        self.num_read: list[int] = []

    def write(self, values: Mapping[BlockHash, Value]) -> None:
        wait_until(self.go.is_set)
        if self.error is not None:
            raise self.error
        for block_hash, value in values.items():
            if len(self.values) >= self.room:
                raise TierFullError("No space left on device", [h for h in values if h in self.values])
            super().write({block_hash: value})

    def read(self, hashes: Sequence[BlockHash]) -> list[bytes | None]:
        self.num_reads += 1
        self.num_read.append(len(hashes))
        wait_until(self.go.is_set)
        if self.error is not None:
            raise self.error
        return super().read(hashes)


QUICK_PAUSE = Times(store=StoreTimes(pause_s=0.05))


async def filled(around: Fleet, *numbers: int) -> None:
    """Have the store take these blocks and write them; only what lies behind memory stays."""
    worker = await around.worker("prefill-0", *numbers)
    await worker.cool(*numbers)
    await until(lambda: around.has("disk", *numbers))
    await around.gone(worker)


async def pushed_out(around: Fleet, *numbers: int) -> None:
    """Fill memory with other blocks, so that these lie behind it only."""
    others = [next(around.fresh_numbers) for _ in range(100)]
    worker = await around.worker("prefill-9", *others)
    for other in others:
        await worker.cool(other)
        await until(lambda other=other: around.has("memory", other))
        if not around.tiers["memory"] & set(hashes_of(*numbers)):
            break
    await around.gone(worker)


def path_of(root: Path, number: int) -> Path:
    return next(root.rglob(f"{key_at(number).hex()}.kv"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    value = bytearray(path.read_bytes())
    value[len(value) // 2] ^= 1
    path.write_bytes(value)


def renumber(path: Path) -> None:
    value = bytearray(path.read_bytes())
    value[8] += 1
    path.write_bytes(value)


@pytest.mark.parametrize("damage", [cut, flip, renumber, Path.unlink])
async def test_a_damaged_file_ends_the_run_before_it(damage, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(num_blocks=8, url="disk", path=str(tmp_path))
    async with fleet() as around, store(around, config):
        for first in (0, 2, 4):
            await filled(around, first, first + 1)
        await pushed_out(around, *range(6))
        caplog.clear()
        damage(path_of(tmp_path, 3))
        assert await around.fetch(*range(6)) == 3
        await until(lambda: not around.has("disk", 3))
        assert around.has("disk", 0, 1, 2, 4, 5)
        assert key_at(3).hex() not in [path.stem for path in files_in(tmp_path)]
        assert len(caplog.records) == 1
        assert await around.fetch(3) == 0
        assert await around.fetch(4, 5) == 2
        worker = await around.worker("prefill-0", 3)
        await worker.cool(3)
        await until(lambda: around.has("disk", 3))
        assert await around.fetch(*range(6)) == 6


async def test_damage_while_the_store_was_away(tmp_path: Path) -> None:
    config = config_of(num_blocks=16, url="disk", path=str(tmp_path))
    async with fleet() as around:
        async with store(around, config):
            await filled(around, 0, 1, 2, 3)
        cut(path_of(tmp_path, 1))
        flip(path_of(tmp_path, 3))
        async with store(around, config):
            assert await around.inventory() == {"disk": set(hashes_of(0, 2, 3))}, "its size tells of the cut one"
            assert await around.fetch(0) == 1
            assert await around.fetch(2, 3) == 1
            assert await around.fetch(1) == 0


async def test_a_folder_deleted_under_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(num_blocks=8, url="disk", path=str(tmp_path))
    async with fleet() as around, store(around, config):
        await filled(around, 0, 1)
        await pushed_out(around, 0, 1)
        shutil.rmtree(tmp_path)
        caplog.clear()
        assert await around.fetch(0, 1) == 0
        await until(lambda: not around.tiers["disk"] & set(hashes_of(0, 1)))
        assert len(caplog.records) == 1
        await filled(around, 0, 1)
        await pushed_out(around, 0, 1)
        assert await around.fetch(0, 1) == 2


async def test_a_full_tier_takes_the_new_for_the_old(caplog: pytest.LogCaptureFixture) -> None:
    tier = Mischief()
    tier.room = 4
    async with fleet() as around, store(around, config_of(url="x"), open_behind=lambda *_: tier):
        await filled(around, 0, 1)
        await filled(around, 2, 3)
        worker = await around.worker("prefill-0", *range(20))
        await worker.cool(10, 11)
        await until(lambda: "No space left" in caplog.text and not around.has("disk", 0))
        assert around.has("memory", 10, 11)
        await worker.cool(12, 13)
        await until(lambda: around.has("disk", 12, 13))
        assert len(tier.values) <= 4
        assert await around.fetch(10, 11, 12, 13) == 4, "memory has them all the same"
        assert caplog.text.count("No space left") == 1


async def test_a_tier_with_no_room_at_all(caplog: pytest.LogCaptureFixture) -> None:
    tier, config = Mischief(), config_of(num_blocks=8, url="x", times=QUICK_PAUSE)
    tier.room = 0
    async with (
        fleet() as around,
        store(around, config, open_behind=lambda *_: tier),
    ):
        worker = await around.worker("prefill-0", *range(40))
        for first in range(0, 40, 2):
            await worker.cool(first, first + 1)
            await until(lambda first=first: around.has("memory", first, first + 1))
            assert await around.fetch(first, first + 1) == 2
        assert "No space left" in caplog.text
        await until(lambda: around.loads[-1].blocks.running == 0)


async def test_a_tier_that_fails_is_left_alone_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    tier, config = Mischief(), config_of(num_blocks=8, url="x", times=QUICK_PAUSE)
    async with (
        fleet() as around,
        store(around, config, open_behind=lambda *_: tier),
    ):
        await filled(around, 0, 1)
        await pushed_out(around, 0, 1)
        tier.error = TierError("on fire")
        caplog.clear()
        for _ in range(5):
            assert await around.fetch(0, 1) == 0
        assert caplog.text.count("on fire") == 1
        assert around.has("disk", 0, 1), "it may come back with what it had"
        worker = await around.worker("prefill-0", 5, 6)
        await worker.cool(5, 6)
        await until(lambda: around.has("memory", 5, 6))
        assert await around.fetch(5, 6) == 2
        tier.error = None

        async def is_back() -> bool:
            return await around.fetch(0, 1) > 0

        await until(is_back)


async def test_while_a_tier_is_left_alone_nobody_waits_for_it() -> None:
    tier, config = Mischief(), config_of(num_blocks=8, url="x", times=Times(store=StoreTimes(pause_s=3_600.0)))
    async with fleet() as around, store(around, config, open_behind=lambda *_: tier):
        await filled(around, 0, 1)
        await pushed_out(around, 0, 1)
        tier.error = TierError("on fire")
        for _ in range(5):
            assert await around.fetch(0, 1) == 0
        assert tier.num_reads == 1
        worker = await around.worker("prefill-0", *range(100, 140))
        for first in range(100, 140, 4):
            await worker.cool(*range(first, first + 4))
            await until(lambda first=first: around.has("memory", *range(first, first + 4)))


async def test_a_slow_tier_refuses_in_time_and_has_it_for_the_next(tmp_path: Path) -> None:
    tier = Mischief()
    config = config_of(num_blocks=8, url="x", timeout_ms=50)
    async with fleet() as around, store(around, config, open_behind=lambda *_: tier):
        await filled(around, 0, 1)
        await filled(around, 2)
        await pushed_out(around, 0, 1, 2)
        tier.go.clear()
        assert await around.fetch(0, 1) == 0, "answered while the tier has not"
        assert await around.fetch(0, 1) == 0
        tier.go.set()
        await until(lambda: around.has("memory", 0, 1))

        async def has_all() -> bool:
            return await around.fetch(0, 1, 2) == 3

        await until(has_all)  # the third may come too late for who asks first
        assert tier.num_read[:2] == [2, 1], "loaded once, whoever asked meanwhile"
        await until(lambda: around.loads[-1].blocks.running == around.loads[-1].blocks.leased == 0)


async def test_a_tier_that_never_answers_ties_up_a_few_threads_only() -> None:
    tier = Mischief()
    config = config_of(num_blocks=32, url="x", timeout_ms=20)
    async with fleet() as around, store(around, config, open_behind=lambda *_: tier):
        await filled(around, *range(8))
        await pushed_out(around, *range(8))
        tier.go.clear()
        assert [await around.fetch(number) for number in range(8)] == [0] * 8
        assert tier.num_reads == backing_module.MAX_LOADS
        tier.go.set()
        await until(lambda: around.has("memory", *range(backing_module.MAX_LOADS)))


async def test_several_who_ask_for_the_same_wait_for_one_load() -> None:
    tier = Mischief()
    config = config_of(num_blocks=8, url="x", timeout_ms=1_900)
    async with fleet() as around, store(around, config, open_behind=lambda *_: tier):
        await filled(around, 0, 1)
        await pushed_out(around, 0, 1)
        tier.go.clear()
        asking = [asyncio.create_task(around.ask(0, 1)) for _ in range(5)]
        await until(lambda: tier.num_reads == 1)
        tier.go.set()
        answers = await asyncio.gather(*asking)
        assert all(isinstance(answer, LeaseGranted) and answer.num_tokens == 16 for answer in answers)
        assert tier.num_read == [2]


async def test_slow_writing_drops_offers_and_keeps_no_worker_waiting(caplog: pytest.LogCaptureFixture) -> None:
    tier, config = Mischief(), config_of(num_blocks=8, url="x", times=Times(worker=WorkerTimes(read_within_ms=50)))
    async with fleet() as around, store(around, config, open_behind=lambda *_: tier):
        tier.go.clear()
        worker = await around.worker("prefill-0", *range(40))
        await worker.cool(*range(40))
        await until(lambda: around.has("memory", 0, 1))
        for _ in range(20):
            await worker.cool(*range(40))
        await until(lambda: "there was no room for them in time" in caplog.text)
        assert around.tiers["memory"] == set(hashes_of(0, 1)), "a quarter of memory waits, and no more comes"
        assert await around.fetch(0, 1) == 2
        tier.go.set()
        await until(lambda: around.has("disk", 0, 1))

        async def are_written() -> bool:
            await worker.cool(*range(8))
            return around.has("disk", *range(8))

        await until(are_written)


async def test_a_store_with_a_stuck_tier_leaves_all_the_same() -> None:
    times = Times(store=StoreTimes(flush_timeout_s=0.1))
    tier, config = Mischief(), config_of(num_blocks=8, url="x", timeout_ms=20, times=times)
    async with fleet() as around:
        async with store(around, config, open_behind=lambda *_: tier):
            await filled(around, 0, 1)
            await pushed_out(around, 0, 1)
            tier.go.clear()
            assert await around.fetch(0, 1) == 0
            worker = await around.worker("prefill-0", 50)
            await worker.cool(50)
            await until(lambda: around.has("memory", 50))
        await until(lambda: around.heard[-1] == "WorkerLeft")
        tier.go.set()


async def test_a_server_that_dies_and_comes_back_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running_server(tmp_path) as server:
        config = config_of(times=QUICK_PAUSE, num_blocks=8, url=server.url, timeout_ms=1_900)
        async with fleet() as around, store(around, config):
            worker = await around.worker("prefill-0", 0, 1, 2)
            await worker.cool(0, 1)
            await until(lambda: around.has("remote", 0, 1))
            await pushed_out(around, 0, 1)
            caplog.clear()
            await asyncio.to_thread(server.stop)
            for _ in range(3):
                assert await around.fetch(0, 1) == 0
            assert len(caplog.records) == 1
            await worker.cool(2)
            await until(lambda: around.has("memory", 2))
            await asyncio.to_thread(server.start)

            async def are_known_to_be_gone() -> bool:
                assert await around.fetch(0, 1) == await around.fetch(1) == 0
                return not around.has("remote", 0) and not around.has("remote", 1)

            async def are_written_again() -> bool:
                await worker.cool(0, 1)
                return around.has("remote", 0, 1)

            await until(are_known_to_be_gone)
            await until(are_written_again)
            await pushed_out(around, 0, 1)
            assert await around.fetch(0, 1) == 2


async def test_a_server_that_forgets_one_key(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        async with fleet() as around, store(around, config_of(num_blocks=8, url=server.url, timeout_ms=1_900)):
            worker = await around.worker("prefill-0", 0, 1)
            await worker.cool(0, 1)
            await until(lambda: around.has("remote", 0, 1))
            await pushed_out(around, 0, 1)
            (key,) = server.client().keys(f"*{key_at(1).hex()}")
            server.client().delete(key)
            assert await around.fetch(0, 1) == 1
            await until(lambda: not around.has("remote", 1) and around.has("remote", 0))


async def test_a_server_with_damaged_values(tmp_path: Path) -> None:
    with running_server(tmp_path) as server:
        async with fleet() as around, store(around, config_of(num_blocks=8, url=server.url, timeout_ms=1_900)):
            worker = await around.worker("prefill-0", 0, 1)
            await worker.cool(0, 1)
            await until(lambda: around.has("remote", 0, 1))
            await pushed_out(around, 0, 1)
            (key,) = server.client().keys(f"*{key_at(1).hex()}")
            server.client().setrange(key, 300, b"\x00\x01\x02")
            assert await around.fetch(0, 1) == 1
            await until(lambda: not around.has("remote", 1))
            assert not server.client().exists(key)
