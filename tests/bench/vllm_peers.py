"""vLLM's own servers, started as its users start them: one process group each, on loopback.

They have the arguments that workers of the mesh give vLLM: eager, prefix cache on, float32, blocks of 32 tokens, the
same budget of a step, nothing logged. Nobody is pinned, on either side: `VLLM_CPU_OMP_THREADS_BIND=nobind`. Bound
to a core, a server would have its transfer's threads on the one that computes.
"""

import asyncio
import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from services.config import WorkerConfig
from services.engine.vllm_engine.formats import BLOCK_SIZE, MAX_SEQUENCES
from services.errors import UserError
from services.launch.options import Launch
from services.ports import free_port
from services.settings import changed

OURS, THEIRS = "ours", "vLLM"
NUM_THREADS = 1
TOKEN_BUDGET = WorkerConfig().token_budget
POOL_BYTES = 512 << 20
READY_TIMEOUT_S, READY_INTERVAL_S, STOP_TIMEOUT_S = 240.0, 0.25, 20.0
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
}
NIXL = {"kv_connector": "NixlConnector"}
TCP = {"kv_connector": "TcpConnector", "kv_connector_module_path": "tests.bench.tcp_connector"}


def on_vllm(options: Launch, model: str, arena_bytes: int = 0, pool_bytes: int = 0) -> Launch:
    """Return the options of a mesh that is compared with these servers. Left out, arena and pool are together as large
    as a server's pool. As a server it refuses nobody for the length of its queue."""
    return changed(
        options,
        {
            "config.model.path": model,
            "config.gateway.port": 0,
            "config.engine.name": "vllm",
            "config.worker.num_threads": NUM_THREADS,
            "config.scheduler.max_queue_ms": 10**9,
            "config.worker.kv_bytes": arena_bytes or POOL_BYTES // 2,
            "config.engine.kv_bytes": pool_bytes or POOL_BYTES // 2,
        },
    )


class Process:
    """A server in a process group of its own; what it writes goes to `log`."""

    def __init__(self, name: str, log: Path, command: Sequence[str], environment: dict[str, str], url: str) -> None:
        self.name = name
        self.url = url
        self._log = log
        self._command = command
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Return once it answers. Raises UserError where it ends before, or does not answer in time."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, *self._command, cwd=ROOT, env=os.environ | self._environment,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + READY_TIMEOUT_S
        async with httpx.AsyncClient(timeout=READY_INTERVAL_S * 8) as http:
            while not await _answers(http, self.url):
                if self._process.returncode is not None:
                    raise UserError(f"{self.name} ended when it started: {self._last_line()}")
                if time.monotonic() > deadline:
                    raise UserError(f"{self.name} does not answer after {READY_TIMEOUT_S:.0f} s: {self._last_line()}")
                await asyncio.sleep(READY_INTERVAL_S)

    @property
    def pid(self) -> int:
        """The leader of its process group. It must have been started."""
        assert self._process is not None
        return self._process.pid

    async def restart(self) -> None:
        """Kill all of it, and start it again."""
        await self._end(signal.SIGKILL)
        await self.start()

    async def stop(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self._process.wait()
        await self._end(signal.SIGKILL)

    async def _end(self, number: signal.Signals) -> None:
        """Signal whatever the group still has."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        await self._process.wait()

    def _last_line(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it wrote nothing"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """One of vLLM's servers. `transfer`: of its KV connector, where it has one. `port`: 0 finds one."""

    name: str
    model: str
    pool_bytes: int = POOL_BYTES
    transfer: dict[str, Any] = field(default_factory=dict[str, Any])
    port: int = 0


def server(options: ServerOptions, folder: Path) -> Process:
    port = options.port or free_port()
    arguments = {
        "--model": options.model,
        "--served-model-name": "random",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--block-size": BLOCK_SIZE,
        "--max-num-batched-tokens": TOKEN_BUDGET,
        "--max-num-seqs": min(MAX_SEQUENCES, TOKEN_BUDGET),
        "--kv-cache-memory-bytes": options.pool_bytes,
        "--generation-config": "vllm",
        "--uvicorn-log-level": "error",
    }
    flags = ["--enforce-eager", "--enable-prefix-caching", "--disable-log-stats", "--disable-uvicorn-access-log"]
    if options.transfer:
        arguments["--kv-transfer-config"] = json.dumps(options.transfer)
    environment = ENVIRONMENT | {
        "OMP_NUM_THREADS": str(NUM_THREADS),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    command = ["-m", "vllm.entrypoints.openai.api_server", *flags]
    command += [str(part) for pair in arguments.items() for part in pair]
    return Process(options.name, folder / f"{options.name}.log", command, environment, f"http://127.0.0.1:{port}")


def proxy(prefill: Process, decode: Process, folder: Path) -> Process:
    port = free_port()
    command = ["-m", "tests.bench.vllm_proxy", str(port), prefill.url, decode.url]
    return Process("proxy", folder / "proxy.log", command, {}, f"http://127.0.0.1:{port}")


@asynccontextmanager
async def started(processes: Sequence[Process]) -> AsyncGenerator[None]:
    """Start them together, and stop them all at the end. Raises UserError."""
    async with AsyncExitStack() as stack:
        for process in processes:
            stack.push_async_callback(process.stop)
        failures = [
            failure
            for failure in await asyncio.gather(*(process.start() for process in processes), return_exceptions=True)
            if failure is not None
        ]
        if failures:
            raise failures[0]
        yield


@asynccontextmanager
async def prefill_and_decode(model: str, transfer: dict[str, Any], folder: Path) -> AsyncGenerator[str]:
    """Run vLLM's prefill and decode server with this connector and a proxy before them; give the proxy's URL."""
    pair = [
        server(ServerOptions(name=name, model=model, transfer=transfer | {"kv_role": role}), folder)
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer"))
    ]
    async with started(pair):
        front = proxy(*pair, folder)
        async with started([front]):
            yield front.url


def missing_nixl() -> str:
    """Say why there is no NIXL; empty where there is."""
    if importlib.util.find_spec("nixl") is not None:
        return ""
    return "NIXL is not installed here: `make vllm-bench` does it"


async def _answers(http: httpx.AsyncClient, url: str) -> bool:
    try:
        return (await http.get(f"{url}/health")).status_code == 200
    except httpx.HTTPError:
        return False
