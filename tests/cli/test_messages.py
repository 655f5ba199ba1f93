"""`kvmesh sub` and `kvmesh req` on a real broker that knows who somebody is."""

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from schemas import subjects
from schemas.message import encode
from schemas.observe import RequestFailed
from schemas.subjects import SUBJECTS, Role
from schemas.worker import DescribeFleet, FleetDescribed
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.bus.typed import Received, TypedBus
from services.cli.limits import MAX_SHOWN_CHARACTERS
from services.cli.messages import text_of
from services.trust.certificates import ca_file
from services.trust.keys import BusAccess, MeshKeys, credentials_file, key_file, load_role_key
from tests.cli.commands import KVMESH, assert_one_line, environment, run, run_here, stopped_with
from tests.wire.examples import EXAMPLES

EXAMPLE_OF = {type(example): example for example in EXAMPLES}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A broker's address, and the folder of the keys that it knows."""
    folder, keys = tmp_path_factory.mktemp("broker"), MeshKeys.fresh()
    keys.save(folder / "keys")
    server = EmbeddedNats.launch(None, folder, keys.broker_config)
    yield server.url, folder / "keys"
    server.stop()


@contextlib.asynccontextmanager
async def member(broker: tuple[str, Path], role: Role) -> AsyncIterator[NatsBus]:
    url, keys = broker
    identity = load_role_key(key_file(keys, role)).identity(f"{role}-test")
    bus = await NatsBus.connect(BusAccess(url, identity, ca_file(keys)), f"{role}-test")
    yield bus
    await bus.close()


def flags(broker: tuple[str, Path], role: Role = Role.OBSERVER) -> list[str]:
    url, keys = broker
    operator = ["--operator"] if role is Role.OPERATOR else []
    return ["--nats", url, "--creds", str(credentials_file(keys, role)), *operator]


def test_sub_prints_what_comes_until_ctrl_c(broker: tuple[str, Path], tmp_path: Path) -> None:
    failed = EXAMPLE_OF[RequestFailed]
    assert isinstance(failed, RequestFailed)
    subject = subjects.FAILED.of(failed.request_id)
    dangerous = encode(failed).replace(b'"detail":"', b'"detail":"\xc2\x9b31m' + b"x" * 3 * MAX_SHOWN_CHARACTERS)
    words = [*KVMESH, "sub", "mesh.v1.request.*.failed", *flags(broker)]
    hearing = subprocess.Popen(words, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)

    async def publish(*payloads: bytes) -> None:
        async with member(broker, Role.GATEWAY) as gateway:
            for payload in payloads:
                await gateway.publish(subject, payload, {})
            await gateway.flush()

    with stopped_with(hearing) as lines:
        assert "receiving mesh.v1.request.*.failed. Ctrl-C ends it." in next(lines)
        asyncio.run(publish(encode(failed), dangerous, b'{"type":"junk\x1b"}'))
        heads, texts = zip(*((next(lines), next(lines)) for _ in range(3)), strict=True)
    assert hearing.returncode == 0
    assert all(subject in head for head in heads) and heads[0].rstrip().endswith("RequestFailed")
    shown = json.loads(texts[0])
    assert (shown["code"], shown["request_id"], "type" in shown) == (failed.code, failed.request_id, False)
    assert len(texts[1]) < MAX_SHOWN_CHARACTERS + 100 and "characters in all" in texts[1]
    assert "no RequestFailed (" in heads[2] and "junk" in texts[2]
    assert not {"\x1b", "\x9b"} & set("".join(heads + texts)), "a terminal would obey it"


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.named)
def test_every_message_is_shown_with_its_name(subject: Any) -> None:
    message = EXAMPLE_OF[subject.carries]
    name, text = text_of(subject.of(*("x" for _ in subject.ids)), encode(message))
    assert name == subject.carries.__name__
    assert "characters in all" in text or json.loads(text).keys() < json.loads(encode(message)).keys()


def test_bytes_are_told_by_their_number() -> None:
    name, text = text_of("mesh.v1.kv.d.stored", encode(EXAMPLE_OF[subjects.STORED.carries]))
    assert name == "BlocksStored" and json.loads(text)["block_hashes"].endswith(" bytes")
    assert text_of("elsewhere", b"\xff\x00") == ("", "\N{REPLACEMENT CHARACTER} ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sub", "mesh.v1.kv.*.stored"], ("an observer does not hear", "--operator")),
        (["sub", "mesh.v1.tokens.>"], ("an observer does not hear", "--operator")),
        (["sub", "mesh.>.load"], ("is no subject", "a last >")),
        (["sub", "a..b"], ("is no subject",)),
        (["sub", ">"], ("denies us a subject",)),
        (["req", "mesh.v1.worker.*.status"], ("is a pattern",)),
        (["req", "mesh.v1.worker.d.load"], ("nobody answers", "kvmesh sub")),
        (["req", "mesh.v1.worker.d.drain"], ("an observer may not ask", "pass --operator")),
        (["req", "mesh.v1.worker.p.run", "--operator"], ("an operator may not ask", "gateway may")),
        (["req", "mesh.v1.scheduler.status", "{"], ("JSON object of a DescribeFleet",)),
        (["req", "mesh.v1.scheduler.status", "[1]"], ("JSON object of a DescribeFleet",)),
        (["req", "mesh.v1.scheduler.status", '{"after": 1}'], ("DescribeFleet", "$.after")),
        (["req", "mesh.v1.scheduler.status"], ("nobody serves requests", "mesh.v1.scheduler.status")),
    ],
)
def test_what_cannot_be_is_one_line(
    broker: tuple[str, Path], tmp_path: Path, words: list[str], says: tuple[str, ...]
) -> None:
    role = Role.OPERATOR if "--operator" in words else Role.OBSERVER
    assert_one_line(run_here(tmp_path, *(w for w in words if w != "--operator"), *flags(broker, role)), *says)


def test_without_a_mesh_it_says_so(tmp_path: Path) -> None:
    for name in ("sub", "req"):
        assert_one_line(run_here(tmp_path, name, "mesh.v1.scheduler.status"), "no mesh runs", "--nats")


async def test_req_prints_the_answer(broker: tuple[str, Path], tmp_path: Path) -> None:
    asked: list[DescribeFleet] = []

    async def describe(received: Received[DescribeFleet]) -> FleetDescribed:
        asked.append(received.message)
        return FleetDescribed(policy="cost", ready=True, workers=(), more=False)

    async with member(broker, Role.SCHEDULER) as bus, asyncio.TaskGroup() as tasks:
        typed = TypedBus(bus, "scheduler")
        await typed.serve(tasks, subjects.FLEET, (), describe)
        await bus.flush()
        for role, more in ((Role.OBSERVER, []), (Role.OPERATOR, ['{"after": "decode-0"}'])):
            words = ["req", "mesh.v1.scheduler.status", *more, *flags(broker, role)]
            done = await asyncio.to_thread(run, tmp_path, *words)
            assert done.returncode == 0, done
            assert json.loads(done.stdout)["type"] == "FleetDescribed"
        await typed.close()
    assert [message.after for message in asked] == ["", "decode-0"]


async def test_req_waits_for_so_long_and_no_longer(broker: tuple[str, Path], tmp_path: Path) -> None:
    async with member(broker, Role.DIRECTORY) as bus:
        await bus.subscribe(subjects.DIRECTORY_STATUS.of())  # it hears, and says nothing
        await bus.flush()
        words = ["req", subjects.DIRECTORY_STATUS.of(), "--timeout-s", "0.2", *flags(broker)]
        assert_one_line(await asyncio.to_thread(run, tmp_path, *words), "no reply within 0.2 s")
