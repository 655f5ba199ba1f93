"""What Litestar's description of the API lacks: the bodies, answers and errors of routes that we decode ourselves."""

import functools
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import msgspec
from litestar.openapi.spec import (
    OpenAPI,
    OpenAPIMediaType,
    OpenAPIResponse,
    OpenAPIType,
    Reference,
    RequestBody,
    Schema,
)

from services.gateway.api.replies import ErrorReply

JSON = "/schema/openapi.json"


class Described(NamedTuple):
    """A route as Litestar does not know it: what it takes and gives is decoded and encoded by ourselves.

    `statuses`: of its errors, beside those that every route has. `with_reply`: those whose answer is `reply`, no error.
    `streams`: the answer may be a stream of events.
    """

    reply: object
    body: type[msgspec.Struct] | None = None
    statuses: Collection[int] = ()
    with_reply: Collection[int] = ()
    streams: bool = False


def describe(openapi: OpenAPI, routes: Mapping[str, Described]) -> None:
    """Describe what each path takes, and every answer that it gives."""
    named = (kind for one in routes.values() for kind in (one.body, one.reply) if kind is not None)
    by_kind, models = _components((*named, ErrorReply))
    cast(dict[str, Any], openapi.components.schemas).update(models)
    for path, one in routes.items():
        item = (openapi.paths or {})[path]
        operation = item.get if one.body is None else item.post
        assert operation is not None
        if one.body is not None:
            operation.request_body = RequestBody(content=_json(by_kind[repr(one.body)]), required=True)
        content = _json(by_kind[repr(one.reply)])
        if one.streams:
            content |= {"text/event-stream": OpenAPIMediaType(schema=_schema({"type": "string"}))}
        operation.responses = {"200": OpenAPIResponse("The answer.", content=content)}
        for status in sorted({*_EVERYWHERE, *one.statuses}):
            reply = one.reply if status in one.with_reply else ErrorReply
            problem = OpenAPIResponse(HTTPStatus(status).phrase, content=_json(by_kind[repr(reply)]))
            operation.responses[str(status)] = problem


@functools.cache
def _components(kinds: tuple[object, ...]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return a reference to the schema of each of these, by its `repr`, and all schemas that these need, by name."""
    refs, models = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    return dict(zip(map(repr, kinds), refs, strict=True)), models


_EVERYWHERE = (401, 405, 421, 500, 503)
"""No key, another method, another's name in the header Host, a fault of ours, too many at once."""


def _json(schema: dict[str, Any]) -> dict[str, OpenAPIMediaType]:
    return {"application/json": OpenAPIMediaType(schema=_schema(schema))}


def _schema(schema: dict[str, Any]) -> Schema | Reference:
    return Reference(schema["$ref"]) if "$ref" in schema else Schema(type=OpenAPIType(schema["type"]))
