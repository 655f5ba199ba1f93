"""The OpenAPI document is true: what it describes, generated and sent, is answered as it says."""

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.gateway.conftest import Rig
from tests.gateway.test_locate import directory_of
from tests.share import examples

OPERATIONS = [
    "POST /v1/completions", "POST /v1/chat/completions", "POST /v1/responses", "POST /tokenize", "POST /detokenize",
    "POST /v1/kv/locate",
    "GET /v1/models", "GET /v1/models/{model_id}", "GET /v1/capabilities", "GET /version", "GET /health",
]  # fmt: skip
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
    unsupported_method,
]  # fmt: skip


GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "logprobs": 1, "prompt_logprobs": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "n": 2},
    "/v1/responses": {"input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "/tokenize": {"prompt": "Hi", "return_token_strs": True},
    "/v1/kv/locate": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}


def try_operation(url: str, name: str, model: str) -> set[int]:
    """Send what may be sent to one route; return the statuses of the answers."""
    schema: Any = schemathesis.openapi.from_url(f"{url}/schema/openapi.json")
    method, path = name.split()
    statuses: set[int] = set()

    operation = schema[path][method]

    def ask(case: Any) -> None:
        response = case.call(timeout=30)
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    @given(case=operation.as_strategy())
    @settings(
        max_examples=examples(60), deadline=None, database=None, derandomize=True, suppress_health_check=[*HealthCheck]
    )
    def send(case: Any) -> None:
        if isinstance(case.body, dict) and len(case.body) % 2:  # else few would get as far as the limits
            known = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}
            case.body.update({name: value for name, value in known.items() if name in case.body})
        ask(case)

    if path in GOOD:
        ask(operation.Case(body=GOOD[path] | {"model": model}, media_type="application/json"))
    send()
    return statuses


@pytest.mark.parametrize("name", OPERATIONS)
async def test_what_is_described_is_what_is_answered(rig: Rig, name: str) -> None:
    async with directory_of(rig):
        statuses = await asyncio.to_thread(try_operation, rig.url, name, rig.model.name)
    assert statuses <= {200, 400, 404} and 200 in statuses | ({200} if "{model_id}" in name else set())


async def test_every_route_is_described(rig: Rig) -> None:
    document = (await rig.http.get("/schema/openapi.json")).json()
    described = [f"{method.upper()} {path}" for path, item in document["paths"].items() for method in item]
    assert sorted(described) == sorted(OPERATIONS)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        operation = document["paths"][path]["post"]
        errors = {"400", "401", "404", "405", "408", "413", "415", "421", "429", "500", "503", "504"}
        assert set(operation["responses"]) == {"200"} | errors
        assert {"application/json", "text/event-stream"} == set(operation["responses"]["200"]["content"])
        assert operation["requestBody"]["required"]
