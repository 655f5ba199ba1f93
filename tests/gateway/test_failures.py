"""What a client sees when workers fail, refuse, leave or hang, and what workers see when a client leaves."""

import asyncio
import json

import httpx
import openai
import pytest

from schemas import subjects
from schemas.block import pack_tokens
from schemas.ids import WorkerId
from schemas.request import AttemptFailure, RefusalReason, RequestTokens
from schemas.worker import WorkerInfo, WorkerJoined
from services.bus.memory import MemoryBus
from services.gateway import limits
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.fake_mesh import Conduct

C = "/v1/completions"
SHORT_WAIT = {"place_wait_s": 0.3}
"""How long a request waits for somebody who could serve it."""


def body(rig: Rig, **fields: object) -> dict[str, object]:
    return {"model": rig.model.name, "prompt": "Hi", "max_tokens": 100, **fields}


def events_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def text_of(events: list[str]) -> str:
    chunks = [json.loads(e) for e in events if e != "[DONE]"]
    return "".join(c["choices"][0]["text"] for c in chunks if c.get("choices"))


@pytest.mark.parametrize("index", [1, 4])
async def test_a_retry_in_the_middle_gives_one_unbroken_stream(rig: Rig, index: int) -> None:
    rig.mesh.conduct["d1"] = Conduct(fails_at=index)
    answer = await rig.http.post(C, json=body(rig, stream=True, stream_options={"include_usage": True}))
    events = events_of(answer.text)
    assert events[-1] == "[DONE]"
    assert text_of(events) == rig.text
    usage = json.loads(events[-2])["usage"]
    assert usage["completion_tokens"] == len(rig.answer)
    assert (usage["kvmesh"]["num_retries"], usage["kvmesh"]["decode_worker"]) == (1, "d2")
    first, second = rig.mesh.runs
    assert first.sampling.seed == second.sampling.seed
    assert (second.attempt, rig.mesh.places[1].excluded_workers) == (first.attempt + 1, ("d1",))
    await rig.mesh.until(lambda: [c.attempt for c in rig.mesh.cancels] == [first.attempt])
    assert "kvmesh_gateway_retries_total 1.0" in rig.metrics_text()


async def test_a_worker_that_leaves_is_replaced(rig: Rig) -> None:
    rig.mesh.conduct["d1"] = Conduct(hangs_at=3)
    asked = asyncio.create_task(rig.http.post(C, json=body(rig)))
    await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)
    await rig.mesh.lose("d1")
    answer = await asked
    assert answer.json()["choices"][0]["text"] == rig.text
    assert rig.mesh.reserves[1].attempt == 2


def joined(incarnation: str) -> WorkerJoined:
    info = WorkerInfo(
        worker_id=WorkerId("d1"), incarnation=incarnation, role="decode", model="m", fingerprint="f", num_blocks=1,
        block_size=16, context_length=1,
    )  # fmt: skip
    return WorkerJoined(worker=info)


async def test_news_of_a_predecessor_is_ignored(rig: Rig) -> None:
    await rig.mesh.bus.publish(subjects.JOINED, ("d1",), joined("2"))
    rig.mesh.gate.clear()
    asked = asyncio.create_task(rig.http.post(C, json=body(rig)))
    await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)
    await rig.mesh.lose("d1")  # incarnation 1
    rig.mesh.gate.set()
    assert (await asked).json()["choices"][0]["text"] == rig.text
    assert len(rig.mesh.runs) == 1


async def test_a_worker_that_restarts_is_replaced(rig: Rig) -> None:
    rig.mesh.conduct["d1"] = Conduct(hangs_at=3)
    asked = asyncio.create_task(rig.http.post(C, json=body(rig)))
    await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)
    rig.mesh.conduct.clear()
    await rig.mesh.bus.publish(subjects.JOINED, ("d1",), joined("2"))
    assert (await asked).json()["choices"][0]["text"] == rig.text
    assert rig.mesh.places[1].excluded_workers == ()  # the new incarnation has failed nobody


async def test_a_prefill_worker_that_leaves_after_token_0_is_not_missed(rig: Rig) -> None:
    rig.mesh.gate.clear()
    async with rig.http.stream("POST", C, json=body(rig, stream=True)) as answer:
        lines = answer.aiter_lines()
        seen = [await anext(lines)]
        await rig.mesh.lose("p1")
        rig.mesh.gate.set()
        seen += [line async for line in lines]
    assert text_of([line.removeprefix("data: ") for line in seen if line]) == rig.text
    assert len(rig.mesh.runs) == 1


@pytest.mark.parametrize("worker", ["p1", "d1"])
async def test_a_refused_attempt_goes_elsewhere(rig: Rig, worker: str) -> None:
    rig.mesh.conduct[worker] = Conduct(refuses=RefusalReason.OVERLOADED)
    answer = await rig.http.post(C, json=body(rig))
    assert answer.json()["choices"][0]["text"] == rig.text
    assert rig.mesh.places[1].excluded_workers == (worker,)
    await rig.mesh.until(lambda: [c.attempt for c in rig.mesh.cancels] == [1])


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overloaded_mesh_says_when_to_come_back(rig: Rig, stream: bool) -> None:
    rig.mesh.refusal, rig.mesh.retry_after_ms = RefusalReason.OVERLOADED, 1_200
    answer = await rig.http.post(C, json=body(rig, stream=stream))
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "2"
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("overloaded", "rate_limit_error")
    with pytest.raises(openai.RateLimitError):
        await rig.client.completions.create(model=rig.model.name, prompt="Hi")


async def test_all_workers_refuse(open_rig: OpenRig) -> None:
    async with open_rig(gateway=SHORT_WAIT) as rig:
        rig.mesh.retry_after_ms = 100
        rig.mesh.conduct = {name: Conduct(refuses=RefusalReason.DRAINING) for name in ("p1", "p2", "d1", "d2")}
        answer = await rig.http.post(C, json=body(rig))
        assert answer.status_code == 503
        assert "retry-after" in answer.headers
        assert len(rig.mesh.places) <= 3 + 3


async def test_a_request_waits_for_the_last_worker_to_start_again(rig: Rig) -> None:
    rig.mesh.refusal, rig.mesh.retry_after_ms = RefusalReason.NO_WORKER, 100
    answer = asyncio.create_task(rig.http.post(C, json=body(rig)))
    await rig.mesh.until(lambda: len(rig.mesh.places) > 1)
    rig.mesh.refusal = None
    assert (await answer).status_code == 200


@pytest.mark.parametrize(
    ("reason", "status"), [(RefusalReason.TOO_LONG, 400), (RefusalReason.DEADLINE, 504), (RefusalReason.NO_WORKER, 503)]
)
async def test_refusals_of_the_scheduler(open_rig: OpenRig, reason: RefusalReason, status: int) -> None:
    async with open_rig(gateway=SHORT_WAIT) as rig:
        rig.mesh.refusal = reason
        answer = await rig.http.post(C, json=body(rig))
        assert answer.status_code == status
        assert f"{reason} for a test" in answer.json()["error"]["message"]


async def test_no_scheduler(open_rig: OpenRig) -> None:
    async with open_rig(gateway=SHORT_WAIT, serves_scheduler=False) as rig:
        with pytest.raises(openai.InternalServerError) as caught:
            await rig.client.completions.create(model=rig.model.name, prompt="Hi")
        assert (caught.value.status_code, caught.value.code) == (503, "no_scheduler")
        assert caught.value.response.headers["retry-after"] == "1"
        assert (await rig.http.get("/health")).status_code == 503


async def test_a_failure_that_cannot_be_retried_ends_a_stream_without_done(rig: Rig) -> None:
    rig.mesh.conduct["d1"] = Conduct(fails_at=3, code=AttemptFailure.ENGINE_FAILED, retryable=False)
    answer = await rig.http.post(C, json=body(rig, stream=True))
    events = events_of(answer.text)
    assert answer.status_code == 200
    assert "[DONE]" not in events
    error = json.loads(events[-1])["error"]
    assert (error["code"], error["type"]) == ("engine_failed", "server_error")
    with pytest.raises(openai.APIError, match="it broke"):
        async for _ in await rig.client.completions.create(**body(rig), stream=True):  # type: ignore[call-overload]
            pass


async def test_a_failure_before_the_first_token_is_a_status(rig: Rig) -> None:
    rig.mesh.conduct["p1"] = Conduct(fails_at=0, code=AttemptFailure.ENGINE_FAILED, retryable=False)
    answer = await rig.http.post(C, json=body(rig, stream=True))
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")


async def test_attempts_are_bounded(open_rig: OpenRig) -> None:
    async with open_rig(split=False, gateway={"resume_wait_s": 0.3}) as rig:
        rig.mesh.conduct = {"p1": Conduct(fails_at=2), "p2": Conduct(fails_at=2)}
        answer = await rig.http.post(C, json=body(rig))
        assert answer.status_code == 503  # every worker is excluded now, and none comes back
        assert "it broke" in answer.json()["error"]["message"]
        await rig.mesh.until(lambda: [c.attempt for c in rig.mesh.cancels] == [1, 2])


async def test_a_token_that_comes_again_and_differs_is_an_error_never_a_wrong_token(rig: Rig) -> None:
    rig.mesh.gate.clear()
    async with rig.http.stream("POST", C, json=body(rig, stream=True)) as answer:
        lines = answer.aiter_lines()
        seen = [await anext(lines)]
        run = rig.mesh.runs[0]
        tokens = pack_tokens([rig.answer[0] + 1])
        await rig.mesh.emit(
            run.gateway_id, "d1", RequestTokens(request_id=run.request_id, attempt=1, index=0, tokens=tokens)
        )
        seen += [line async for line in lines]
    events = [line.removeprefix("data: ") for line in seen if line]
    assert json.loads(events[-1])["error"]["code"] == "replay_mismatch"
    assert text_of(events[:-1]) == rig.model.codec.decode(rig.answer[:1])
    await rig.mesh.until(lambda: [c.attempt for c in rig.mesh.cancels] == [1])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_everywhere(rig: Rig, stream: bool) -> None:
    rig.mesh.gate.clear()
    async with httpx.AsyncClient(base_url=str(rig.http.base_url)) as client:
        asked = asyncio.create_task(client.post(C, json=body(rig, stream=stream, n=2)))
        await rig.mesh.until(lambda: len(rig.mesh.reserves) == 2)
        asked.cancel()
        await asyncio.wait([asked])
    await rig.mesh.until(lambda: len(rig.mesh.cancels) == 2)
    assert {c.reason for c in rig.mesh.cancels} == {"the client has disconnected"}
    assert {c.request_id for c in rig.mesh.cancels} == {r.request_id for r in rig.mesh.runs}
    assert 'outcome="client_gone"' in rig.metrics_text()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_deadline_ends_a_hanging_request(open_rig: OpenRig, stream: bool) -> None:
    async with open_rig(timeout_s=0.5) as rig:
        rig.mesh.conduct["d1"] = Conduct(hangs_at=2)
        answer = await rig.http.post(C, json=body(rig, stream=stream))
        if stream:
            events = events_of(answer.text)
            assert text_of(events[:-1]) == rig.model.codec.decode(rig.answer[:2])
            error = json.loads(events[-1])["error"]
        else:
            assert answer.status_code == 504
            error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("deadline", "timeout_error")
        await rig.mesh.until(lambda: [c.reason for c in rig.mesh.cancels] == ["deadline"])


async def test_duplicates_and_strangers_are_ignored(rig: Rig) -> None:
    rig.mesh.conduct["d1"] = Conduct(hangs_at=1)
    asked = asyncio.create_task(rig.http.post(C, json=body(rig)))
    await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)
    run = rig.mesh.runs[0]

    async def share(worker: str, attempt: int, index: int, tokens: list[int], reason=None) -> None:
        share = RequestTokens(
            request_id=run.request_id, attempt=attempt, index=index, tokens=pack_tokens(tokens), finish_reason=reason
        )
        await rig.mesh.emit(run.gateway_id, worker, share)

    await share("d2", 1, 1, [9, 9])
    await share("d1", 7, 1, [9, 9])
    await share("d1", 1, 3, rig.answer[3:], "stop")
    await share("d1", 1, 0, rig.answer[:2])
    await share("d1", 1, 1, rig.answer[1:3])
    assert (await asked).json()["choices"][0]["text"] == rig.text


async def test_stopping_ends_what_runs(open_rig: OpenRig) -> None:
    async with open_rig(times={"drain_s": 0.1}) as rig:
        rig.mesh.conduct["d1"] = Conduct(hangs_at=1)
        asked = asyncio.create_task(rig.http.post(C, json=body(rig)))
        await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)
        rig.stop.set()
        answer = await asked
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        await rig.gateway
        with pytest.raises(httpx.ConnectError):
            await httpx.AsyncClient(base_url=str(rig.http.base_url)).get("/health")


async def test_stopping_lets_what_runs_end(open_rig: OpenRig) -> None:
    async with open_rig() as rig:
        rig.mesh.gate.clear()
        asked = asyncio.create_task(rig.http.post(C, json=body(rig)))
        await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)
        rig.stop.set()
        await asyncio.sleep(0)
        rig.mesh.gate.set()
        assert (await asked).json()["choices"][0]["text"] == rig.text


async def test_what_nobody_foresaw_ends_one_request_only(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bus raises what it never does; who is served meanwhile is served on."""
    rig.mesh.conduct["d1"] = Conduct(hangs_at=3)
    served = asyncio.create_task(rig.http.post(C, json=body(rig)))
    await rig.mesh.until(lambda: len(rig.mesh.reserves) == 1)

    async def broken(*_args: object) -> None:
        raise RuntimeError("nobody has thought of it")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryBus, "request", broken)
        failed = await rig.http.post(C, json=body(rig))
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal")
    assert "RuntimeError" in failed.json()["error"]["message"]
    await rig.mesh.lose("d1")
    assert (await served).json()["choices"][0]["text"] == rig.text


@pytest.mark.parametrize("refusal", [None, RefusalReason.OVERLOADED])
async def test_a_tenant_s_placements_are_asked_for_a_few_at_a_time(
    open_rig: OpenRig, refusal: RefusalReason | None
) -> None:
    """A scheduler serves one after another: who comes behind hundreds of one tenant's would wait for all of them."""
    keys, most = {"key-a": "a", "key-b": "b"}, limits.PLACED_AT_ONCE
    async with open_rig(gateway={"tenants": keys}, times={"place_turn_s": 3_600}, refusal=refusal) as rig:

        async def ask(key: str, num_prompts: int) -> int:
            body = {"model": rig.model.name, "prompt": ["Q"] * num_prompts, "max_tokens": 1}
            answer = await rig.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
            return answer.status_code

        rig.mesh.place_gate.clear()
        many = asyncio.create_task(ask("key-a", 4 * most))
        await rig.mesh.until(lambda: len(rig.mesh.places) == most)
        one = asyncio.create_task(ask("key-b", 1))
        await rig.mesh.until(lambda: len(rig.mesh.places) > most)
        assert [place.tenant for place in rig.mesh.places] == ["a"] * most + ["b"]
        rig.mesh.place_gate.set()
        if refusal is None:
            assert [await many, await one] == [200, 200]
            assert len(rig.mesh.places) == 4 * most + 1
        else:
            assert [await many, await one] == [429, 429]
            assert len(rig.mesh.places) == most + 1, "none of those behind is asked for in vain"
