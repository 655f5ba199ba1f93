"""Answers that outlive their workers, lost messages, a scheduler that comes back, a client that does not read."""

import asyncio
import json
import socket
from pathlib import Path

import openai
import pytest

from schemas import subjects
from schemas.block import hash_blocks, join_hashes, unpack_tokens
from schemas.ids import RequestId, WorkerId
from schemas.request import AskWanted, AttemptId, RefusalReason
from schemas.worker import BlockCounts, WorkerInfo, WorkerLoad
from services.config import GatewayConfig, MeshConfig, load_config, write_config
from services.errors import UserError
from services.gateway import requests
from services.gateway.limits import MAX_PARTS
from services.gateway.request.events import Deliver, Finish
from services.gateway.request.mailbox import Mailbox
from services.runtime import now_ms
from tests.credentials import SEED
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.fake_mesh import Conduct
from tests.gateway.test_failures import C, body, events_of, text_of
from tests.waiting import until

QUICK = {"progress_after_ms": 200, "worker_silent_ms": 1_600, "accept_timeout_s": 0.2}


def load(worker: str, incarnation: str = "1", **blocks: int) -> WorkerLoad:
    info = WorkerInfo(
        worker_id=WorkerId(worker), incarnation=incarnation, role="decode", model="m", fingerprint="f", num_blocks=9,
        block_size=16, context_length=1,
    )  # fmt: skip
    counts = BlockCounts(**{"total": 9, "free": 9, "running": 0, "leased": 0, **blocks})
    return WorkerLoad(worker=info, state="ready", blocks=counts, num_running=0, num_queued=0, num_uncomputed_tokens=0)


@pytest.mark.parametrize("index", [1, 4])
async def test_an_attempt_goes_on_where_the_answer_stopped(rig: Rig, index: int) -> None:
    rig.mesh.conduct["d1"] = Conduct(fails_at=index)
    prompt = [5] * 40
    answer = await rig.http.post(C, json=body(rig, prompt=prompt))
    assert answer.json()["choices"][0]["text"] == rig.text
    usage = answer.json()["usage"]
    mesh = usage["kvmesh"]
    assert (mesh["num_retries"], mesh["resumed_tokens"]) == (1, index)
    assert (
        mesh["cached_tokens"] + mesh["transferred_tokens"] + mesh["recomputed_tokens"] == usage["prompt_tokens"] == 40
    )
    place, run, reserve = rig.mesh.places[1], rig.mesh.runs[1], rig.mesh.reserves[1]
    whole = prompt + rig.answer[:index]
    layout = rig.model.layout
    assert unpack_tokens(run.prompt) == unpack_tokens(reserve.prompt) == whole
    assert run.num_answered_tokens == reserve.num_answered_tokens == index
    assert (place.num_prompt_tokens, place.max_tokens) == (40 + index, 100 - index)
    hashes = hash_blocks(whole, layout.block_size, model_fingerprint=layout.fingerprint)
    assert place.block_hashes == join_hashes(hashes)
    assert run.sampling == rig.mesh.runs[0].sampling
    metrics = rig.metrics_text()
    assert "kvmesh_resumes_total 1.0" in metrics
    assert "kvmesh_unfinished_requests_oldest_seconds 0.0" in metrics


async def test_the_last_token_is_not_split(rig: Rig) -> None:
    rig.mesh.conduct["d1"] = Conduct(fails_at=2)
    answer = await rig.http.post(C, json=body(rig, max_tokens=3))
    assert answer.json()["choices"][0]["text"] == rig.model.codec.decode(rig.answer[:3])
    assert (rig.mesh.runs[1].downstream, len(rig.mesh.reserves)) == (None, 1)


@pytest.mark.parametrize(("worker", "lost"), [("p1", (0,)), ("d1", (3, 4)), ("d1", (43,)), ("d1", (1, 43))])
async def test_lost_messages_are_asked_for(open_rig: OpenRig, worker: str, lost: tuple[int, ...]) -> None:
    async with open_rig(gateway=QUICK) as rig:
        assert len(rig.answer) == 44
        rig.mesh.conduct[worker] = Conduct(drops=lost)
        answer = await rig.http.post(C, json=body(rig, stream=True))
        events = events_of(answer.text)
        assert (text_of(events), events[-1]) == (rig.text, "[DONE]")
        assert len(rig.mesh.runs) == 1
        assert rig.mesh.questions[0].index == lost[0]
        assert "kvmesh_progress_asked_total 0.0" not in rig.metrics_text()


async def test_a_worker_that_has_forgotten_the_request_is_replaced(open_rig: OpenRig) -> None:
    async with open_rig(gateway=QUICK) as rig:
        rig.mesh.conduct["d1"] = Conduct(hangs_at=3, forgets=True)
        answer = await rig.http.post(C, json=body(rig))
        assert answer.json()["choices"][0]["text"] == rig.text
        assert rig.mesh.runs[1].num_answered_tokens == 3


async def test_a_worker_that_is_gone_without_a_word_is_replaced(open_rig: OpenRig) -> None:
    async with open_rig(gateway=QUICK, conduct={"d1": Conduct(hangs_at=3, is_gone=True)}) as rig:
        answer = await rig.http.post(C, json=body(rig))
        assert answer.json()["choices"][0]["text"] == rig.text
        assert (rig.mesh.runs[1].num_answered_tokens, rig.mesh.questions) == (3, [])


async def test_a_silent_worker_is_replaced_while_others_are_heard(open_rig: OpenRig) -> None:
    async with open_rig(gateway=QUICK, conduct={"d1": Conduct(hangs_at=3, is_gone=True)}) as rig:
        # Somebody listens, and never answers: a stopped process.
        stopped = await rig.mesh.connection.subscribe(subjects.PROGRESS.of("d1"))
        asked = asyncio.create_task(rig.http.post(C, json=body(rig)))
        while not asked.done():
            await rig.mesh.bus.publish(subjects.LOAD, ("p1",), load("p1"))
            await asyncio.wait([asked], timeout=0.2)
        await stopped.close()
        assert (await asked).json()["choices"][0]["text"] == rig.text
        assert rig.mesh.places[1].excluded_workers == ("d1",)


async def test_an_answer_waits_for_workers_and_the_scheduler_to_come_back(rig: Rig) -> None:
    rig.mesh.conduct["d1"] = Conduct(hangs_at=3)
    asked = asyncio.create_task(rig.http.post(C, json=body(rig, stream=True)))
    await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)
    rig.mesh.refusal, rig.mesh.retry_after_ms = RefusalReason.NO_WORKER, 100
    await rig.mesh.lose("d1")
    await rig.mesh.until(lambda: len(rig.mesh.places) >= 4)
    rig.mesh.refusal = None
    events = events_of((await asked).text)
    assert (text_of(events), events[-1]) == (rig.text, "[DONE]")
    assert {place.attempt for place in rig.mesh.places[1:]} == {2}


async def test_a_wait_for_workers_ends(open_rig: OpenRig) -> None:
    async with open_rig(gateway={"resume_wait_s": 0.3}) as rig:
        rig.mesh.conduct["d1"] = Conduct(fails_at=3)
        asked = asyncio.create_task(rig.http.post(C, json=body(rig, stream=True)))
        await rig.mesh.until(lambda: len(rig.mesh.places) == 1)
        rig.mesh.refusal, rig.mesh.retry_after_ms = RefusalReason.NO_WORKER, 100
        events = events_of((await asked).text)
        assert json.loads(events[-1])["error"]["code"] == "no_worker"
        assert all('finish_reason":"' not in event for event in events)


async def test_workers_learn_what_is_still_wanted(rig: Rig) -> None:
    rig.mesh.conduct["d1"] = Conduct(hangs_at=3)
    asked = asyncio.create_task(rig.http.post(C, json=body(rig)))
    await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)
    run = rig.mesh.runs[0]
    attempts = [(run.request_id, 1), (run.request_id, 2), (RequestId("req-0"), 1)]

    async def unwanted() -> set[tuple[str, int]]:
        ids = tuple(AttemptId(request_id=request_id, attempt=attempt) for request_id, attempt in attempts)
        question = AskWanted(worker_id=WorkerId("d1"), attempts=ids)
        reply = await rig.mesh.ask_wanted(run.gateway_id, question)
        return {(a.request_id, a.attempt) for a in reply.unwanted}

    assert await unwanted() == {*attempts[1:]}
    await rig.mesh.lose("d1")
    await asked
    assert await unwanted() == {*attempts}


async def test_the_blocks_of_the_workers_are_told(rig: Rig) -> None:
    await rig.mesh.bus.publish(subjects.LOAD, ("d1",), load("d1", free=2, cached=3, leased=4, orphaned=1))
    await rig.mesh.bus.publish(subjects.LOAD, ("d1",), load("d1", incarnation="0"))  # a predecessor that woke up
    metrics = rig.metrics_text()
    for state, count in {"free": 2, "cached": 3, "running": 0, "leased": 4, "orphaned": 1}.items():
        assert f'kvmesh_kv_blocks{{state="{state}",worker="d1"}} {count}.0' in metrics
    await rig.mesh.lose("d1")
    assert 'worker="d1"' not in rig.metrics_text()


async def test_a_worker_whose_restart_was_not_heard_counts_once_its_old_self_is_quiet(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    later_ms = 0
    monkeypatch.setattr(requests, "now_ms", lambda: now_ms() + later_ms)
    for worker, time_ms in (("d1", 0), ("p1", 1_400), ("p1", 2_800)):
        later_ms = time_ms
        await rig.mesh.bus.publish(subjects.LOAD, (worker,), load(worker, free=2))
        await rig.mesh.bus.connection.flush()
    for time_ms, count in ((2_900, 2), (4_000, 7)):
        later_ms = time_ms
        await rig.mesh.bus.publish(subjects.LOAD, ("d1",), load("d1", incarnation="2", free=7))
        metrics = rig.metrics_text()
        assert f'kvmesh_kv_blocks{{state="free",worker="d1"}} {count}.0' in metrics


async def test_a_client_that_never_reads_stalls_nobody(open_rig: OpenRig) -> None:
    long = [1000 + i % 500 for i in range(4_000)]
    async with open_rig(split=False, send_buffer=4_096) as rig:
        rig.mesh.answers = lambda prompt: long if len(prompt) == 7 else rig.answer
        fields = {"prompt": [5] * 7, "max_tokens": 4_000, "stream": True, "return_token_ids": True}
        payload = json.dumps(body(rig, **fields))
        loop, partitioned = asyncio.get_running_loop(), socket.socket()
        partitioned.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        partitioned.setblocking(False)
        await loop.sock_connect(partitioned, ("127.0.0.1", int(rig.url.rsplit(":", 1)[1])))
        head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
        await loop.sock_sendall(partitioned, f"POST {C} HTTP/1.1\r\n{head}{payload}".encode())
        await rig.mesh.until(lambda: len(rig.mesh.runs) == 1)
        run = rig.mesh.runs[0]
        others = await asyncio.gather(*(rig.http.post(C, json=body(rig, stream=True)) for _ in range(4)))
        assert [text_of(events_of(answer.text)) for answer in others] == [rig.text] * 4
        await until(lambda: len(rig.mesh.known["p1", run.request_id, 1]) >= len(long))
        await rig.http.post(C, json=body(rig))  # its tokens come after all of those
        metrics = rig.metrics_text()
        assert "kvmesh_gateway_running_requests 0.0" in metrics  # the mesh has done with it; its answer waits as ids
        ended = [line.split()[1] for line in metrics.splitlines() if line.startswith("kvmesh_gateway_requests_total")]
        assert ended == ["5.0"]
        partitioned.close()


async def test_a_body_that_never_ends_is_not_waited_for(open_rig: OpenRig) -> None:
    async with open_rig(timeout_s=0.3) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.http.base_url.port)
        head = b"host: localhost\r\ncontent-type: application/json\r\ncontent-length: 99"
        writer.write(b"POST /v1/completions HTTP/1.1\r\n" + head + b"\r\n\r\n{")
        assert b" 408 " in await asyncio.wait_for(reader.readline(), 30)
        writer.close()


async def test_what_waits_for_a_client_is_its_own_answer_once() -> None:
    mailbox = Mailbox()
    for index in range(100):
        mailbox.put(0, Deliver(index, (index,)))
        mailbox.put(1, Deliver(index, (index, index)))
    mailbox.put(0, Finish("stop"))
    assert mailbox.num_waiting_tokens == 300
    items = await mailbox.collect()
    assert len(items) <= 2 * MAX_PARTS + 1
    tokens: list[int] = []
    for choice, output in items:
        if choice == 0 and isinstance(output, Deliver):
            assert output.index == len(tokens)
            tokens += output.tokens
    assert tokens == [*range(100)]
    assert [output for choice, output in items if choice == 0][-1] == Finish("stop")


TENANTS = {"tenants": {"key-a": "a", "key-b": "team_b-2"}}


@pytest.mark.parametrize("authorization", ["", "Bearer key-c", "Basic key-a", "Bearer", "key-a"])
async def test_an_unknown_key_is_refused(open_rig: OpenRig, authorization: str) -> None:
    async with open_rig(gateway=TENANTS) as rig:
        headers = {"authorization": authorization} if authorization else {}
        gets = [await rig.http.get(path, headers=headers) for path in ("/v1/models", f"/v1/models/{rig.model.name}")]
        for answer in (await rig.http.post(C, json=body(rig), headers=headers), *gets):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
        with pytest.raises(openai.AuthenticationError):
            await rig.client.completions.create(model=rig.model.name, prompt="Hi")
        assert rig.mesh.places == [] and not rig.spans, "of strangers nothing is kept"
        assert (await rig.http.get("/health")).status_code == 200


async def test_a_tenant_goes_with_the_request(open_rig: OpenRig) -> None:
    async with open_rig(gateway=TENANTS) as rig:
        client = openai.AsyncOpenAI(base_url=f"{rig.url}/v1", api_key="key-b", max_retries=0)
        async with client:
            answer = await client.completions.create(model=rig.model.name, prompt=[5] * 40, max_tokens=100)
        assert answer.choices[0].text == rig.text
        place, run, reserve = rig.mesh.places[0], rig.mesh.runs[0], rig.mesh.reserves[0]
        assert place.tenant == run.tenant == reserve.tenant == "team_b-2"
        layout = rig.model.layout
        hashes = hash_blocks([5] * 40, layout.block_size, model_fingerprint=layout.fingerprint, tenant="team_b-2")
        assert place.block_hashes == join_hashes(hashes)


def test_tenants_are_written_and_read(tmp_path: Path) -> None:
    tenants = {'sk-"quoted"': "a", "sk.dotted": "b"}
    config = MeshConfig(tenant_seed=SEED, gateway=GatewayConfig(tenants=tenants))
    write_config(config, tmp_path / "mesh.toml")
    assert load_config(tmp_path / "mesh.toml").gateway == config.gateway
    write_config(MeshConfig(), tmp_path / "mesh.toml")
    assert load_config(tmp_path / "mesh.toml").gateway.tenants == {}
    (tmp_path / "mesh.toml").write_text('[gateway]\ntenants = {key = "two words"}\n')
    with pytest.raises(UserError, match="two words"):
        load_config(tmp_path / "mesh.toml")
