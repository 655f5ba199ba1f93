"""Every parameter that is known is honoured, neutral or refused by name; no other one is taken."""

import json
from functools import reduce
from typing import Any

import pytest

from schemas.block import unpack_tokens
from services.gateway import limits
from services.gateway.api import parameters
from services.gateway.api.capabilities import BODIES
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.openai import decode_as
from services.gateway.api.parameters import PARTS, UNHONOURED, Parameter, Part, Route, Treatment
from tests.gateway.conftest import Rig

NEEDED = {
    Route.COMPLETIONS: {"model": "demo_model", "prompt": "Hi"},
    Route.CHAT: {"model": "demo_model", "messages": [{"role": "user", "content": "Hi"}]},
    Route.RESPONSES: {"model": "demo_model", "input": "Hi"},
}
CASES = [(parameter, route) for parameter in UNHONOURED for route in sorted(parameter.routes & BODIES.keys())]
REFUSED_PARTS = [
    (part, route, value)
    for part in PARTS
    for route in sorted(part.routes)
    for value in part.values
    if part.treatment is Treatment.REFUSED
]
HARMFUL = {"asks for": ["something", 7]}


def named(value: object) -> str:
    if isinstance(value, Parameter):
        return f"{value.name}-{value.treatment}"
    return value.path if isinstance(value, Part) else str(value)


def refusal(route: Route, **fields: object) -> InvalidRequestError | None:
    try:
        decode_as(json.dumps(NEEDED[route] | fields).encode(), BODIES[route], route)
    except InvalidRequestError as error:
        return error
    return None


@pytest.mark.parametrize(("parameter", "route"), CASES, ids=named)
def test_each_is_taken_or_refused_as_the_table_says(parameter: Parameter, route: Route) -> None:
    for value in (None, *parameter.harmless):
        assert refusal(route, **{parameter.name: value}) is None
    error = refusal(route, **{parameter.name: HARMFUL})
    if parameter.treatment is Treatment.NEUTRAL:
        assert error is None
    else:
        assert error is not None and (error.status, error.param) == (400, parameter.name)
        assert error.code == "unsupported_parameter" and parameter.why in error.message


@pytest.mark.parametrize(("part", "route", "value"), REFUSED_PARTS, ids=named)
def test_a_value_that_is_refused_is_refused_by_name(part: Part, route: Route, value: object) -> None:
    name, *rest = part.path.split(".")
    asked: object = reduce(lambda inner, step: {step: inner}, reversed(rest), value)
    error = refusal(route, **{name: asked})
    assert error is not None and (error.status, error.param, error.code) == (400, part.path, "unsupported_parameter")
    assert part.why in error.message


async def test_a_summary_is_the_best_there_is(rig: Rig) -> None:
    body = NEEDED[Route.RESPONSES] | {"model": rig.model.name, "reasoning": {"summary": "auto"}}
    answer = await rig.http.post(Route.RESPONSES, json=body)
    assert answer.status_code == 200 and answer.json()["reasoning"]["summary"] is None


@pytest.mark.parametrize("route", BODIES)
def test_no_parameter_stands_in_the_table_twice(route: Route) -> None:
    names = [parameter.name for parameter in UNHONOURED if route in parameter.routes]
    assert len(names) == len(set(names))
    assert not set(names) & set(BODIES[route].__struct_fields__)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("frequencey_penalty", "frequency_penalty"),
     ("kv_transfer_param", "kv_transfer_params"), ("stop_token_id", "stop_token_ids"), ("xyzzy", None)],
)  # fmt: skip
@pytest.mark.parametrize("route", BODIES)
def test_an_unknown_name_is_refused_with_the_nearest_one(route: Route, name: str, meant: str | None) -> None:
    error = refusal(route, **{name: None})
    assert error is not None and (error.param, error.code) == (name, "unknown_parameter")
    assert (f"did you mean `{meant}`?" in error.message) if meant else ("did you mean" not in error.message)


def test_a_name_of_a_million_characters_costs_nothing() -> None:
    error = refusal(Route.CHAT, **{"x" * 1_000_000: 1})
    assert error is not None and len(error.message) <= 500


@pytest.mark.parametrize("route", BODIES)
def test_what_is_long_is_refused_or_passed_over_before_it_is_decoded(
    route: Route, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long body no value is looked into but what is part of the prompt."""
    monkeypatch.setattr(parameters, "_decoded", lambda raw: pytest.fail(f"{len(bytes(raw))} bytes are decoded"))
    long = "x" * 2_000_000
    for name in BODIES[route].__struct_fields__:
        if limits.LONG_FIELDS.get(name) != limits.MAX_BODY_BYTES:
            error = refusal(route, **{name: long})
            assert error is not None and (error.param, error.code) == (name, "too_large")
    for parameter, routes in CASES:
        if routes is route:
            error = refusal(route, **{parameter.name: long})
            assert error is not None and error.param == parameter.name
            assert error.code == "too_large" or parameter.treatment is Treatment.REFUSED


async def test_capabilities_name_every_parameter(rig: Rig) -> None:
    told = (await rig.http.get("/v1/capabilities")).json()
    assert (told["model"], told["context_length"]) == (rig.model.name, rig.model.context_length)
    for route, body in BODIES.items():
        found = {one["name"]: one["treatment"] for one in told["parameters"][route.value] if not one["values"]}
        assert {name for name, treatment in found.items() if treatment == "honoured"} == set(body.__struct_fields__)
        others = {one.name: one.treatment for one in UNHONOURED if route in one.routes}
        told_parts = {(one["name"], one["treatment"], *one["values"]) for one in told["parameters"][route.value]}
        parts = [part for part in PARTS if route in part.routes]
        assert told_parts >= {(part.path, part.treatment, *part.values) for part in parts}
        paths = {part.path for part in parts}
        assert {name: found[name] for name in found.keys() - body.__struct_fields__ - paths} == others


@pytest.mark.parametrize("route", BODIES)
async def test_sampling_parameters_reach_the_workers(rig: Rig, route: Route) -> None:
    asked = {"min_p": 0.25, "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
             "repetition_penalty": 1.25, "logit_bias": {"5": -100, "6": 2.5}, "allowed_token_ids": [5, 6],
             "max_tokens": 4, "top_k": 3, "top_p": 0.5, "temperature": 0.75, "stop_token_ids": [9]}  # fmt: skip
    body = {**NEEDED[route], "model": rig.model.name, **asked}
    if route is Route.RESPONSES:
        body["max_output_tokens"] = body.pop("max_tokens")
    answer = await rig.http.post(route.value, json=body)
    assert answer.status_code == 200, answer.text
    sampling = rig.mesh.runs[0].sampling
    told = {name: getattr(sampling, name) for name in asked}
    assert told == asked | {"logit_bias": ((5, -100.0), (6, 2.5)), "allowed_token_ids": (5, 6), "stop_token_ids": (9,)}


@pytest.mark.parametrize(
    ("param", "fields"),
    [("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": False}}),
     ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
     ("chat_template_kwargs", {"reasoning_effort": "low"}), ("documents", {"documents": [{"text": "x"}]}),
     ("continue_final_message", {"continue_final_message": True})],
)  # fmt: skip
async def test_what_the_template_does_not_know_is_refused(rig: Rig, param: str, fields: dict[str, object]) -> None:
    answer = await rig.http.post("/v1/chat/completions", json=NEEDED[Route.CHAT] | fields | {"model": rig.model.name})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("route", "options"), [
    (Route.COMPLETIONS, {"include_usage": True}), (Route.CHAT, {"continuous_usage_stats": True}),
    (Route.RESPONSES, {"include_obfuscation": True}),
])  # fmt: skip
async def test_options_of_a_stream_go_with_a_stream(rig: Rig, route: Route, options: dict[str, Any]) -> None:
    body: dict[str, Any] = NEEDED[route] | {"model": rig.model.name}
    for stream in (None, False):
        answer = await rig.http.post(route, json=body | {"stream": stream, "stream_options": options})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream_options")
    for fields in ({"stream_options": options, "stream": True}, {"stream_options": {}}):
        assert (await rig.http.post(route, json=body | fields)).status_code == 200


async def test_an_answer_may_go_on_with_the_last_message(rig: Rig) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The old"}]
    body = {"model": rig.model.name, "messages": messages, "continue_final_message": True}
    assert (await rig.http.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = unpack_tokens(rig.mesh.runs[0].prompt)
    assert rig.model.codec.decode(prompt).endswith("The old")


async def test_bad_words_reach_the_workers_as_tokens(rig: Rig) -> None:
    body = {"model": rig.model.name, "prompt": "Hi", "bad_words": ["harbour", " quiet mill"]}
    assert (await rig.http.post("/v1/completions", json=body)).status_code == 200
    encode = rig.model.codec.encode
    words = ["harbour", " harbour", "quiet mill", " quiet mill"]
    assert rig.mesh.runs[0].sampling.bad_words == tuple(tuple(encode(word, add_special_tokens=False)) for word in words)
