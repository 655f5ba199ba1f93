"""A real worker's ticket secret is replaced while it runs: a SIGHUP has it read the file again."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from dataplane.blocks.layout import BlockTable, Segment, uniform_shape
from dataplane.blocks.ticket import TicketRefusedError, TicketSecrets
from dataplane.carriers.host import HostArena
from dataplane.ends.reader import PlaneReader, ReadRequest
from dataplane.protocol.stream import TransferFailedError
from schemas import subjects
from schemas.block import hash_blocks, join_hashes, pack_tokens
from schemas.ids import GatewayId, RequestId, WorkerId
from schemas.kv import LeaseGranted, ReadEnd, RequestLease
from schemas.request import AttemptAccepted, RunAttempt, SamplingParams
from schemas.subjects import Role
from schemas.worker import WorkerLoad
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.bus.typed import Received, TypedBus
from services.config import MeshConfig, NatsConfig, WorkerConfig, write_config
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.files import write_private
from services.runtime import now_ms
from services.trust.keys import BusAccess, MeshKeys, key_file
from tests.credentials import SIGNER, proved

OLD, NEW = "the old ticket secret", "the new ticket secret"
WORKER = WorkerId("a-0")
PATIENCE_S = 60


class Worker:
    """A worker's process, and what it is configured with."""

    def __init__(self, folder: Path, url: str, keys: MeshKeys) -> None:
        file, self.log, self.url, self.keys = folder / "mesh.toml", folder / "log", url, keys
        self.key = key_file(folder / "keys", Role.HOLDER)
        self.key.parent.mkdir()
        write_config(MeshConfig(nats=NatsConfig(url=url), worker=WorkerConfig(kv_bytes=4 << 20)), file)
        self.configure(OLD)
        command = [sys.executable, "-m", "services.cli.main", "serve", "aggregated", "--id", WORKER]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, "--config", str(file)], stdout=subprocess.DEVNULL, stderr=log)

    def configure(self, *secrets: str) -> None:
        signer = {"tenant_public_key": SIGNER.public_key}
        key = msgspec.structs.replace(self.keys.roles[Role.HOLDER], ticket_secrets=secrets, **signer)
        write_private(self.key, msgspec.json.encode(key))

    async def join(self, role: Role, name: str) -> TypedBus:
        """Return the bus of another member."""
        access = BusAccess(self.url, self.keys.roles[role].identity(name))
        return TypedBus(await NatsBus.connect(access, name, PATIENCE_S), name)

    async def rotate(self, *secrets: str, signalled: bool = False) -> None:
        """Configure other secrets, and return once they have been read."""
        num_before = self.num_read
        self.configure(*secrets)
        if signalled:
            self.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(PATIENCE_S):
            while self.num_read == num_before:
                await asyncio.sleep(0.02)

    @property
    def num_read(self) -> int:
        """How often the file was read again, of use or not."""
        return len(re.findall("were read again|stays in use", self.log.read_text()))


@pytest.fixture
def worker(tmp_path: Path) -> Generator[Worker]:
    keys = MeshKeys.fresh()
    broker = EmbeddedNats.launch(None, tmp_path / "broker", keys.broker_config)
    made = Worker(tmp_path, broker.url, keys)
    yield made
    made.process.terminate()
    made.process.wait(PATIENCE_S)
    broker.stop()


async def test_leases_outlive_a_rotation_and_a_secret_that_is_out_opens_nothing(worker: Worker) -> None:
    checkpoint = read_checkpoint(str(DEMO_MODEL_DIR))
    layout = layout_of(checkpoint, dtype="float32", block_size=16, wire_dtype="same")
    prompt = list(range(10, 60))
    hashes = hash_blocks(prompt, 16, model_fingerprint=layout.fingerprint)
    shape = uniform_shape(layout, 8)
    arena = HostArena.create(shape)
    reader = PlaneReader(arena, shape, TicketSecrets([NEW.encode(), OLD.encode()]))
    async with asyncio.timeout(2 * PATIENCE_S), asyncio.TaskGroup() as tasks:
        bus, peer = await worker.join(Role.GATEWAY, "g"), await worker.join(Role.HOLDER, "d-0")
        loads: asyncio.Queue[WorkerLoad] = asyncio.Queue()

        def on_load(received: Received[WorkerLoad]) -> None:
            loads.put_nowait(received.message)

        await bus.listen(tasks, subjects.LOAD, (WORKER,), on_load)
        endpoint = (await loads.get()).worker.endpoint
        assert endpoint is not None
        run = RunAttempt(
            request_id=RequestId("r1"), attempt=1, deadline_ms=now_ms() + 60_000, gateway_id=GatewayId("g"),
            prompt=pack_tokens(prompt), sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
        )  # fmt: skip
        assert isinstance(await bus.ask(subjects.RUN, (WORKER,), proved(run), 10), AttemptAccepted)
        while (await loads.get()).blocks.cached < len(hashes):
            pass  # until the prompt is computed and kept

        async def lease() -> LeaseGranted:
            asked = RequestLease(
                request_id=RequestId("r2"), attempt=1, deadline_ms=now_ms() + 60_000, reader=WorkerId("d-0"),
                fingerprint=layout.fingerprint, first_block=0, block_hashes=join_hashes(hashes),
            )  # fmt: skip
            granted = await peer.ask(subjects.LEASE, (WORKER, asked.reader), proved(asked), 10)
            assert isinstance(granted, LeaseGranted), granted
            return granted

        async def read(granted: LeaseGranted, ticket: str) -> int:
            tables = (BlockTable((Segment(0, 8),)),)
            request = ReadRequest(endpoint, ticket, "tcp", tables, granted.first_token, granted.num_tokens, PATIENCE_S)
            return (await reader.read_kv(request)).num_tokens

        before = await lease()
        await worker.rotate(NEW, OLD, signalled=True)
        assert await read(before, before.ticket) == 16 * len(hashes), "made before the rotation, read after it"
        during = await lease()
        with pytest.raises(TicketRefusedError):
            TicketSecrets([OLD.encode()]).signed(during.ticket).ticket(now_ms())
        ticket = TicketSecrets([NEW.encode()]).signed(during.ticket).ticket(now_ms())
        await worker.rotate("short")
        assert "stays in use" in worker.log.read_text()
        await worker.rotate(NEW)
        with pytest.raises(TransferFailedError) as raised:
            await read(during, TicketSecrets([OLD.encode()]).sign(ticket))
        assert raised.value.code is ReadEnd.TICKET and "signature" in raised.value.detail
        assert await read(during, during.ticket) == 16 * len(hashes)
        await bus.close()
        await peer.close()
    reader.close()
    arena.close()
