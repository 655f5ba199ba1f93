"""Sends requests to workers over the bus, as a gateway does: the only way to choose what KV is read from whom."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from schemas import subjects
from schemas.block import hash_blocks, join_hashes, pack_tokens
from schemas.directory import LocateBlocks
from schemas.ids import GatewayId, RequestId, WorkerId, new_id
from schemas.request import KVSource, Refused, RequestTokens, RunAttempt, SamplingParams, TokensEmitted, TransferReport
from schemas.subjects import Role
from schemas.worker import WorkerInfo
from services.bench.drive.http_client import RequestFailedError
from services.bus.base import BusError
from services.bus.nats import NatsBus
from services.bus.typed import Received, TypedBus
from services.launch.known_workers import describe_fleet
from services.launch.supervisor import Supervisor
from services.runtime import now_ms
from services.trust.credentials import TenantSigner

DIRECT_TIMEOUT_S = 120.0
"""A question or a request that goes to one worker over the bus."""
LOCATE_INTERVAL_S = 0.01
"""Between two questions to the directory, until it knows the blocks that were just computed."""


class TimedFirstToken(NamedTuple):
    """The time to the first token from sending the request, and the worker's account of the prompt."""

    ttft_ms: float
    report: TransferReport


class DirectClient:
    """A client on one mesh's bus. Make it with `open`. Requests may run concurrently."""

    def __init__(
        self, bus: TypedBus, asking: TypedBus, gateway_id: GatewayId, worker: WorkerInfo, signer: TenantSigner
    ) -> None:
        self._signer = signer
        self._bus = bus
        self._asking = asking
        self._gateway_id = gateway_id
        self._worker = worker
        self._waiting: dict[RequestId, asyncio.Queue[RequestTokens]] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, supervisor: Supervisor) -> "AsyncGenerator[DirectClient]":
        """Connect, and subscribe to tokens. Raises UserError where no mesh answers."""
        fleet = await describe_fleet(supervisor.access())
        gateway = supervisor.access(Role.GATEWAY)
        gateway_id = GatewayId(gateway.identity.name if gateway.identity else new_id("bench"))
        connection = await NatsBus.connect(gateway, "kvmesh-bench")
        asking = await NatsBus.connect(supervisor.access(Role.SCHEDULER), "kvmesh-bench")  # only it asks the directory
        bus, located = TypedBus(connection, "bench"), TypedBus(asking, "bench")
        client = cls(bus, located, gateway_id, fleet.workers[0].worker, supervisor.signer)
        async with asyncio.TaskGroup() as tasks:
            await bus.listen(tasks, subjects.TOKENS, ("*", client._gateway_id), client._hear)
            await connection.flush()
            try:
                yield client
            finally:
                await bus.close()
                await located.close()

    @property
    def block_size(self) -> int:
        return self._worker.block_size

    async def first_token(
        self, worker_id: WorkerId, prompt: Sequence[int], sources: tuple[KVSource, ...] = ()
    ) -> TimedFirstToken:
        """Have one worker compute one token, after it has read from the sources. Raises RequestFailedError."""
        request_id, deadline_ms = RequestId(new_id("req")), now_ms() + int(DIRECT_TIMEOUT_S * 1e3)
        request = RunAttempt(
            request_id=request_id,
            attempt=1,
            deadline_ms=deadline_ms,
            proof=self._signer.sign(request_id, "", deadline_ms),
            gateway_id=self._gateway_id,
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
            sources=sources,
        )
        inbox: asyncio.Queue[RequestTokens] = asyncio.Queue()
        self._waiting[request.request_id] = inbox
        started = time.perf_counter()
        try:
            async with asyncio.timeout(DIRECT_TIMEOUT_S):
                reply = await self._bus.ask(subjects.RUN, (worker_id,), request, DIRECT_TIMEOUT_S)
                if isinstance(reply, Refused):
                    raise RequestFailedError(f"{worker_id} refused a request: {reply.reason}, {reply.detail}")
                return await _wait_first(inbox, started)
        except (BusError, TimeoutError) as error:
            raise RequestFailedError(
                f"{worker_id} did not answer a request: {error or type(error).__name__}"
            ) from error
        finally:
            del self._waiting[request.request_id]

    async def wait_located(self, prompt: Sequence[int], holder: WorkerId) -> int:
        """Return how many full blocks the prompt has, once the directory says that `holder` has all of them."""
        hashes = hash_blocks(prompt, self.block_size, model_fingerprint=self._worker.fingerprint)
        request_id = RequestId(new_id("locate"))
        async with asyncio.timeout(DIRECT_TIMEOUT_S):
            while True:
                located = await self._asking.ask(
                    subjects.LOCATE,
                    (),
                    LocateBlocks(
                        request_id=request_id,
                        attempt=1,
                        deadline_ms=now_ms() + 1_000,
                        block_hashes=join_hashes(hashes),
                    ),
                    DIRECT_TIMEOUT_S,
                )
                if any(h.worker_id == holder and h.num_blocks == len(hashes) for h in located.holders):
                    return len(hashes)
                await asyncio.sleep(LOCATE_INTERVAL_S)  # the directory publishes nothing to wait for

    def _hear(self, received: Received[TokensEmitted]) -> None:
        for share in received.message.requests:
            if inbox := self._waiting.get(RequestId(share.request_id)):
                inbox.put_nowait(share)


async def _wait_first(inbox: "asyncio.Queue[RequestTokens]", started: float) -> TimedFirstToken:
    """Wait for the only token. The worker's account of the prompt may come with it or after it."""
    ttft_ms: float | None = None
    while True:
        share = await inbox.get()
        if share.failure is not None:
            raise RequestFailedError(f"a worker failed a request: {share.failure.detail}")
        if share.tokens and ttft_ms is None:
            ttft_ms = (time.perf_counter() - started) * 1e3
        if share.finish_reason is not None:
            if ttft_ms is None:
                raise RequestFailedError("a worker ended a request without a token")
            return TimedFirstToken(ttft_ms, share.report or TransferReport())
