"""The API's description as a page without scripts: it needs no network, and nothing but the schema."""

from collections.abc import Mapping
from typing import Any, cast

import jinja2
import msgspec
from litestar import Request
from litestar.datastructures import State
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.openapi.spec import OpenAPI, OpenAPIMediaType, Reference, RequestBody

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
{% for field, schema in model.properties.items() %}
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


def add_bodies(openapi: OpenAPI, bodies: Mapping[str, type[msgspec.Struct]]) -> None:
    """Say what each path takes: its route decodes the body itself, so Litestar does not know."""
    refs, models = msgspec.json.schema_components(bodies.values(), ref_template="#/components/schemas/{name}")
    cast(dict[str, Any], openapi.components.schemas).update(models)
    for path, ref in zip(bodies, refs, strict=True):
        operation = (openapi.paths or {})[path].post
        assert operation is not None
        media = OpenAPIMediaType(schema=Reference(ref["$ref"]))
        operation.request_body = RequestBody(content={"application/json": media}, required=True)


def _type_name(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(map(_type_name, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"array of ({_type_name(schema['items'])})"
    return schema.get("type", "any")


_template = jinja2.Template(_HTML, autoescape=True, trim_blocks=True)
