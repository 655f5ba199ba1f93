"""The bus as a person with stock NATS tools meets it: nats-py speaks what the `nats` command speaks."""

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import nats
import pytest
from nats.aio.client import Client, RawCredentials
from nats.aio.msg import Msg

from schemas import subjects
from schemas.directory import DirectoryDescribed
from schemas.message import decode
from schemas.observe import RequestDescribed, WorkerDescribed
from schemas.subjects import SUBJECTS, Role, Subject
from schemas.worker import FleetDescribed
from services.config import GatewayConfig, MeshConfig
from services.launch.options import Launch
from tests.mesh.processes import Mesh, RunningMesh
from tests.pages import listening
from tests.pages.listening import LISTENING

SERVICES = {"gateway": 2, "scheduler": 1, "directory": 1, "prefill": 1, "decode": 1, "store": 1}
ASK_S = 20.0
WORKER = {
    subjects.PING,
    subjects.PROGRESS,
    subjects.WORKER_STATUS,
    subjects.PURGE,
    subjects.INVENTORY,
    subjects.LEASE,
    subjects.RUN,
    subjects.DRAIN,
}
SERVED: dict[str, set[Subject[Any, Any]]] = {
    "gateway": {subjects.WANTED, subjects.GRAMMAR, subjects.REQUEST_STATUS, subjects.REQUEST_SOUGHT},
    "scheduler": {subjects.PLACE, subjects.FLEET, subjects.LEAVE, subjects.TIME},
    "directory": {subjects.LOCATE, subjects.DIRECTORY_STATUS, subjects.HEAT},
    "prefill": WORKER,
    "decode": WORKER,
    "store": {subjects.PING, subjects.WORKER_STATUS, subjects.PURGE, subjects.INVENTORY, subjects.LEASE},
}


@pytest.fixture(scope="module")
def mesh(running_mesh: RunningMesh, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    options = Launch(num_gateways=2, store="memory", config=MeshConfig(gateway=GatewayConfig(port=0)))
    with running_mesh(tmp_path_factory.mktemp("readable"), options) as running:
        yield running


@asynccontextmanager
async def connected(mesh: Mesh, role: Role = Role.OBSERVER) -> AsyncIterator[Client]:
    identity = mesh.access(role).identity
    assert identity is not None
    credentials = RawCredentials(identity.credentials)
    client = await nats.connect(mesh.nats_url, user_credentials=credentials, inbox_prefix=identity.inbox)
    yield client
    await client.close()


async def ask(client: Client, subject: str, payload: bytes = b"") -> bytes:
    """`nats req SUBJECT ''`"""
    return (await client.request(subject, payload, timeout=ASK_S)).data


async def survey(mesh: Mesh, verb: str) -> list[dict[str, Any]]:
    """`nats micro ls|info|stats`: every service answers."""
    async with connected(mesh) as client:
        inbox = await client.subscribe("_INBOX.survey")
        await client.publish(f"$SRV.{verb}", b"", reply="_INBOX.survey")
        replies: list[dict[str, Any]] = []
        while len(replies) < sum(SERVICES.values()):
            replies.append(json.loads((await inbox.next_msg(timeout=ASK_S)).data))
        return replies


async def test_the_fleet_answers_an_empty_question(mesh: Mesh) -> None:
    async with connected(mesh) as client:
        for payload in (b"", b"{}"):
            fleet = decode(await ask(client, "mesh.v1.scheduler.status", payload), FleetDescribed)
            assert {load.worker.worker_id for load in fleet.workers} == {"prefill-0", "decode-0", "store-0"}


async def test_a_request_and_its_workers_say_where_it_is(mesh: Mesh) -> None:
    body = {"model": mesh.model, "prompt": [7] * 100, "max_tokens": 3_000, "ignore_eos": True, "stream": True}
    async with connected(mesh) as client:
        with mesh.client.stream("POST", "/v1/completions", json=body) as response:
            request_id = response.headers["x-request-id"]
            lines = response.iter_lines()
            next(lines)
            for _ in range(4):  # either gateway is asked
                described = decode(await ask(client, f"mesh.v1.request.{request_id}.status"), RequestDescribed)
                assert (described.phase, described.request_id, described.max_tokens) == ("decode", request_id, 3_000)
                assert (described.prefill_worker, described.decode_worker) == ("prefill-0", "decode-0")
            while True:  # the hand-over may still be under way
                worker = decode(await ask(client, "mesh.v1.worker.decode-0.status"), WorkerDescribed)
                [held] = worker.requests
                assert (held.request_id, held.part, held.num_prompt_tokens) == (request_id, "decode", 100)
                if held.stage == "computing":
                    break
            assert held.age_ms <= described.age_ms + 60_000 and worker.num_requests == 1
            blocks = worker.load.blocks
            assert blocks.running > 0 and blocks.total == blocks.free + blocks.cached + blocks.running + blocks.leased
        while described.phase == "decode":  # until the gateway has seen the client go
            described = decode(await ask(client, f"mesh.v1.request.{request_id}.status"), RequestDescribed)
        assert (described.phase, described.detail) == ("cancelled", "the client has disconnected")
        unknown = decode(await ask(client, "mesh.v1.request.req-none.status"), RequestDescribed)
        assert unknown.phase == "unknown"
        store = decode(await ask(client, "mesh.v1.worker.store-0.status"), WorkerDescribed)
        assert (store.load.worker.role, store.requests, store.leases) == ("store", (), ())
    await asyncio.to_thread(mesh.assert_no_blocks_held)


async def test_every_service_and_endpoint_describes_itself(mesh: Mesh) -> None:
    found = await survey(mesh, "INFO")
    names = [service["name"] for service in found]
    assert {name: names.count(name) for name in names} == SERVICES
    incarnations = {w.worker.worker_id: w.worker.incarnation for w in mesh.fleet.workers}
    for service in found:
        metadata = service["metadata"]
        assert service["version"] and service["description"] and metadata["role"] == service["name"]
        assert metadata.get("incarnation") == incarnations.get(metadata["id"])
        served = {endpoint["subject"]: endpoint for endpoint in service["endpoints"]}
        expected = {
            s.of(*("*" if name in ("id", "reader", "worker_id") else metadata["id"] for name in s.ids)): s
            for s in SERVED[service["name"]]
        }
        assert set(served) == set(expected)
        for subject, endpoint in served.items():
            assert endpoint["metadata"]["carries"] == expected[subject].carries.__name__
    assert {metadata["id"] for metadata in (service["metadata"] for service in found)} >= set(incarnations)


def test_every_subject_with_an_answer_is_served() -> None:
    """A name's claim is answered beside the Services API: before its owner may serve anything."""
    assert set().union(*SERVED.values()) == {subject for subject in SUBJECTS if subject.reply} - {subjects.CLAIM}


async def test_statistics_count_what_was_asked_and_how_long_it_took(mesh: Mesh) -> None:
    def status_of(services: list[dict[str, Any]]) -> dict[str, Any]:
        [directory] = [service for service in services if service["name"] == "directory"]
        return next(found for found in directory["endpoints"] if found["subject"] == "mesh.v1.directory.locate")

    before = status_of(await survey(mesh, "STATS"))
    async with connected(mesh, Role.SCHEDULER) as client:
        for request in range(3):
            question = {"request_id": f"req-{request}", "attempt": 1, "left_ms": 60_000, "block_hashes": ""}
            await ask(client, "mesh.v1.directory.locate", json.dumps(question).encode())
        await client.publish("mesh.v1.directory.locate", b"not a question", reply=client.new_inbox())
        await client.flush()
        while (after := status_of(await survey(mesh, "STATS")))["num_errors"] == before["num_errors"]:
            pass
    assert after["num_requests"] - before["num_requests"] >= 4
    assert after["processing_time"] > before["processing_time"]
    assert after["last_error"] == "the request does not decode"


async def test_one_subscription_tells_a_requests_story_in_order(mesh: Mesh) -> None:
    async with connected(mesh) as client:
        heard: list[Msg] = []

        async def note(message: Msg) -> None:
            heard.append(message)

        await client.subscribe("mesh.>", cb=note)
        await client.flush()
        answer = await asyncio.to_thread(mesh.complete, [9, 8, 7] * 30)
        request_id = answer["usage"]["kvmesh"]["request_id"]

        def story() -> list[str]:
            mine = [message.subject for message in heard if request_id in message.subject]
            return [subject.rsplit(".", 1)[-1] for subject in mine]

        async with asyncio.timeout(60):
            while not {"finished", "released"} <= set(story()):
                await asyncio.sleep(0.02)
    told = story()
    assert [part for part in told if part in ("accepted", "placed", "first_token", "finished")] == [
        "accepted", "placed", "first_token", "finished",
    ]  # fmt: skip
    handed_over = ["reserved", "streaming", "landed", "released"]  # the offer has the ticket
    assert sorted(set(told) & set(handed_over), key=told.index) == handed_over
    assert told[0] == "accepted"


def command(mesh: Mesh, *arguments: str) -> "subprocess.Popen[str]":
    whole = [sys.executable, "-m", "services.cli.main", *arguments, *mesh.bus_options()]
    return subprocess.Popen(whole, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


ENVIRONMENT = os.environ | {"COLUMNS": "80", "PYTHONUNBUFFERED": "1"}


def test_tail_that_was_there_before_the_request_tells_its_story(mesh: Mesh) -> None:
    process = command(mesh, "tail")
    assert process.stdout is not None
    heard: list[str] = []
    while not heard:  # until it listens
        mesh.complete([3, 1, 4] * 20, max_tokens=2)
        ready, _, _ = select.select([process.stdout], [], [], 0.2)
        heard += [process.stdout.readline()] if ready else []
    request_id = mesh.complete([2, 7, 1] * 20, max_tokens=4)["usage"]["kvmesh"]["request_id"]
    told: list[str] = []
    for line in process.stdout:
        if request_id in line:
            told.append(line.split()[3])
            if told[-1] == "finished":
                break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert [part for part in told if part in ("accepted", "placed", "first_token", "finished")] == [
        "accepted", "placed", "first_token", "finished",
    ]  # fmt: skip


def test_tail_of_a_request_ends_with_it(mesh: Mesh) -> None:
    body = {"model": mesh.model, "prompt": [6] * 50, "max_tokens": 2_500, "ignore_eos": True, "stream": True}
    first = ""
    while ": decode for " not in first:  # it may have ended before the command has begun
        with mesh.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            request_id = response.headers["x-request-id"]
            process = command(mesh, "tail", request_id)
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith(f"{request_id}: ")
    told, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert "cancelled" in [line.split()[3] for line in told.splitlines()]
    again = command(mesh, "tail", request_id.replace("req-", "cmpl-"))
    told, _ = again.communicate(timeout=60)
    assert again.returncode == 0 and "cancelled for" in told


def test_top_prints_one_frame(mesh: Mesh) -> None:
    mesh.complete([5, 8] * 30)
    frame, errors = command(mesh, "top", "--once").communicate(timeout=60)
    assert errors == "" and max(map(len, frame.splitlines())) <= 80
    assert all(worker_id in frame for worker_id in ("prefill-0", "decode-0", "store-0"))
    assert "policy cost" in frame
    assert re.search(r"^since \d\d:\d\d:\d\d  0 finished", frame, re.MULTILINE), "it counts from its own start"


def test_top_in_a_terminal_ends_at_a_signal_and_leaves_it_as_it_was(mesh: Mesh) -> None:
    ours, theirs = pty.openpty()
    whole = [sys.executable, "-m", "services.cli.main", "top", *mesh.bus_options()]
    process = subprocess.Popen(whole, stdout=theirs, stderr=subprocess.PIPE, env=ENVIRONMENT | {"TERM": "xterm"})
    os.close(theirs)
    shown = b""
    while b"decode-0" not in shown:
        shown += os.read(ours, 65_536)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):  # the other end is closed
        while chunk := os.read(ours, 65_536):
            shown += chunk
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
    assert shown.count(b"\x1b[?1049h") == shown.count(b"\x1b[?1049l") == 1  # its screen is given back
    assert shown.rfind(b"\x1b[?25h") > shown.rfind(b"\x1b[?25l")  # and the cursor
    os.close(ours)


def test_ten_subscriptions_worth_knowing_are_all_heard() -> None:
    """The page's own command, on a mesh of its own: nothing that it shows is empty."""
    heard = asyncio.run(listening.hear())
    empty = [entry.subscription for entry in LISTENING if len(heard.messages[entry.subscription]) < entry.num_shown]
    assert empty == []
    story = [
        subject.rsplit(".", 1)[-1] for subject, _ in heard.messages["mesh.v1.request.>"] if heard.request_id in subject
    ]
    assert [part for part in story if part != "cancel"] == [
        "accepted", "placed", "first_token", "resumed", "placed", "finished",
    ]  # fmt: skip
    fleet, directory, worker, request = (payload for _, payload in heard.answers)
    assert len(decode(fleet, FleetDescribed).workers) == len(decode(directory, DirectoryDescribed).holders) == 4
    assert heard.request_id in {held.request_id for held in decode(worker, WorkerDescribed).requests}
    assert decode(request, RequestDescribed).phase == "decode"
