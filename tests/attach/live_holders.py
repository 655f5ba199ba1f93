"""A holder that servers attach to, as it runs: `run_attach` on an event loop of a thread's, over a bus in memory."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from dataplane.addresses import IPV4_LOOPBACK
from schemas import subjects
from schemas.attach import KVIdentity
from schemas.block import BlockHasher, join_hashes
from schemas.directory import BlocksLocated, LocateBlocks
from schemas.ids import RequestId
from schemas.observe import DescribeWorker, WorkerDescribed
from services.attach.connector.identity import layout_of
from services.attach.door import bound_socket
from services.attach.prefix import PATH
from services.attach.service import AttachParts, run_attach
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import TypedBus
from services.config import AttachConfig, MeshConfig, StoreConfig, WorkerConfig, at_scale
from services.directory.service import run_directory
from services.engine.checkpoint import Checkpoint
from services.ports import bind
from services.runtime import now_ms
from services.scheduler.service import run_scheduler
from services.telemetry import ListExporter, SpanRecord, Telemetry
from services.times import Times
from tests.attach.core_rig import IDENTITY
from tests.credentials import CREDENTIALS, SECRET, SEED
from tests.store.rig import LAYOUT
from tests.waiting import until

NAME = "attach-0"
PATIENCE_S = 60.0
ResultT = TypeVar("ResultT")


class LiveHolders:
    """Several on one bus, each with a socket of its own, beside a scheduler and a directory. `num_blocks`: of each
    arena. `spans`: what all of them have recorded. `stop` them once."""

    def __init__(
        self,
        *paths: Path,
        num_blocks: int = 64,
        identity: KVIdentity = IDENTITY,
        with_prefixes: bool = False,
        **store: Any,
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._broker = MemoryBroker()
        self._stop = asyncio.Event()
        self._is_ready = threading.Event()
        self.spans: list[SpanRecord] = []
        self._parts: dict[str, tuple[MeshConfig, AttachParts]] = {}
        for number, path in enumerate(paths):
            name = f"attach-{number}"
            config = at_scale(
                MeshConfig(
                    ticket_secrets=(SECRET.decode(),),
                    tenant_seed=SEED,
                    store=StoreConfig(memory_bytes=num_blocks * LAYOUT.block_bytes, **store),
                    worker=WorkerConfig(block_size=LAYOUT.block_size),
                    attach=AttachConfig(socket=str(path)),
                    times=Times(scale=20.0),
                )
            )
            held = contextlib.ExitStack()
            prefix_sock = held.enter_context(bind(IPV4_LOOPBACK, 0)) if with_prefixes else None
            sock = held.enter_context(bound_socket(path))
            parts = AttachParts(
                name=name, checkpoint=checkpoint_of(identity), credentials=CREDENTIALS, sock=sock, held=held,
                prefix_sock=prefix_sock,
            )  # fmt: skip
            self._parts[name] = (config, parts)
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()), daemon=True)
        self._thread.start()
        assert self._is_ready.wait(PATIENCE_S)

    def prefix_url(self, name: str = NAME) -> str:
        """Return where routers ask."""
        sock = self._parts[name][1].prefix_sock
        assert sock is not None
        return f"http://{IPV4_LOOPBACK}:{sock.getsockname()[1]}{PATH}"

    def describe(self, name: str = NAME) -> WorkerDescribed:
        """Return what a holder says of itself to whoever asks on the bus."""

        async def ask() -> WorkerDescribed:
            bus = TypedBus(MemoryBus(self._broker), "tests")
            reply = await bus.ask(subjects.WORKER_STATUS, (name,), DescribeWorker(), PATIENCE_S)
            await bus.close()
            assert isinstance(reply, WorkerDescribed)
            return reply

        return self._call(ask())

    def await_located(self, tokens: Sequence[int], name: str = NAME) -> None:
        """Wait until the directory knows that a holder has all whole blocks of this prompt."""
        hasher = BlockHasher(LAYOUT.block_size, model_fingerprint=layout_of(IDENTITY).fingerprint)
        hashes = hasher.extend(tokens, len(tokens))

        async def ask() -> None:
            bus = TypedBus(MemoryBus(self._broker), "tests")

            async def is_located() -> bool:
                question = LocateBlocks(
                    request_id=RequestId("r"),
                    attempt=1,
                    deadline_ms=now_ms() + 1000 * round(PATIENCE_S),
                    block_hashes=join_hashes(hashes),
                )
                located = await bus.ask(subjects.LOCATE, (), question, PATIENCE_S)
                assert isinstance(located, BlocksLocated)
                return any((each.worker_id, each.num_blocks) == (name, len(hashes)) for each in located.holders)

            await until(is_located)
            await bus.close()

        self._call(ask())

    @property
    def num_held(self) -> int:
        """Blocks that are pinned, or in a purse, at the first one."""
        return self.describe().load.blocks.running

    def end(self) -> None:
        """Have them end."""
        self._loop.call_soon_threadsafe(self._stop.set)

    def stop(self) -> None:
        self.end()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    async def _run(self) -> None:
        config = next(iter(self._parts.values()))[0]
        async with asyncio.TaskGroup() as tasks:
            waits: list[asyncio.Event] = []

            def start(run: Callable[..., Coroutine[Any, Any, object]], name: str, *arguments: Any) -> None:
                ready = asyncio.Event()
                waits.append(ready)
                bus, telemetry = MemoryBus(self._broker), Telemetry(name, (ListExporter(self.spans),), at_once=True)
                tasks.create_task(run(*arguments, bus, telemetry, self._stop, ready.set), name=name)

            start(run_scheduler, "scheduler", config)
            start(run_directory, "directory", config)
            for name, (own, parts) in self._parts.items():
                start(run_attach, name, own, parts)
            for ready in waits:
                await ready.wait()
            self._is_ready.set()


@contextlib.contextmanager
def live_holders(*paths: Path, **options: Any) -> Generator[LiveHolders]:
    holders = LiveHolders(*paths, **options)
    try:
        yield holders
    finally:
        holders.stop()


def checkpoint_of(identity: KVIdentity) -> Checkpoint:
    return Checkpoint(
        path="/models/m", name="m", model_type="t", architecture="TForCausalLM", num_layers=identity.num_layers,
        num_kv_heads=identity.num_kv_heads, head_dim=identity.head_dim, vocab_size=256, context_length=4_096,
        windows=(), eos_token_ids=frozenset(), weights=identity.weights, dtype=identity.dtype, num_bytes=1,
        weight_files=("model.safetensors",), is_plain=True,
    )  # fmt: skip
