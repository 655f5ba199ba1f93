"""What this API takes: every known parameter, and what becomes of it. Pages and `/v1/capabilities` are made of it."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

import msgspec
from msgspec import inspect as types

from services.gateway.api.openai import ChatBody, CompletionBody
from services.gateway.api.parameters import PARTS, UNHONOURED, Route, Treatment
from services.gateway.api.responses import ResponsesBody

BODIES: Mapping[Route, type[msgspec.Struct]] = {
    Route.COMPLETIONS: CompletionBody,
    Route.CHAT: ChatBody,
    Route.RESPONSES: ResponsesBody,
}
"""The body of each route that is served."""


class ParameterReply(msgspec.Struct, frozen=True, kw_only=True):
    """`name` has a path where it is about a part of a parameter. `harmless`: the values of a refused parameter that are
    taken, beside null, as they ask for nothing. `values`: those that `treatment` is about, where it is not all."""

    name: str
    origin: str
    treatment: Treatment
    description: str
    harmless: tuple[Any, ...] = ()
    values: tuple[Any, ...] = ()


class CapabilitiesReply(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    context_length: int
    parameters: dict[str, tuple[ParameterReply, ...]]
    """By route."""


def capabilities(model: str, context_length: int) -> CapabilitiesReply:
    parameters = {route.value: tuple(parameters_of(route)) for route in BODIES}
    return CapabilitiesReply(model=model, context_length=context_length, parameters=parameters)


def parameters_of(route: Route) -> Iterator[ParameterReply]:
    """Yield the parameters of a route: those that are honoured in the order of its body, then the others, then
    parts of those that are honoured."""
    info = types.type_info(BODIES[route])
    assert isinstance(info, types.StructType)
    for field in info.fields:
        described = field.type
        assert isinstance(described, types.Metadata), f"{field.name} says what it is for"
        meta = cast(Any, described)
        yield ParameterReply(
            name=field.encode_name,
            origin=meta.extra["origin"],
            treatment=Treatment.HONOURED,
            description=meta.extra_json_schema["description"],
        )
    for parameter in UNHONOURED:
        if route in parameter.routes:
            name, origin, treatment, _, why, harmless = parameter
            yield ParameterReply(name=name, origin=origin, treatment=treatment, description=why, harmless=harmless)
    for part in PARTS:
        if route in part.routes:
            path, origin, treatment, _, why, values = part
            yield ParameterReply(name=path, origin=origin, treatment=treatment, description=why, values=values)
