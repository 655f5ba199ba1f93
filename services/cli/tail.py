"""`kvmesh tail`: prints the messages about a request, a line each in their order, until its end."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from schemas import handoff, kv, observe, subjects
from schemas.directory import LocateBlocks
from schemas.ids import is_subject_token
from schemas.message import Message, RequestMessage, UndecodableMessageError, decode
from schemas.observe import DescribeRequest, RequestDescribed, RequestPhase
from schemas.permissions import ALL
from schemas.request import AskGrammar, CancelRequest, PlaceRequest, RunAttempt
from schemas.subjects import SUBJECTS
from services.bus.base import BusError, Subscription
from services.bus.memory import matches
from services.bus.nats import NatsBus
from services.bus.typed import TypedBus
from services.cli.limits import ASK_TIMEOUT_S, TAIL_LINGER_S
from services.cli.recorded import bare_id
from services.errors import UserError
from services.runtime import ended_before
from services.trust.keys import BusAccess

ENDS = (observe.RequestFinished, observe.RequestFailed, observe.RequestCancelled)

_REQUEST_SUBJECTS = {
    tuple(subject.pattern.replace("{}", "*").split(".")): subject
    for subject in SUBJECTS
    if issubclass(subject.carries, RequestMessage) and subject is not subjects.PROGRESS
}
"""The subjects of messages about requests, by their tokens. Questions about their progress are left out."""


class TailEvent(NamedTuple):
    """One message about a request. `who`: its sender or its receiver; `what`: its text."""

    request_id: str
    name: str
    who: str
    what: str
    is_end: bool


def event_of(subject: str, payload: bytes) -> TailEvent | None:
    """Return the event of a message; None for one that is not about a request, or does not decode."""
    tokens = tuple(subject.split("."))
    found = next((known for pattern, known in _REQUEST_SUBJECTS.items() if matches(pattern, tokens)), None)
    if found is None:
        return None
    try:
        message = decode(payload, found.carries)
    except UndecodableMessageError:
        return None
    assert isinstance(message, RequestMessage)
    who, what = _describe(message, tokens)
    return TailEvent(message.request_id, tokens[-1], who, what, isinstance(message, ENDS))


@dataclass
class Tail:
    """Turns events into lines, of one request or, where `wanted` is empty, of all. Each choice of a request is a
    part of its own."""

    wanted: str
    _began: dict[str, float] = field(default_factory=dict[str, float])
    _open: set[str] = field(default_factory=set[str])
    has_ended: bool = False

    def line_of(self, event: TailEvent, now_s: float) -> Text | None:
        """Return the event's line; None where it belongs to another request. `now_s`: Unix time."""
        if self.wanted and not _is_part(bare_id(event.request_id), self.wanted):
            return None
        began_s = self._began.setdefault(event.request_id, now_s)
        if event.is_end:
            self._open.discard(event.request_id)
            self.has_ended = not self._open
        elif not self.has_ended:
            self._open.add(event.request_id)
        clock = time.strftime("%H:%M:%S", time.localtime(now_s)) + f".{int(now_s % 1 * 1000):03}"
        style = {"finished": "green", "failed": "red", "cancelled": "yellow", "resumed": "yellow"}.get(
            event.name, "bold"
        )
        line = Text.assemble((clock, "dim"), f" {(now_s - began_s) * 1000:+9.1f} ms  ", (f"{event.name:<11}", style))
        if not self.wanted or "_c" in event.request_id:
            line.append(f" {event.request_id}", style="cyan")
        line.append(f" {event.who}", style="magenta")
        return line.append(f"  {event.what}")


async def tail(access: BusAccess, request_id: str, stop: asyncio.Event) -> None:
    """Print until the request's end, or until `stop`; without an id the messages about all requests. Raises
    UserError."""
    connection = await NatsBus.connect(access, "kvmesh-tail")
    console = Console(highlight=False, soft_wrap=True)
    try:
        # One subscription for all services: messages then come in the order in which the broker received them.
        subscription = await connection.subscribe(ALL)
        await connection.flush()
        if request_id:
            described = await _where(TypedBus(connection, "tail"), request_id)
            console.print(_where_line(described))
            if described.phase in (RequestPhase.FINISHED, RequestPhase.FAILED, RequestPhase.CANCELLED):
                return
        await ended_before(stop, _print(subscription, Tail(bare_id(request_id)), console))
    finally:
        await connection.close()


async def _print(subscription: Subscription, tail: Tail, console: Console) -> None:
    async for event in _events(subscription, tail):
        if (line := tail.line_of(event, time.time())) is not None:
            console.print(line)


async def _events(subscription: Subscription, tail: Tail) -> AsyncIterator[TailEvent]:
    """Yield events, until TAIL_LINGER_S after the request's end."""
    deliveries = aiter(subscription)
    ends_s = None
    while True:
        if tail.wanted and tail.has_ended and ends_s is None:
            ends_s = time.monotonic() + TAIL_LINGER_S
        try:
            async with asyncio.timeout(None if ends_s is None else max(0.0, ends_s - time.monotonic())):
                delivery = await anext(deliveries)
        except (TimeoutError, StopAsyncIteration):
            return
        if (event := event_of(delivery.subject, delivery.payload)) is not None:
            yield event


async def _where(bus: TypedBus, request_id: str) -> RequestDescribed:
    """Return what a gateway knows of the request. Raises UserError where none knows it: ids are made by gateways, so
    that nobody can name a request that is still to come."""
    token = f"req-{bare_id(request_id)}"
    if not is_subject_token(token):
        raise UserError(f"{request_id!r} is no request's id")
    try:
        reply = await bus.ask(subjects.REQUEST_STATUS, (token,), DescribeRequest(), ASK_TIMEOUT_S)
    except BusError as error:
        raise UserError(f"no gateway answers ({error}): is a mesh running at this broker?") from error
    if reply.phase == "unknown":
        raise UserError(
            f"no gateway knows request {request_id!r}: take the id from an answer's x-request-id, "
            "or leave it out for all requests"
        )
    return reply


def _is_part(request_id: str, wanted: str) -> bool:
    """Return whether a request is the wanted one, or one of its choices (`services.gateway.api.prepare`)."""
    return request_id == wanted or request_id.startswith(f"{wanted}_c")


def _where_line(described: RequestDescribed) -> Text:
    workers = " → ".join(worker for worker in (described.prefill_worker, described.decode_worker) if worker)
    where = (
        f"{described.phase} for {described.phase_age_ms} ms, {described.num_tokens} of {described.max_tokens} tokens"
    )
    text = ", ".join(part for part in (where, workers, described.detail) if part)
    return Text(f"{described.request_id}: {text}", style="dim")


def _describe(message: Message, tokens: tuple[str, ...]) -> tuple[str, str]:
    """Return the fields `who` and `what` of the event."""
    if isinstance(message, observe.StoryMessage):
        return message.gateway_id, _event_text(message)
    if isinstance(message, handoff.HandoffMessage):
        return f"{message.source_worker} → {message.target_worker}", _handoff_text(message)
    # The fourth word of a subject with one receiver is the receiver's name. Joined block hashes have 16 bytes each.
    match message:
        case PlaceRequest(attempt=attempt, num_prompt_tokens=num, excluded_workers=excluded):
            without = f", not {', '.join(excluded)}" if excluded else ""
            return "scheduler", f"attempt {attempt}: {num} tokens{without}"
        case RunAttempt(attempt=attempt, upstream=None, sources=sources):
            read = f", {len(sources)} sources to read from" if sources else ""
            return tokens[3], f"attempt {attempt}{read}"
        case RunAttempt(attempt=attempt, upstream=upstream) if upstream is not None:
            return tokens[3], f"attempt {attempt}, KV from {upstream.worker_id}"
        case CancelRequest(attempt=attempt, reason=reason):
            return "workers", f"attempt {attempt}: {reason}"
        case AskGrammar():
            return tokens[3], "a worker asks what the answer must be"
        case LocateBlocks(block_hashes=hashes):
            return "directory", f"{len(hashes) // 16} blocks"
        case kv.RequestLease(reader=reader, block_hashes=hashes):
            return tokens[3], f"{reader} asks for {len(hashes) // 16} blocks"
        case kv.ReturnLease(reader=reader):
            return tokens[3], f"{reader} reads no more"
        case kv.ReplicateBlocks(source=source, block_hashes=hashes):
            return tokens[3], f"{source} has {len(hashes) // 16} blocks to copy"
        case _:
            return "", ""


def _event_text(message: observe.StoryMessage) -> str:
    match message:
        case observe.RequestAccepted(num_prompt_tokens=num, max_tokens=limit):
            return f"{num} tokens, up to {limit} to come"
        case observe.RequestPlaced(prefill_worker=prefill, decode_worker=decode, attempt=attempt):
            return f"attempt {attempt}: {prefill} → {decode}" if decode else f"attempt {attempt}: {prefill} alone"
        case observe.RequestResumed(num_answered_tokens=num, reason=reason):
            return f"goes on after {num} tokens; {reason}"
        case observe.RequestFinished(finish_reason=reason, num_tokens=num):
            return f"{num} tokens in {message.age_ms} ms, {reason}"
        case observe.RequestFailed(code=code, detail=detail, num_tokens=num):
            return f"{code} after {num} tokens: {detail}"
        case observe.RequestCancelled(reason=reason, num_tokens=num):
            return f"after {num} tokens: {reason}"
        case _:
            return f"{message.age_ms} ms after it was accepted"


def _handoff_text(message: handoff.HandoffMessage) -> str:
    match message:
        case handoff.BlocksReserved(num_blocks=num):
            return f"room for {num} blocks"
        case handoff.KVOffered(num_tokens=num):
            return f"{num} tokens, under a lease"
        case handoff.KVStreaming(carrier=carrier):
            return f"the first bytes are here, over {carrier}"
        case handoff.KVLanded(num_tokens=num, num_bytes=num_bytes, carrier=carrier):
            return f"{num} tokens, {num_bytes:,} bytes over {carrier}, verified"
        case handoff.KVReleased(num_blocks=num):
            return f"{num} blocks given back"
        case handoff.HandoffAborted(reason=reason):
            return reason
        case _:
            return ""
