"""The API's description as a page without scripts: it needs no network, and nothing but the schema."""

import functools
from collections.abc import Collection, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import jinja2
import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.openapi.plugins import OpenAPIRenderPlugin
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

PAGE = "/schema"
JSON = "/schema/openapi.json"

_HTML = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ info.title }}: API</title>
<style>body { font-family: sans-serif; max-width: 60em; margin: auto; padding: 1em } td { padding-right: 2em }</style>
</head>
<body>
<h1>{{ info.title }}: API</h1>
<p>The same as JSON: <a href="{{ json }}">OpenAPI {{ openapi }}</a></p>
{% for path, operations in paths.items() %}{% for method, operation in operations.items() %}
<h2><code>{{ method | upper }} {{ path }}</code></h2>
<p>{{ operation.summary }}
{% if operation.requestBody %}
{% set model = type_name(operation.requestBody.content["application/json"].schema) %}
<br>Body: <a href="#{{ model }}">{{ model }}</a>
{% endif %}</p>
{% endfor %}{% endfor %}
{% for name, model in components.schemas.items() %}
<h2 id="{{ name }}">{{ name }}</h2>
<table>
{% for field, schema in (model.properties or {}).items() %}
<tr><td><code>{{ field }}</code></td><td>{{ type_name(schema) }}</td>
<td>{{ "required" if field in model.required }}</td></tr>
{% endfor %}
</table>
{% endfor %}
</body>
</html>
"""


class SchemaPage(OpenAPIRenderPlugin):
    """Lists operations and the models of their bodies."""

    def __init__(self) -> None:
        super().__init__(path="/")

    def render(self, request: Request[Any, Any, State], openapi_schema: dict[str, Any]) -> bytes:
        return _template.render(openapi_schema, json=JSON, type_name=_type_name).encode()


class Described(NamedTuple):
    """A route as Litestar does not know it: what it takes and gives is decoded and encoded by ourselves.

    `statuses`: of its errors, beside those that every route has. `told`: those that say more than an error. `streams`:
    the answer may be a stream of events.
    """

    reply: object
    body: type[msgspec.Struct] | None = None
    statuses: Collection[int] = ()
    told: Collection[int] = ()
    streams: bool = False


def describe(openapi: OpenAPI, routes: Mapping[str, Described]) -> None:
    """Say what each path takes, and every answer that it gives."""
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
            reply = one.reply if status in one.told else ErrorReply
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


def _type_name(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_type_name, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"array of ({_type_name(schema.get('items', {}))})"
    return schema.get("type", "any")


_template = jinja2.Template(_HTML, autoescape=True, trim_blocks=True)
