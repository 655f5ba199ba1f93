"""Stock vLLM servers on two hosts, each with a holder of its own: two network namespaces, TLS, every part killed."""

import ctypes
import itertools
import os
import random
import signal
import subprocess
import urllib.error
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

from services.attach.connector.settings import ConnectorSettings, transfer_config
from services.bus.embedded import find_server
from services.files import write_private
from services.trust.keys import BROKER_FILE, Role, person_access
from tests.attach.servers import MODULE, VllmServer, arenas_of_the_dead, described, free_port, is_at_rest, prompt
from tests.mesh.test_namespaces import EAST, KVMESH, WEST, Inside, inside, keys
from tests.waiting import wait_until

__all__ = ["inside", "keys"]
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1_800)]

BROKER = f"tls://{EAST}:4222"
HOLDERS = {EAST: "attach-0", WEST: "attach-west"}
NUM_REQUESTS = 200
CLONE_NEWNET = 0x40000000
ResultT = TypeVar("ResultT")


class Hosts:
    """`east` has the broker and `kvmesh up --attach`, `west` a `kvmesh attach`; each has a vLLM server."""

    def __init__(self, inside: Inside, keys: Path, folder: Path) -> None:
        self._inside, self._keys, self.folder = inside, keys, folder
        included = os.path.relpath(keys / BROKER_FILE, folder)  # nats-server takes no absolute path
        settings = f'host: "{EAST}"\nport: 4222\nmax_payload: 8MB\ninclude "{included}"\n'
        write_private(folder / "nats.conf", settings)
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands = {
            "broker": (EAST, [find_server(), "-c", str(folder / "nats.conf")]),
            "up": (EAST, [*KVMESH, "up", "--attach", "--nats", BROKER, *self._flags(EAST)]),
            "attach": (WEST, [*KVMESH, "attach", "--bus", BROKER, "--id", HOLDERS[WEST], *self._flags(WEST)]),
        }
        self.servers = {address: self._server(address) for address in HOLDERS}
        # What is asked from here is asked in the west, from where both hosts are reached.
        self.pool = ThreadPoolExecutor(4, initializer=self._enter)

    def start(self, name: str) -> None:
        address, command = self._commands[name]
        environment = dict(os.environ) | {"KVMESH_STATE_DIR": str(self._state(address))}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                self._inside(address, *command), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def kill(self, name: str) -> None:
        """Kill one that was started here, and start it again."""
        self.running[name].kill()
        self.running[name].wait()
        self.start(name)

    def kill_service(self, role: str) -> None:
        """Kill one that `kvmesh up` starts again."""
        found = subprocess.run(
            ["pgrep", "-f", f"serve {role} --id {role}.*{self._state(EAST)}"],
            capture_output=True,
            text=True,
            check=True,
        )
        os.kill(int(found.stdout.split()[0]), signal.SIGKILL)

    def kill_server(self, address: str) -> None:
        self.servers[address].kill()
        self.servers[address].start()

    def status(self, address: str) -> dict[str, Any]:
        """Return what a holder says of itself; {} where it does not answer."""
        access = person_access(BROKER, self._keys / "observer.creds", Role.OBSERVER)
        return self.there(lambda: described(access, HOLDERS[address]))

    def is_proven(self) -> bool:
        servers = [self.status(address).get("servers", []) for address in HOLDERS]
        return [[each["sharing"] for each in of_one] for of_one in servers] == [["on"], ["on"]]

    def there(self, work: Callable[[], ResultT]) -> ResultT:
        """Return what this returns in the west."""
        return self.pool.submit(work).result()

    def close(self) -> None:
        for server in self.servers.values():
            server.kill()
        for name in ("attach", "up", "broker"):
            if name in self.running:
                self.running[name].terminate()
                self.running[name].wait(60)
        self.pool.shutdown()

    def _flags(self, address: str) -> list[str]:
        return ["--keys", str(self._keys), "--socket", str(self._socket(address)), "--plane-host", address]

    def _state(self, address: str) -> Path:
        return self.folder / ("east" if address == EAST else "west")

    def _socket(self, address: str) -> Path:
        return self._state(address) / "a.sock"

    def _server(self, address: str) -> VllmServer:
        port = free_port()
        settings = ConnectorSettings(socket=str(self._socket(address)), url=f"http://127.0.0.1:{port}")
        return VllmServer(
            self.folder, self._state(address).name, transfer_config(settings, MODULE), port=port,
            arguments=("--host", "0.0.0.0"), host=address, wrapper=tuple(self._inside(address)),
        )  # fmt: skip

    def _enter(self) -> None:
        pid = self._inside(WEST)[2]
        with Path(f"/proc/{pid}/ns/net").open("rb") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) == 0


@pytest.fixture(scope="module")
def hosts(inside: Inside, keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Hosts]:
    pytest.importorskip("vllm", reason="vLLM is not installed here: make attach-test")
    made = Hosts(inside, keys, tmp_path_factory.mktemp("h"))
    try:
        for name in ("broker", "up", "attach"):
            made.start(name)
        for server in made.servers.values():
            server.start()
        for server in made.servers.values():
            made.there(server.await_health)
        wait_until(made.is_proven)
        yield made
    finally:
        made.close()


def test_two_hundred_requests_while_every_part_is_killed_once(hosts: Hosts) -> None:
    rng = random.Random(1)
    prefixes = [prompt(number, 400) for number in range(10)]
    asked = [
        prefixes[rng.randrange(10)][: rng.randrange(100, 400)] + prompt(1_000 + at, 40) for at in range(NUM_REQUESTS)
    ]
    where = [rng.choice((EAST, WEST)) for _ in asked]
    kills: dict[int, Callable[[], None]] = {
        25: lambda: hosts.kill("broker"),
        50: lambda: hosts.kill_service("directory"),
        70: lambda: hosts.kill_service("scheduler"),
        90: lambda: hosts.kill_service("attach"),
        115: lambda: hosts.kill("attach"),
        140: lambda: hosts.kill_server(EAST),
        170: lambda: hosts.kill_server(WEST),
    }

    def ask(at: int) -> list[int]:
        """Ask as a router does: whoever does not answer is passed over for the other one."""
        address = where[at]
        while True:
            try:
                return hosts.servers[address].ask(asked[at]).tokens
            except (OSError, urllib.error.URLError, ValueError):
                address = WEST if address == EAST else EAST

    answers: list[Future[list[int]]] = []
    for at in range(NUM_REQUESTS):
        if (kill := kills.get(at)) is not None:
            for answer in answers:
                answer.result()
            answers.append(hosts.pool.submit(ask, at))  # one is under way
            kill()
        else:
            answers.append(hosts.pool.submit(ask, at))
    found = [answer.result() for answer in answers]
    for server in hosts.servers.values():
        hosts.there(server.await_health)
    wait_until(hosts.is_proven)
    right = list(hosts.pool.map(lambda one: hosts.servers[EAST].computed(one), asked))
    assert found == right
    # What one host's server computes now the other host's loads, at the latest once the directory knows of it. What it
    # has computed itself it does not load: each try has a prompt of its own, that was computed before the last try.
    seeds = itertools.count(5_000)
    hosts.there(lambda: hosts.servers[EAST].ask(prompt(5_000)))

    def is_loaded() -> bool:
        seed, before = next(seeds), hosts.servers[WEST].num_loaded()
        hosts.servers[EAST].ask(prompt(seed + 1))
        hosts.servers[WEST].ask(prompt(seed))
        return hosts.servers[WEST].num_loaded() > before

    wait_until(lambda: hosts.there(is_loaded))
    (shown,) = hosts.status(WEST)["servers"]
    assert shown["num_brought_blocks"]
    for address, server in hosts.servers.items():
        server.kill()
        wait_until(lambda one=address: is_at_rest(hosts.status(one)) and not hosts.status(one)["servers"])
    assert not arenas_of_the_dead()
