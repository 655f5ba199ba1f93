"""What people hear of requests on the bus, and what they are told when they ask where one is.

Nothing waits for it: what is told is sent in order by a task of its own, and while the broker is away only so much of
it is kept. The least thing about a story is that it has one end.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, TypeVar

import msgspec

from schemas import subjects
from schemas.ids import GatewayId, RequestId
from schemas.observe import (
    DescribeRequest,
    FirstTokenHeard,
    RequestAccepted,
    RequestCancelled,
    RequestDescribed,
    RequestFailed,
    RequestFinished,
    RequestPhase,
    RequestPlaced,
    RequestResumed,
    StoryMessage,
)
from schemas.subjects import Subject
from services.bus.base import BusError
from services.bus.typed import Received, TypedBus
from services.gateway.request.core import Phase, RequestCore
from services.gateway.request.events import Abandon, Action, Deliver, Fail, Finish, SendRun
from services.gateway.request.job import Job
from services.runtime import now_ms

log = logging.getLogger(__name__)

StoryT = TypeVar("StoryT", bound=StoryMessage)

MAX_UNTOLD = 2_000
"""Messages that may wait to be sent; beyond it the oldest go untold."""
MAX_TOLD_IN_VAIN = 2_000
"""Messages that may wait in the send buffer while the broker is away: it is there for what requests need."""
MAX_ENDED = 1_000
ENDED_KEPT_MS = 300_000
SEEK_TIMEOUT_S = 0.25
"""How long the other gateways have to say that they know a request."""

_REQUEST_TOKEN = 3
"""Where a request's id stands in its subjects."""


class _Fields(TypedDict):
    request_id: RequestId
    attempt: int
    deadline_ms: int
    gateway_id: GatewayId
    age_ms: int


class _Unsent(NamedTuple):
    subject: Subject[Any, None]
    message: StoryMessage
    traceparent: str


@dataclass(slots=True)
class Tale:
    """How far the story of one request has been told. Times are Unix ms."""

    job: Job
    core: RequestCore
    accepted_ms: int
    phase: RequestPhase = "placing"
    phase_ms: int = 0
    attempt: int = 1
    detail: str = ""


@dataclass
class Stories:
    """All requests of one gateway, as people see them. Those that have ended are known for a while."""

    gateway_id: GatewayId
    bus: TypedBus
    tasks: asyncio.TaskGroup
    num_untold: int = 0
    _tales: dict[RequestId, Tale] = field(default_factory=dict[RequestId, Tale])
    _ended: OrderedDict[RequestId, tuple[int, RequestDescribed]] = field(
        default_factory=OrderedDict[RequestId, tuple[int, RequestDescribed]]
    )
    _waiting: deque[_Unsent] = field(default_factory=deque[_Unsent])
    _is_sending: bool = False
    _num_in_vain: int = 0

    async def listen(self) -> None:
        """Answer where a request is: whichever gateway is asked finds out."""
        await self.bus.serve(self.tasks, subjects.REQUEST_STATUS, ("*",), self._on_status)
        await self.bus.serve(self.tasks, subjects.REQUEST_SOUGHT, ("*",), self._on_sought, queue=self.gateway_id)

    def begin(self, job: Job, core: RequestCore) -> None:
        now = now_ms()
        tale = self._tales[job.request_id] = Tale(job, core, now, phase_ms=now)
        accepted = RequestAccepted(
            **self._fields(tale, now),
            num_prompt_tokens=job.num_prompt_tokens,
            max_tokens=job.sampling.max_tokens,
            tenant=job.key.tenant,
        )
        self._tell(subjects.ACCEPTED, accepted, job)

    def go_on(self, request_id: RequestId, actions: list[Action]) -> None:
        """Tell what a request's core has just decided. After its end nothing is told."""
        tale = self._tales.get(request_id)
        if tale is None or (tale.phase == "decode" and _is_more(actions)):
            return
        core, now = tale.core, now_ms()
        if core.attempt > tale.attempt and core.phase is not Phase.ENDED:
            tale.attempt, tale.detail = core.attempt, core.last_trouble
            resumed = RequestResumed(
                **self._fields(tale, now), num_answered_tokens=core.num_answered, reason=core.last_trouble
            )
            self._tell(subjects.RESUMED, resumed, tale.job)
        for action in actions:
            match action:
                case SendRun(prefill_worker=prefill, decode_worker=decode):
                    placed = RequestPlaced(**self._fields(tale, now), prefill_worker=prefill, decode_worker=decode)
                    self._tell(subjects.PLACED, placed, tale.job)
                case Deliver(index=0):
                    self._tell(subjects.FIRST_TOKEN, FirstTokenHeard(**self._fields(tale, now)), tale.job)
                case Finish() | Fail() | Abandon():
                    self._end(tale, action, now)
                    return
                case _:
                    pass
        if (phase := _phase_of(core)) != tale.phase:
            tale.phase, tale.phase_ms = phase, now

    def describe(self, request_id: RequestId) -> RequestDescribed | None:
        """Return where a request is; None if it is not, and was not lately, one of this gateway's."""
        now = now_ms()
        if tale := self._tales.get(request_id):
            return self._described(tale, now)
        self._forget_old(now)
        if request_id not in self._ended:
            return None
        ended_ms, described = self._ended[request_id]
        return msgspec.structs.replace(described, phase_age_ms=now - ended_ms)

    def _end(self, tale: Tale, end: Finish | Fail | Abandon, now: int) -> None:
        fields, num_tokens, job = self._fields(tale, now), len(tale.core.tokens), tale.job
        match end:
            case Finish(reason=reason):
                finished = RequestFinished(**fields, finish_reason=reason, num_tokens=num_tokens)
                self._tell(subjects.FINISHED, finished, job)
                tale.phase, tale.detail = "finished", reason
            case Fail(code=code, message=detail, status=status):
                failed = RequestFailed(**fields, code=code, detail=detail, status=status, num_tokens=num_tokens)
                self._tell(subjects.FAILED, failed, job)
                tale.phase, tale.detail = "failed", f"{code}: {detail}"
            case Abandon(reason=reason):
                cancelled = RequestCancelled(**fields, reason=reason, num_tokens=num_tokens)
                self._tell(subjects.CANCELLED, cancelled, job)
                tale.phase, tale.detail = "cancelled", reason
        tale.phase_ms = now
        del self._tales[job.request_id]
        self._ended[job.request_id] = (now, self._described(tale, now))
        self._forget_old(now)

    def _forget_old(self, now: int) -> None:
        while self._ended:
            oldest, (ended_ms, _) = next(iter(self._ended.items()))
            if len(self._ended) <= MAX_ENDED and now - ended_ms <= ENDED_KEPT_MS:
                return
            del self._ended[oldest]

    def _fields(self, tale: Tale, now: int) -> _Fields:
        return {
            "request_id": tale.job.request_id,
            "attempt": tale.core.attempt,
            "deadline_ms": tale.job.deadline_ms,
            "gateway_id": self.gateway_id,
            "age_ms": now - tale.accepted_ms,
        }

    def _described(self, tale: Tale, now: int) -> RequestDescribed:
        job, core = tale.job, tale.core
        return RequestDescribed(
            request_id=job.request_id,
            phase=tale.phase,
            phase_age_ms=now - tale.phase_ms,
            age_ms=now - tale.accepted_ms,
            left_ms=max(0, job.deadline_ms - now),
            gateway_id=self.gateway_id,
            attempt=core.attempt,
            prefill_worker=core.prefill_worker or "",
            decode_worker=core.decode_worker or "",
            num_prompt_tokens=job.num_prompt_tokens,
            num_tokens=len(core.tokens),
            max_tokens=job.sampling.max_tokens,
            detail=tale.detail,
        )

    # Questions.

    async def _on_status(self, received: Received[DescribeRequest]) -> RequestDescribed:
        request_id = _request_of(received)
        if (described := self.describe(request_id)) is not None:
            return described
        try:
            return await self.bus.ask(subjects.REQUEST_SOUGHT, (request_id,), DescribeRequest(), SEEK_TIMEOUT_S)
        except BusError:  # no gateway has said that it knows it
            return RequestDescribed(request_id=request_id, phase="unknown")

    async def _on_sought(self, received: Received[DescribeRequest]) -> RequestDescribed | None:
        """Only who knows the request says something: the asker takes the first answer."""
        return self.describe(_request_of(received))

    # Telling.

    def _tell(self, subject: Subject[StoryT, None], message: StoryT, job: Job) -> None:
        if len(self._waiting) >= MAX_UNTOLD:
            self._waiting.popleft()
            self._count_untold()
        self._waiting.append(_Unsent(subject, message, job.traceparent))
        if not self._is_sending:
            self._is_sending = True
            self.tasks.create_task(self._send(), name="tell the story")

    async def _send(self) -> None:
        """Send what waits, in order."""
        while self._waiting:
            subject, message, traceparent = self._waiting.popleft()
            self._num_in_vain = 0 if self.bus.connection.is_connected else self._num_in_vain + 1
            if self._num_in_vain > MAX_TOLD_IN_VAIN:
                self._count_untold()
                continue
            try:
                await self.bus.publish(subject, (message.request_id,), message, traceparent)
            except BusError:
                self._count_untold()
        self._is_sending = False

    def _count_untold(self) -> None:
        self.num_untold += 1
        if self.num_untold.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …
            log.warning("%d messages of requests' stories could not be told", self.num_untold)


def _request_of(received: Received[DescribeRequest]) -> RequestId:
    return RequestId(received.subject.split(".")[_REQUEST_TOKEN])


def _is_more(actions: list[Action]) -> bool:
    """Say whether this is but one more piece of an answer that goes on: by far the most of what happens."""
    return len(actions) == 1 and isinstance(actions[0], Deliver)


def _phase_of(core: RequestCore) -> RequestPhase:
    match core.phase:
        case Phase.PLACING:
            return "placing"
        case Phase.WAITING:
            return "waiting"
        case _:
            return "decode" if core.has_first_token else "prefill"
