"""Who may say and hear what: the table, on a real nats-server with stock clients."""

import asyncio
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import nats.errors
import pytest
from nats.aio.client import Client

from schemas import subjects
from schemas.ids import RequestId
from schemas.message import encode
from schemas.observe import DescribeWorker
from schemas.permissions import ALL, Direction, granted, permissions_of
from schemas.request import AskProgress
from schemas.subjects import SUBJECTS, Role
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.bus.typed import Received, TypedBus
from services.errors import BrokerRefusesError, UserError
from services.files import write_private
from services.trust.keys import BusAccess, Identity, MeshKeys, credentials_file, key_file, load_role_key, person
from tests.waiting import until
from tests.wire.cells import Member, every_cell, foreign_replies


@pytest.fixture(scope="module")
def keys() -> MeshKeys:
    return MeshKeys.fresh()


@pytest.fixture(scope="module")
def url(keys: MeshKeys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedNats.launch(None, tmp_path_factory.mktemp("closed"), keys.broker_config)
    yield server.url
    server.stop()


def identity_of(keys: MeshKeys, role: Role, name: str) -> Identity:
    return keys.roles[role].identity(name)


async def test_every_cell_is_what_the_table_says(url: str, keys: MeshKeys) -> None:
    found = await every_cell(url, functools.partial(identity_of, keys))
    wrong = [str(cell) for cell, works in found.items() if works != cell.is_allowed]
    assert not wrong, "\n".join(wrong)
    assert len(found) >= 800 and sum(found.values()) >= 100


@pytest.mark.parametrize("how", [{}, {"user": "kvmesh", "password": "kvmesh"}, {"token": "kvmesh"}], ids=str)
async def test_a_stranger_is_not_let_in(url: str, how: dict[str, str]) -> None:
    client = Client()
    with pytest.raises(nats.errors.Error, match="Authorization Violation"):
        await client.connect(url, allow_reconnect=False, **how)  # type: ignore[arg-type]
    await client._close(Client.CLOSED, False)  # the library leaves its connection open


async def test_another_mesh_s_key_and_one_that_has_expired_are_one_line(url: str, keys: MeshKeys) -> None:
    expired = keys.roles[Role.GATEWAY].identity("late", life_s=-5)
    for identity in (MeshKeys.fresh().roles[Role.GATEWAY].identity("foreign"), expired, None):
        with pytest.raises(BrokerRefusesError, match=r"--keys.*--creds|--creds.*--keys") as refused:
            await NatsBus.connect(BusAccess(url, identity), "x")
        assert "\n" not in str(refused.value)


async def test_replies_reach_whoever_asked_and_nobody_else(url: str, keys: MeshKeys) -> None:
    async with (
        Member.join(url, identity_of(keys, Role.GATEWAY, "g")) as requester,
        Member.join(url, identity_of(keys, Role.HOLDER, "w")) as holder,
        Member.join(url, identity_of(keys, Role.OBSERVER, "o")) as observer,
        Member.join(url, identity_of(keys, Role.OPERATOR, "p")) as operator,
    ):
        subject, reply_to = subjects.PROGRESS.of("w"), []
        questions = await holder.client.subscribe(subject)
        for curious in (observer, operator):
            for pattern in (">", "_REPLY.>", "_REPLY.*.g.>", "_REPLY.gateway.g.>"):
                curious.denied.clear()
                await curious.client.subscribe(pattern)
                await curious.settle()
                assert curious.denied, pattern
        await holder.settle()
        asking = asyncio.create_task(requester.client.request(subject, b"", timeout=20))
        question = await questions.next_msg(20)
        reply_to.append(question.reply)
        await question.respond(b"once")
        assert (await asking).data == b"once"
        await question.respond(b"twice")
        await holder.client.publish("_REPLY.gateway.g.guessed", b"never asked")
        await holder.settle()
        assert len(holder.denied) == 2, "a question is answered once, and only by whom it has reached"


async def test_a_key_opens_no_other_role_s_replies_under_any_name(url: str, keys: MeshKeys) -> None:
    num_tries, got = await foreign_replies(url, keys.roles)
    assert num_tries >= 100 and not got, "\n".join(got)


async def test_a_reply_is_led_nowhere_but_to_who_may_ask(url: str, keys: MeshKeys) -> None:
    """A worker may say that it leaves, and a gateway may not: nor may it have the worker's answer go there."""
    name = "w"
    connection = await NatsBus.connect(BusAccess(url, identity_of(keys, Role.HOLDER, name)), name)
    bus, asked = TypedBus(connection, "prefill"), list[str]()

    async def answer(received: Received[DescribeWorker | AskProgress]) -> None:
        asked.append(received.subject)

    async with (
        asyncio.TaskGroup() as tasks,
        Member.join(url, identity_of(keys, Role.GATEWAY, "g")) as gateway,
        Member.join(url, identity_of(keys, Role.OBSERVER, "o")) as observer,
    ):
        for subject in (subjects.PROGRESS, subjects.WORKER_STATUS):
            await bus.serve(tasks, subject, (name,), answer)
        await connection.flush()
        progress = encode(AskProgress(request_id=RequestId("r"), attempt=1, deadline_ms=10**6, index=0))
        told = subjects.PROGRESS.of(name), subjects.WORKER_STATUS.of(name)
        elsewhere = (subjects.LEFT.of(name), "_REPLY.holder.other.x", "_INBOX.x", f"{name}", "$SRV.PING")
        for reply in (*elsewhere, "_REPLY.gateway.g.x"):
            await gateway.client.publish(told[0], progress, reply=reply)
        for reply in ("_REPLY.gateway.g.x", "_REPLY.operator.p.x", "_INBOX.x"):
            await observer.client.publish(told[1], b"{}", reply=reply)
        await gateway.settle()
        await observer.settle()
        await until(lambda: len(asked) + bus.num_dropped == len(elsewhere) + 4)
        assert sorted(asked) == sorted([told[0], told[1], told[1]])
        await bus.close()


async def test_a_survey_is_answered_only_where_people_await_replies(url: str, keys: MeshKeys) -> None:
    """A worker may say that it leaves, and an observer may not: nor may it have the worker's answer go there."""
    connection = await NatsBus.connect(BusAccess(url, identity_of(keys, Role.HOLDER, "w")), "w")
    await connection.announce("decode", "a worker", {})
    async with (
        Member.join(url, identity_of(keys, Role.SCHEDULER, "s")) as scheduler,
        Member.join(url, identity_of(keys, Role.GATEWAY, "g")) as gateway,
        Member.join(url, identity_of(keys, Role.OPERATOR, "p")) as operator,
        Member.join(url, identity_of(keys, Role.OBSERVER, "o")) as observer,
    ):
        elsewhere, people = (subjects.LEFT.of("w"), "_REPLY.gateway.g"), ("_REPLY.operator.p", "_INBOX.o")
        heard = [await scheduler.client.subscribe(elsewhere[0])]
        for member, prefix in zip((gateway, operator, observer), (elsewhere[1], *people), strict=True):
            heard.append(await member.client.subscribe(f"{prefix}.*"))
        for member in (scheduler, gateway, operator):
            await member.settle()
        surveys = [f"$SRV.{verb}{rest}" for verb in ("PING", "INFO", "STATS") for rest in ("", ".decode")]
        for number, survey in enumerate(surveys):  # a reply's subject is of use once
            for prefix in (*elsewhere, *people):
                reply = prefix if prefix == elsewhere[0] else f"{prefix}.{number}"
                await observer.client.publish(survey, b"", reply=reply)
        for subscription in heard[2:]:
            assert {json.loads((await subscription.next_msg(20)).data)["name"] for _ in surveys} == {"decode"}
        await connection.flush()
        for member in (scheduler, gateway):
            await member.settle()
        assert [subscription.pending_msgs for subscription in heard] == [0, 0, 0, 0]
    await connection.close()


def test_no_reply_is_what_its_asker_may_not_say() -> None:
    """As whoever answers may say it there, and a reply goes where the requester wants."""
    for subject in SUBJECTS:
        for other in SUBJECTS:
            if other.carries in subject.reply:
                assert {grant.role for grant in subject.published_by} <= {grant.role for grant in other.published_by}, (
                    f"{subject.pattern} is answered by {other.carries.__name__}, which its requester may not say"
                )


@pytest.mark.parametrize("role", [Role.OBSERVER, Role.OPERATOR])
async def test_nobody_serves_is_said_though_an_observer_hears_all(url: str, keys: MeshKeys, role: Role) -> None:
    """A listener that hears questions makes the broker take them for served: death is noticed late then."""
    said = nats.errors.NoRespondersError if role is Role.OBSERVER else nats.errors.TimeoutError
    async with (
        Member.join(url, identity_of(keys, role, "p")) as person,
        Member.join(url, identity_of(keys, Role.SCHEDULER, "s")) as scheduler,
    ):
        await person.client.subscribe(ALL)
        await person.settle()
        with pytest.raises(said):
            await scheduler.client.request(subjects.PING.of("nobody"), b"", timeout=0.5)


async def test_an_observer_hears_all_that_it_may_with_one_subscription(url: str, keys: MeshKeys) -> None:
    async with Member.join(url, identity_of(keys, Role.OBSERVER, "o")) as observer:
        inbox = await observer.client.subscribe(ALL)
        await observer.settle()
        assert not observer.denied
        for subject in SUBJECTS:
            name = "x"
            async with Member.join(url, identity_of(keys, subject.published_by[0].role, name)) as speaker:
                await speaker.client.publish(subject.of(*(name for _ in subject.ids)), b"")
                await speaker.settle()
        await observer.settle()
        heard = {(await inbox.next_msg(20)).subject for _ in range(inbox.pending_msgs)}
    named = {s.of(*("x" for _ in s.ids)) for s in SUBJECTS if Role.OBSERVER in {g.role for g in s.received_by}}
    assert heard == named


SECRET = (subjects.RUN, subjects.TOKENS, subjects.OFFERED, subjects.LEASE, subjects.PROGRESS)
HASHES = (
    subjects.STORED, subjects.EVICTED, subjects.EVICTION_CANDIDATES, subjects.REPLICATE, subjects.LOCATE, subjects.HEAT,
    subjects.PLACE,
)  # fmt: skip


def test_no_prompt_no_token_no_hash_and_no_ticket_reaches_an_observer() -> None:
    heard = {s for s in SUBJECTS if granted(s, Role.OBSERVER, Direction.SUBSCRIBE, "o")}
    assert not heard & {*SECRET, *HASHES}
    texts = {"prompt", "tokens", "block_hashes", "ticket", "body"}
    assert not [s.pattern for s in heard if texts & set(s.carries.__struct_fields__)]


def test_every_role_says_something_and_no_role_says_all() -> None:
    for role in Role:
        permissions = permissions_of(role, "me")
        assert permissions.publish and not {">", "mesh.>", "*"} & set(permissions.publish)


def test_key_files_are_their_owner_s_only(tmp_path: Path, keys: MeshKeys) -> None:
    folder = tmp_path / "keys"
    keys.save(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert load_role_key(key_file(folder, Role.HOLDER)).role is Role.HOLDER
    assert person(credentials_file(folder, Role.OBSERVER), Role.OBSERVER).inbox == "_INBOX.observer"
    assert "SEED" not in keys.broker_config and "SU" not in keys.broker_config.split("resolver")[0][:20]


def test_a_key_that_others_may_read_is_refused_unless_it_is_mounted_so(
    tmp_path: Path, keys: MeshKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.create(tmp_path / "keys", 60)
    key, creds = key_file(tmp_path / "keys", Role.HOLDER), credentials_file(tmp_path / "keys", Role.OBSERVER)
    for mode in (0o640, 0o604, 0o620):
        for path, load in ((key, load_role_key), (creds, lambda path: person(path, Role.OBSERVER))):
            path.chmod(mode)
            with pytest.raises(UserError, match=f"others may read the key .*mode {mode:o}.*KVMESH_READABLE_KEYS=1"):
                load(path)
            with monkeypatch.context() as mounted:
                mounted.setenv("KVMESH_READABLE_KEYS", "1")
                load(path)


def test_keys_replace_nothing_and_follow_no_link(tmp_path: Path, keys: MeshKeys) -> None:
    """Nor is a folder narrowed that was there before: others may keep something in it."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "gateway.key.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"has the keys of a mesh already \(gateway.key.json\)"):
        keys.create(folder, 60)
    assert not (tmp_path / "elsewhere").exists() and len(list(folder.iterdir())) == 1
    (folder / "gateway.key.json").unlink()
    keys.create(folder, 60)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    before = key_file(folder, Role.HOLDER).read_bytes()
    with pytest.raises(UserError, match="has the keys of a mesh already"):
        MeshKeys.fresh().create(folder, 60)
    assert key_file(folder, Role.HOLDER).read_bytes() == before


async def test_an_operator_is_in_no_queue_of_a_service(url: str, keys: MeshKeys) -> None:
    """There it would take questions away from whoever answers them."""
    async with (
        Member.join(url, identity_of(keys, Role.OPERATOR, "p")) as operator,
        Member.join(url, identity_of(keys, Role.SCHEDULER, "s")) as scheduler,
    ):
        await scheduler.client.subscribe(subjects.PLACE.pattern, queue="scheduler")
        await scheduler.settle()
        assert not scheduler.denied
        for pattern in (subjects.PLACE.pattern, "mesh.v1.schedule.*", ALL):
            operator.denied.clear()
            await operator.client.subscribe(pattern, queue="scheduler")
            await operator.settle()
            assert operator.denied, pattern
            operator.denied.clear()
            await operator.client.subscribe(pattern)
            await operator.settle()
            assert not operator.denied, pattern


@pytest.mark.parametrize("content", [b"", b"{}", b'{"role":"holder","account":"A","seed":"SU"}', None])
def test_what_is_no_key_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "holder.key.json"
    if content is not None:
        write_private(path, content)
    with pytest.raises(UserError, match="bus-config"):
        load_role_key(path)


@pytest.mark.parametrize("content", ["", "root:x:0:0", "-----BEGIN USER NKEY SEED-----\nSUAB\n", None])
def test_what_is_no_person_s_credentials_is_one_line(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "observer.creds"
    if content is not None:
        write_private(path, content)
    with pytest.raises(UserError, match="credentials"):
        person(path, Role.OBSERVER)


@pytest.mark.parametrize("name", ["", "*", ">", "a.b", "a b", "{{name()}}", "a\r\nPUB"])
def test_a_name_is_one_token(keys: MeshKeys, name: str) -> None:
    with pytest.raises(UserError):
        keys.roles[Role.HOLDER].identity(name)
