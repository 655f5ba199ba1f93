"""A real mesh for tests: real nats-server, real processes, real HTTP; stopped by process id."""

import asyncio
import os
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from schemas import subjects
from schemas.block import unpack_tokens
from schemas.request import TokensEmitted
from schemas.subjects import Role
from services.bus.nats import NatsBus
from services.bus.typed import Received, TypedBus
from services.launch.options import Launch
from services.launch.supervisor import Supervisor
from services.trust.keys import credentials_file
from tests.mesh.forked import ForkedSupervisor, ForkingLoop
from tests.promises import same_tokens
from tests.waiting import PATIENCE_S

ResultT = TypeVar("ResultT")


class Mesh:
    """A running mesh, and the loop in a thread of its own for what is asynchronous."""

    def __init__(self, supervisor: Supervisor, run_dir: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.supervisor = supervisor
        self.run_dir = run_dir
        self.loop = loop
        self.url = supervisor.url
        self.nats_url = supervisor.nats_url
        self.access = supervisor.access
        self.client = httpx.Client(base_url=supervisor.url, timeout=120)

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the mesh's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=240)

    def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """Ask for a completion; the answer must be a 200."""
        body = {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 16} | fields
        # A client of its own: a pool that 16 threads share has left sockets open on a busy machine.
        response = httpx.post(f"{self.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()

    @property
    def model(self) -> str:
        assert self.supervisor.checkpoint is not None
        return self.supervisor.checkpoint.name

    @property
    def fleet(self) -> Any:
        from services.launch.known_workers import describe_fleet

        return self.call(describe_fleet(self.access()))

    def bus_options(self, role: Role = Role.OBSERVER) -> list[str]:
        """Return the options by which somebody who did not start this mesh names its bus."""
        keys = self.supervisor.keys_dir
        return ["--nats", self.nats_url, "--creds", str(credentials_file(keys, role))]

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Wait, generously, for something that other processes bring about."""

        async def poll() -> None:
            async with asyncio.timeout(PATIENCE_S):
                while not await asyncio.to_thread(holds):
                    await asyncio.sleep(0.05)

        try:
            asyncio.run(poll())
        except TimeoutError:
            raise AssertionError(f"not within {PATIENCE_S:g} s: {what}") from None

    def kill_who_decodes(self) -> bool:
        """End a decode worker that says it has a running request, at once; return whether there is one. A request that
        runs is not always told yet."""
        busy = {w.worker.worker_id for w in self.fleet.workers if w.worker.role == "decode" and w.num_running}
        child = next((child for child in self.supervisor.children if child.name in busy), None)
        if child is not None:
            os.kill(child.process.pid, signal.SIGKILL)
        return child is not None

    def assert_no_blocks_held(self) -> None:
        """After the last request nothing is running or leased: every block is free, or kept for its content."""
        self.wait_until(
            lambda: all(
                w.blocks.free + w.blocks.cached == w.blocks.total and w.num_running == 0 for w in self.fleet.workers
            ),
            "nothing running or leased",
        )


RunningMesh = Callable[..., AbstractContextManager[Mesh]]
"""`running_mesh` for this session: takes the run's folder, the options of `kvmesh up`, and `forked`."""


@contextmanager
def running_mesh(forking: ForkingLoop, run_dir: Path, options: Launch, *, forked: bool = True) -> Iterator[Mesh]:
    """Start a mesh in processes and stop it. Not `forked`: each imports everything itself, as under `kvmesh up`."""
    supervisor = ForkedSupervisor(options, run_dir, forking.zygote) if forked else Supervisor(options, run_dir)
    try:
        forking.run(supervisor.start_all(), 300)
        mesh = Mesh(supervisor, run_dir, forking.loop)
        with mesh.client:
            yield mesh
    finally:
        forking.run(supervisor.stop_all(), 300)
        for child in supervisor.children:
            assert child.process.returncode == 0, (child.name, (supervisor.log_dir / f"{child.name}.log").read_text())


class TokenRecorder:
    """Hears every token on the bus: the ids themselves, not the text that the API makes of them."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._tokens: dict[str, dict[int, int]] = defaultdict(dict)
        self._finished: set[str] = set()
        self._stop = asyncio.Event()
        self._ready = threading.Event()

    def __enter__(self) -> "TokenRecorder":
        self._run = asyncio.run_coroutine_threadsafe(self._listen(), self._mesh.loop)
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._mesh.loop.call_soon_threadsafe(self._stop.set)
        self._run.result(timeout=30)

    def tokens(self, request_id: str) -> list[int]:
        """Return the answer's tokens; waits for the last of them."""
        self._mesh.wait_until(lambda: request_id in self._finished, f"the end of {request_id}")
        by_index = self._tokens[request_id]
        same_tokens(sorted(by_index), list(range(len(by_index))))  # none is missing
        return [by_index[index] for index in range(len(by_index))]

    async def _listen(self) -> None:
        connection = await NatsBus.connect(self._mesh.access(Role.OPERATOR), "recorder")
        bus = TypedBus(connection, "recorder")
        async with asyncio.TaskGroup() as tasks:
            await bus.listen(tasks, subjects.TOKENS, ("*", "*"), self._hear)
            await connection.flush()
            self._ready.set()
            await self._stop.wait()
            await bus.close()

    def _hear(self, received: Received[TokensEmitted]) -> None:
        for tokens in received.message.requests:
            for index, token in enumerate(unpack_tokens(tokens.tokens), start=tokens.index):
                earlier = self._tokens[tokens.request_id].setdefault(index, token)
                same_tokens(earlier, token)
            if tokens.finish_reason is not None:
                self._finished.add(tokens.request_id)


def in_parallel(jobs: list[Callable[[], ResultT]], width: int) -> list[ResultT]:
    """Run the jobs `width` at a time, and return their results in order."""
    with ThreadPoolExecutor(width) as pool:
        return [future.result() for future in [pool.submit(job) for job in jobs]]
