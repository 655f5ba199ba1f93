"""Streams as clients and proxies expect them: when they begin, what keeps them open, and what is in each event."""

import asyncio
import itertools
import json
from typing import Any

import pytest

from schemas.block import pack_tokens
from schemas.request import AttemptFailure, RefusalReason, RequestTokens
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.fake_mesh import Conduct

C, H = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


impatient = pytest.mark.times(first_output_s=0.01, silence_s=0.01)
"""Streams begin at once, and every silence is a long one."""


def body(rig: Rig, path: str = C, **fields: object) -> dict[str, Any]:
    asked = {"messages": MESSAGES} if path == H else {"prompt": "Hi"}
    return {"model": rig.model.name, "max_tokens": 100, "stream": True, **asked, **fields}


async def chunks(rig: Rig, path: str = C, **fields: object) -> list[dict[str, Any]]:
    """Return the events of a whole stream but [DONE]."""
    answer = await rig.http.post(path, json=body(rig, path, **fields))
    *events, done, end = answer.text.split("\n\n")
    assert (answer.status_code, done, end) == (200, "data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events if not event.startswith(":")]


@pytest.mark.parametrize("path", [C, H, "/v1/responses"])
async def test_an_event_is_one_line_for_whoever_splits_lines_as_python_does(rig: Rig, path: str) -> None:
    text = "a\u2028b\u2029c\u0085d\v\f\x1c\x1d\x1e\re\x7f"
    assert len(text.splitlines()) == 10
    answer = [*rig.model.codec.encode(text, add_special_tokens=False), min(rig.model.eos_token_ids)]
    rig.mesh.answers = lambda prompt: answer
    about = {"prompt": "Hi"} if path == C else {"messages": MESSAGES} if path == H else {"input": text}
    more = {"instructions": text, "metadata": {text: text}} if path == "/v1/responses" else {"return_token_ids": True}
    asked = {"model": rig.model.name, "stream": True, **({} if path == "/v1/responses" else {"max_tokens": 100})}
    told = ""
    async with rig.http.stream("POST", path, json=asked | about | more) as reply:
        async for line in reply.aiter_lines():
            name, _, value = line.partition(": ")
            assert name in ("", "event", "data"), line
            if name == "data" and value != "[DONE]":
                event = json.loads(value)
                for choice in event.get("choices", ()):
                    told += choice.get("text") or choice.get("delta", {}).get("content") or ""
                told += event["delta"] if event.get("type") == "response.output_text.delta" else ""
    assert told == rig.model.codec.decode(answer) and "\u2028" in told


# As they come.


async def test_each_step_s_token_is_an_event_of_its_own_as_it_comes(rig: Rig) -> None:
    """The next step comes once the event of the one before it was read; at the end three come at once."""
    rig.mesh.conduct["d1"] = Conduct(hangs_at=1)
    async with rig.http.stream("POST", C, json=body(rig, return_token_ids=True, ignore_eos=True)) as answer:
        run = rig.mesh.runs[0]

        async def steps(*indexes: int) -> None:
            shares = [
                RequestTokens(
                    request_id=run.request_id,
                    attempt=run.attempt,
                    index=index,
                    tokens=pack_tokens([rig.answer[index]]),
                    finish_reason="length" if index == 8 else None,
                )
                for index in indexes
            ]
            await rig.mesh.emit(run.gateway_id, "d1", *shares)

        events = (json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {"))
        for index in range(6):
            if index:
                await steps(index)
            assert (await anext(events))["choices"][0]["token_ids"] == [rig.answer[index]]
        await steps(6, 7, 8)
        rest = [event["choices"][0]["token_ids"] async for event in events]
    assert rest == [[token] for token in rig.answer[6:9]] + [[]]


# Beginning, and staying open.


@impatient
@pytest.mark.parametrize("path", [C, H])
async def test_a_stream_begins_and_is_kept_open_while_the_prompt_is_computed(rig: Rig, path: str) -> None:
    rig.mesh.conduct["p1"] = Conduct(hangs_at=0)
    async with rig.http.stream("POST", path, json=body(rig, path)) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")
        assert answer.headers["x-request-id"] == rig.mesh.places[0].request_id
        lines = answer.aiter_lines()
        assert [await anext(lines) for _ in range(4)] == [": keep-alive", "", ": keep-alive", ""]
        await rig.mesh.lose("p1")
        seen = [line async for line in lines if line.startswith("data: ")]
    assert seen[-1] == "data: [DONE]"
    assert "".join(_text(json.loads(line[6:])) for line in seen[:-1]) == rig.text


@pytest.mark.times(silence_s=0.01)
async def test_a_silence_in_the_middle_is_filled_as_well(rig: Rig) -> None:
    rig.mesh.gate.clear()
    async with rig.http.stream("POST", C, json=body(rig)) as answer:
        lines = answer.aiter_lines()
        while await anext(lines) != ": keep-alive":
            pass
        rig.mesh.gate.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("chat", [False, True])
@impatient
async def test_openais_own_client_reads_over_the_comments(rig: Rig, chat: bool) -> None:
    rig.mesh.gate.clear()
    create = rig.client.chat.completions.create if chat else rig.client.completions.create
    stream = await create(**body(rig, H if chat else C))  # type: ignore[call-overload]
    asyncio.get_running_loop().call_later(0.2, rig.mesh.gate.set)
    read = [_text(chunk.model_dump()) async for chunk in stream]
    assert "".join(read) == rig.text


async def test_a_stream_without_silence_has_no_comments(rig: Rig) -> None:
    answer = await rig.http.post(C, json=body(rig))
    assert not [event for event in answer.text.split("\n\n") if event.startswith(":")]


@impatient
async def test_an_answer_that_is_not_streamed_waits_for_its_status(rig: Rig) -> None:
    rig.mesh.gate.clear()
    asyncio.get_running_loop().call_later(0.2, rig.mesh.gate.set)
    answer = await rig.http.post(C, json=body(rig, stream=False))
    assert answer.json()["choices"][0]["text"] == rig.text
    assert "x-accel-buffering" not in answer.headers


@pytest.mark.parametrize(("patience_s", "status"), [(60.0, 503), (0.01, 200)])
async def test_an_error_is_a_status_where_it_comes_soon_and_an_event_later(
    open_rig: OpenRig, patience_s: float, status: int
) -> None:
    async with open_rig(gateway={"place_wait_s": 0.5}, times={"first_output_s": patience_s}) as rig:
        rig.mesh.refusal = RefusalReason.NO_WORKER
        answer = await rig.http.post(C, json=body(rig))
        assert answer.status_code == status
        error = json.loads(answer.text.removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == ("no_worker", "server_error")
        assert "[DONE]" not in answer.text
        assert ("retry-after" in answer.headers) == (status == 503)


@impatient
async def test_a_failure_after_the_headers_reaches_openais_client(rig: Rig) -> None:
    import openai

    rig.mesh.gate.clear()
    rig.mesh.conduct["d1"] = Conduct(fails_at=1, code=AttemptFailure.ENGINE_FAILED, retryable=False)
    asyncio.get_running_loop().call_later(0.2, rig.mesh.gate.set)
    with pytest.raises(openai.APIError, match="it broke"):
        async for _ in await rig.client.completions.create(**body(rig)):  # type: ignore[call-overload]
            pass


@impatient
async def test_a_client_that_leaves_before_the_first_token_is_heard(rig: Rig) -> None:
    rig.mesh.conduct["p1"] = Conduct(hangs_at=0)
    async with rig.http.stream("POST", C, json=body(rig)) as answer:
        assert answer.status_code == 200
    await rig.mesh.until(lambda: len(rig.mesh.cancels) == 1)


# What is in each event.


@pytest.mark.parametrize("path", [C, H])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 7}, {"stop": "34 sh"}, {"n": 2}])
async def test_each_event_but_the_last_has_text(rig: Rig, path: str, fields: dict[str, Any]) -> None:
    found = await chunks(rig, path, **fields)
    for index in range(fields.get("n", 1)):
        choices = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == index]
        *events, last = choices
        assert all(_text({"choices": [choice]}) and choice["finish_reason"] is None for choice in events)
        assert last["finish_reason"] == ("length" if "max_tokens" in fields else "stop")
        assert last["delta"] == {} if path == H else last["text"] == ""
        if path == H:
            assert [choice["delta"].get("role") for choice in events] == ["assistant"] + [None] * (len(events) - 1)


@pytest.mark.parametrize("path", [C, H])
async def test_the_token_that_ends_an_answer_is_in_its_last_event(rig: Rig, path: str) -> None:
    found = [chunk["choices"][0] for chunk in await chunks(rig, path, return_token_ids=True)]
    assert found[-1]["token_ids"] == [rig.answer[-1]]
    assert [choice["token_ids"] for choice in found] == [[token] for token in rig.answer]


@pytest.mark.parametrize("path", [C, H])
async def test_an_answer_without_text_is_one_event(rig: Rig, path: str) -> None:
    rig.mesh.answers = lambda prompt: [rig.answer[-1]]
    (only,) = [chunk["choices"][0] for chunk in await chunks(rig, path, return_token_ids=True)]
    assert (only["finish_reason"], only["token_ids"]) == ("stop", [rig.answer[-1]])
    assert only["delta"] == {"role": "assistant"} if path == H else only["text"] == ""


@pytest.mark.parametrize("path", [C, H])
async def test_text_that_only_the_end_makes_certain_comes_before_the_last_event(rig: Rig, path: str) -> None:
    """What may be a stop string's beginning is held back; so is its token, unless it was asked for."""
    end = rig.text[-4:]
    found = [chunk["choices"][0] for chunk in await chunks(rig, path, stop=f"{end}!", return_token_ids=True)]
    assert _text({"choices": [found[-2]]}).endswith(end)
    assert (_text({"choices": [found[-1]]}), found[-1]["token_ids"]) == ("", [rig.answer[-1]])
    assert [token for choice in found for token in choice["token_ids"]] == rig.answer


@pytest.mark.parametrize("path", [C, H])
@pytest.mark.parametrize("include_usage", [False, True])
async def test_usage_in_every_event(rig: Rig, path: str, include_usage: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include_usage}
    found = await chunks(rig, path, stream_options=options, return_token_ids=True)
    num_prompt = rig.mesh.places[0].num_prompt_tokens
    usages = [chunk["usage"] for chunk in found]
    assert all(usage["total_tokens"] == num_prompt + usage["completion_tokens"] for usage in usages)
    assert all(usage["prompt_tokens"] == num_prompt for usage in usages)
    counts = [usage["completion_tokens"] for usage in usages]
    ids = [choice["token_ids"] for chunk in found for choice in chunk["choices"]]
    assert counts[: len(ids)] == [*itertools.accumulate(map(len, ids))]
    assert counts[-1] == len(rig.answer)
    assert (found[-1]["choices"] == []) == include_usage
    assert ("kvmesh" in usages[-1]) == include_usage


async def test_usage_in_every_event_counts_all_choices(rig: Rig) -> None:
    found = await chunks(rig, n=3, stream_options={"continuous_usage_stats": True})
    assert found[-1]["usage"]["completion_tokens"] == 3 * len(rig.answer)


async def test_usage_is_not_in_every_event_unless_asked_for(rig: Rig) -> None:
    assert not any("usage" in chunk for chunk in await chunks(rig))
    found = await chunks(rig, stream_options={"include_usage": True, "continuous_usage_stats": False})
    assert [chunk["usage"] is None for chunk in found] == [True] * (len(found) - 1) + [False]


def _text(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return (choice["delta"].get("content") if "delta" in choice else choice["text"]) or ""
