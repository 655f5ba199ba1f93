"""A machine joins a mesh with a token, at a real join port over TLS, and is known there later."""

import asyncio
import contextlib
import http.client
import json
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from http import HTTPStatus
from pathlib import Path

import msgspec
import pytest

from dataplane.addresses import listen
from schemas.subjects import Role
from services.config import GatewayConfig, MeshConfig, NatsConfig, TelemetryConfig
from services.engine.checkpoint import read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.errors import UserError
from services.gateway.server import Server, connections_for, tls_context
from services.join.client import Asking, JoinRefusedError, JoinUnreachableError, JoinUrl
from services.join.head import Head, WrongTokens, forget_host
from services.join.host import JoinedHost, check_seen, join, reached
from services.join.messages import MAX_BYTES, Asks, FromHost, Secrets, Seen, release
from services.join.service import JoinPort
from services.times import Times
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE
from services.trust.hosts import Token, new_token, read_hosts, revoke_token, sign_as_host
from services.trust.keys import MESH_FILE, MeshKey, MeshKeys, key_file, load_role_key, read_key
from services.trust.nats_jwt import user_of

HERE = "127.0.0.1"
WEST = ("decode-west-0", "decode-west-1")
CHECKPOINT = read_checkpoint(str(DEMO_MODEL_DIR), "transformers")
CONFIG = MeshConfig(
    nats=NatsConfig(url="tls://127.0.0.1:1,tls://nats-1:4222"),
    gateway=GatewayConfig(host="0.0.0.0", tenants={"an-api-key": "ada"}),
    telemetry=TelemetryConfig(otlp_endpoint="http://localhost:4318", trace_dir="/of/the/head"),
    ticket_secrets=("nobody is sent the head's own",),
)


class Mesh:
    """A mesh's keys, and its join port. `bodies`: what came there."""

    def __init__(self, keys: Path, folder: Path) -> None:
        self.keys = keys
        self.folder = folder
        self.bodies: list[bytes] = []
        self.port = 0

    @property
    def url(self) -> JoinUrl:
        return JoinUrl(f"tls://{HERE}:{self.port}")

    def token(
        self, *, role: Role = Role.HOLDER, names: str = "*", host: str = "", uses: int = 1, life_s: int = 600
    ) -> Token:
        ca = (self.keys / CA_FILE).read_bytes()
        return new_token(self.keys, ca, role=role, names=names, host=host, num_uses=uses, life_s=life_s)

    def join(
        self, token: Token | None = None, members: tuple[str, ...] = WEST, host: str = "west", at: str = "host"
    ) -> JoinedHost:
        return join(self.folder / at, self.url, token or self.token(), host, members, "")

    def secrets(self) -> tuple[str, ...]:
        return load_role_key(key_file(self.keys, Role.HOLDER)).ticket_secrets

    def revoked(self) -> set[str]:
        mesh = read_key(self.keys / MESH_FILE, MeshKey)
        return {name for name, made in mesh.members.items() if all(each.revoked_s for each in made)}

    def asks(self, method: str, path: str, body: bytes = b"") -> tuple[int, str]:
        """Ask as a stranger; return the status, and what is said of it."""
        context = ssl.create_default_context(cafile=self.keys / CA_FILE)
        with contextlib.closing(
            http.client.HTTPSConnection(HERE, self.port, timeout=60, context=context)
        ) as connection:
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = tmp_path_factory.mktemp("made") / "keys"
    MeshKeys.fresh((HERE,)).create(keys, 3600)
    return keys


@pytest.fixture
def mesh(made: Path, tmp_path: Path) -> Iterator[Mesh]:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o700)
    for path in made.iterdir():
        (keys / path.name).write_bytes(path.read_bytes())
        (keys / path.name).chmod(0o600)
    found = Mesh(keys, tmp_path)
    with _served(found):
        yield found


@contextlib.contextmanager
def _served(mesh: Mesh) -> Iterator[None]:
    class Heard(Head):
        def answer(self, asks: Asks, body: bytes, address: str) -> tuple[HTTPStatus, msgspec.Struct]:
            mesh.bodies.append(body)
            return super().answer(asks, body, address)

    ready: Future[tuple[asyncio.AbstractEventLoop, Server]] = Future()
    sock = listen(HERE, 0)
    sock.setblocking(False)
    mesh.port = sock.getsockname()[1]

    async def serve() -> None:
        port = JoinPort(Heard(mesh.keys, CONFIG, CHECKPOINT), mesh.keys, CONFIG.nats.url)
        tls = tls_context(str(mesh.keys / CERTIFICATE_FILE), str(mesh.keys / KEY_FILE))
        server = Server(port, connections_for(16, Times().gateway), tls)
        serving = asyncio.create_task(server.serve([sock]))
        await server.ready.wait()
        ready.set_result((asyncio.get_running_loop(), server))
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    loop, server = ready.result(60)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(server.stop)
        thread.join(60)


def refused(act: Callable[[], object], kind: type[UserError] = UserError) -> str:
    with pytest.raises(kind) as caught:
        act()
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_a_machine_gets_keys_whose_secret_halves_it_has_made(mesh: Mesh) -> None:
    joined = mesh.join()
    for name in WEST:
        key = load_role_key(key_file(joined.keys / name, Role.HOLDER))
        assert (key.name, key.seed, key.ticket_secrets) == (name, "", mesh.secrets())
        assert user_of(key.credentials).name == name
        assert (joined.keys / name / CA_FILE).read_bytes() == (mesh.keys / CA_FILE).read_bytes()
        secret = key.credentials.partition("SEED-----\n")[2].partition("\n")[0]
        assert secret.startswith("SU") and not any(secret.encode() in body for body in mesh.bodies)
    assert user_of((joined.keys / "observer.creds").read_text()).name == "observer-west"
    for path in (joined.folder, *joined.folder.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    assert read_hosts(mesh.keys).hosts["west"].members == WEST
    assert joined.own_address == HERE


def test_a_machine_gets_the_meshs_settings_and_nothing_that_is_the_heads_alone(mesh: Mesh) -> None:
    config = mesh.join().state.config
    assert (config.gateway, config.ticket_secrets) == (GatewayConfig(), ()), "API keys are for gateways"
    assert config.model.dtype == "float32", "what the head has settled"
    assert config.telemetry == TelemetryConfig(otlp_endpoint=f"http://{HERE}:4318"), "the head's, as it is reached"
    joined = mesh.join(mesh.token(role=Role.GATEWAY), ("gateway-east-0",), "east", at="east")
    assert joined.state.config.gateway.tenants == CONFIG.gateway.tenants
    key = load_role_key(key_file(joined.keys / "gateway-east-0", Role.GATEWAY))
    assert key.tenant_seed and not key.ticket_secrets


def test_the_brokers_are_named_as_they_are_reached(mesh: Mesh) -> None:
    assert mesh.join().state.brokers == f"tls://{HERE}:1,tls://nats-1:4222"
    assert reached("tls://127.0.0.1:4223", "head.example") == "tls://head.example:4223"
    assert reached("tls://[::1]:4222", "fd00::7") == "tls://[fd00::7]:4222"


def test_a_token_is_used_up(mesh: Mesh) -> None:
    token = mesh.token()
    mesh.join(token)
    assert "used up" in refused(lambda: mesh.join(token, ("decode-east-0",), "east", at="east"), JoinRefusedError)
    twice = mesh.token(uses=2)
    for host in ("north", "south"):
        mesh.join(twice, (f"decode-{host}-0",), host, at=host)
    assert not read_hosts(mesh.keys).tokens[twice.token_id].num_uses


def test_a_token_that_is_over_or_revoked_or_of_another_secret_is_refused_alike(mesh: Mesh) -> None:
    revoked, over = mesh.token(), mesh.token(life_s=0)
    revoke_token(mesh.keys, revoked.token_id)
    wrong = mesh.token()._replace(secret=mesh.token().secret)
    said = {refused(lambda token=token: mesh.join(token), JoinRefusedError) for token in (revoked, over, wrong)}
    assert len(said) == 1, "nobody learns which"
    assert not (mesh.folder / "host").exists(), "nothing is left behind"
    assert "no token" in refused(lambda: revoke_token(mesh.keys, revoked.token_id))


def test_the_secret_is_said_to_the_tokens_mesh_alone(mesh: Mesh) -> None:
    foreign = mesh.token()._replace(ca_hash="0" * 64)
    assert "is another mesh than the token's" in refused(lambda: mesh.join(foreign))
    assert not mesh.bodies


def test_wrong_tokens_from_an_address_are_counted(mesh: Mesh) -> None:
    wrong = mesh.token()._replace(secret="x" * 43)
    for _ in range(5):
        assert "used up" in refused(lambda: mesh.join(wrong))
    assert "wait a minute" in refused(lambda: mesh.join(mesh.token())), "the right one too"


def test_an_address_may_try_again_after_a_minute_and_few_are_remembered() -> None:
    now_s = [0.0]
    wrong = WrongTokens(lambda: now_s[0])
    for _ in range(5):
        wrong.check("10.0.0.7")
        wrong.note_wrong("10.0.0.7")
    wrong.check("10.0.0.8")
    with pytest.raises(Exception):  # noqa: B017
        wrong.check("10.0.0.7")
    now_s[0] = 61.0
    wrong.check("10.0.0.7")


@pytest.mark.parametrize(
    ("scope", "host", "members", "said"),
    [
        ({}, "west", ("gateway-west-0",), "this token is for holders, and not for gateway-west-0"),
        ({"role": Role.GATEWAY}, "west", WEST, "this token is for gateways, and not for decode-west-0"),
        ({"names": "prefill-*"}, "west", WEST, "for holders called prefill-*, and not for decode-west-0"),
        ({"host": "east"}, "west", WEST, "for a machine called east, and this one is west"),
        ({}, "we.st", ("decode-we.st-0",), "is no name of a machine"),
        ({}, "west", ("decode-east-0",), "is no member of west"),
        ({}, "west", ("decode-west",), "is no member of west"),
        ({}, "west", ("scheduler-west-0",), "not for scheduler-west-0"),
        ({}, "west", ("observer-west-0",), "not for observer-west-0"),
        ({}, "west", tuple(f"decode-west-{n}" for n in range(65)), "has 1 to 64 members"),
    ],
)
def test_a_token_is_for_what_it_was_made_for(
    mesh: Mesh, scope: dict[str, object], host: str, members: tuple[str, ...], said: str
) -> None:
    token = mesh.token(**scope)  # type: ignore[arg-type]
    assert said in refused(lambda: mesh.join(token, members, host), JoinRefusedError)
    assert read_hosts(mesh.keys).tokens[token.token_id].num_uses == 1, "it can be tried again"


def test_a_name_is_of_the_machine_that_has_it(mesh: Mesh) -> None:
    first = mesh.join()
    assert "another machine has joined as west" in refused(lambda: mesh.join(at="another"), JoinRefusedError)
    assert "`kvmesh leave` first" in refused(lambda: mesh.join(host="east", members=("decode-east-0",)))
    more = (*WEST, "prefill-west-0")
    again = mesh.join(members=more)
    assert read_hosts(mesh.keys).hosts["west"].members == more == again.state.members
    assert again.state.public == first.state.public
    fewer = mesh.join(members=WEST[:1])
    assert not (fewer.keys / "prefill-west-0").exists()


def seen(**changes: object) -> Seen:
    found = Seen(
        release=release(), engine="transformers", model="demo_model", model_path=CHECKPOINT.path,
        weights=CHECKPOINT.weights, now_s=time.time(),
    )  # fmt: skip
    return msgspec.structs.replace(found, **changes)


def test_what_must_be_the_same_here_and_there() -> None:
    assert check_seen(seen(), "").weights == CHECKPOINT.weights
    assert check_seen(seen(model_path="/elsewhere/services/engine/demo_model"), "").path == CHECKPOINT.path
    for changes, words in (
        ({"release": "9.9.9"}, ("the mesh is kvmesh 9.9.9", "pip install kvmesh==9.9.9")),
        ({"now_s": time.time() + 2 * 3600}, ("clock", "2.0 hours")),
        ({"weights": "f00d"}, ("are not those of demo_model", "--model")),
        ({"model_path": "/no/such/model"}, ("which is not here", "--model")),
    ):
        said = refused(lambda changes=changes: check_seen(seen(**changes), ""))
        assert all(word in said for word in words), said


def test_secrets_that_are_replaced_come_to_the_machine(mesh: Mesh) -> None:
    joined = mesh.join()
    assert not joined.look_after()
    path = key_file(mesh.keys, Role.HOLDER)
    path.write_bytes(
        msgspec.json.encode(msgspec.structs.replace(load_role_key(path), ticket_secrets=("a new one" * 3,)))
    )
    before = read_hosts(mesh.keys).hosts["west"].has_secrets
    assert joined.look_after() and not joined.look_after()
    assert load_role_key(key_file(joined.keys / WEST[0], Role.HOLDER)).ticket_secrets == mesh.secrets()
    assert read_hosts(mesh.keys).hosts["west"].has_secrets not in ("", before), "who rotates knows that it has them"


def test_keys_are_signed_again_before_their_end(mesh: Mesh) -> None:
    joined = mesh.join()
    path = key_file(joined.keys / WEST[0], Role.HOLDER)
    before = user_of(load_role_key(path).credentials)
    joined.state = msgspec.structs.replace(joined.state, begins_s=0, ends_s=int(time.time()) + 600)
    assert joined.look_after()
    after = user_of(load_role_key(path).credentials)
    assert after.sub == before.sub and (after.exp or 0) >= (before.exp or 0)
    found = JoinedHost.found(joined.folder)
    assert found is not None and found.state.ends_s > time.time() + 24 * 3600
    assert found.may_run(mesh.url, "west", WEST[:1]) and not found.may_run(mesh.url, "west", ("prefill-west-0",))
    assert not found.look_after()


def test_a_machine_that_was_removed_is_told_so_and_its_keys_are_revoked(mesh: Mesh) -> None:
    joined = mesh.join()
    forget_host(mesh.keys, "west", read_hosts(mesh.keys).hosts["west"])
    assert {*WEST, "observer-west"} <= mesh.revoked()
    assert "is no machine of this mesh" in refused(joined.look_after, JoinRefusedError)
    again = mesh.join()
    assert not {*WEST} & mesh.revoked(), "it has fresh keys"
    assert not again.look_after()


def test_a_machine_leaves(mesh: Mesh) -> None:
    joined = mesh.join()
    joined.leave_mesh()
    assert {*WEST, "observer-west"} <= mesh.revoked() and not read_hosts(mesh.keys).hosts
    assert JoinedHost.found(joined.folder) is None and not joined.keys.exists()


def test_nobody_speaks_for_a_machine_but_itself(mesh: Mesh) -> None:
    west = mesh.join()
    east = mesh.join(members=("decode-east-0",), host="east", at="east")
    asking = Asking(mesh.url, (mesh.keys / CA_FILE).read_bytes())
    asked = FromHost(host="west", now_s=0)
    said = refused(lambda: asking.ask_as(asked, east.state.secret, Asks.POLL, Secrets), JoinRefusedError)
    assert "not signed by the machine" in said
    old = msgspec.structs.replace(asked, now_s=int(time.time()) - 3 * 3600)
    signed = msgspec.structs.replace(old, signature=sign_as_host(west.state.secret, old.signed_text(Asks.POLL)))
    assert "clocks" in refused(lambda: asking.ask(Asks.POLL, signed, Secrets), JoinRefusedError)
    for_poll = msgspec.structs.replace(asked, now_s=int(time.time()))
    signed = msgspec.structs.replace(
        for_poll, signature=sign_as_host(west.state.secret, for_poll.signed_text(Asks.POLL))
    )
    assert "not signed" in refused(lambda: asking.ask(Asks.LEAVE, signed, Secrets), JoinRefusedError)


def test_what_is_no_question_is_refused_and_the_port_goes_on(mesh: Mesh) -> None:
    assert mesh.asks("GET", "/")[0] == HTTPStatus.NOT_FOUND
    assert mesh.asks("GET", Asks.JOIN)[0] == HTTPStatus.METHOD_NOT_ALLOWED
    assert mesh.asks("POST", Asks.JOIN, b"{")[0] == HTTPStatus.BAD_REQUEST
    assert mesh.asks("POST", Asks.JOIN, b"x" * (MAX_BYTES + 1))[0] == HTTPStatus.REQUEST_ENTITY_TOO_LARGE
    token = mesh.token()
    for changes in ({"public": "zz"}, {"members": {"decode-west-0": "no key"}}, {"observer": ""}, {"release": "0"}):
        question = {
            "token_id": token.token_id, "secret": token.secret, "host": "west", "public": "00" * 32,
            "members": {"decode-west-0": "U" + "A" * 55}, "observer": "U" + "B" * 55, "release": release(),
        } | changes  # fmt: skip
        assert mesh.asks("POST", Asks.JOIN, json.dumps(question).encode())[0] == HTTPStatus.FORBIDDEN, changes
    assert mesh.asks("GET", Asks.CA)[1] == (mesh.keys / CA_FILE).read_text()
    assert not read_hosts(mesh.keys).hosts


def test_an_address_that_is_none_and_one_where_nobody_is(mesh: Mesh) -> None:
    for text in ("http://head:7843", "tls://", "tls://head:port", "tls://head/path", ""):
        assert "is no mesh to join" in refused(lambda text=text: JoinUrl(text))
    assert str(JoinUrl("head")) == "tls://head:7843" and str(JoinUrl("tls://[::1]:1")) == "tls://[::1]:1"
    with listen(HERE, 0) as sock:
        port = sock.getsockname()[1]
    said = refused(lambda: Asking.trusting(JoinUrl(f"tls://{HERE}:{port}"), ""), JoinUnreachableError)
    assert "--join-port open" in said


def test_the_names_of_the_certificate_are_said_to_who_uses_another(mesh: Mesh) -> None:
    asking = Asking(JoinUrl(f"tls://localhost:{mesh.port}"), (mesh.keys / CA_FILE).read_bytes())
    asked = FromHost(host="west", now_s=0)
    assert "certificate is not for localhost" in refused(lambda: asking.ask(Asks.POLL, asked, Secrets))


@pytest.mark.parametrize("text", ["", "kvj1", "kvj1.a.b.c", f"kvj2.{'0' * 64}.00000000.{'x' * 43}"])
def test_what_is_no_token(text: str) -> None:
    assert "what `kvmesh token` prints" in refused(lambda: Token.parse(text))


def test_a_machine_that_was_cut_off_while_it_joined_can_try_again(mesh: Mesh) -> None:
    """Its key is written before it asks: the mesh may know it already."""
    joined = mesh.join()
    state = msgspec.structs.replace(joined.state, begins_s=0, ends_s=0)
    (joined.folder / "host.key.json").write_bytes(msgspec.json.encode(state))
    found = JoinedHost.found(joined.folder)
    assert found is not None and not found.is_member and not found.may_run(mesh.url, "west", WEST)
    assert mesh.join().is_member


def test_a_state_that_is_damaged_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "host.key.json").write_text("{")
    assert "join with a new token" in refused(lambda: JoinedHost.found(tmp_path))
