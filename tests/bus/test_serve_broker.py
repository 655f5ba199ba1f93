"""A broker of three as a user starts it: with the files of `kvmesh bus-config --routes`, by `kvmesh serve broker`."""

import asyncio
import contextlib
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dataplane.addresses import listen
from schemas.subjects import Role
from services.bus.nats import NatsBus
from services.cli.status import server_lines
from services.errors import UserError
from services.ports import free_port
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from services.trust.keys import BusAccess, credentials_file, key_file, load_role_key, person_access
from services.trust.routes import ROUTE_CA_FILE, ROUTE_CERTIFICATE_FILE, ROUTE_KEY_FILE, ROUTE_PORT
from tests.cli.commands import KVMESH, assert_one_line, environment, run, run_here
from tests.waiting import until, wait_until

HOSTS = ("127.0.5.1", "127.0.5.2", "127.0.5.3")
PLACE_OF_THEIR_OWN = "moved here"


class Brokers:
    """Three servers. Their keys lie elsewhere than where `kvmesh bus-config` has written them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.keys = folder, folder / PLACE_OF_THEIR_OWN
        made = folder / "keys"
        assert run_here(folder, "bus-config", str(made), "--host", ",".join(HOSTS), "--routes").returncode == 0
        made.rename(self.keys)
        self._port = free_port()
        self._running: dict[str, subprocess.Popen[str]] = {}

    @property
    def urls(self) -> list[str]:
        return [f"tls://{host}:{self._port}" for host in HOSTS]

    @property
    def url(self) -> str:
        return ",".join(self.urls)

    def start(self, host: str) -> None:
        wait_until(lambda: self._is_free(host))  # of one that was killed the server takes a moment to end
        command = [*KVMESH, "serve", "broker", "--keys", str(self.keys), "--id", host, "--host", host]
        self._running[host] = subprocess.Popen(
            [*command, "--port", str(self._port)], env=environment(self.folder), stdout=subprocess.PIPE, text=True
        )

    def _is_free(self, host: str) -> bool:
        try:
            listen(host, self._port).close()
        except OSError:
            return False
        return True

    def wait_ready(self, host: str) -> None:
        out = self._running[host].stdout
        assert out is not None and out.readline() == "ready\n"

    def end(self, host: str, how: signal.Signals) -> int:
        with self._running.pop(host) as process:
            process.send_signal(how)
            return process.wait(60)

    def close(self) -> None:
        for host in list(self._running):
            self.end(host, signal.SIGKILL)

    async def bus_config(self, *options: str) -> str:
        """Run `kvmesh bus-config` on the keys, and return what it says."""
        said = await asyncio.to_thread(run, self.folder, "bus-config", str(self.keys), *options)
        assert said.returncode == 0, said.stderr
        return said.stdout

    async def member(self, name: str, keys: Path | None = None, url: str = "") -> NatsBus:
        """Connect one, with the key in this folder. Raises UserError."""
        role = Role.GATEWAY if name.startswith("gateway") else Role.HOLDER
        identity = load_role_key(key_file(keys or self.keys, role)).member(name)
        return await NatsBus.connect(BusAccess(url or self.url, identity, self.keys / CA_FILE), name)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    three = Brokers(tmp_path_factory.mktemp("brokers"))
    try:
        for host in HOSTS:
            three.start(host)
        for host in HOSTS:
            three.wait_ready(host)
        yield three
    finally:
        three.close()


@pytest.fixture
async def gateway(brokers: Brokers) -> AsyncIterator[NatsBus]:
    bus = await brokers.member("gateway-0")
    await until(lambda: bus.num_seen == len(HOSTS))
    yield bus
    await bus.close()


async def test_three_servers_find_each_other_and_members_spread(brokers: Brokers, gateway: NatsBus) -> None:
    members = [await brokers.member(f"gateway-{number}") for number in range(1, 12)]
    assert {bus.server for bus in members} == set(brokers.urls)
    for bus in members:
        await bus.close()


async def test_who_surveys_sees_each_server_with_its_members(brokers: Brokers) -> None:
    names = [f"gateway-{number}" for number in range(6)]
    members = [await brokers.member(name) for name in names]
    for bus, name in zip(members, names, strict=True):
        await bus.announce("gateway", "for the survey", {"id": name})
    credentials = credentials_file(brokers.keys, Role.OBSERVER)
    person = await NatsBus.connect(person_access(brokers.url, credentials, Role.OBSERVER), "person")

    async def all_see_all() -> bool:
        return all(each.num_seen == len(HOSTS) for each in await person.survey())

    await until(all_see_all)
    seen = await person.survey()
    assert [each.url for each in seen] == sorted(brokers.urls)
    for each in seen:
        assert each.members == {name for bus, name in zip(members, names, strict=True) if bus.server == each.url}
    [line] = server_lines(seen)
    assert "on one machine" in line and all(url in line for url in brokers.urls)
    for bus in (*members, person):
        await bus.close()


async def test_one_push_takes_a_member_off_each_server(brokers: Brokers, gateway: NatsBus) -> None:
    await brokers.bus_config("--member", "decode-0")
    own = brokers.keys / "decode-0"
    leaver = await brokers.member("decode-0", own, brokers.urls[2])
    # Only the first server is told.
    said = await brokers.bus_config("--revoke", "decode-0", "--push", "--nats", brokers.urls[0])
    assert f"{brokers.urls[0]}  took it" in said and "ticket secrets" in said
    await leaver.closed.wait()
    for url in brokers.urls:
        with pytest.raises(UserError, match="is revoked"):
            await brokers.member("decode-0", own, url)
    assert gateway.num_reroutes == 0, "nobody else is asked to leave"


async def test_a_server_that_was_away_is_told_what_is_revoked(brokers: Brokers) -> None:
    config = brokers.keys / "broker.conf"
    before = config.read_text()
    await brokers.bus_config("--member", "decode-1")
    brokers.end(HOSTS[2], signal.SIGKILL)
    await brokers.bus_config("--revoke", "decode-1", "--push", "--nats", brokers.urls[0])
    config.write_text(before)  # as on a machine that has the files of the first day
    brokers.start(HOSTS[2])
    await asyncio.to_thread(brokers.wait_ready, HOSTS[2])

    async def is_refused() -> bool:
        try:
            bus = await brokers.member("decode-1", brokers.keys / "decode-1", brokers.urls[2])
        except UserError as error:
            print(error)
            return "is revoked" in str(error)
        await bus.close()
        return False

    await until(is_refused)


async def test_a_server_that_is_asked_to_end_sends_its_members_to_the_others_first(brokers: Brokers) -> None:
    members = [await brokers.member(f"gateway-{number}") for number in range(12)]
    assert brokers.urls[1] in {bus.server for bus in members}
    assert await asyncio.to_thread(brokers.end, HOSTS[1], signal.SIGTERM) == 0
    for bus in members:
        assert bus.server != brokers.urls[1]
        await bus.close()
    brokers.start(HOSTS[1])
    await asyncio.to_thread(brokers.wait_ready, HOSTS[1])


@pytest.mark.parametrize("certificate", [None, (CERTIFICATE_FILE, KEY_FILE)], ids=["none", "of a broker"])
async def test_a_route_is_opened_with_the_routes_certificate_only(
    brokers: Brokers, certificate: tuple[str, str] | None
) -> None:
    assert await is_let_in(brokers, (ROUTE_CERTIFICATE_FILE, ROUTE_KEY_FILE))
    assert not await is_let_in(brokers, certificate)


async def is_let_in(brokers: Brokers, certificate: tuple[str, str] | None) -> bool:
    """Say whether a server goes on with who comes as a route."""
    context = ssl.create_default_context(cafile=brokers.keys / ROUTE_CA_FILE)
    if certificate:
        context.load_cert_chain(*(brokers.keys / name for name in certificate))
    reader, writer = await asyncio.open_connection(HOSTS[0], ROUTE_PORT, ssl=context)
    try:
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            return (await reader.readline()).startswith(b"INFO ")
        return False
    finally:
        writer.close()


def test_where_a_broker_finds_its_files_can_be_said(tmp_path: Path) -> None:
    made = run_here(
        tmp_path, "bus-config", str(tmp_path / "k"), "--host", "nats-0,nats-1", "--routes", "--at", "/etc/nats/keys"
    )
    assert made.returncode == 0, made.stderr
    for name in ("broker.conf", "cluster.conf"):
        text = (tmp_path / "k" / name).read_text()
        assert '"/etc/nats/keys/' in text and str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bus-config", "{}/new", "--routes"], ["--host nats-0,nats-1,nats-2"]),
        (["bus-config", "{}/new", "--host", "nats-0", "--routes"], ["--host nats-0,nats-1,nats-2"]),
        (["bus-config", "{}/new", "--routes", "--revoke", "decode-0"], ["--revoke", "one of them"]),
        (["bus-config", "{}/keys", "--push"], ["--push needs", "--nats"]),
        (["bus-config", "{}/keys", "--push", "--nats", "nats://127.0.0.1:9"], ["no server took it"]),
        (["serve", "broker"], ["--keys", "bus-config"]),
        (["serve", "broker", "--keys", "{}/none"], ["broker.conf", "No such file"]),
        (["serve", "broker", "--keys", "{}/keys"], ["--id nats-0"]),
        (["serve", "broker", "--keys", "{}/keys", "--id", "x", "--host", "192.0.2.1"], ["192.0.2.1"]),
        (["serve", "gateway"], ["--config"]),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    run_here(tmp_path, "bus-config", str(tmp_path / "keys"), "--host", "nats-0,nats-1,nats-2", "--routes")
    assert_one_line(run_here(tmp_path, *(each.format(tmp_path) for each in arguments)), *words)
