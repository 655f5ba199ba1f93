"""Keys of one member: of use under its name, until its end, and not once they are revoked. On a real nats-server."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import msgspec
import pytest
from typer.testing import CliRunner

from schemas.subjects import Role
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.cli.app import app
from services.errors import BrokerRefusesError, BrokerUnreachableError, UserError
from services.trust import nats_jwt
from services.trust.keys import (
    BROKER_FILE,
    MESH_FILE,
    BusAccess,
    MeshKeys,
    credentials_file,
    key_file,
    load_role_key,
    person_access,
)
from services.trust.members import add_member, revoke_member
from services.trust.nats_jwt import user_of
from tests.waiting import until

DAY_S = 24 * 3600


class Place(NamedTuple):
    """A mesh's keys, and its broker, whose configuration includes theirs."""

    keys: Path
    broker: EmbeddedNats

    def access(self, name: str, own: Path | None = None) -> BusAccess:
        """Return how a holder of this name gets to the broker, with the key of a folder."""
        path = key_file(own or self.keys / name, Role.HOLDER)
        return BusAccess(
            self.broker.url, load_role_key(path).member(name), renew=lambda: load_role_key(path).identity(name)
        )

    def read_again(self) -> None:
        os.kill(self.broker.pid, signal.SIGHUP)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    MeshKeys.fresh().create(tmp_path / "keys", DAY_S)
    broker = EmbeddedNats.launch(None, tmp_path / "broker", f"include ../keys/{BROKER_FILE}")
    yield Place(tmp_path / "keys", broker)
    broker.stop()


async def test_a_member_s_key_has_no_seed_of_its_role_and_opens_one_name(place: Place) -> None:
    own = add_member(place.keys, "decode-0", DAY_S)
    role = load_role_key(key_file(place.keys, Role.HOLDER))
    written = b"".join(path.read_bytes() for path in own.iterdir())
    mesh = msgspec.json.decode((place.keys / MESH_FILE).read_bytes())
    seeds = [role.seed, mesh["seed"], *mesh["people"].values()]
    assert not any(seed.encode() in written for seed in seeds)
    assert {path.stat().st_mode & 0o777 for path in own.iterdir()} == {0o600}
    key = load_role_key(key_file(own, Role.HOLDER))
    assert (key.ticket_secrets, key.content_secrets) == (role.ticket_secrets, role.content_secrets)
    with pytest.raises(UserError, match="this key is decode-0's alone"):
        key.identity("decode-1")
    bus = await NatsBus.connect(place.access("decode-0"), "decode-0")
    await bus.publish("mesh.v1.worker.decode-0.left", b"{}", {})
    await bus.flush()
    await bus.publish("mesh.v1.worker.decode-1.left", b"{}", {})
    with pytest.raises(BrokerUnreachableError, match=r"denies.*decode-1"):
        await bus.flush()
    await bus.close()


async def test_who_leaves_is_locked_out_and_nobody_else(place: Place) -> None:
    for name in ("decode-0", "decode-1"):
        add_member(place.keys, name, DAY_S)
    leaver = await NatsBus.connect(place.access("decode-0"), "decode-0")
    add_member(place.keys, "decode-0", DAY_S)  # it has had two keys
    second = await NatsBus.connect(place.access("decode-0"), "decode-0")
    other = await NatsBus.connect(place.access("decode-1"), "decode-1")
    revoke_member(place.keys, "decode-0")
    place.read_again()
    for bus in (leaver, second):
        async with asyncio.timeout(30):
            await bus.closed.wait()
    with pytest.raises(BrokerRefusesError):
        await NatsBus.connect(place.access("decode-0"), "decode-0")
    await other.flush()
    assert other.num_connects == 1
    with pytest.raises(UserError, match="'decode-0' has no key of its own"):
        revoke_member(place.keys, "decode-0")
    add_member(place.keys, "decode-0", DAY_S)  # it is taken back
    again = await NatsBus.connect(place.access("decode-0"), "decode-0")
    for bus in (leaver, second, other, again):
        await bus.close()


async def test_a_key_from_before_the_clock_was_set_back_is_revoked(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker compares with the date of the key, which is an hour ahead."""
    with monkeypatch.context() as ahead:
        ahead.setattr(nats_jwt, "time", SimpleNamespace(time=lambda: time.time() + 3600))
        add_member(place.keys, "decode-0", DAY_S)
    access = place.access("decode-0")
    assert access.identity and user_of(access.identity.credentials).iat > time.time() + 3000
    leaver = await NatsBus.connect(access, "decode-0")
    revoke_member(place.keys, "decode-0")
    place.read_again()
    async with asyncio.timeout(30):
        await leaver.closed.wait()
    with pytest.raises(BrokerRefusesError):
        await NatsBus.connect(place.access("decode-0"), "decode-0")
    add_member(place.keys, "decode-0", DAY_S)
    await (await NatsBus.connect(place.access("decode-0"), "decode-0")).close()


async def test_people_s_are_made_and_revoked_too(place: Place) -> None:
    creds = credentials_file(place.keys, Role.OBSERVER)
    first = await NatsBus.connect(person_access(place.broker.url, creds, Role.OBSERVER), "observer")
    own = add_member(place.keys, "operator-ann", DAY_S)
    ann = person_access(place.broker.url, credentials_file(own, Role.OPERATOR), Role.OPERATOR)
    assert ann.identity and ann.identity.inbox == "_REPLY.operator.operator-ann"
    operator = await NatsBus.connect(ann, "ann")
    revoke_member(place.keys, "observer")
    place.read_again()
    async with asyncio.timeout(30):
        await first.closed.wait()
    assert add_member(place.keys, "observer", DAY_S) == place.keys
    second = await NatsBus.connect(person_access(place.broker.url, creds, Role.OBSERVER), "observer")
    await operator.flush()
    for bus in (first, second, operator):
        await bus.close()


async def test_a_service_takes_its_next_key_before_the_one_it_has_ends(place: Place) -> None:
    """With its role's key it makes one itself."""
    key = load_role_key(key_file(place.keys, Role.HOLDER))
    first = key.identity("decode-0", life_s=8)
    bus = await NatsBus.connect(BusAccess(place.broker.url, first, renew=lambda: key.identity("decode-0")), "decode-0")
    ends_s = user_of(first.credentials).exp
    assert ends_s is not None
    await until(lambda: bus.num_connects == 2)
    assert time.time() < ends_s
    await until(lambda: time.time() > ends_s + 1)
    await bus.flush()
    assert not bus.closed.is_set() and bus.num_connects == 2
    await bus.close()


async def test_a_member_takes_the_next_one_from_its_folder_or_ends(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    add_member(place.keys, "decode-0", 5)
    access = place.access("decode-0")
    assert access.identity
    ends_s = user_of(access.identity.credentials).exp
    assert ends_s
    bus = await NatsBus.connect(access, "decode-0")
    await until(lambda: "the key of decode-0 ends soon" in caplog.text)
    async with asyncio.timeout(30):
        await bus.closed.wait()
    await until(lambda: time.time() > ends_s + 1)  # the broker counts whole seconds
    with pytest.raises(BrokerRefusesError, match="has expired"):
        await NatsBus.connect(place.access("decode-0"), "decode-0")
    add_member(place.keys, "decode-0", DAY_S)
    await (await NatsBus.connect(place.access("decode-0"), "decode-0")).close()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--member", "worker-0"], "must begin with what it is"),
        (["--member", "decode-*"], "must begin with what it is"),
        (["--member", "decode-0", "--host", "a"], "one of them"),
        (["--revoke", "decode-7"], "'decode-7' has no key of its own"),
        (["--revoke", "decode-7", "--member", "decode-7"], "one of them"),
        ([], "has the keys of a mesh already"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(tmp_path: Path, arguments: list[str], line: str) -> None:
    MeshKeys.fresh().create(tmp_path / "keys", DAY_S)
    ended = CliRunner().invoke(app, ["bus-config", str(tmp_path / "keys"), *arguments])
    assert isinstance(ended.exception, UserError) and line in str(ended.exception)


def test_a_member_s_folder_is_what_its_service_needs(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    MeshKeys.fresh(["127.0.0.1"]).create(keys, DAY_S)
    ended = CliRunner().invoke(app, ["bus-config", str(keys), "--member", "decode-0", "--days", "7"])
    assert ended.exit_code == 0 and "for 7 days" in ended.output
    assert {path.name for path in (keys / "decode-0").iterdir()} == {"holder.key.json", "ca.pem"}
    key = load_role_key(key_file(keys / "decode-0", Role.HOLDER))
    user = user_of(key.credentials)
    assert (user.name, user.exp) == ("decode-0", user.iat + 7 * DAY_S)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("as it was", "utf-8")
    path = key_file(keys / "decode-0", Role.HOLDER)
    path.unlink()
    path.symlink_to(elsewhere)
    add_member(keys, "decode-0", DAY_S)
    assert elsewhere.read_text("utf-8") == "as it was" and not path.is_symlink()
