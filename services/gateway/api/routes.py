"""The HTTP surface: routes, health, and errors in OpenAI's shape."""

import asyncio
import contextlib
import functools
import importlib.metadata
import logging
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from litestar import Litestar, Request, Response, get, post
from litestar.config.cors import CORSConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.openapi import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.params import FromPath
from litestar.response import Redirect
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from schemas.ids import GatewayId, RequestId, new_id
from services.bus.base import BusError
from services.bus.fleet import ask_fleet
from services.bus.typed import TypedBus
from services.config import MeshConfig
from services.gateway import limits
from services.gateway.api.answer import Answer, Call
from services.gateway.api.bodies import ENCODINGS, Bodies, owner_of
from services.gateway.api.capabilities import CapabilitiesReply, capabilities
from services.gateway.api.choice import Choice
from services.gateway.api.constraints import Constraint
from services.gateway.api.docs import JSON, Described, describe
from services.gateway.api.grammars import UnderstoodGrammars
from services.gateway.api.guard import ApiKeys, EarlyRefusal, NotNowError, asks_to_split, check_json
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.locate import LocateBody, Located, LocateReply, prompt_asked_for
from services.gateway.api.logprobs import TokenTexts
from services.gateway.api.openai import ChatBody, CompletionBody, decode_body
from services.gateway.api.parameters import Route
from services.gateway.api.prepare import GatewayModel, Prepared, check_model, make_jobs, prepare
from services.gateway.api.replies import (
    ErrorReply,
    HealthReply,
    ModelReply,
    ModelsReply,
    VersionReply,
    encode_reply,
    error_of_fail,
    error_of_invalid,
    retry_after_of,
)
from services.gateway.api.responses import Responses, ResponsesBody
from services.gateway.api.responses_style import ResponseReply, ResponsesStyle
from services.gateway.api.styles import ChatStyle, CompletionStyle, MessageChoice, Reply, TextChoice
from services.gateway.api.text import StopMatcher
from services.gateway.api.tokenizing import (
    DetokenizeBody,
    DetokenizeReply,
    TokenizeBody,
    TokenizeReply,
    detokenize,
    tokenize,
)
from services.gateway.api.unsent import BoundedReply, Unsent
from services.gateway.observe.answer_observer import AnswerObserver
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.request.events import FailRequest
from services.gateway.request.job import Job, PackedPrompt
from services.gateway.requests import Requests
from services.metric_names import REQUESTS
from services.runtime import now_ms
from services.telemetry import Key, Telemetry
from services.times import GatewayTimes
from services.trust.credentials import signer_of

log = logging.getLogger(__name__)

AskedT = TypeVar("AskedT")
HttpRequest = Request[object, object, State]

_EXPOSED = ["x-request-id", "traceparent", "retry-after"]
"""Headers of an answer that a page of another origin may read, where such pages are let in."""


@dataclass(kw_only=True)
class Gateway:
    """What the routes share. `stopping`: intake has ended."""

    config: MeshConfig
    model: GatewayModel
    requests: Requests
    metrics: GatewayMetrics
    bus: TypedBus
    started_s: int
    stopping: bool = False
    keys: ApiKeys = field(init=False)
    bodies: Bodies = field(init=False)
    unsent: Unsent = field(default_factory=Unsent)
    grammars: UnderstoodGrammars = field(init=False)
    located: Located = field(init=False)

    def __post_init__(self) -> None:
        self.keys = ApiKeys(self.config.gateway.tenants)
        self.bodies = Bodies(self.times)
        self.grammars = UnderstoodGrammars(self.model.grammars, self.times)
        self.located = Located(self.model, self.bus, self.times.place_timeout_s)

    @property
    def times(self) -> GatewayTimes:
        return self.config.times.gateway


def make_gateway(
    config: MeshConfig,
    model: GatewayModel,
    gateway_id: GatewayId,
    bus: TypedBus,
    telemetry: Telemetry,
    tasks: asyncio.TaskGroup,
) -> Gateway:
    """Return a gateway that does not listen yet. Raises UserError where there is no tenant seed."""
    requests = Requests(config, signer_of(config), gateway_id, bus, telemetry, tasks)
    return Gateway(
        config=config,
        model=model,
        requests=requests,
        metrics=GatewayMetrics(bus.metrics, model.name, requests),
        bus=bus,
        started_s=int(time.time()),
    )


_OF_BODIES = (400, 404, 408, 413, 415)
_OF_ANSWERS = (*_OF_BODIES, 429, 504)
_DESCRIBED = {
    Route.COMPLETIONS.value: Described(Reply[TextChoice], CompletionBody, _OF_ANSWERS, streams=True),
    Route.CHAT.value: Described(Reply[MessageChoice], ChatBody, _OF_ANSWERS, streams=True),
    Route.RESPONSES.value: Described(ResponseReply, ResponsesBody, _OF_ANSWERS, streams=True),
    "/tokenize": Described(TokenizeReply, TokenizeBody, _OF_BODIES),
    "/detokenize": Described(DetokenizeReply, DetokenizeBody, _OF_BODIES),
    "/v1/kv/locate": Described(LocateReply, LocateBody, _OF_BODIES),
    "/v1/models": Described(ModelsReply),
    "/v1/models/{model_id}": Described(ModelReply, statuses=(404,)),
    "/v1/capabilities": Described(CapabilitiesReply),
    "/version": Described(VersionReply),
    "/health": Described(HealthReply, with_reply=(503,)),
}


_serving: ContextVar[Gateway] = ContextVar("serving")
"""The gateway whose request is being served."""


class GatewayApp:
    """The ASGI application of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._routes = _routes(gateway.config.gateway.cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self.gateway
        _serving.set(gateway)
        if scope["type"] != "http":
            await self._routes(scope, receive, send)
            return
        request: HttpRequest = Request(scope)
        with contextlib.suppress(InvalidRequestError):
            owner = owner_of(request, gateway.keys.tenant_of(request.headers))
            send = BoundedReply(gateway.unsent, owner, send).pass_on
        # A generation has a deadline of its own, which is earlier.
        limit_s = gateway.config.gateway.request_timeout_s + gateway.times.body_s + 2 * gateway.times.unread_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._routes(scope, receive, send)


@functools.cache
def _routes(origins: tuple[str, ...]) -> Litestar:
    """Return the routes of any gateway that lets in pages of these origins. They keep no state of a gateway, and are
    made once: that costs as much as ten requests."""
    taken, given = (
        [completions, chat_completions, responses, tokens, text, locate],
        [models, model, what_is_taken, version],
    )
    app = Litestar(
        route_handlers=[*taken, *given, health, description],
        exception_handlers={
            HTTPException: _on_http_exception,
            InvalidRequestError: _on_invalid,
            Exception: _on_exception,
        },
        request_max_body_size=limits.MAX_BODY_BYTES,
        cors_config=CORSConfig([*origins], allow_methods=["GET", "POST"], expose_headers=_EXPOSED) if origins else None,
        logging_config=None,
        openapi_config=OpenAPIConfig(title="kvmesh", version="1", render_plugins=[JsonRenderPlugin()]),
    )
    describe(app.openapi_schema, _DESCRIBED)
    return app


@post(Route.COMPLETIONS, status_code=200, summary="OpenAI completions")
async def completions(request: HttpRequest) -> ASGIApp:
    return await _generate(_serving.get(), request, Route.COMPLETIONS)


@post(Route.CHAT, status_code=200, summary="OpenAI chat completions")
async def chat_completions(request: HttpRequest) -> ASGIApp:
    return await _generate(_serving.get(), request, Route.CHAT)


@post(Route.RESPONSES, status_code=200, summary="OpenAI responses, none of which is stored")
async def responses(request: HttpRequest) -> ASGIApp:
    return await _generate(_serving.get(), request, Route.RESPONSES)


@get("/v1/models", summary="The model that is served")
async def models(request: HttpRequest) -> Response[bytes]:
    gateway = _let_in(request)
    return _json(ModelsReply(data=tuple(_model_reply(gateway, name) for name in _names(gateway))))


@get("/v1/models/{model_id:path}", summary="One model")
async def model(request: HttpRequest, model_id: FromPath[str]) -> Response[bytes]:
    gateway, name = _let_in(request), model_id.lstrip("/")
    check_model(gateway.model, name)
    return _json(_model_reply(gateway, name))


@get("/v1/capabilities", summary="Every parameter, and what becomes of it")
async def what_is_taken(request: HttpRequest) -> Response[bytes]:
    served = _let_in(request).model
    return _json(capabilities(served.name, served.context_length))


@get("/version", summary="This program's version")
async def version(request: HttpRequest) -> Response[bytes]:
    _let_in(request)
    return _json(VersionReply(version=importlib.metadata.version("kvmesh")))


@post("/tokenize", status_code=200, summary="The tokens of a text, or of a conversation")
async def tokens(request: HttpRequest) -> ASGIApp:
    return await _answer(_serving.get(), request, lambda model, body, _: tokenize(model, body), _as_it_is)


@post("/detokenize", status_code=200, summary="The text of tokens")
async def text(request: HttpRequest) -> ASGIApp:
    return await _answer(_serving.get(), request, lambda model, body, _: detokenize(model, body), _as_it_is)


@post("/v1/kv/locate", status_code=200, summary="Who holds the KV of a prompt of this tenant's")
async def locate(request: HttpRequest) -> ASGIApp:
    gateway = _serving.get()

    async def holders(prompt: PackedPrompt, owner: str) -> msgspec.Struct:
        return await gateway.located.holders_of(prompt, owner, RequestId(new_id("req")))

    return await _answer(gateway, request, prompt_asked_for, holders)


@get("/health", summary="Could a request be served now?")
async def health() -> Response[bytes]:
    reason = await _unhealthy_reason(_serving.get())
    if reason:
        return _json(HealthReply(status="unavailable", reason=reason), 503)
    return _json(HealthReply(status="ok"))


@get(["/", "/docs", "/openapi.json"], include_in_schema=False)
async def description() -> Redirect:
    return Redirect(JSON, status_code=307)


def _let_in(request: HttpRequest) -> Gateway:
    """Return the gateway that is asked. Raises InvalidRequestError for who has no key of it."""
    gateway = _serving.get()
    gateway.keys.tenant_of(request.headers)
    return gateway


async def _generate(gateway: Gateway, request: HttpRequest, route: Route) -> ASGIApp:
    """Return the response that answers a generation, or names what is wrong with it.

    Who asks, and what is sent, is known from the headers: of an unauthenticated client no body is read, and nothing is
    kept.
    """
    has_read = False
    observer: AnswerObserver | None = None
    try:
        tenant = gateway.keys.tenant_of(request.headers)
        check_json(request.headers)
    except InvalidRequestError as error:
        gateway.metrics.registry.inc(REQUESTS, route, str(error.status), "invalid")
        return _refusal(gateway, error_of_invalid(error), error.status, {}, has_read=False)
    try:
        # Read and understand the body. A completion may have many prompts, so that its body may be longer.
        if gateway.stopping:
            raise NotNowError("draining", "this gateway is shutting down")
        must_split = asks_to_split(request.headers) or gateway.config.gateway.split == "always"
        num_prompts = limits.MAX_CHOICES if route is Route.COMPLETIONS else 1
        max_bytes = gateway.model.max_body_bytes(num_prompts)
        timeout_s = gateway.config.gateway.request_timeout_s
        async with gateway.bodies.read_body(request, timeout_s, tenant, max_bytes) as body:
            has_read = True
            observer = _observer(gateway, request, route)
            owner = owner_of(request, tenant)
            call = await _call(gateway, observer, tenant, owner, route, body, must_split=must_split)
    except InvalidRequestError as error:
        # A refusal has a request id and a trace too: begin them here where the body was never read.
        observer = observer or _observer(gateway, request, route)
        observer.refused(error.status, "invalid", error.message)
        reply, status, headers = error_of_invalid(error), error.status, _headers_of(error)
    except NotNowError as error:
        observer, fail = observer or _observer(gateway, request, route), error.fail
        observer.refused(fail.status, fail.code, fail.message)
        reply, status, headers = error_of_fail(fail), fail.status, _retry_headers(fail)
    except BaseException as error:
        # A cancellation also ends here: the observer's spans are recorded only when they end.
        if observer is not None:
            observer.broke(error)
        raise
    else:
        return Answer(call, observer, gateway.requests, gateway.times)
    headers |= {"x-request-id": observer.request_id, "traceparent": observer.trace}
    return _refusal(gateway, reply, status, headers, has_read=has_read)


async def _answer(
    gateway: Gateway,
    request: HttpRequest,
    understand: Callable[[GatewayModel, bytes, str], AskedT],
    reply_to: Callable[[AskedT, str], Awaitable[msgspec.Struct]],
) -> ASGIApp:
    """Return the response of a route that generates nothing: what `reply_to` answers to what was understood of a body,
    for its tenant and its owner."""
    has_read = False
    try:
        tenant = gateway.keys.tenant_of(request.headers)
        check_json(request.headers)
        max_bytes, timeout_s = gateway.model.max_body_bytes(1), gateway.config.gateway.request_timeout_s
        async with gateway.bodies.read_body(request, timeout_s, tenant, max_bytes) as body:
            has_read = True
            owner = owner_of(request, tenant)
            asked = await gateway.bodies.understand(owner, len(body), lambda: understand(gateway.model, body, tenant))
        reply = await reply_to(asked, owner)
    except InvalidRequestError as error:
        refused, status, headers = error_of_invalid(error), error.status, _headers_of(error)
    except NotNowError as error:
        refused, status, headers = error_of_fail(error.fail), error.fail.status, _retry_headers(error.fail)
    else:
        return ASGIResponse(body=encode_reply(reply), media_type="application/json")
    return _refusal(gateway, refused, status, headers, has_read=has_read)


async def _as_it_is(reply: msgspec.Struct, _: str) -> msgspec.Struct:
    return reply


def _headers_of(error: InvalidRequestError) -> dict[str, str]:
    """RFC 9110: whoever refuses how a body is packed names what is taken."""
    return {"accept-encoding": ENCODINGS} if error.code == "unsupported_encoding" else {}


def _retry_headers(fail: FailRequest) -> dict[str, str]:
    return {"retry-after": retry_after_of(fail)}


def _observer(gateway: Gateway, request: HttpRequest, route: Route) -> AnswerObserver:
    return AnswerObserver(
        RequestId(new_id("req")),
        route,
        request.headers.get("traceparent", ""),
        {Key.URL_PATH: request.scope["path"], Key.URL_SCHEME: request.scope["scheme"]},
        gateway.metrics,
        gateway.requests.spans,
        gateway.requests.keep_trace,
    )


async def _call(
    gateway: Gateway,
    observer: AnswerObserver,
    tenant: str,
    owner: str,
    route: Route,
    payload: bytes,
    *,
    must_split: bool,
) -> Call:
    """Check and tokenize a body, in the line of its `owner`. Raises InvalidRequestError and NotNowError."""
    request_id, model = observer.request_id, gateway.model
    deadline_ms = now_ms() + round(gateway.config.gateway.request_timeout_s * 1000)

    # Decoding, tokenizing and hashing grow with the body: `Bodies.understand` moves them to a thread for a long one.
    def understand() -> tuple[Responses | None, Prepared, list[Job]]:
        responses = Responses(payload) if route is Route.RESPONSES else None
        body = decode_body(payload, is_chat=route is Route.CHAT) if responses is None else responses.chat
        with _own_names(responses):
            prepared = prepare(model, body, gateway.bus.connection.max_bytes)
        with _own_names(responses):
            jobs = make_jobs(
                model.key_of(tenant), prepared, request_id, deadline_ms, observer.trace, must_split=must_split
            )
        return responses, prepared, jobs

    responses, prepared, jobs = await gateway.bodies.understand(owner, len(payload), understand)
    options = prepared.options
    # Make the grammars, one for each prompt: whether an answer begins with a space that is not shown depends on its
    # prompt. All choices of a prompt share one.
    if prepared.constraint is not None:
        grammars: list[str] = []
        with _own_names(responses):
            for end in prepared.ends:
                constraint = msgspec.structs.replace(prepared.constraint, behind_space=end.drops_space)
                grammars += [await gateway.grammars.grammar_of(constraint, owner)] * options.n
            _check_room(gateway, tenant, prepared.constraint, set(grammars))
        jobs = [job.held_to(grammar) for job, grammar in zip(jobs, grammars, strict=True)]
    # Choose how the answer is written. Its id has the number of the request's id, so that either leads to the other.
    texts = TokenTexts(model.codec.token_bytes, model.codec.first_bytes, shows_ids=options.shows_ids)
    number, created = request_id.removeprefix("req-"), int(time.time())
    if responses is not None:
        style = ResponsesStyle(options, texts, responses.body, answer_id=f"resp_{number}", created=created)
    elif route is Route.CHAT:
        style = ChatStyle(options, texts, answer_id=f"chatcmpl-{number}", created=created)
    else:
        style = CompletionStyle(options, texts, answer_id=f"cmpl-{number}", created=created)
    return Call(
        style=style,
        options=options,
        jobs=jobs,
        # Jobs are in the order of prompts, `n` for each.
        choices=[_choice(model, prepared, number // options.n) for number in range(len(jobs))],
        num_prompt_tokens=sum(map(len, prepared.prompts)),
        timeout_s=gateway.config.gateway.request_timeout_s,
    )


def _check_room(gateway: Gateway, tenant: str, constraint: Constraint, grammars: set[str]) -> None:
    """See that what answers must be fits into a message each, and all of a tenant's, those under way among them, into
    its share of memory. Raises InvalidRequestError and NotNowError."""
    most = gateway.bus.connection.max_bytes - limits.ENVELOPE_BYTES
    if (longest := max(len(msgspec.json.encode(grammar)) for grammar in grammars)) > most:
        message = f"`{constraint.param}` comes to {longest} bytes, and at most {most} fit into a message: simplify it"
        raise InvalidRequestError(message, constraint.param, "request_too_large", 413)
    most = limits.MAX_LIVE_GRAMMAR_CHARACTERS
    if sum(map(len, gateway.requests.grammars(tenant) | grammars)) > most:
        message = f"what your answers under way must be leaves no room for `{constraint.param}`: it may have {most} "
        raise NotNowError("rate_limit_exceeded", message + "characters all together", 429)


def _own_names(responses: Responses | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if responses is None else responses.own_names()


def _choice(model: GatewayModel, prepared: Prepared, prompt: int) -> Choice:
    """Return one choice of the answer to this prompt."""
    options = prepared.options
    sampling = options.sampling
    ends = set(sampling.stop_token_ids) | (set[int]() if sampling.ignore_eos else model.eos_token_ids)
    return Choice(
        prompt=prepared.prompts[prompt],
        prompt_end=prepared.ends[prompt],
        prompt_text=prepared.texts[prompt] if prepared.texts else "",
        detokenizer=model.codec.detokenizer(prepared.ends[prompt]),
        reader=prepared.parser.reader(StopMatcher(options.stops, keeps_stop=options.keeps_stop)),
        min_tokens=sampling.min_tokens,
        hidden_ids=set[int]() if options.keeps_stop else ends,
        returns_reasoning=prepared.parser.returns_reasoning,
        shows_none=options.max_tokens == 0,
        has_named_call=prepared.parser.has_named_call,
    )


async def _unhealthy_reason(gateway: Gateway) -> str:
    """Return why no request could be served now; empty if one could."""
    if gateway.stopping:
        return "this gateway is shutting down"
    try:
        fleet = await ask_fleet(gateway.bus, gateway.times.health_timeout_s)
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


def _on_invalid(request: HttpRequest, error: InvalidRequestError) -> Response[bytes]:
    return _json(error_of_invalid(error), error.status)


def _on_exception(request: HttpRequest, error: Exception) -> Response[bytes]:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _json(error_of_fail(FailRequest("internal", "an internal error; see the gateway's log", 500)), 500)


def _json(reply: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response[bytes]:
    return Response(encode_reply(reply), status_code=status, media_type="application/json", headers=headers)


def _refusal(gateway: Gateway, reply: ErrorReply, status: int, headers: dict[str, str], *, has_read: bool) -> ASGIApp:
    """Return the response of a refused request, whose body has been read or has not."""
    if not has_read:
        return EarlyRefusal(reply, status, gateway.times.linger_s, headers)
    return ASGIResponse(body=encode_reply(reply), status_code=status, media_type="application/json", headers=headers)
