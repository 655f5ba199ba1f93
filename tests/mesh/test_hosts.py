"""A mesh over three machines: the head and two that join in one line. What a user meets on the way, in the order in
which it is met."""

import contextlib
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.engine.demo_model import DEMO_MODEL_DIR
from tests.cli.commands import QUESTION
from tests.mesh.machines import Machines, machines
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEAD, EAST, WEST, NORTH = "head", "east", "west", "north"
API_KEY = "a-key"
JOIN_PORT = 7843
SMALL = ("--kv-mib", "64", "--threads", "1")


class Mesh:
    """The head's mesh, and how it is asked."""

    def __init__(self, world: Machines) -> None:
        self.world = world
        self.url = f"tls://{world.address[HEAD]}:{JOIN_PORT}"

    def token(self, *words: str) -> str:
        """Return a token, as it stands in the line that is printed."""
        said = self.world.kvmesh(HEAD, "token", *words)
        assert said.returncode == 0, said.stderr
        line = said.stdout.split()
        assert line[:3] == ["kvmesh", "join", self.url] and "shown once" in said.stderr
        return line[line.index("--token") + 1]

    def joins(self, name: str, *words: str) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
        return self.world.running(name, "join", self.url, *words, *SMALL)

    def refused(self, name: str, *words: str, first_on_path: Path | None = None) -> str:
        """Return the one line with which a machine is refused. `first_on_path`: where Python looks first."""
        done = self.world.kvmesh(name, "join", self.url, *words, *SMALL, first_on_path=first_on_path)
        lines = [line for line in done.stderr.splitlines() if line]
        assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
        return lines[0]

    def has_joined(self, name: str) -> bool:
        said = self.world.said(name, "join")
        assert "error" not in said, said
        return "joined" in said

    def workers(self) -> set[str]:
        said = self.world.kvmesh(HEAD, "status", "--json")
        return {load["worker"]["worker_id"] for load in json.loads(said.stdout)["workers"]} if said.stdout else set()

    def answer(self, prompt: str = QUESTION, gateway: str = HEAD) -> dict[str, Any]:
        """Ask from another machine, at this one's gateway."""
        body = json.dumps({"model": "demo_model", "prompt": prompt, "max_tokens": 16, "temperature": 0})
        said = self.world.run(
            WEST, "curl", "-s", f"http://{self.world.address[gateway]}:8000/v1/completions", "-H",
            "Content-Type: application/json", "-H", f"Authorization: Bearer {API_KEY}", "-d", body,
        )  # fmt: skip
        return json.loads(said)

    def says(self, prompt: str = QUESTION, gateway: str = HEAD) -> str:
        return self.answer(prompt, gateway)["choices"][0]["text"].strip()


def up(world: Machines, *words: str) -> "contextlib.AbstractContextManager[subprocess.Popen[bytes]]":
    address = world.address[HEAD]
    return world.running(
        HEAD, "up", "--host", "0.0.0.0", "--hosts", address, "--api-key", API_KEY, "--join-port", str(JOIN_PORT),
        "--prefill", "1", "--decode", "1", *SMALL, *words,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def mesh(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    with contextlib.ExitStack() as stack:
        world = stack.enter_context(machines(tmp_path_factory.mktemp("machines"), HEAD, EAST, WEST, NORTH))
        stack.enter_context(up(world, "--engine", request.param))
        wait_until(lambda: "kvmesh is up" in world.said(HEAD, "up"))
        yield Mesh(world)


def test_what_is_refused_is_one_line(mesh: Mesh, tmp_path: Path) -> None:
    token = mesh.token()
    assert "--token is missing" in mesh.refused(EAST, "--decode", "1")
    foreign = f"kvj1.{'0' * 64}.{token.split('.', 2)[2]}"
    assert "another mesh" in mesh.refused(EAST, "--decode", "1", "--token", foreign)
    assert "not for gateway-east-0" in mesh.refused(EAST, "--gateways", "1", "--token", token)
    assert "used up" in mesh.refused(EAST, "--decode", "1", "--token", mesh.token("--ttl", "1s")[:-43] + "x" * 43)
    model = tmp_path / "demo_model"
    shutil.copytree(DEMO_MODEL_DIR, model)
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    said = mesh.refused(EAST, "--decode", "1", "--token", token, "--model", str(model))
    assert "are not those of demo_model" in said
    # Another release, as the installed package says it.
    other = tmp_path / "other" / "kvmesh-9.9.9.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: kvmesh\nVersion: 9.9.9\n")
    said = mesh.refused(EAST, "--decode", "1", "--token", token, first_on_path=other.parent)
    assert "this machine has 9.9.9: install that one here" in said
    revoked = mesh.token()
    assert mesh.world.kvmesh(HEAD, "token", "revoke", revoked.split(".")[2]).returncode == 0
    assert "revoked" in mesh.refused(EAST, "--decode", "1", "--token", revoked)


def test_machines_join_serve_and_leave(mesh: Mesh) -> None:
    world = mesh.world
    token = mesh.token()
    # A port that the head's firewall closes is named before anything depends on it.
    world.close_port(EAST, 7000)
    said = mesh.refused(EAST, "--decode", "1", "--token", token)
    assert "cannot read from decode-east-0" in said and "open TCP ports 7000-7015 of this machine" in said
    world.open_ports(EAST)
    # The same line again: the token is used up, and the machine is known.
    with (
        mesh.joins(EAST, "--decode", "1", "--token", token),
        mesh.joins(WEST, "--prefill", "1", "--token", mesh.token()),
    ):
        wait_until(lambda: mesh.has_joined(EAST) and mesh.has_joined(WEST))
        everybody = {"prefill-0", "decode-0", "decode-east-0", "prefill-west-0"}
        assert mesh.workers() == everybody
        assert "used up" in mesh.refused(NORTH, "--decode", "1", "--token", token)
        lines = world.kvmesh(EAST, "status").stdout
        assert f"at {world.address[EAST]}: decode-east-0" in lines and "not ready" not in lines
        carriers = set[object]()
        for number in range(24):
            answer = mesh.answer(f"{number} {QUESTION}")
            assert answer["choices"][0]["text"].strip() == "7412", answer
            carriers.add(answer["usage"]["kvmesh"]["carrier"])
        assert {"tcp", "shm"} <= carriers, "between machines, and on one"
        # Each worker in turn, wherever it is: its own supervisor starts it again.
        restarted = world.kvmesh(HEAD, "restart", "--rolling")
        assert restarted.returncode == 0 and restarted.stdout.count("it is back") == 4, restarted
        # A gateway elsewhere: it knows the same keys, and is no worker.
        gateways = mesh.token("--role", "gateway")
        assert "not for decode-north-0" in mesh.refused(NORTH, "--decode", "1", "--token", gateways)
        with mesh.joins(NORTH, "--gateways", "1", "--token", mesh.token("--role", "gateway", "--host", NORTH)):
            wait_until(lambda: mesh.has_joined(NORTH))
            assert mesh.says(f"north {QUESTION}", NORTH) == "7412"
        # A machine that is cut off: answers come from the others, and it is back with the cable.
        world.unplug(EAST)
        for number in range(6):
            assert mesh.says(f"cut {number} {QUESTION}") == "7412"
        wait_until(lambda: mesh.workers() == everybody - {"decode-east-0"})
        world.plug(EAST)
        wait_until(lambda: mesh.workers() == everybody)
        rotated = world.kvmesh(HEAD, "rotate")
        assert rotated.returncode == 0 and "has not taken it" not in rotated.stdout, rotated
        assert mesh.says(f"rotated {QUESTION}") == "7412"
        # One leaves by itself, the other one is locked out.
        left = world.kvmesh(WEST, "leave")
        assert left.returncode == 0 and "west has left" in left.stdout, left
        removed = world.kvmesh(HEAD, "remove", EAST)
        assert removed.returncode == 0 and "kvmesh rotate" in removed.stdout, removed
        wait_until(lambda: mesh.workers() == {"prefill-0", "decode-0"})
        wait_until(lambda: "is no machine of this mesh" in world.said(EAST, "join"))
    assert "missing" in mesh.refused(EAST, "--decode", "1") and "missing" in mesh.refused(WEST, "--prefill", "1")
    assert mesh.says() == "7412"


def test_the_unit_for_systemd_has_no_secret(mesh: Mesh) -> None:
    said = mesh.world.kvmesh(EAST, "join", mesh.url, "--token", "kvj1.secret", "--decode", "1", "--systemd").stdout
    assert f"join {mesh.url} --decode 1\n" in said and "secret" not in said and "KillSignal=SIGINT" in said
