"""The program of docs/protocol.md that keeps an index of its own, with its own key on a real broker."""

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nats
import pytest

from schemas import subjects
from schemas.block import join_hashes
from schemas.directory import BlocksEvicted, BlocksStored, Inventory, ReadInventory, Tier
from schemas.ids import BlockHash, WorkerId
from schemas.permissions import Direction, granted
from schemas.subjects import SUBJECTS, Role
from schemas.worker import LeftReason, WorkerInfo, WorkerJoined, WorkerLeft
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.bus.typed import Received, TypedBus
from services.directory.service import Directory
from services.telemetry import Telemetry
from services.times import DirectoryTimes
from services.trust.keys import BusAccess, MeshKeys, credentials_file

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
NUM_EVENTS = 10_000
PAGE_BLOCKS = 50
"""In a page of an inventory here."""


def program() -> dict[str, Any]:
    found: dict[str, Any] = {"__name__": "indexer"}
    exec(PAGE.read_text().split("```python\n")[1].split("```")[0], found)
    return found


@dataclass
class Holder:
    """A holder that says what it does, and loses some of it on the way."""

    name: WorkerId
    bus: TypedBus
    tasks: asyncio.TaskGroup
    rng: random.Random
    life: int = 0
    sequence: int = 0
    held: dict[Tier, dict[BlockHash, None]] = field(default_factory=lambda: defaultdict(dict))

    async def serve(self) -> None:
        await self.bus.serve(self.tasks, subjects.INVENTORY, (self.name,), self._inventory)

    async def join(self) -> None:
        self.life, self.sequence = self.life + 1, 0
        self.held.clear()
        await self.speak()

    async def speak(self) -> None:
        """Say that it is there, as workers do all the time: whoever missed a page of its inventory asks again."""
        info = WorkerInfo(
            worker_id=self.name, incarnation=str(self.life), role="store", model="m", fingerprint="f",
            num_blocks=1_000, block_size=16, context_length=1_000,
        )  # fmt: skip
        await self.bus.publish(subjects.JOINED, (self.name,), WorkerJoined(worker=info))

    async def leave(self) -> None:
        left = WorkerLeft(worker_id=self.name, incarnation=str(self.life), reason=LeftReason.STOPPED)
        await self.bus.publish(subjects.LEFT, (self.name,), left)

    async def change(self, *, must_arrive: bool = False) -> None:
        """Store or evict a few blocks; one event in fifty is lost."""
        tier: Tier = "memory" if self.rng.random() < 0.5 else "disk"
        held = self.held[tier]
        self.sequence += 1
        stores = len(held) < 100 or self.rng.random() < 0.5
        if stores:
            hashes = [BlockHash(self.rng.randbytes(16)) for _ in range(self.rng.randint(1, 3))]
            held.update(dict.fromkeys(hashes))
        else:
            hashes = self.rng.sample(list(held), 2)
            for each in hashes:
                del held[each]
        if self.rng.random() < 0.02 and not must_arrive:
            return
        kind, subject = (BlocksStored, subjects.STORED) if stores else (BlocksEvicted, subjects.EVICTED)
        event = kind(
            worker_id=self.name, incarnation=str(self.life), sequence=self.sequence, block_hashes=join_hashes(hashes),
            tier=tier,
        )  # fmt: skip
        await self.bus.publish(subject, (self.name,), event)

    async def _inventory(self, received: Received[ReadInventory]) -> Inventory:
        parts = [
            (tier, list(held)[at : at + PAGE_BLOCKS])
            for tier, held in sorted(self.held.items())
            for at in range(0, len(held), PAGE_BLOCKS)
        ] or [("memory", [])]
        at = min(received.message.offset, len(parts) - 1)
        tier, hashes = parts[at]
        return Inventory(
            worker_id=self.name, incarnation=str(self.life), sequence=self.sequence, block_hashes=join_hashes(hashes),
            tier=tier, next_offset=at + 1 if at + 1 < len(parts) else None,
        )  # fmt: skip


@pytest.fixture(scope="module")
def keys() -> MeshKeys:
    return MeshKeys.fresh()


@pytest.fixture
async def broker(keys: MeshKeys, tmp_path: Path) -> AsyncIterator[EmbeddedNats]:
    keys.save(tmp_path / "keys")
    server = EmbeddedNats.launch(None, tmp_path / "run", keys.broker_config)
    yield server
    server.stop()


async def joined(broker: EmbeddedNats, keys: MeshKeys, role: Role, name: str) -> TypedBus:
    identity = keys.roles[role].identity(name)
    return TypedBus(await NatsBus.connect(BusAccess(broker.url, identity), name), name.partition("-")[0])


async def test_it_stays_equal_to_the_directory(broker: EmbeddedNats, keys: MeshKeys, tmp_path: Path) -> None:
    """After 10,000 events, of which some were lost, holders that began anew, and one that left."""
    creds = str(credentials_file(tmp_path / "keys", Role.INDEXER))
    client = await nats.connect(broker.url, user_credentials=creds, inbox_prefix="_REPLY.indexer.indexer")
    index = program()["Index"](client)
    rng, names = random.Random(5), [WorkerId(f"store-{number}") for number in range(3)]
    async with asyncio.TaskGroup() as tasks:
        bus = await joined(broker, keys, Role.DIRECTORY, "directory-0")
        directory = Directory(bus, tasks, Telemetry("directory-0", []), DirectoryTimes())
        await directory.begin_serving()
        holders = [Holder(name, await joined(broker, keys, Role.HOLDER, name), tasks, rng) for name in names]
        for holder in holders:
            await holder.serve()
            await holder.join()
        for number in range(NUM_EVENTS):
            if number == NUM_EVENTS // 4:  # it comes in the middle
                await client.subscribe("mesh.>", cb=index.hear)
            if number in (NUM_EVENTS // 2, NUM_EVENTS // 3):
                await holders[number % 3].join()
            await rng.choice(holders).change()
        await holders[0].leave()
        for holder in holders[1:]:
            await holder.change(must_arrive=True)
        living = {holder.name: {tier: set(of) for tier, of in holder.held.items() if of} for holder in holders[1:]}

        def indexed() -> dict[str, Any]:
            found = {name: {tier: of for tier, of in h["blocks"].items() if of} for name, h in index.holders.items()}
            return found if all(h["number"] is not None for h in index.holders.values()) else {}

        known = [each for of in living.values() for hashes in of.values() for each in hashes]

        def located() -> dict[str, Any]:
            found = defaultdict[str, dict[Tier, set[bytes]]](lambda: defaultdict(set))
            for each in known:
                for held in directory.core.locate(each):
                    found[held.worker_id][held.tier].add(each)
            return {name: dict(of) for name, of in found.items()}

        async with asyncio.timeout(60):
            while not indexed() == located() == living or directory.core.num_known_blocks != len(known):
                for holder in holders[1:]:
                    await holder.speak()
                    await holder.bus.connection.flush()
        assert set(directory.core.known_holders) == set(living)
        await client.close()
        for holder in holders:
            await holder.bus.close()
        await directory.close()


def test_an_indexer_hears_hashes_and_no_prompt_no_answer_no_tenant() -> None:
    heard = {s for s in SUBJECTS if granted(s, Role.INDEXER, Direction.SUBSCRIBE, "i")}
    assert heard == {subjects.STORED, subjects.EVICTED, subjects.JOINED, subjects.LEFT, subjects.LOAD}
    said = {s for s in SUBJECTS if granted(s, Role.INDEXER, Direction.PUBLISH, "i")}
    assert said == {subjects.INVENTORY}
    told = {name for s in heard for name in s.carries.__struct_fields__}
    assert not told & {"prompt", "tokens", "tenant", "ticket", "body", "sampling"}
    assert "tenant" not in Inventory.__struct_fields__
