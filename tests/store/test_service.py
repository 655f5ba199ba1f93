"""The store among workers: what it takes, what it gives, and what it costs when something is wrong."""

import asyncio
import random
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from dataplane.blocks.layout import KVLayout
from dataplane.protocol.stream import TransferFailedError
from schemas import subjects
from schemas.block import join_hashes
from schemas.ids import RequestId, WorkerId
from schemas.kv import EvictionCandidates, LeaseGranted, PurgeBlocks, ReplicateBlocks
from schemas.request import RefusalReason, Refused
from schemas.worker import LeftReason, PingWorker, WorkerLeft
from services.config import MeshConfig, StoreConfig
from services.errors import UserError
from services.runtime import now_ms
from services.store.disk import DiskTier
from services.store.load import load_store
from services.store.tiers import StoreKey, TierError, Value
from services.store.values import HEADER_BYTES
from services.times import Times, WorkerTimes
from tests.credentials import SECRET, SEED
from tests.store.fleet import LAYOUT, STORE, Fleet, arenas, config_of, files_in, fleet, kv_of, store
from tests.store.rig import WHOLE, WINDOWED, hash_of, hashes_of, key_at
from tests.waiting import PATIENCE_S, until, wait_until

pytestmark = pytest.mark.virtual_time


def behind(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, object]:
    """Return the settings of a tier."""
    if kind == "memory":
        return {}
    if kind == "disk":
        return {"url": "disk", "path": str(tmp_path)}
    server = request.getfixturevalue("server")
    server.client().flushall()
    return {"url": server.url, "timeout_ms": 1_900}


NAMES = {"memory": "memory", "disk": "disk", "valkey": "remote"}


@pytest.mark.parametrize("kind", ["memory", "disk", "valkey"])
@pytest.mark.parametrize("carrier", ["shm", "tcp"])
@pytest.mark.parametrize("layout", [LAYOUT, WHOLE], ids=["any", "whole"])
async def test_cooled_blocks_outlive_their_worker(
    kind: str, carrier: str, layout: KVLayout, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await cooled_blocks_outlive_their_worker(
        kind, config_of(carrier=carrier, **behind(kind, tmp_path, request)), layout
    )


async def cooled_blocks_outlive_their_worker(
    kind: str, config: MeshConfig, layout: KVLayout, *, on_cards: bool = False
) -> None:
    carrier = config.worker.carrier
    async with fleet(on_cards=on_cards, layout=layout) as around, store(around, config, layout=layout):
        worker = await around.worker("prefill-0", *range(10))
        await worker.cool(*range(9, -1, -1))
        await until(lambda: around.has("memory", *range(10)) and around.has(NAMES[kind], *range(10)))
        await around.until_events_tell_all()
        await until(lambda: worker.outcomes == ["landed"])
        await around.gone(worker)
        assert await around.fetch(*range(10), carrier=carrier) == 10
        assert await around.fetch(3, 4, 5, first_block=7, carrier=carrier) == 3
        assert await around.fetch(8, 9, 10, 11, carrier=carrier) == 2
        assert await around.fetch(10, 9, carrier=carrier) == 0
        await until(lambda: around.loads[-1].blocks.leased == 0)


@pytest.mark.parametrize("kind", ["disk", "valkey"])
@pytest.mark.parametrize("layout", [LAYOUT, WHOLE], ids=["any", "whole"])
async def test_a_restarted_store_has_what_it_wrote(
    kind: str, layout: KVLayout, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = config_of(**behind(kind, tmp_path, request))
    async with fleet(layout=layout) as around:
        async with store(around, config, layout=layout):
            worker = await around.worker("prefill-0", *range(10))
            await worker.cool(*range(10))
            await until(lambda: around.has(NAMES[kind], *range(10)))
            await around.gone(worker)
        async with store(around, config, layout=layout):
            assert await around.inventory() == {NAMES[kind]: set(hashes_of(*range(10)))}
            assert await around.fetch(*range(10)) == 10
            await until(lambda: around.has("memory", *range(10)))
            assert (await around.inventory())[NAMES[kind]] == set(hashes_of(*range(10)))
        assert len(around.held) == 2, "each start is an incarnation of its own"


async def test_what_waits_to_be_written_is_written_before_it_leaves(tmp_path: Path) -> None:
    config = config_of(num_blocks=128, url="disk", path=str(tmp_path))
    async with fleet() as around:
        async with store(around, config):
            worker = await around.worker("prefill-0", *range(30))
            await worker.cool(*range(30))
            await until(lambda: around.has("memory", *range(30)))
        async with store(around, config):
            assert await around.inventory() == {"disk": set(hashes_of(*range(30)))}


@pytest.mark.parametrize("kind", ["disk", "valkey"])
async def test_under_memory_pressure_nothing_is_lost_or_wrong(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Memory has room for 8 of 60 blocks: each read brings back what it needs, several at a time."""
    config = config_of(num_blocks=8, **behind(kind, tmp_path, request))
    async with fleet() as around, store(around, config):
        worker = await around.worker("prefill-0", *range(60))
        await worker.cool(*range(30))
        await worker.cool(*range(30, 60))
        await until(lambda: around.has(NAMES[kind], *range(60)))
        await around.gone(worker)
        assert len(around.tiers["memory"]) <= 8

        async def has_six(first: int) -> bool:
            num_read = await around.fetch(*range(first, first + 6))
            assert num_read >= 2, "the lease of the read before may hold its six blocks for another moment"
            return num_read == 6

        async def has_as_much_as_memory_holds() -> bool:
            num_read = await around.fetch(*range(60))
            assert num_read <= 8
            return num_read == 8

        for first in range(0, 60, 6):
            await until(lambda first=first: has_six(first))
        await until(has_as_much_as_memory_holds)
        await until(lambda: around.loads[-1].blocks.leased == 0)
        assert len(around.tiers["memory"]) <= 8
        await around.until_events_tell_all()


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_is_offered_and_asked_what_is_read_is_right(seed: int, tmp_path: Path) -> None:
    """Readers and workers at random, a small memory, a small disk; every block that is read is compared."""
    dice = random.Random(seed)
    max_bytes = 12 * (LAYOUT.block_bytes + 100)
    config = config_of(num_blocks=8, url="disk", path=str(tmp_path), max_bytes=max_bytes)
    num_read = 0
    async with fleet() as around, store(around, config):
        workers = [await around.worker(f"prefill-{at}", *range(40)) for at in range(2)]

        async def read_some() -> None:
            nonlocal num_read
            for _ in range(40):
                await asyncio.sleep(0.005)
                answer = await around.ask(*range(first := dice.randrange(40), first + dice.randrange(1, 6)))
                if isinstance(answer, Refused):
                    assert answer.reason in (RefusalReason.GONE, RefusalReason.OVERLOADED), "or half is on loan already"
                    continue
                async with lock:  # the readers share their memory
                    found = await around.read(answer)
                assert found == [kv_of(hash_of(first + at)) for at in range(len(found))]
                num_read += len(found)

        async def offer_some() -> None:
            for _ in range(80):
                await dice.choice(workers).cool(*dice.sample(range(40), 10))
                await asyncio.sleep(0.005)

        lock = asyncio.Lock()
        await asyncio.gather(offer_some(), read_some(), read_some(), read_some())
        await until(lambda: around.loads[-1].blocks.leased == around.loads[-1].blocks.running == 0)
        await around.until_events_tell_all()
    assert num_read > 0
    assert sum(path.stat().st_size for path in files_in(tmp_path)) <= max_bytes


async def test_a_bounded_disk_keeps_what_was_used_last(tmp_path: Path) -> None:
    config = config_of(num_blocks=16, url="disk", path=str(tmp_path), max_bytes=6 * (LAYOUT.block_bytes + HEADER_BYTES))
    async with fleet() as around, store(around, config):
        worker = await around.worker("prefill-0", *range(12))
        for number in range(6):
            await worker.cool(number)
            await until(lambda number=number: around.has("disk", number))
        assert await around.fetch(0, 1) == 2
        for number in range(6, 10):
            await worker.cool(number)
            await until(lambda number=number: around.has("disk", number))
        assert around.tiers["disk"] == set(hashes_of(0, 1, 6, 7, 8, 9))
        assert len(files_in(tmp_path)) == 6


# Taking.


async def test_blocks_that_the_worker_has_given_up_are_passed_over() -> None:
    async with fleet() as around, store(around, config_of()):
        worker = await around.worker("prefill-0", 2, 3, 6)
        await worker.cool(1, 2, 3, 4, 5, 6, 7)
        await until(lambda: around.has("memory", 2, 3, 6))
        assert around.tiers["memory"] == set(hashes_of(2, 3, 6))
        await until(lambda: len(worker.asked) == 6)
        assert worker.asked[-1] == hashes_of(1)


async def test_a_worker_that_has_given_all_up_is_not_asked_for_ever() -> None:
    async with fleet() as around, store(around, config_of()):
        worker = await around.worker("prefill-0")
        await worker.cool(*range(100))
        await until(lambda: len(worker.asked) == 17)
        other = await around.worker("prefill-1", 50)
        await other.cool(50)
        await until(lambda: around.has("memory", 50))
        assert len(worker.asked) == 17


async def test_what_is_here_is_not_read_again() -> None:
    async with fleet() as around, store(around, config_of()):
        first, second = await around.worker("prefill-0", 1, 2), await around.worker("prefill-1", 2, 3)
        await first.cool(1, 2)
        await until(lambda: around.has("memory", 1, 2))
        await second.cool(2, 3)
        await until(lambda: around.has("memory", 3))
        assert second.asked == [hashes_of(3)]


async def test_what_is_offered_during_a_pull_is_taken_by_it() -> None:
    async with fleet() as around, store(around, config_of()):
        worker = await around.worker("prefill-0", *range(20))
        for number in range(20):
            await worker.cool(number)
        await until(lambda: around.has("memory", *range(20)))


async def test_a_worker_that_says_no_is_left_alone() -> None:
    async with fleet() as around, store(around, config_of()):
        worker = await around.worker("prefill-0", 1, 2)
        worker.refuses = Refused(request_id="r", attempt=1, deadline_ms=0, reason=RefusalReason.OVERLOADED)  # type: ignore[arg-type]
        await worker.cool(1, 2)
        await until(lambda: len(worker.asked) == 1)
        worker.refuses = None
        await worker.cool(1, 2)
        await until(lambda: around.has("memory", 1, 2))
        assert len(worker.asked) == 2


async def test_a_worker_that_dies_under_the_read_costs_a_line_and_what_landed_is_kept(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet() as around, store(around, config_of()):
        worker = await around.worker("prefill-0", *range(6), num_tokens_ready=3 * LAYOUT.block_size + 1)
        await worker.cool(*range(6))
        await until(lambda: len(worker.asked) == 1 and worker.plane.num_streams == 1)
        await asyncio.sleep(0.05)  # what is ready is on its way
        await around.gone(worker)
        await until(lambda: "were not taken" in caplog.text)
        assert caplog.text.count("were not taken") == 1
        found = await around.fetch(*range(6))
        assert found <= 3
        again = await around.worker("prefill-0", *range(6))
        await again.cool(*range(6))
        await until(lambda: around.has("memory", *range(6)))
        assert await around.fetch(*range(6)) == 6


async def test_an_offer_of_nobody_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet() as around, store(around, config_of()):
        ghost = await around.worker("prefill-0", 1)
        await around.gone(ghost)
        await around.bus.publish(*candidates("prefill-0", 1, incarnation=ghost.incarnation))
        await until(lambda: "were not taken" in caplog.text)
        worker = await around.worker("prefill-0", 1)
        await worker.cool(1)
        await until(lambda: around.has("memory", 1))


def candidates(worker_id: str, *numbers: int, incarnation: str = "w"):
    hashes = join_hashes(hashes_of(*numbers))
    message = EvictionCandidates(worker_id=WorkerId(worker_id), incarnation=incarnation, block_hashes=hashes)
    return subjects.EVICTION_CANDIDATES, (worker_id,), message


async def test_a_model_with_windows_is_not_taken(caplog: pytest.LogCaptureFixture) -> None:
    config = config_of()
    async with fleet() as around, store(around, config, layout=WINDOWED):
        worker = await around.worker("prefill-0", 1, 2, layout=WINDOWED)
        await worker.cool(1, 2)
        await until(lambda: len(around.loads) > 1)
        assert worker.asked == []
        assert caplog.text.count("windowed layers") == 1


# Lending.


async def test_a_lease_that_is_not_read_ends() -> None:
    times = Times(worker=WorkerTimes(open_lease_within_ms=1_500))
    async with fleet() as around, store(around, config_of(times=times)):
        worker = await around.worker("prefill-0", 1, 2)
        await worker.cool(1, 2)
        await until(lambda: around.has("memory", 1, 2))
        answer = await around.ask(1, 2)
        assert isinstance(answer, LeaseGranted)
        await until(lambda: any(load.blocks.leased == 2 for load in around.loads))
        await until(lambda: around.loads[-1].blocks.leased == 0)
        with pytest.raises(TransferFailedError):
            await around.read(answer)
        assert await around.fetch(1, 2) == 2


async def test_a_lease_ends_with_its_reader() -> None:
    async with fleet() as around, store(around, config_of()):
        worker = await around.worker("prefill-0", 1, 2)
        await worker.cool(1, 2)
        await until(lambda: around.has("memory", 1, 2))
        assert isinstance(await around.ask(1, 2), LeaseGranted)
        await until(lambda: around.loads[-1].blocks.leased == 2)
        reader = await around.worker("decode-0")
        await reader.leave()
        await until(lambda: around.loads[-1].blocks.leased == 0)


async def incarnation_of(around: Fleet) -> str:
    alive = await around.bus.ask(subjects.PING, (STORE,), PingWorker(), 10)
    assert alive.worker_id == STORE
    return alive.incarnation


async def test_a_store_that_was_declared_lost_joins_anew_with_all_it_has() -> None:
    async with fleet() as around, store(around, config_of()):
        worker = await around.worker("prefill-0", *range(10))
        await worker.cool(*range(10))
        await until(lambda: around.has("memory", *range(10)))
        lent, before = await around.ask(*range(4)), await incarnation_of(around)
        assert isinstance(lent, LeaseGranted)
        assert await around.fetch(*range(4)) == 4
        for lost in ("another one", before, before):
            left = WorkerLeft(worker_id=STORE, incarnation=lost, reason=LeftReason.SILENT)
            await around.bus.publish(subjects.LEFT, (STORE,), left)
        await until(lambda: around.heard.count("WorkerJoined") == 2)
        assert await incarnation_of(around) != before
        assert around.heard.count("WorkerJoined") == 2, "told once more it stays who it is"
        with pytest.raises(TransferFailedError):
            await around.read(lent)
        assert (await around.inventory())["memory"] == set(hashes_of(*range(10)))
        assert await around.fetch(*range(10)) == 10
        await around.gone(worker)


async def test_what_a_worker_wants_kept_elsewhere_is_taken() -> None:
    async with fleet() as around, store(around, config_of()):
        worker = await around.worker("decode-0", *range(10))
        offer = ReplicateBlocks(
            request_id=RequestId("r1"), attempt=1, deadline_ms=now_ms() + 10_000, source=WorkerId("decode-0"),
            fingerprint=LAYOUT.fingerprint, first_block=5, block_hashes=join_hashes(hashes_of(*range(10))),
        )  # fmt: skip
        for changes in ({"fingerprint": "other"}, {"block_hashes": b"cut"}, {"source": "a.b"}, {}):
            changed = msgspec.structs.replace(offer, **changes)
            await around.bus.publish(subjects.REPLICATE, (STORE, changed.source), changed)
        await until(lambda: around.has("memory", *range(10)))
        assert len(worker.asked) == 1
        await until(lambda: worker.outcomes == ["landed"])  # the directory may be told first
        await around.gone(worker)
        assert await around.fetch(*range(10)) == 10


# Damage.


@pytest.mark.parametrize("kind", ["memory", "disk", "valkey"])
async def test_what_is_damaged_in_the_stores_memory_is_not_believed(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The store hands on the tags of who has computed a block, also those that it has read again from behind memory."""
    config = config_of(**behind(kind, tmp_path, request))
    async with fleet() as around:
        async with store(around, config) as parts:
            worker = await around.worker("prefill-0", *range(10))
            await worker.cool(*range(10))
            await until(lambda: around.has("memory", *range(10)) and around.has(NAMES[kind], *range(10)))
            assert len(parts.memory.kept.tags) == 10 and await around.fetch(*range(10)) == 10
            parts.arena.array[:] ^= 1
            with pytest.raises(TransferFailedError, match="not what its MAC says"):
                await around.fetch(*range(10))
        if kind != "memory":
            async with store(around, config) as parts:
                assert await around.fetch(*range(10)) == 10
                parts.arena.array[:] ^= 1
                with pytest.raises(TransferFailedError, match="not what its MAC says"):
                    await around.fetch(*range(10))


# Forgetting.


async def purge(around: Fleet, tenant: str | None = None) -> int:
    reply = await around.bus.ask(subjects.PURGE, (STORE,), PurgeBlocks(tenant=tenant), PATIENCE_S)
    assert (reply.worker_id, reply.failure) == (STORE, "")
    return reply.num_blocks


@pytest.mark.parametrize("kind", ["memory", "disk", "valkey"])
async def test_what_was_purged_is_nowhere(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config = config_of(**behind(kind, tmp_path, request))
    num_tiers = len({"memory", NAMES[kind]})
    async with fleet() as around:
        async with store(around, config):
            worker = await around.worker("prefill-0", *range(10))
            await worker.cool(*range(10))
            await until(lambda: around.has("memory", *range(10)) and around.has(NAMES[kind], *range(10)))
            assert await purge(around, "another tenant") == 0
            assert await purge(around) == 10 * num_tiers and await purge(around) == 0
            await until(lambda: not any(around.tiers.values()))
            assert await around.fetch(*range(10)) == 0 and not files_in(tmp_path)
            await worker.cool(*range(5))
            await until(lambda: around.has("memory", *range(5)) and around.has(NAMES[kind], *range(5)))
        if kind != "memory":
            async with store(around, config):
                assert await around.inventory() == {NAMES[kind]: set(hashes_of(*range(5)))}


async def test_what_is_being_written_while_it_is_purged_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, write = threading.Event(), threading.Event(), DiskTier.write

    def slow(self: DiskTier, values: Mapping[StoreKey, Value]) -> None:
        begun.set()
        wait_until(goes_on.is_set)
        write(self, values)

    monkeypatch.setattr(DiskTier, "write", slow)
    async with fleet() as around, store(around, config_of(url="disk", path=str(tmp_path))):
        worker = await around.worker("prefill-0", *range(10))
        await worker.cool(*range(10))
        await until(begun.is_set)
        purging = asyncio.create_task(purge(around))
        await until(lambda: not around.tiers["memory"])
        goes_on.set()
        await purging
        await until(lambda: not files_in(tmp_path))
        assert await around.inventory() == {}


@pytest.mark.parametrize("kind", ["disk", "valkey"])
async def test_a_store_of_an_earlier_format_is_not_believed(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """Its blocks have no tags. They are left where they are until they are purged."""
    settings, key = behind(kind, tmp_path, request), key_at(1).hex()
    if kind == "disk":
        old = tmp_path / LAYOUT.fingerprint / key[:2] / f"{key}.kv"
        old.parent.mkdir(parents=True)
        old.write_bytes(b"KVBLOCK\0" + bytes(LAYOUT.block_bytes + 64))
    else:
        request.getfixturevalue("server").client().set(f"kvmesh:{LAYOUT.fingerprint}:{key}", bytes(72))
    async with fleet() as around, store(around, config_of(**settings)):
        assert "an earlier format and not believed; `kvmesh purge --store` deletes" in caplog.text
        assert await around.inventory() == {} and await around.fetch(1) == 0
        await purge(around)
        if kind == "disk":
            assert not (tmp_path / LAYOUT.fingerprint).exists()
        else:
            assert request.getfixturevalue("server").client().keys("*") == []


async def test_a_purge_that_the_folder_does_not_allow_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: DiskTier) -> None:
        raise TierError("the disk is read-only")

    async with fleet() as around, store(around, config_of(url="disk", path=str(tmp_path))):
        monkeypatch.setattr(DiskTier, "delete_all", fails)
        reply = await around.bus.ask(subjects.PURGE, (STORE,), PurgeBlocks(), PATIENCE_S)
        assert reply.failure == "the disk is read-only"


async def test_a_store_joins_and_leaves_like_a_worker() -> None:
    async with fleet() as around:
        async with store(around, config_of(num_blocks=32)):
            await until(lambda: len(around.loads) > 1)
            info = around.loads[-1].worker
            assert (info.worker_id, info.role, info.num_blocks, info.block_size) == (STORE, "store", 32, 8)
            assert info.fingerprint == LAYOUT.fingerprint and info.carriers == ("shm", "tcp")
            assert around.heard == ["WorkerJoined"]
        await until(lambda: len(around.heard) == 3)
        assert around.heard == ["WorkerJoined", "WorkerDraining", "WorkerLeft"]


async def test_a_stopping_store_lends_nothing_more_and_serves_what_it_has_lent(tmp_path: Path) -> None:
    """Readers that go on asking do not keep it; one that has a lease does."""
    async with fleet() as around:
        leave, is_filled = asyncio.Event(), asyncio.Event()

        async def serve() -> None:
            async with store(around, config_of(url="disk", path=str(tmp_path))):
                worker = await around.worker("prefill-0", 1, 2, 3)
                await worker.cool(1, 2, 3)
                await until(lambda: around.has("memory", 1, 2, 3))
                is_filled.set()
                await leave.wait()

        serving = asyncio.create_task(serve())
        await is_filled.wait()
        first, second = await around.ask(1, 2), await around.ask(3)
        assert isinstance(first, LeaseGranted) and isinstance(second, LeaseGranted)
        leave.set()
        await until(lambda: "WorkerDraining" in around.heard)
        assert await around.read(first) == [kv_of(hash_of(1)), kv_of(hash_of(2))]
        for _ in range(3):
            refused = await around.ask(1)
            assert isinstance(refused, Refused) and refused.reason == "draining"
        assert around.heard[-1] == "WorkerDraining", "somebody is about to read"
        assert await around.read(second) == [kv_of(hash_of(3))]
        async with asyncio.timeout(10):  # its `drain_s` is 30
            await serving
        await until(lambda: around.heard[-1] == "WorkerLeft")


async def test_a_stop_in_the_middle_of_everything(tmp_path: Path) -> None:
    """Pulls that do not end, leases that nobody reads: the store leaves all the same, and its memory with it."""
    before = arenas()
    async with fleet() as around, store(around, config_of(url="disk", path=str(tmp_path))):
        worker = await around.worker("prefill-0", *range(10))
        await worker.cool(*range(10))
        await until(lambda: around.has("disk", *range(10)))
        assert isinstance(await around.ask(1, 2), LeaseGranted)
        endless = await around.worker("prefill-1", *range(20, 30), num_tokens_ready=8)
        await endless.cool(*range(20, 30))
        await until(lambda: endless.plane.num_streams == 1)
    assert arenas() <= before


# At the start.


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"memory_bytes": 10}, "hold no block"),
        ({"url": "disk", "max_bytes": 10, "path": "."}, "hold no block"),
        ({"url": "nonsense"}, "URL"),
        ({"url": "disk", "path": "/dev/null"}, "cannot write"),
        ({"url": "redis://127.0.0.1:1/0", "timeout_ms": 200}, "does not answer"),
    ],
)
def test_what_is_wrong_at_the_start_is_one_clear_line(settings: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load_store(
            MeshConfig(ticket_secrets=(SECRET.decode(),), tenant_seed=SEED, store=StoreConfig(**settings)), "store-0"
        )  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_store_of_the_demo_model(tmp_path: Path) -> None:
    settings = StoreConfig(url="disk", path=str(tmp_path), memory_bytes=8 << 20)
    parts = load_store(MeshConfig(ticket_secrets=(SECRET.decode(),), tenant_seed=SEED, store=settings), "store-0")
    assert parts.memory.num_free > 0 and parts.tier is not None
    parts.arena.close()
    parts.tier.close()


def test_no_secret_no_store() -> None:
    with pytest.raises(UserError, match="secret"):
        load_store(MeshConfig(), "store-0")
