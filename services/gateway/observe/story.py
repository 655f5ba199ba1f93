"""A request's story for people: what is published of it, and the answer to where it is.

Nothing waits for it: messages are sent in order by a task of their own, and while the broker is away only so many of
them are kept. Every story has one beginning and one end.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypedDict, TypeVar

import msgspec

from dataplane.lasting import lasting
from schemas import subjects
from schemas.ids import GatewayId, RequestId
from schemas.observe import (
    DescribeRequest,
    FirstTokenReceived,
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
from services.gateway import limits
from services.gateway.request.core import Phase, RequestCore
from services.gateway.request.events import Abandon, Action, Deliver, FailRequest, Finish, SendAttempt
from services.gateway.request.job import Job
from services.gateway.request.live import LiveRequest
from services.runtime import now_ms
from services.times import GatewayTimes

log = logging.getLogger(__name__)

StoryT = TypeVar("StoryT", bound=StoryMessage)

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
    trace: str


@dataclass
class Stories:
    """All requests of one gateway, as people see them: those that are `live`, and for a while those that have ended."""

    gateway_id: GatewayId
    bus: TypedBus
    tasks: asyncio.TaskGroup
    times: GatewayTimes
    live: Mapping[RequestId, LiveRequest]
    num_dropped: int = 0
    _ended: OrderedDict[RequestId, tuple[int, RequestDescribed]] = field(
        default_factory=OrderedDict[RequestId, tuple[int, RequestDescribed]]
    )
    _waiting: deque[_Unsent] = field(default_factory=deque[_Unsent])
    _is_sending: bool = False
    _num_buffered: int = 0

    def accepted(self, live: LiveRequest) -> None:
        """A request was accepted."""
        job = live.job
        accepted = RequestAccepted(
            **self._fields(live, live.started_ms),
            num_prompt_tokens=job.prompt.num_tokens,
            max_tokens=job.sampling.max_tokens,
            tenant=job.key.tenant,
        )
        self._publish(subjects.ACCEPTED, accepted, job)

    def saw(self, live: LiveRequest, actions: Sequence[Action]) -> None:
        """Publish what a request's core has just decided. After its end it decides nothing."""
        core, published = live.core, live.published
        # By far most calls end here: a further piece of an answer changes no phase and needs no message.
        if published.phase == RequestPhase.DECODE and _is_more(actions):
            return
        # A new attempt begins with the message that it resumes the request, unless the request has ended.
        now = now_ms()
        if core.attempt > published.attempt and core.phase is not Phase.ENDED:
            published.attempt, published.detail = core.attempt, core.last_trouble
            resumed = RequestResumed(
                **self._fields(live, now),
                num_answered_tokens=core.num_answered,
                reason=core.last_trouble,
                moved_by=core.moved_by,
            )
            self._publish(subjects.RESUMED, resumed, live.job)
        # Publish each step once: of a split attempt's two ends only the prefill worker's counts as its placement.
        for action in actions:
            match action:
                case SendAttempt(worker_id=prefill, upstream=None, downstream=to):
                    decode = to.worker_id if to is not None else None
                    placed = RequestPlaced(**self._fields(live, now), prefill_worker=prefill, decode_worker=decode)
                    self._publish(subjects.PLACED, placed, live.job)
                case Deliver(index=0):
                    self._publish(subjects.FIRST_TOKEN, FirstTokenReceived(**self._fields(live, now)), live.job)
                case Finish() | FailRequest() | Abandon():
                    self._end(live, action, now)
                    return
                case _:
                    pass
        # The phase is not published: it is kept for who asks where the request is.
        if core.phase is not Phase.ENDED and (phase := _phase_of(core)) != published.phase:
            published.phase, published.phase_ms = phase, now

    def describe(self, request_id: RequestId) -> RequestDescribed | None:
        """Return where a request is; None if this gateway does not have it, and has not had it for a while."""
        now = now_ms()
        if live := self.live.get(request_id):
            return self._described(live, now)
        self._forget_old(now)
        if request_id not in self._ended:
            return None
        ended_ms, described = self._ended[request_id]
        return msgspec.structs.replace(described, phase_age_ms=now - ended_ms)

    def _end(self, live: LiveRequest, end: Finish | FailRequest | Abandon, now: int) -> None:
        fields, num_tokens, job, published = self._fields(live, now), len(live.core.tokens), live.job, live.published
        match end:
            case Finish(reason=reason):
                finished = RequestFinished(**fields, finish_reason=reason, num_tokens=num_tokens)
                self._publish(subjects.FINISHED, finished, job)
                published.phase, published.detail = RequestPhase.FINISHED, reason
            case FailRequest(code=code, message=detail, status=status):
                failed = RequestFailed(**fields, code=code, detail=detail, status=status, num_tokens=num_tokens)
                self._publish(subjects.FAILED, failed, job)
                published.phase, published.detail = RequestPhase.FAILED, f"{code}: {detail}"
            case Abandon(reason=reason):
                cancelled = RequestCancelled(**fields, reason=reason, num_tokens=num_tokens)
                self._publish(subjects.CANCELLED, cancelled, job)
                published.phase, published.detail = RequestPhase.CANCELLED, reason
        published.phase_ms = now
        self._ended[job.request_id] = (now, self._described(live, now))
        self._forget_old(now)

    def _forget_old(self, now: int) -> None:
        while self._ended:
            oldest, (ended_ms, _) = next(iter(self._ended.items()))
            if len(self._ended) <= limits.MAX_ENDED and now - ended_ms <= self.times.ended_kept_ms:
                return
            del self._ended[oldest]

    def _fields(self, live: LiveRequest, now: int) -> _Fields:
        return {
            "request_id": live.job.request_id,
            "attempt": live.core.attempt,
            "deadline_ms": live.job.deadline_ms,
            "gateway_id": self.gateway_id,
            "age_ms": now - live.started_ms,
        }

    def _described(self, live: LiveRequest, now: int) -> RequestDescribed:
        job, core, published = live.job, live.core, live.published
        return RequestDescribed(
            request_id=job.request_id,
            phase=published.phase,
            phase_age_ms=now - published.phase_ms,
            age_ms=now - live.started_ms,
            left_ms=max(0, job.deadline_ms - now),
            gateway_id=self.gateway_id,
            attempt=core.attempt,
            prefill_worker=core.prefill_worker or "",
            decode_worker=core.decode_worker or "",
            num_prompt_tokens=job.prompt.num_tokens,
            num_tokens=len(core.tokens),
            max_tokens=job.sampling.max_tokens,
            detail=published.detail,
        )

    # Questions.

    async def on_status(self, received: Received[DescribeRequest]) -> RequestDescribed:
        """Answer where a request is. Whichever gateway is asked finds out from the others."""
        request_id = _request_of(received)
        if (described := self.describe(request_id)) is not None:
            return described
        try:
            timeout_s = self.times.seek_timeout_s
            return await self.bus.ask(subjects.REQUEST_SOUGHT, (request_id,), DescribeRequest(), timeout_s)
        except BusError:  # no gateway has answered that it knows it
            return RequestDescribed(request_id=request_id, phase=RequestPhase.UNKNOWN)

    async def on_sought(self, received: Received[DescribeRequest]) -> RequestDescribed | None:
        """Answer another gateway, where the request is one of ours: the requester takes the first answer."""
        return self.describe(_request_of(received))

    # Sending.

    def _publish(self, subject: Subject[StoryT, None], message: StoryT, job: Job) -> None:
        if len(self._waiting) >= limits.MAX_UNSENT:
            self._waiting.popleft()
            self._count_dropped()
        self._waiting.append(_Unsent(subject, message, job.trace))
        if not self._is_sending:
            self._is_sending = True
            self.tasks.create_task(lasting(self._send, "sending the story"), name="send the story")

    async def _send(self) -> None:
        """Send what waits, in order."""
        while self._waiting:
            subject, message, trace = self._waiting.popleft()
            self._num_buffered = 0 if self.bus.connection.is_connected else self._num_buffered + 1
            if self._num_buffered > limits.MAX_BUFFERED:
                self._count_dropped()
                continue
            try:
                await self.bus.publish(subject, (message.request_id,), message, trace)
            except BusError:
                self._count_dropped()
        self._is_sending = False

    def _count_dropped(self) -> None:
        self.num_dropped += 1
        log.warning("a message of a request's story could not be sent")


def _request_of(received: Received[DescribeRequest]) -> RequestId:
    return RequestId(received.subject.split(".")[_REQUEST_TOKEN])


def _is_more(actions: Sequence[Action]) -> bool:
    """Return whether this is but one more piece of an answer that goes on: by far the most of what happens."""
    return len(actions) == 1 and isinstance(actions[0], Deliver)


def _phase_of(core: RequestCore) -> RequestPhase:
    match core.phase:
        case Phase.PLACING:
            return RequestPhase.PLACING
        case Phase.WAITING:
            return RequestPhase.WAITING
        case _:
            return RequestPhase.DECODE if core.has_first_token else RequestPhase.PREFILL
