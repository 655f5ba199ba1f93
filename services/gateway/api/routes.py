"""The HTTP surface: routes, health, and errors in OpenAI's shape."""

import logging
import time
from dataclasses import dataclass, field

import msgspec
from litestar import Litestar, Request, Response, get, post
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig
from litestar.params import FromPath
from litestar.response import Redirect
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp

from schemas import subjects
from schemas.ids import RequestId, new_id
from schemas.worker import DescribeFleet
from services.bus.base import BusError
from services.bus.typed import TypedBus
from services.config import GatewayConfig
from services.gateway import limits
from services.gateway.api.answer import Answer, Call, ChoiceText
from services.gateway.api.bodies import Bodies
from services.gateway.api.docs import JSON, PAGE, SchemaPage, add_bodies
from services.gateway.api.guard import EarlyRefusal, NotNowError, check_json, tenant_of
from services.gateway.api.openai import ChatBody, CompletionBody, InvalidRequestError, decode_body
from services.gateway.api.prepare import GatewayModel, Prepared, make_jobs, prepare
from services.gateway.api.replies import (
    ErrorReply,
    HealthReply,
    ModelReply,
    ModelsReply,
    Style,
    encode_reply,
    error_of_fail,
    error_of_invalid,
    retry_after_of,
)
from services.gateway.api.text import StopMatcher
from services.gateway.observe.answer_observer import AnswerObserver
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.events import FailRequest
from services.gateway.request.job import Job
from services.gateway.requests import Requests
from services.runtime import now_ms
from services.telemetry import Telemetry

log = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"

HttpRequest = Request[object, object, State]

_EXPOSED = ["x-request-id", "traceparent", "retry-after"]
"""Headers of an answer that a page of another origin may read, where such pages are let in."""
_TRACEPARENT_LENGTH = 55
"""Another one is malformed; it may be long, and what reads them remembers them."""


@dataclass(kw_only=True)
class Gateway:
    """What the routes share. `stopping`: intake has ended."""

    config: GatewayConfig
    model: GatewayModel
    requests: Requests
    telemetry: Telemetry
    metrics: GatewayMetrics
    bus: TypedBus
    started_s: int
    bodies: Bodies = field(default_factory=Bodies)
    stopping: bool = False


def build_app(gateway: Gateway) -> Litestar:
    """Return the ASGI application of one gateway."""

    @post(COMPLETIONS, status_code=200, summary="OpenAI completions")
    async def completions(request: HttpRequest) -> ASGIApp:
        return await _generate(gateway, request, COMPLETIONS)

    @post(CHAT_COMPLETIONS, status_code=200, summary="OpenAI chat completions")
    async def chat_completions(request: HttpRequest) -> ASGIApp:
        return await _generate(gateway, request, CHAT_COMPLETIONS)

    @get("/v1/models", summary="The model that is served")
    async def models(request: HttpRequest) -> Response[bytes]:
        try:
            tenant_of(gateway.config.tenants, request.headers)
        except InvalidRequestError as error:
            return _json(error_of_invalid(error), error.status)
        return _json(ModelsReply(data=tuple(_model_reply(gateway, name) for name in _names(gateway))))

    @get("/v1/models/{model_id:path}", summary="One model")
    async def model(request: HttpRequest, model_id: FromPath[str]) -> Response[bytes]:
        name = model_id.lstrip("/")
        try:
            tenant_of(gateway.config.tenants, request.headers)
            if name not in gateway.model.names:
                raise InvalidRequestError(f"there is no model {name!r} here", "model", "model_not_found", 404)
        except InvalidRequestError as error:
            return _json(error_of_invalid(error), error.status)
        return _json(_model_reply(gateway, name))

    @get("/health", summary="Could a request be served now?")
    async def health() -> Response[bytes]:
        reason = await _unhealthy_reason(gateway)
        if reason:
            return _json(HealthReply(status="unavailable", reason=reason), 503)
        return _json(HealthReply(status="ok"))

    @get(["/", "/docs"], include_in_schema=False)
    async def docs() -> Redirect:
        return Redirect(PAGE, status_code=307)

    @get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> Redirect:
        return Redirect(JSON, status_code=307)

    origins = gateway.config.cors_origins
    cors = CORSConfig([*origins], allow_methods=["GET", "POST"], expose_headers=_EXPOSED) if origins else None
    app = Litestar(
        route_handlers=[completions, chat_completions, models, model, health, docs, openapi_json],
        exception_handlers={HTTPException: _on_http_exception, Exception: _on_exception},
        request_max_body_size=limits.MAX_BODY_BYTES,
        cors_config=cors,
        logging_config=None,
        openapi_config=OpenAPIConfig(title="kvmesh", version="1", render_plugins=[SchemaPage()]),
    )
    add_bodies(app.openapi_schema, {COMPLETIONS: CompletionBody, CHAT_COMPLETIONS: ChatBody})
    return app


async def _generate(gateway: Gateway, request: HttpRequest, route: str) -> ASGIApp:
    """Return the response that answers a generation, or says what is wrong with it.

    Who asks, and what is sent, is known from the headers: of a stranger no body is read.
    """
    has_read = False
    observer: AnswerObserver | None = None
    try:
        if gateway.stopping:
            raise NotNowError("draining", "this gateway is shutting down")
        tenant = tenant_of(gateway.config.tenants, request.headers)
        check_json(request.headers)
        async with gateway.bodies.read(request, gateway.config.request_timeout_s) as body:
            has_read = True
            observer = _observer(gateway, request, route)
            call = await _call(gateway, observer, tenant, route, body)
    except InvalidRequestError as error:
        observer = observer or _observer(gateway, request, route)
        observer.refused(error.status, "invalid", error.message)
        reply, status, headers = error_of_invalid(error), error.status, dict[str, str]()
    except NotNowError as error:
        observer, fail = observer or _observer(gateway, request, route), error.fail
        observer.refused(fail.status, fail.code, fail.message)
        reply, status, headers = error_of_fail(fail), fail.status, {"retry-after": retry_after_of(fail)}
    except BaseException as error:
        if observer is not None:
            observer.broke(error)
        raise
    else:
        return Answer(call, observer, gateway.requests)
    headers |= {"x-request-id": observer.request_id, "traceparent": observer.trace.traceparent}
    return _asgi_error(reply, status, headers) if has_read else EarlyRefusal(reply, status, headers)


def _observer(gateway: Gateway, request: HttpRequest, route: str) -> AnswerObserver:
    parent = request.headers.get("traceparent", "")
    return AnswerObserver(
        RequestId(new_id("req")),
        route,
        parent if len(parent) == _TRACEPARENT_LENGTH else "",
        gateway.metrics,
        gateway.telemetry,
        gateway.requests.keep_trace,
    )


async def _call(gateway: Gateway, observer: AnswerObserver, tenant: str, route: str, payload: bytes) -> Call:
    """Check and tokenize a body. Raises InvalidRequestError and NotNowError."""
    request_id, model, is_chat = observer.request_id, gateway.model, route == CHAT_COMPLETIONS
    deadline_ms = now_ms() + round(gateway.config.request_timeout_s * 1000)

    def understand() -> tuple[Prepared, list[Job]]:
        prepared = prepare(model, decode_body(payload, is_chat=is_chat))
        return prepared, make_jobs(model.key_of(tenant), prepared, request_id, deadline_ms, observer.trace)

    prepared, jobs = await gateway.bodies.understand(len(payload), understand)
    options = prepared.options
    style = Style(
        chat=is_chat,
        hex_id=request_id.removeprefix("req-"),
        created=int(time.time()),
        model=options.model,
        include_usage=options.include_usage,
    )
    return Call(
        style=style,
        options=options,
        jobs=jobs,
        texts=[_choice_text(model, prepared) for _ in jobs],
        num_prompt_tokens=sum(map(len, prepared.prompts)),
        timeout_s=gateway.config.request_timeout_s,
    )


def _choice_text(model: GatewayModel, prepared: Prepared) -> ChoiceText:
    options = prepared.options
    hidden = set(options.stop_token_ids) | (set[int]() if options.ignore_eos else model.eos_token_ids)
    return ChoiceText(model.codec.detokenizer(), StopMatcher(options.stops), hidden)


async def _unhealthy_reason(gateway: Gateway) -> str:
    """Say why no request could be served now; empty if one could."""
    if gateway.stopping:
        return "this gateway is shutting down"
    try:
        fleet = await gateway.bus.ask(subjects.FLEET, (), DescribeFleet(), limits.HEALTH_TIMEOUT_S)
    except BusError as error:
        return f"no scheduler answers: {error.reason}"
    if not fleet.ready:
        return f"no request could be placed: {len(fleet.workers)} workers are known, and they are not enough"
    fingerprint = gateway.model.layout.fingerprint
    if all(load.worker.fingerprint != fingerprint for load in fleet.workers):
        return f"no worker serves this gateway's model {gateway.model.name} ({fingerprint})"
    return ""


def _names(gateway: Gateway) -> list[str]:
    """The name that clients should use stands first."""
    return [gateway.model.name, *sorted(gateway.model.names - {gateway.model.name})]


def _model_reply(gateway: Gateway, name: str) -> ModelReply:
    return ModelReply(id=name, created=gateway.started_s, context_length=gateway.model.context_length)


def _on_http_exception(request: HttpRequest, error: HTTPException) -> Response[bytes]:
    """404, 405 and their like, in OpenAI's shape."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    invalid = InvalidRequestError(message, status=error.status_code)
    return _json(error_of_invalid(invalid), error.status_code, dict(error.headers or {}))


def _on_exception(request: HttpRequest, error: Exception) -> Response[bytes]:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _json(error_of_fail(FailRequest("internal", "an internal error; see the gateway's log", 500)), 500)


def _json(reply: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response[bytes]:
    return Response(encode_reply(reply), status_code=status, media_type="application/json", headers=headers)


def _asgi_error(reply: ErrorReply, status: int, headers: dict[str, str]) -> ASGIApp:
    """Like `_json`, for a route whose other answer is an ASGI application."""
    return ASGIResponse(body=encode_reply(reply), status_code=status, media_type="application/json", headers=headers)
