"""The API over real HTTP, with OpenAI's own client."""

import json
from pathlib import Path

import msgspec
import openai
import pytest

from schemas.ids import HandoffId, WorkerId
from schemas.request import OtherEnd, RefusalReason
from tests.engine.grammar_rig import Checkpoint
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.fake_mesh import Conduct


async def test_a_whole_completion(rig: Rig) -> None:
    answer = await rig.client.completions.create(model=rig.model.name, prompt="Hello there", max_tokens=100)
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == rig.text
    assert answer.choices[0].finish_reason == "stop"
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(rig.model.codec.encode("Hello there"))
    assert usage.completion_tokens == len(rig.answer)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == 1  # what the prefill worker did not compute
    mesh = usage.kvmesh  # type: ignore[attr-defined]
    assert mesh["request_id"] == rig.mesh.runs[0].request_id
    assert mesh["transferred_tokens"] == usage.prompt_tokens
    assert mesh["transferred_from"] == {"p1": usage.prompt_tokens}
    for part in (mesh, mesh["prefill"]):
        parts = part["cached_tokens"], part["transferred_tokens"], part["recomputed_tokens"]
        assert sum(parts) == usage.prompt_tokens and sum(part["transferred_from"].values()) == parts[1]
    assert (mesh["carrier"], mesh["prefill_worker"], mesh["decode_worker"]) == ("shm", "p1", "d1")


@pytest.mark.parametrize("n", [1, 3])
async def test_the_sources_add_up_for_several_choices(rig: Rig, n: int) -> None:
    body = {"model": rig.model.name, "prompt": ["Hello there", "Hi"], "max_tokens": 3, "n": n}
    usage = (await rig.http.post("/v1/completions", json=body)).json()["usage"]
    mesh = usage["kvmesh"]
    assert mesh["transferred_tokens"] + mesh["cached_tokens"] + mesh["recomputed_tokens"] == usage["prompt_tokens"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
async def test_token_ids_on_request(rig: Rig, chat: bool, stream: bool) -> None:
    body: dict[str, object] = {"model": rig.model.name, "max_tokens": 5, "stream": stream, "return_token_ids": True}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
    answer = await rig.http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    if not stream:
        assert answer.json()["choices"][0]["token_ids"] == list(rig.answer[:5])
        return
    lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    ids = [token for line in lines for choice in line["choices"] for token in choice.get("token_ids", [])]
    assert ids == list(rig.answer[:5])


async def test_no_token_ids_unless_asked_for(rig: Rig) -> None:
    answer = await rig.http.post("/v1/completions", json={"model": rig.model.name, "prompt": "Hi", "max_tokens": 5})
    assert "token_ids" not in answer.json()["choices"][0]


async def test_what_crosses_the_mesh(rig: Rig) -> None:
    trace = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    body = {"model": rig.model.name, "prompt": [5] * 40, "max_tokens": 5, "seed": 7, "top_k": 3, "top_p": 0.5}
    answer = await rig.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200
    place, run, reserve = rig.mesh.places[0], rig.mesh.runs[0], rig.mesh.reserves[0]
    assert answer.headers["x-request-id"] == place.request_id == run.request_id == reserve.request_id
    assert len(place.block_hashes) == 2 * 16
    assert (place.num_prompt_tokens, place.max_tokens) == (40, 5)
    handoff_id = HandoffId(f"{run.request_id}-{run.attempt}")
    assert run.downstream == OtherEnd(worker_id=WorkerId("d1"), handoff_id=handoff_id) and run.upstream is None
    assert reserve.upstream == OtherEnd(worker_id=WorkerId("p1"), handoff_id=handoff_id) and reserve.downstream is None
    assert run.sampling == reserve.sampling
    assert (run.sampling.seed, run.sampling.top_k, run.sampling.top_p) == (7, 3, 0.5)
    assert run.deadline_ms == pytest.approx(place.deadline_ms, abs=60_000) and place.deadline_ms > 0
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    root = answer.headers["traceparent"]
    assert root.split("-")[1] == trace
    assert rig.mesh.run_traces == [root]
    rig.telemetry.close()
    (asked,) = (span for span in rig.spans if span.name == "place")
    assert rig.mesh.place_traces == [f"00-{trace}-{asked.span_id}-01"], "the scheduler's part lies under the question"
    assert asked.attributes["kvmesh.reuse"] == answer.json()["usage"]["kvmesh"]["reuse"] == "nothing_held"


async def test_spans(rig: Rig) -> None:
    await rig.http.post("/v1/completions", json={"model": rig.model.name, "prompt": "Hi", "max_tokens": 5})
    rig.telemetry.close()
    spans = {span.name: span for span in rig.spans}
    root = spans["POST /v1/completions"]
    assert {"tokenize", "place", "dispatch", "first_token"} == set(spans) - {root.name}
    assert all(span.parent_id == root.span_id for span in spans.values() if span is not root)
    attributes = root.attributes
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["kvmesh.outcome"] == "ok"
    assert attributes["kvmesh.prefill_worker"] == "p1"
    assert attributes["kvmesh.ttft_ms"] > 0
    assert {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "url.scheme": "http",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvmesh",
        "gen_ai.request.model": rig.model.name,
    }.items() <= attributes.items()
    assert "error.type" not in attributes and not root.error


CHAT, HI = "/v1/chat/completions", {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("route", "refusal", "body", "status", "outcome", "operation"),
    [
        (CHAT, None, {}, 400, "invalid", "chat"),
        ("/v1/responses", None, {"model": "nobody", "input": "Hi"}, 404, "invalid", "chat"),
        (CHAT, RefusalReason.TOO_LONG, {"messages": [HI]}, 400, "context_length_exceeded", "chat"),
        (CHAT, RefusalReason.OVERLOADED, {"messages": [HI]}, 429, "overloaded", "chat"),
        ("/v1/completions", RefusalReason.INVALID, {"prompt": "Hi"}, 500, "invalid", "text_completion"),
    ],
)  # fmt: skip
async def test_a_span_is_an_error_where_the_server_has_failed(
    open_rig: OpenRig,
    route: str,
    refusal: RefusalReason | None,
    body: dict[str, object],
    status: int,
    outcome: str,
    operation: str,
) -> None:
    async with open_rig(refusal=refusal) as rig:
        answer = await rig.http.post(route, json={"model": rig.model.name} | body)
        rig.telemetry.close()
    (root,) = (span for span in rig.spans if span.is_server)
    attributes = root.attributes
    assert answer.status_code == attributes["http.response.status_code"] == status
    assert (attributes["http.route"], attributes["gen_ai.operation.name"]) == (route, operation)
    assert attributes["kvmesh.outcome"] == outcome
    message = answer.json()["error"]["message"]
    if status < 500:
        assert (root.error, attributes.get("error.type")) == ("", None)
        assert str(attributes["kvmesh.refusal"]) in message
        assert not any(span.error for span in rig.spans if span.name == "tokenize")
    else:
        assert (root.error, attributes["error.type"], attributes.get("kvmesh.refusal")) == (message, outcome, None)


async def test_a_streamed_completion_with_usage(rig: Rig) -> None:
    stream = await rig.client.completions.create(
        model=rig.model.name, prompt="Hi", max_tokens=100, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == rig.text
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(rig.answer)
    assert len({chunk.id for chunk in chunks}) == 1


async def test_a_whole_chat(rig: Rig) -> None:
    answer = await rig.client.chat.completions.create(
        model=rig.model.name, messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.content == rig.text
    assert answer.choices[0].message.role == "assistant"
    place = rig.mesh.places[0]
    assert place.num_prompt_tokens + place.max_tokens == rig.model.context_length


async def test_a_streamed_chat(rig: Rig) -> None:
    stream = await rig.client.chat.completions.create(
        model=rig.model.name, messages=[{"role": "user", "content": "Hi"}], stream=True, max_completion_tokens=200
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == rig.text
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_stream_on_the_wire_ends_with_done(rig: Rig) -> None:
    body = {"model": rig.model.name, "prompt": "Hi", "max_tokens": 3, "stream": True}
    answer = await rig.http.post("/v1/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert "usage" not in json.loads(events[0].removeprefix("data: "))
    assert len(events) == 3 + 1 + 2  # one per token, the finish, DONE


async def test_several_prompts_times_n(rig: Rig) -> None:
    rig.mesh.answers = lambda prompt: [*rig.model.codec.encode(f"{len(prompt)} tokens"), rig.answer[-1]]
    answer = await rig.client.completions.create(
        model=rig.model.name, prompt=[[1, 2, 3], [4, 5]], n=2, seed=40, max_tokens=20
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["3 tokens", "3 tokens", "2 tokens", "2 tokens"]
    assert sorted(run.sampling.seed for run in rig.mesh.runs) == [40, 40, 41, 41]
    assert len({run.request_id for run in rig.mesh.runs}) == 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


async def test_several_choices_streamed(rig: Rig) -> None:
    stream = await rig.client.completions.create(model=rig.model.name, prompt="Hi", n=3, max_tokens=100, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [rig.text] * 3


async def test_one_token_is_never_split(rig: Rig) -> None:
    answer = await rig.client.completions.create(model=rig.model.name, prompt="Hi", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    assert rig.mesh.runs[0].downstream is None
    assert rig.mesh.reserves == []


async def test_without_a_decode_worker_the_prefill_worker_goes_on(open_rig: OpenRig) -> None:
    async with open_rig(split=False) as rig:
        answer = await rig.client.completions.create(model=rig.model.name, prompt="Hi", max_tokens=100)
        assert answer.choices[0].text == rig.text
        assert rig.mesh.runs[0].downstream is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_and_cancels(rig: Rig, stream: bool) -> None:
    body = {"model": rig.model.name, "prompt": "Hi", "max_tokens": 100, "stop": ["no", "34 sh"], "stream": stream}
    if stream:
        chunks = [c async for c in await rig.client.completions.create(**body)]
        text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        answer = await rig.client.completions.create(**body)
        text, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == (rig.text[: rig.text.index("34 sh")], "stop")


async def test_a_stop_string_cancels_what_still_runs(rig: Rig) -> None:
    rig.mesh.conduct["d1"] = Conduct(hangs_at=len(rig.answer) - 2)
    answer = await rig.client.completions.create(model=rig.model.name, prompt="Hi", max_tokens=100, stop="ships")
    assert answer.choices[0].finish_reason == "stop"
    await rig.mesh.until(lambda: len(rig.mesh.cancels) == 1)


async def test_a_stop_token_is_not_shown(rig: Rig) -> None:
    rig.mesh.answers = lambda prompt: rig.answer[:6]
    answer = await rig.client.completions.create(
        model=rig.model.name, prompt="Hi", max_tokens=100, extra_body={"stop_token_ids": [rig.answer[5]]}
    )
    assert answer.choices[0].text == rig.model.codec.decode(rig.answer[:5])
    assert rig.mesh.runs[0].sampling.stop_token_ids == (rig.answer[5],)


async def test_models(rig: Rig) -> None:
    models = await rig.client.models.list()
    assert models.data[0].id == rig.model.name
    assert (await rig.client.models.retrieve(rig.model.name)).id == rig.model.name
    with pytest.raises(openai.NotFoundError) as caught:
        await rig.client.models.retrieve("none/such")
    assert caught.value.code == "model_not_found"


async def test_health(rig: Rig) -> None:
    assert (await rig.http.get("/health")).status_code == 200
    rig.mesh.fingerprint = "another"
    answer = await rig.http.get("/health")
    assert answer.status_code == 503
    assert "no worker serves" in answer.json()["reason"]
    rig.mesh.ready = False
    assert (await rig.http.get("/health")).status_code == 503


async def test_metrics(rig: Rig) -> None:
    await rig.client.completions.create(model=rig.model.name, prompt="Hi", max_tokens=4)
    text = rig.metrics_text()
    assert 'kvmesh_gateway_requests_total{outcome="ok",route="/v1/completions",status="200"} 1.0' in text
    labels = (
        f'gen_ai_operation_name="text_completion",gen_ai_provider_name="kvmesh",gen_ai_request_model="{rig.model.name}"'
    )
    assert f'gen_ai_client_token_usage_sum{{{labels},gen_ai_token_type="output"}} 4.0' in text
    assert f'gen_ai_server_request_duration_seconds_count{{error_type="",{labels}}} 1.0' in text
    assert f"gen_ai_server_time_per_output_token_seconds_count{{{labels}}} 1.0" in text
    num_prompt = len(rig.model.codec.encode("Hi"))
    assert f'kvmesh_gateway_prompt_tokens_by_source_total{{source="transferred"}} {num_prompt}.0' in text
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{labels}}} 1.0" in text
    assert "kvmesh_gateway_running_requests 0.0" in text


async def test_metrics_link_to_the_traces_of_requests(rig: Rig) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    await rig.client.completions.create(model=rig.model.name, prompt="Hi", max_tokens=4, extra_headers=headers)
    text = rig.metrics_text("application/openmetrics-text;version=1.0.0")
    linked = {line.split("{")[0] for line in text.splitlines() if f'trace_id="{trace_id}"' in line}
    assert {
        "gen_ai_server_time_to_first_token_seconds_bucket",
        "gen_ai_server_request_duration_seconds_bucket",
        "kvmesh_bus_request_seconds_bucket",
        "kvmesh_gateway_requests_total",
    } <= linked
    assert 'kvmesh_unfinished_requests{age="<1s"} 0.0' in text
    assert "kvmesh_unfinished_requests_overdue_seconds 0.0" in text


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json"])
async def test_the_schema_is_served(rig: Rig, path: str) -> None:
    answer = await rig.http.get(path, follow_redirects=True)
    assert answer.status_code == 200 and answer.url.path == "/schema/openapi.json"
    assert answer.history[0].status_code == 307 and "json" in answer.headers["content-type"]
    schema = msgspec.json.decode(answer.content)
    assert {"/v1/completions", "/v1/chat/completions", "/health"} <= set(schema["paths"])
    assert {"prompt", "stop"} <= set(schema["components"]["schemas"]["CompletionBody"]["properties"])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "field",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": SCHEMA},
    ],
)
@pytest.mark.parametrize("chat", [False, True])
async def test_what_an_answer_must_be_goes_to_both_workers(rig: Rig, chat: bool, field: dict[str, object]) -> None:
    body = {"model": rig.model.name, "max_tokens": 5, **field}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
    answer = await rig.http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert answer.status_code == 200
    sampling = rig.mesh.runs[0].sampling
    assert sampling == rig.mesh.reserves[0].sampling
    assert Checkpoint("demo", Path()).takes(sampling.grammar, '{"a":1}')


async def test_a_bad_schema_is_refused_with_its_place_and_no_worker_sees_it(rig: Rig) -> None:
    schema = {"type": "object", "properties": {"a": {"uniqueItems": True}, "b": {"type": "nothing"}}}
    for bad, place in ((schema, "/properties/a/uniqueItems"), ({"properties": {"b": {"type": "x"}}}, "/properties/b")):
        body = {"model": rig.model.name, "prompt": "Hi", "guided_json": bad}
        answer = await rig.http.post("/v1/completions", json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and (error["param"], error["code"]) == ("guided_json", "invalid_schema")
        assert f"`guided_json` at {place}" in error["message"]
    assert not rig.mesh.places
