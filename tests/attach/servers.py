"""Stock vLLM servers as processes, attached to a holder of a real mesh, for tests of the night."""

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from schemas import subjects
from schemas.observe import DescribeWorker
from services.attach.connector.settings import ConnectorSettings, transfer_config
from services.bus.base import BusError
from services.bus.nats import NatsBus
from services.bus.typed import TypedBus
from services.cli.limits import ASK_TIMEOUT_S
from services.cli.running import mesh_of
from services.engine.demo_model import DEMO_MODEL_DIR
from services.trust.keys import BusAccess, Role, credentials_file, person_access
from tests.waiting import wait_until

MODULE = "services.attach.connector.connector"
MODEL = "m"
BLOCK_SIZE = 32
START_S = 300.0
KV_BYTES = 64 << 20
VOCABULARY = 250
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "INFO", "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, all servers of a machine share its first core
}  # fmt: skip


def prompt(seed: int, num_tokens: int = 700) -> list[int]:
    return random.Random(seed).choices(range(1, VOCABULARY), k=num_tokens)


def whole(num_tokens: int) -> int:
    """Return how many tokens of a prompt can be loaded."""
    return (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Answer:
    tokens: list[int]
    params: dict[str, Any] | None


@dataclass
class VllmServer:
    """One `vllm serve`. `config`: its `--kv-transfer-config`, none: a server that is attached to nobody. `host`: where
    it is asked. `wrapper`: the command that runs its own. `python`: of another environment than this one, where nothing
    of ours is on the path."""

    folder: Path
    name: str
    config: Mapping[str, Any] | None = None
    model: Path = DEMO_MODEL_DIR
    arguments: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    host: str = "127.0.0.1"
    wrapper: Sequence[str] = ()
    python: Path | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, in a session of its own, so that all its processes can be killed."""
        command = [
            *self.wrapper, str(self.python or sys.executable), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.model), "--served-model-name", MODEL, "--dtype", "float32",
            "--block-size", str(BLOCK_SIZE), "--port", str(self.port), "--kv-cache-memory-bytes", str(KV_BYTES),
            "--max-num-batched-tokens", "512",
            "--enforce-eager", "--max-model-len", "2048", *self.arguments,
        ]  # fmt: skip
        if self.config is not None:
            command += ["--kv-transfer-config", json.dumps(self.config)]
        environment, folder = dict(os.environ) | ENVIRONMENT, None
        if self.python is not None:
            environment, folder = (
                {name: each for name, each in environment.items() if name != "PYTHONPATH"},
                self.folder,
            )
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env=environment, cwd=folder,
            )  # fmt: skip

    def await_health(self) -> None:
        """Wait until it takes requests."""
        wait_until(self._is_healthy)

    def _is_healthy(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log[-4_000:]
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            urllib.request.urlopen(f"{self.url}/health", timeout=START_S),
        ):
            return True
        return False

    def await_end(self) -> str:
        """Wait until it has ended by itself, and return its log."""
        assert self.process is not None
        self.process.wait(START_S)
        return self.log

    def await_log(self, text: str) -> None:
        wait_until(lambda: text in self.log)

    def kill(self) -> None:
        """End all its processes at once."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def ask(self, prompt: Sequence[int], num_tokens: int = 16, **fields: Any) -> Answer:
        """Have a prompt completed, greedily unless the fields say otherwise."""
        body = {
            "model": MODEL, "prompt": list(prompt), "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        } | fields  # fmt: skip
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            answer = json.load(reply)
        return Answer(answer["choices"][0]["token_ids"], answer.get("kv_transfer_params"))

    def computed(self, prompt: Sequence[int], num_tokens: int = 16, **fields: Any) -> list[int]:
        """Return what it answers from nothing: neither its own cache nor the holder has this salt."""
        return self.ask(prompt, num_tokens, **fields, cache_salt=os.urandom(8).hex()).tokens

    def num_loaded(self) -> int:
        """Return how many tokens were loaded so far, by vLLM's own count."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=START_S) as reply:
            lines = reply.read().decode().splitlines()
        (line,) = [each for each in lines if each.startswith("vllm:external_prefix_cache_hits_total{")]
        return int(float(line.rpartition(" ")[2]))


@dataclass
class Holder:
    """`kvmesh up --attach` in a folder. `arguments`: more of its flags. `python`: of the environment it runs in."""

    folder: Path
    memory_gib: int = 1
    arguments: Sequence[str] = ()
    python: str = sys.executable
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "attach.sock"

    @property
    def environment(self) -> dict[str, str]:
        return dict(os.environ) | {"KVMESH_STATE_DIR": str(self.folder)}

    def start(self) -> None:
        command = [self.python, "-m", "services.cli.main", "up", "--attach", "--socket", str(self.socket)]
        log_path = self.folder / "up.log"
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, "--memory-gib", str(self.memory_gib), *self.arguments], stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, env=self.environment,
            )  # fmt: skip
        wait_until(lambda: "kvmesh is up" in log_path.read_text())

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            (self.folder / "up.log").unlink()

    @property
    def pid(self) -> int:
        """Of the holder itself."""
        return self._pid_of(f"serve attach --id attach-0 .*{self.folder}")

    @property
    def broker_pid(self) -> int:
        return self._pid_of(f"nats-server .*{self.folder}")

    def _pid_of(self, command: str) -> int:
        found = subprocess.run(["pgrep", "-f", command], capture_output=True, text=True, check=True)
        return int(found.stdout.split()[0])

    def status(self) -> dict[str, Any]:
        """Return what it says of itself; {} where it does not answer."""
        mesh = mesh_of(self.folder)
        if mesh is None:
            return {}
        key = credentials_file(Path(mesh.keys), Role.OBSERVER)
        return described(person_access(mesh.nats_url, key, Role.OBSERVER), "attach-0")

    def servers(self) -> list[dict[str, Any]]:
        return self.status().get("servers", [])

    def config(self, server_port: int, *, module: str = MODULE, **settings: Any) -> dict[str, Any]:
        made = ConnectorSettings(socket=str(self.socket), url=f"http://127.0.0.1:{server_port}", **settings)
        return transfer_config(made, module)

    def arenas(self) -> list[Path]:
        """Return those in shared memory of the holder that runs."""
        return sorted(Path("/dev/shm").glob(f"kvmesh-{self.pid}-*"))


def described(access: BusAccess, name: str) -> dict[str, Any]:
    """Return what `kvmesh status NAME --json` prints, without a process a question; {} where nobody answers."""

    async def ask() -> dict[str, Any]:
        connection = await NatsBus.connect(access, "tests")
        try:
            bus = TypedBus(connection, "tests")
            return msgspec.to_builtins(await bus.ask(subjects.WORKER_STATUS, (name,), DescribeWorker(), ASK_TIMEOUT_S))
        finally:
            await connection.close()

    try:
        return asyncio.run(ask())
    except BusError:
        return {}


def is_at_rest(status: dict[str, Any]) -> bool:
    """Return whether a holder holds nothing for its servers but their empty slots; False where it did not answer."""
    if not status:
        return False
    servers, blocks = status["servers"], status["load"]["blocks"]
    num_empty = sum(each["num_empty"] for each in servers)
    return not any(each["num_pinned"] for each in servers) and (blocks["running"], blocks["leased"]) == (num_empty, 0)


def arenas_of_the_dead() -> list[Path]:
    """Return what processes of ours that are no more left in shared memory."""
    return [path for path in Path("/dev/shm").glob("kvmesh-*") if not Path("/proc", path.name.split("-")[1]).exists()]


def attached(holder: Holder, name: str, *, module: str = MODULE, **settings: Any) -> VllmServer:
    """Return a server of this holder, not started, which takes no samples: a request that is compared loads nothing.
    `arguments`: of vLLM; `python`: see `VllmServer`."""
    port, arguments, python = free_port(), settings.pop("arguments", ()), settings.pop("python", None)
    config = holder.config(port, module=module, **{"check_every": 1 << 30} | settings)
    return VllmServer(holder.folder, name, config, arguments=arguments, port=port, python=python)


@contextlib.contextmanager
def running(*servers: VllmServer) -> Generator[None]:
    """Have these servers up, all at once, and gone at the end."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.await_health()
        yield
    finally:
        for server in servers:
            server.kill()


class Pair:
    """Two servers of one holder. `python`: see `VllmServer`."""

    def __init__(self, folder: Path, python: Path, module: str) -> None:
        self._port = free_port()
        self.holder = Holder(folder, arguments=("--prefix-port", str(self._port)))
        self.holder.start()
        self.one, self.other = (attached(self.holder, name, module=module, python=python) for name in ("one", "other"))

    def is_proven(self) -> bool:
        return [each["sharing"] for each in self.holder.servers()] == ["on", "on"]

    def await_held(self, tokens: Sequence[int], cache_salt: str = "") -> None:
        """Wait until the holder has all of a prompt that can be loaded: it answers routers."""
        question = json.dumps({"tokens": list(tokens), "cache_salt": cache_salt}).encode()
        url, headers = f"http://127.0.0.1:{self._port}/v1/kv/prefix", {"Content-Type": "application/json"}
        request = urllib.request.Request(url, question, headers)

        def is_held() -> bool:
            with urllib.request.urlopen(request, timeout=START_S) as reply:
                return json.load(reply)["tokens"] >= whole(len(tokens))

        wait_until(is_held)

    def is_at_rest(self) -> bool:
        """Return whether nothing is pinned, and what is neither free nor kept is in the servers' purses."""
        return is_at_rest(self.holder.status())
