"""A server that attaches as vLLM does: a scheduler and a worker with pages of their own, whose hooks are called in
vLLM's order (`docs/attach.md`), and an API that computes KV as a function of the tokens before it.

`tests/attach/test_vllm_attach.py` has vLLM itself do the same.
"""

import hashlib
import itertools
import json
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from schemas.attach import Half, KVIdentity
from services.attach.connector.client import HolderClient
from services.attach.connector.plan import StepPlan
from services.attach.connector.scheduler_half import SchedulerHalf
from services.attach.connector.worker_half import WorkerHalf
from tests.attach.core_rig import IDENTITY, hello
from tests.waiting import wait_until

NUM_PAGES = 64
STEP_TOKENS = 32
PURSE_STEP_BLOCKS = 4
"""What it says that a step may compute: its purse has room for twice as many blocks, a prompt of these tests."""
TOP = 20


@dataclass(eq=False)
class Request:
    """What the connector reads of `vllm.v1.request.Request`."""

    request_id: str
    all_token_ids: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None
    trace_headers: dict[str, str] | None = None
    mm_features: list[object] = field(default_factory=list)
    prompt_embeds: object | None = None
    lora_request: object | None = None
    skip_reading_prefix_cache: bool = False
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids


@dataclass
class Ran:
    """How a request went. `num_loaded`: tokens; `answer`: a word for all KV that its next token was chosen from."""

    num_loaded: int
    num_failed: int
    answer: bytes
    params: dict[str, Any] | None


class FakeServer:
    """`wrong`: by which its KV differs from another server's."""

    def __init__(
        self, path: Path, name: str, identity: KVIdentity = IDENTITY, *, check_every: int = 1 << 30, wrong: int = 0,
        **changes: Any,
    ) -> None:  # fmt: skip
        self.identity = identity
        self.wrong = wrong
        self._size = identity.block_size
        self._free = list(range(1, NUM_PAGES))
        row = 2 * identity.block_size * identity.num_kv_heads * identity.head_dim * 4
        self.pages = [np.zeros((NUM_PAGES, row), np.uint8) for _ in range(identity.num_layers)]
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._api = _Api(self)
        changes = {"url": self._api.url, "identity": identity} | changes
        self.clients = {half: HolderClient(str(path), hello(name, half, **changes)) for half in Half}
        self.scheduler = SchedulerHalf(
            self.clients[Half.SCHEDULER], identity, check_every=check_every, step_tokens=PURSE_STEP_BLOCKS * self._size
        )
        self.worker = WorkerHalf(self.clients[Half.WORKER], identity)
        self.worker.register_pages(dict(enumerate(self.pages)))
        self.on_plan = lambda plan: None
        """Sees, and may change, what a step is to copy."""

    def start(self, *, required: bool = False) -> None:
        for client in self.clients.values():
            client.start(required=required)

    def close(self) -> None:
        self._api.close()
        self.worker.close()
        for client in self.clients.values():
            client.close()

    def await_proven(self) -> None:
        for client in self.clients.values():
            wait_until(lambda one=client: one.is_proven)

    def await_off(self) -> str:
        client = self.clients[Half.SCHEDULER]
        wait_until(lambda: bool(client.off_reason))
        return client.off_reason

    def run(self, tokens: Sequence[int], **fields: Any) -> Ran:
        """Serve one request, as vLLM's scheduler and worker do, without a prefix cache of its own."""
        with self._lock:
            return self._serve(Request(f"r{next(self._numbers)}", list(tokens), **fields))

    def _serve(self, request: Request) -> Ran:
        self.scheduler.new_request(request)
        num_loaded = num_failed = 0
        while True:
            num, is_async = self.scheduler.num_matched(request, 0)
            self.scheduler.num_matched(request, 0)  # vLLM asks again where there was no room
            if num is not None:
                break
        assert is_async == bool(num)
        self._take_pages(request)
        self.scheduler.allocated(request, request.pages if num else [], num)
        if num:
            self._step({}, request)
            ended: set[str] = set()
            while request.request_id not in ended:
                now, failed = self.worker.take_ended()
                ended |= now
                self.scheduler.loads_ended(now, failed)
                num_failed += len(failed)
            if num_failed:
                assert self.scheduler.num_matched(request, 0) == (0, False)
            else:
                num_loaded = request.num_computed = num
            self.scheduler.allocated(request, [], 0)
        while request.num_computed < request.num_tokens:
            num_tokens = min(STEP_TOKENS, request.num_tokens - request.num_computed)
            self._step({request: num_tokens}, request)
        answer = self.answer(request)
        params = self.scheduler.finished(request)
        self._free += request.pages
        return Ran(num_loaded, num_failed, answer, params)

    def _take_pages(self, request: Request) -> None:
        num_pages = -(-request.num_tokens // self._size)
        request.pages = [self._free.pop(0) for _ in range(num_pages)]
        for page in request.pages:
            for rows in self.pages:
                rows[page] = 255  # what another request has left

    def _step(self, scheduled: dict[Request, int], shown: Request) -> None:
        new = [SimpleNamespace(req_id=one.request_id, num_computed_tokens=one.num_computed) for one in scheduled]
        state = SimpleNamespace(get_block_ids=lambda _: (shown.pages,))
        plan: StepPlan = self.scheduler.plan_step(
            SimpleNamespace(
                num_scheduled_tokens={one.request_id: num for one, num in scheduled.items()},
                scheduled_new_reqs=new,
                scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
                kv_connector_block_state=state,
            )
        )
        self.on_plan(plan)
        self.worker.start_loads(plan)
        for one, num_tokens in scheduled.items():
            self._compute(one, one.num_computed, one.num_computed + num_tokens)
            one.num_computed += num_tokens
        self.worker.save(plan)

    def _compute(self, request: Request, start: int, end: int) -> None:
        """Write the KV of these tokens: of each, numbers that follow from all tokens up to it."""
        for at in range(start, end):
            digest = hashlib.blake2b(repr(request.all_token_ids[: at + 1]).encode(), digest_size=8).digest()
            rng = np.random.default_rng(int.from_bytes(digest, "big") + self.wrong)
            for rows in self.pages:
                tokens = rows[request.pages[at // self._size]].view(np.float32).reshape(2, self._size, -1)
                tokens[:, at % self._size] = rng.standard_normal((2, tokens.shape[2]), np.float32)

    def answer(self, request: Request) -> bytes:
        """Return a word for all KV of a request, as the likeliest next tokens depend on all of it."""
        digest = hashlib.blake2b(digest_size=16)
        for at in range(request.num_tokens):
            for rows in self.pages:
                tokens = rows[request.pages[at // self._size]].reshape(2, self._size, -1)
                digest.update(tokens[:, at % self._size].tobytes())
        return digest.digest()


class _Api:
    """Its HTTP, as far as a canary asks for it."""

    def __init__(self, server: FakeServer) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(200, {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                ran = server.run(
                    body["prompt"], kv_transfer_params=body["kv_transfer_params"], cache_salt=body["cache_salt"]
                )
                rng = np.random.default_rng(int.from_bytes(ran.answer, "big"))
                ids, values = rng.choice(1_000, TOP, replace=False), -np.sort(rng.random(TOP))
                top = {f"token_id:{token}": float(value) for token, value in zip(ids, values, strict=True)}
                choice = {"logprobs": {"top_logprobs": [top]}, "token_ids": [int(ids[0])]}
                self._reply(200, {"choices": [choice], "kv_transfer_params": ran.params})

            def _reply(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@contextmanager
def fake_server(path: Path, name: str, **changes: Any) -> Generator[FakeServer]:
    server = FakeServer(path, name, **changes)
    try:
        server.start()
        yield server
    finally:
        server.close()
