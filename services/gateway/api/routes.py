"""The HTTP surface: routes, health, metrics, and errors in OpenAI's shape."""

import asyncio
import logging
import time
from dataclasses import dataclass

import msgspec
from litestar import Litestar, Request, Response, get, post
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
from services.gateway.api.docs import JSON, PAGE, SchemaPage, add_bodies
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
from services.gateway.requests import Requests
from services.runtime import now_ms
from services.telemetry import Telemetry

log = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
CHAT_COMPLETIONS = "/v1/chat/completions"

HttpRequest = Request[object, object, State]


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
            _tenant_of(gateway, request)
        except InvalidRequestError as error:
            return _json(error_of_invalid(error), error.status)
        return _json(ModelsReply(data=tuple(_model_reply(gateway, name) for name in _names(gateway))))

    @get("/v1/models/{model_id:path}", summary="One model")
    async def model(request: HttpRequest, model_id: FromPath[str]) -> Response[bytes]:
        name = model_id.lstrip("/")
        try:
            _tenant_of(gateway, request)
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

    @get("/metrics", summary="Prometheus metrics")
    async def metrics(request: HttpRequest) -> Response[bytes]:
        text, content_type = gateway.metrics.render(request.headers.get("accept", ""))
        return Response(text, media_type=content_type)

    @get(["/", "/docs"], include_in_schema=False)
    async def docs() -> Redirect:
        return Redirect(PAGE, status_code=307)

    @get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> Redirect:
        return Redirect(JSON, status_code=307)

    app = Litestar(
        route_handlers=[completions, chat_completions, models, model, health, metrics, docs, openapi_json],
        exception_handlers={HTTPException: _on_http_exception, Exception: _on_exception},
        request_max_body_size=limits.MAX_BODY_BYTES,
        logging_config=None,
        openapi_config=OpenAPIConfig(title="kvmesh", version="1", render_plugins=[SchemaPage()]),
    )
    add_bodies(app.openapi_schema, {COMPLETIONS: CompletionBody, CHAT_COMPLETIONS: ChatBody})
    return app


async def _generate(gateway: Gateway, request: HttpRequest, route: str) -> ASGIApp:
    """Return the response that answers a generation, or says what is wrong with it."""
    request_id = RequestId(new_id("req"))
    body = await _read(request, gateway.config.request_timeout_s)
    parent = request.headers.get("traceparent", "")
    observer = AnswerObserver(
        request_id, route, parent, gateway.metrics, gateway.telemetry, gateway.requests.keep_trace
    )
    try:
        tenant = _tenant_of(gateway, request)
        if isinstance(body, InvalidRequestError):
            raise body
        if gateway.stopping:
            return _refuse_stopping(observer)
        call = await _call(gateway, observer, tenant, route, body)
    except InvalidRequestError as error:
        observer.refused(error.status, "invalid", error.message)
        headers = {"x-request-id": request_id, "traceparent": observer.trace.traceparent}
        return _asgi_error(error_of_invalid(error), error.status, headers)
    except BaseException as error:
        observer.broke(error)
        raise
    return Answer(call, observer, gateway.requests)


def _tenant_of(gateway: Gateway, request: HttpRequest) -> str:
    """Return whose request this is. Raises InvalidRequestError for a key that is missing or unknown."""
    tenants = gateway.config.tenants
    if not tenants:
        return ""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    tenant = tenants.get(key.strip()) if scheme.lower() == "bearer" else None
    if tenant is None:
        raise InvalidRequestError("this API key is missing or unknown", None, "invalid_api_key", 401)
    return tenant


async def _read(request: HttpRequest, timeout_s: float) -> bytes | InvalidRequestError:
    try:
        async with asyncio.timeout(timeout_s):
            return await request.body()
    except TimeoutError:
        return InvalidRequestError(f"the body did not come within {timeout_s:g} s", None, "request_timeout", 408)
    except HTTPException as error:
        if error.status_code != 413:
            raise
        return InvalidRequestError(f"the body is over {limits.MAX_BODY_BYTES} bytes", None, "request_too_large", 413)


async def _call(gateway: Gateway, observer: AnswerObserver, tenant: str, route: str, payload: bytes) -> Call:
    """Check and tokenize a body. Raises InvalidRequestError."""
    request_id, model, is_chat = observer.request_id, gateway.model, route == CHAT_COMPLETIONS
    deadline_ms = now_ms() + round(gateway.config.request_timeout_s * 1000)
    prepared = await prepare(model, decode_body(payload, is_chat=is_chat))
    jobs = await make_jobs(model.key_of(tenant), prepared, request_id, deadline_ms, observer.trace)
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


def _refuse_stopping(observer: AnswerObserver) -> ASGIApp:
    fail = FailRequest("draining", "this gateway is shutting down", 503, limits.DEFAULT_RETRY_AFTER_MS)
    observer.refused(fail.status, fail.code, fail.message)
    headers = {"retry-after": retry_after_of(fail), "traceparent": observer.trace.traceparent}
    return _asgi_error(error_of_fail(fail), fail.status, headers)


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
