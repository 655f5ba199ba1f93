"""Every command and snippet of README and docs/usage.md does what the page promises.

Each line of a ```sh fence is a case, and WAYS says how it is tried. Most run as they stand in a scratch folder that
looks like the repository's root, against a real mesh; what is the reader's (DIR, REQUEST_ID …) is filled in.
"""

import asyncio
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from typer.core import TyperGroup
from typer.main import get_command

from schemas.subjects import SUBJECTS, Role
from services.bus.memory import matches
from services.bus.nats import NatsBus
from services.cli import up
from services.cli.app import app
from services.cli.running import RunningMesh as StateFile
from services.config import GatewayConfig, MeshConfig, WorkerConfig, load_config, write_config
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from services.ports import free_port
from services.scheduler.placement.named import policy_named
from services.trust.keys import MeshKeys
from tests.cli.commands import QUESTION, stopped_with
from tests.mesh.processes import Mesh, RunningMesh
from tests.mesh.test_mesh import fresh
from tests.pages.scene import KV_BYTES, TOO_LARGE

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/usage.md")
LIMIT_S = 120


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page. `line`: of its first line of text."""

    page: str
    line: int
    text: str

    @property
    def commands(self) -> Iterator["Fence"]:
        """Yield each command, with the lines that a backslash continues joined."""
        lines = enumerate(self.text.splitlines(), self.line)
        for number, line in lines:
            while line.endswith("\\"):
                line = line[:-1].rstrip() + " " + next(lines)[1].strip()
            if shlex.split(line, comments=True):
                yield Fence(self.page, number, line)

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text[:48]}"


def fences(language: str) -> list[Fence]:
    """Return the blocks of all pages that are in this language."""
    found: list[Fence] = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            found.append(Fence(page, text.count("\n", 0, match.start(1)) + 1, match[1]))
    return found


def table_commands() -> Iterator[Fence]:
    """Yield the commands that stand in the cells of the pages' tables, beside what they measure."""
    for page in PAGES:
        for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
            if line.startswith("|"):
                for command in re.findall(r"`((?:kvmesh|make|python -m) [^`]+)`", line):
                    yield Fence(page, number, command)


class Scratch:
    """A folder that looks like the repository's root after `make up`, and the environment of a command there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".venv/bin").mkdir(parents=True)
        for name, command in {"kvmesh": "python -m services.cli.main", "python": "python"}.items():
            shim = folder / ".venv/bin" / name
            shim.write_text(f'#!/bin/sh\nexec {command.replace("python", sys.executable, 1)} "$@"\n')
            shim.chmod(0o755)
        (folder / ".venv/bin/nats-server").symlink_to(Path(sys.executable).with_name("nats-server"))
        for entry in ROOT.iterdir():
            if not entry.name.startswith("."):
                (folder / entry.name).symlink_to(entry)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVMESH_", "OTEL_"))}
        self.environment = kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip

    def start(self, words: list[str]) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            words, cwd=self.folder, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


class Place(Scratch):
    """A scratch folder in which a mesh runs that has answered one request and refused another."""

    def __init__(self, mesh: Mesh, folder: Path) -> None:
        super().__init__(folder)
        self.mesh = mesh
        state, supervisor = folder / ".kvmesh", mesh.supervisor
        running = StateFile(
            pid=os.getpid(),
            url=mesh.url,
            nats_url=mesh.nats_url,
            keys=str(supervisor.keys_dir),
            trace_dir=str(supervisor.trace_dir),
        )
        (state / "mesh.json").write_bytes(msgspec.json.encode(running))
        (state / "metrics.json").write_bytes(msgspec.json.encode(supervisor.metrics_targets))
        self.request_id: str = mesh.complete(QUESTION)["usage"]["kvmesh"]["request_id"]
        self.refuse()

    def refuse(self) -> None:
        body = {"model": self.mesh.model, "prompt": [9] * TOO_LARGE, "max_tokens": 8}
        assert httpx.post(f"{self.mesh.url}/v1/completions", json=body, timeout=LIMIT_S).status_code == 400

    def filled(self, text: str) -> str:
        """Return a command or a snippet with what is this mesh's in it."""
        text = text.replace("http://127.0.0.1:8000", self.mesh.url)
        text = re.sub(r"\bREQUEST_ID\b", self.request_id, text)
        [metrics] = [t.targets[0] for t in self.mesh.supervisor.metrics_targets if t.labels["role"] == "gateway"]
        return re.sub(r"\bMETRICS\b", metrics, text)


@pytest.fixture(scope="module")
def place(running_mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("place")
    options = Launch(
        num_decode=2, config=MeshConfig(gateway=GatewayConfig(port=0), worker=WorkerConfig(kv_bytes=KV_BYTES))
    )
    with running_mesh(folder / ".kvmesh/run", options) as mesh:
        yield Place(mesh, folder)


@dataclass
class Trial:
    """What a way to try a command has at hand."""

    command: Fence
    fixtures: pytest.FixtureRequest

    @property
    def place(self) -> Place:
        return self.fixtures.getfixturevalue("place")

    @property
    def scratch(self) -> Scratch:
        """A folder without a mesh."""
        return Scratch(self.fixtures.getfixturevalue("tmp_path"))


Try = Callable[[Trial], None]


def run(says: str) -> Try:
    """As it stands, to its end: exit code 0, and the output has this in it."""

    def attempt(trial: Trial) -> None:
        done = trial.place.run(trial.place.filled(trial.command.text))
        assert done.returncode == 0 and re.search(says, done.stdout), done

    return attempt


def follow(says: str) -> Try:
    """Runs until Ctrl-C, while requests are sent: it prints this, and Ctrl-C ends it with exit code 0."""

    def attempt(trial: Trial) -> None:
        place, heard = trial.place, threading.Event()

        def send() -> None:
            while not heard.is_set():
                place.mesh.complete(QUESTION)

        sender = threading.Thread(target=send)
        following = place.start(shlex.split(place.filled(trial.command.text), comments=True))
        with stopped_with(following) as lines:
            sender.start()
            try:
                assert any(re.search(says, line) for line in lines)
            finally:
                heard.set()
                sender.join()
        assert following.returncode == 0

    return attempt


def start(trial: Trial) -> None:
    """A mesh, with little memory and on free ports: it comes up, and Ctrl-C ends it with exit code 0."""
    scratch, words = trial.scratch, up_words(trial)
    _until_ctrl_c(scratch, [*words, "--port", "0", "--kv-mib", "64"], "Ctrl-C stops everything")
    assert not (scratch.folder / ".kvmesh/mesh.json").exists()


def _until_ctrl_c(scratch: Scratch, words: list[str], says: str) -> None:
    process, said = scratch.start(words), ""
    with stopped_with(process) as lines:
        for line in lines:
            said += line
            if says in line:
                break
    assert says in said and process.returncode == 0, said


def dry_make(words: list[str]) -> "subprocess.CompletedProcess[str]":
    """What make would do, said as outside of the `make test` that may run this."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(
        ["make", "-n", *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def up_words(trial: Trial) -> list[str]:
    """Return the `kvmesh up …` of a command; of `make up` what make would run last."""
    words = trial.command.words
    if words[0] == "make":
        words = shlex.split(dry_make(words[1:]).stdout.splitlines()[-1])
    assert words[:2] == [".venv/bin/kvmesh", "up"]
    return [str(DEMO_MODEL_DIR) if word == "DIR" else word for word in words]


def configure(trial: Trial) -> None:
    """A mesh that is not started: its flags are taken, and make a configuration that services can read."""
    taken: list[Launch] = []
    monkeypatch: pytest.MonkeyPatch = trial.fixtures.getfixturevalue("monkeypatch")
    folder: Path = trial.fixtures.getfixturevalue("tmp_path")
    monkeypatch.setattr(up, "run_up", lambda launch: taken.append(launch) or 0)
    (folder / "keys.toml").write_text('KEY = "research"')
    words = [str(folder / "keys.toml") if word == "KEYS" else word for word in up_words(trial)]
    get_command(app).main(words[1:], prog_name="kvmesh", standalone_mode=False)
    [launch] = taken
    policy_named(launch.config.scheduler)
    write_config(launch.config, folder / "mesh.toml")
    assert load_config(folder / "mesh.toml") == launch.config


def make_keys(trial: Trial) -> None:
    """The keys of a mesh, in a folder of one's own; a second time they are not overwritten."""
    scratch = trial.scratch
    command = f".venv/bin/{trial.command.text.removeprefix('.venv/bin/')}"
    assert [scratch.run(command).returncode for _ in range(2)] == [0, 2]
    assert (scratch.folder / trial.command.words[2] / "broker.conf").exists()


def parse(trial: Trial) -> None:
    """Not run, because it takes minutes: its arguments are those of the command."""
    command, name, words, context = get_command(app), "kvmesh", trial.command.words[1:], None
    while True:
        context = command.make_context(name, words, parent=context)
        rest = [*context._protected_args, *context.args]
        if not isinstance(command, TyperGroup) or not rest:
            return
        name, command, words = command.resolve_command(context, rest)  # type: ignore[assignment]
        assert command is not None and name is not None


def make(trial: Trial) -> None:
    """Not run, because it takes minutes, or installs: make knows the target."""
    done = dry_make(trial.command.words[1:])
    assert done.returncode == 0, done.stderr


def has_module(trial: Trial) -> None:
    """Not run, because it takes minutes: there is such a module."""
    assert importlib.util.find_spec(trial.command.words[2])


def serve(trial: Trial) -> None:
    """One service, by the page's own mesh.toml: it becomes ready, and Ctrl-C ends it with exit code 0."""
    scratch = trial.scratch
    [text] = [fence.text for fence in fences("toml") if fence.page == trial.command.page and "[nats]" in fence.text]
    MeshKeys.fresh().save(scratch.folder / "keys")
    text = text.replace("8000", str(free_port())).replace("[nats]", "[nats]\nopen = true")
    (scratch.folder / "mesh.toml").write_text(text)
    scratch.environment["KVMESH_NATS_URL"] = trial.fixtures.getfixturevalue("nats_url")
    _until_ctrl_c(scratch, trial.command.words, "ready")


def serve_broker(trial: Trial) -> None:
    scratch = trial.scratch
    MeshKeys.fresh().save(scratch.folder / "keys")
    _until_ctrl_c(scratch, trial.command.text.replace("4222", str(free_port())).split(), "Server is ready")


def hear(trial: Trial) -> None:
    """`nats sub`: there is such a subject, and somebody publishes there while a request is served and one refused."""
    subject, place = trial.command.words[-1], trial.place
    assert any(matches(tuple(subject.split(".")), tuple(s.pattern.replace("{}", "x").split("."))) for s in SUBJECTS)

    async def listen() -> None:
        bus = await NatsBus.connect(place.mesh.access(Role.OPERATOR), "page")
        try:
            subscription = await bus.subscribe(subject)
            await bus.flush()
            await asyncio.to_thread(place.mesh.complete, fresh(200), max_tokens=4)
            await asyncio.to_thread(place.refuse)
            async with asyncio.timeout(LIMIT_S):
                assert json.loads((await anext(aiter(subscription))).payload)
        finally:
            await bus.close()

    place.mesh.call(listen())


def ask(subject: str = "") -> Try:
    """`nats req`: somebody answers with JSON. Without a subject it is the command's last word but one."""

    def attempt(trial: Trial) -> None:
        place, words = trial.place, trial.command.words

        async def question() -> bytes:
            bus = await NatsBus.connect(place.mesh.access(Role.OPERATOR), "page")
            try:
                return (await bus.request(subject or place.filled(words[-2]), b"", {}, LIMIT_S)).payload
            finally:
                await bus.close()

        assert json.loads(place.mesh.call(question()))["type"]

    return attempt


def drain(trial: Trial) -> None:
    """The worker ends well, and is started again by whoever started it."""
    place = trial.place
    [worker] = [child for child in place.mesh.supervisor.children if child.name == "decode-1"]
    before = worker.process
    assert place.run(trial.command.text.replace("PID", str(before.pid))).returncode == 0
    place.mesh.wait_until(lambda: worker.process is not before, "the worker is started again")
    assert before.returncode == 0
    place.mesh.wait_until(lambda: worker.ready.is_set(), "the worker is ready")


def kill(trial: Trial) -> None:
    """In a mesh of its own that is answering: processes are killed or replaced, the answer goes on to its end."""
    scratch, port = trial.scratch, free_port()
    up = ["kvmesh", "up", "--prefill", "2", "--decode", "2", "--kv-mib", "64", "--port", str(port)]
    up += ["--spare-engines", "1"] if "decode-0 engine" in trial.command.text else []
    process = scratch.start([f".venv/bin/{up[0]}", *up[1:]])
    body = {"model": "demo_model", "prompt": QUESTION, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with stopped_with(process) as lines:
        assert any("Ctrl-C stops everything" in line for line in lines)
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=LIMIT_S) as answer:
            events = (line for line in answer.iter_lines() if line.startswith("data: {"))
            next(events)
            services = subprocess.check_output(["pgrep", "--parent", str(process.pid)], text=True).split()
            ours = ",".join([str(process.pid), *services])  # engines are children of theirs
            done = scratch.run(trial.command.text.replace("pkill", f"pkill --parent {ours}"))
            assert done.returncode == 0, done
            assert any('"finish_reason":"length"' in event for event in events)
    assert process.returncode == 0


def elsewhere(reason: str, check: Try) -> Try:
    """Never run by tests, for a reason. What of it is ours is checked."""
    assert reason
    return check


def names_files(trial: Trial) -> None:
    words = trial.command.words
    named = [file for flag, file in pairwise(words) if flag in ("-f", "--file")]
    assert named and all((ROOT / file).is_file() for file in named)


def names_extras(trial: Trial) -> None:
    [extras] = re.findall(r"\.\[([\w,]+)\]", trial.command.text)
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= ours.keys()


NATS = r"XDG_CONFIG_HOME=\.kvmesh/run nats --context (observer|operator)"
WAYS: tuple[tuple[str, Try], ...] = (
    (r"make up", start),
    (r"make up UP_FLAGS=.*", configure),
    (r"make .*", make),
    (r"kvmesh up (--model DIR|--aggregated 2)", start),
    (r"kvmesh up --help", run("--replicate")),
    (r"kvmesh up( .*)?", configure),
    (r"kvmesh serve .*", serve),
    (r"nats-server .*", serve_broker),
    (r"curl .*/v1/(chat/)?completions .*", run('"finish_reason":')),
    (r"curl .*/v1/models", run("demo_model")),
    (r"curl .*/health", run("true|ok|ready")),
    (r"curl .*/metrics", run("kvmesh_gateway_requests_total")),
    (r"cat .kvmesh/metrics.json", run('"targets"')),
    (r"kvmesh (status|top)( .*)?", run("decode-0")),
    (r"kvmesh purge --store", parse),  # this mesh has none
    (r"kvmesh purge .*", run("prefill-0")),
    (r"kvmesh trace --failed --rejected", run("context_length_exceeded")),
    (r"kvmesh trace --failed", parse),  # the mesh has failed nothing here
    (r"kvmesh trace( .*)?", run("ms|TTFT")),
    (r"kvmesh tail", follow("finished")),
    (r"kvmesh tail REQUEST_ID", run("finished")),
    (r"kvmesh bus-config \w+", make_keys),
    (r"kvmesh (bus-config keys --host|serve broker) .*", parse),  # tests/bus/test_serve_broker.py
    (r"kvmesh (token|join .*|leave|remove .*|rotate)", parse),  # tests/mesh/test_hosts.py
    (r"kvmesh simulate --faults list", run("kill")),
    (r"kvmesh simulate .*--requests \d\d .*--json", run('"wrong": 0')),
    (r"kvmesh simulate .*--requests \d\d", run("no promise was broken")),
    (r"kvmesh simulate .*", parse),
    (r"python -m tests.bench.links.*", run("calculated")),
    (r"kvmesh bench .*", parse),
    (r"python -m tests\..*", has_module),
    (r"kvmesh sub.*", follow("Request(Finished|Accepted)|TokensEmitted")),
    (r"kvmesh req .*", run('"type": "')),
    (rf"{NATS} sub .*", elsewhere("the nats command is not installed by us", hear)),
    (rf"{NATS} req .*", elsewhere("the nats command is not installed by us", ask())),
    (rf"{NATS} micro ls", elsewhere("the nats command is not installed by us", ask("$SRV.PING"))),
    (r"kill -TERM PID", drain),
    (r"kvmesh (drain decode-0|restart --rolling)", kill),
    (r"pkill -KILL (-f 'serve decode --id decode-0'|-o '\^decode-0 engine')", kill),
    (r"docker compose .*", elsewhere("needs a container engine: make compose-test", names_files)),
    (r"pip install .*", elsewhere("installs gigabytes", names_extras)),
)
"""How each command is tried: the first pattern that is a whole command, without `.venv/bin/` and comments."""


def _way(command: Fence) -> Try | None:
    text = re.sub(r"(^| )#.*", "", command.text).strip().removeprefix(".venv/bin/")
    return next((way for pattern, way in WAYS if re.fullmatch(pattern, text)), None)


def way_of(command: Fence) -> Try:
    """Return how a command is tried. Fails where no pattern fits it."""
    if (way := _way(command)) is not None:
        return way
    pytest.fail(f"{command}: no pattern of WAYS in {Path(__file__).name} fits: add one that says how this is tried")


def all_commands() -> list[Fence]:
    return [*(each for fence in fences("sh") for each in fence.commands), *table_commands()]


def cases() -> list[Any]:
    """Return a case for each command. Of those that start something, `make test` runs README's `make up`."""
    commands, shown_first = all_commands(), ("README.md", ["make", "up"])
    is_slow = [_way(each) in (start, serve, kill) and (each.page, each.words) != shown_first for each in commands]
    return [pytest.param(c, marks=[pytest.mark.slow] * slow) for c, slow in zip(commands, is_slow, strict=True)]


@pytest.mark.parametrize("command", cases(), ids=str)
def test_a_command_does_what_its_page_says(command: Fence, request: pytest.FixtureRequest) -> None:
    way_of(command)(Trial(command, request))


@pytest.mark.parametrize("snippet", fences("python"), ids=str)
def test_a_snippet_runs(snippet: Fence, place: Place) -> None:
    done = subprocess.run(
        [sys.executable, "-c", place.filled(snippet.text)], env=place.environment, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("configuration", fences("toml"), ids=str)
def test_a_configuration_is_one(configuration: Fence, tmp_path: Path) -> None:
    (tmp_path / "mesh.toml").write_text(configuration.text)
    assert load_config(tmp_path / "mesh.toml") != MeshConfig()


def test_a_command_that_nobody_has_thought_of_is_found() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"README.md:7 .*add one"):
        way_of(Fence("README.md", 7, "kvmesh unknown"))


def test_lines_are_joined_and_comments_are_no_commands() -> None:
    fence = Fence("README.md", 3, "# why\n\nmake up # now\ncurl -s \\\n    '#x'\n")
    assert [(each.line, each.words) for each in fence.commands] == [(5, ["make", "up"]), (6, ["curl", "-s", "#x"])]


@pytest.mark.parametrize("words", ["kvmesh bench ttft --no-such-flag", "kvmesh bench nothing", "make no-such-target"])
def test_what_is_only_parsed_fails_where_it_is_wrong(words: str, request: pytest.FixtureRequest) -> None:
    trial = Trial(Fence("README.md", 1, words), request)
    with pytest.raises(Exception, match=r"(?i)no.such") as raised:
        way_of(trial.command)(trial)
    assert not isinstance(raised.value, pytest.fail.Exception)
