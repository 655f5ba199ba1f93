"""`/v1/kv/locate` over real HTTP, with a directory that hears holders."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from schemas import subjects
from schemas.block import hash_blocks, join_hashes
from schemas.directory import BlocksStored, Tier
from schemas.ids import WorkerId
from services.bus.typed import TypedBus
from services.directory.service import Directory
from services.times import DirectoryTimes
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.test_chats import USER
from tests.waiting import until

PATH = "/v1/kv/locate"
KEYS = {"tenants": {"key-a": "a", "key-b": "b"}}
TEXT = "The harbour lies still, and nobody has come yet. " * 20


@contextlib.asynccontextmanager
async def directory_of(rig: Rig) -> AsyncIterator[Directory]:
    async with asyncio.TaskGroup() as tasks:
        directory = Directory(TypedBus(rig.mesh.connection, "directory"), tasks, rig.telemetry, DirectoryTimes())
        await directory.begin_serving()
        yield directory
        await directory.close()


async def store(
    rig: Rig, directory: Directory, worker: str, tokens: Sequence[int], tenant: str = "", tier: Tier = "arena"
) -> None:
    """Have a holder say that it holds the full blocks of a prompt."""
    layout = rig.model.layout
    hashes = hash_blocks(tokens, layout.block_size, model_fingerprint=layout.fingerprint, tenant=tenant)
    event = BlocksStored(
        worker_id=WorkerId(worker), incarnation="1", sequence=1, block_hashes=join_hashes(hashes), tier=tier
    )
    await rig.mesh.bus.publish(subjects.STORED, (worker,), event)
    await until(lambda: any(each.worker_id == worker for each in directory.core.locate(join_hashes(hashes))))


async def ask(rig: Rig, key: str = "", **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await rig.http.post(PATH, json=body, headers=headers)
    return {"status": answer.status_code, **answer.json()}


async def test_who_holds_what_of_a_prompt(rig: Rig) -> None:
    tokens, size = rig.model.codec.encode(TEXT), rig.model.layout.block_size
    assert len(tokens) > 6 * size
    async with directory_of(rig) as directory:
        nobody = await ask(rig, tokens=tokens)
        assert (nobody["status"], nobody["holders"], nobody["num_held_tokens"]) == (200, [], 0)
        await store(rig, directory, "p1", tokens[: 2 * size + 1])
        await store(rig, directory, "store", tokens[: 5 * size], tier="disk")
        found = await ask(rig, prompt=TEXT)
        assert found.pop("status") == 200 and found == {
            "object": "kv.location",
            "model": rig.model.name,
            "num_tokens": len(tokens),
            "block_size": size,
            "num_held_tokens": 5 * size,
            "holders": [
                {"worker_id": "store", "tier": "disk", "first_token": 0, "num_tokens": 5 * size},
                {"worker_id": "p1", "tier": "arena", "first_token": 0, "num_tokens": 2 * size},
            ],
        }
        assert (await ask(rig, tokens=tokens))["holders"] == found["holders"]
        assert (await ask(rig, messages=[{"role": "user", "content": TEXT}]))["holders"] == [], "a template comes first"


async def test_a_tenant_finds_its_own_only(open_rig: OpenRig) -> None:
    """What others hold is to a tenant what nobody holds: its questions are about other hashes."""
    async with open_rig(gateway=KEYS) as rig, directory_of(rig) as directory:
        tokens, size = rig.model.codec.encode(TEXT), rig.model.layout.block_size
        await store(rig, directory, "p1", tokens, tenant="a")
        assert (await ask(rig, "key-a", tokens=tokens))["num_held_tokens"] == len(tokens) // size * size
        other = await ask(rig, "key-b", tokens=tokens)
        assert (other["status"], other["holders"]) == (200, [])
        never = await ask(rig, "key-b", tokens=tokens[::-1])
        assert other == never


async def test_without_a_directory_it_says_so(rig: Rig) -> None:
    answer = await rig.http.post(PATH, json={"prompt": TEXT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_directory")
    assert "retry-after" in answer.headers


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "prompt"),
        ({"prompt": "x", "tokens": [1]}, 400, "prompt"),
        ({"prompt": "x", "messages": USER}, 400, "prompt"),
        ({"tokens": [10**9]}, 400, "tokens"),
        ({"tokens": [1] * 300_000}, 400, "prompt"),
        ({"prompt": "x", "n": 2}, 400, "n"),
        ({"prompt": "x", "model": "other"}, 404, "model"),
    ],
)
async def test_what_cannot_be_asked(rig: Rig, body: dict[str, Any], status: int, param: str) -> None:
    found = await ask(rig, **body)
    assert (found["status"], found["error"]["param"]) == (status, param)


async def test_strangers_are_told_nothing(open_rig: OpenRig) -> None:
    async with open_rig(gateway=KEYS) as rig:
        assert (await ask(rig, "other", prompt="x"))["status"] == 401
