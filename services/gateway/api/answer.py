"""Writes one HTTP request's answer, whole or streamed."""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from litestar.types import Receive, Scope, Send

from schemas.request import FinishReason
from services.gateway import limits
from services.gateway.api.openai import Options
from services.gateway.api.replies import (
    DONE,
    EVENT_STREAM_TYPE,
    JSON_TYPE,
    FinishedChoice,
    Style,
    UsageReply,
    encode_reply,
    error_of_fail,
    event,
    retry_after_of,
    usage_of,
)
from services.gateway.api.text import Detokenizer, StopMatcher
from services.gateway.asking import LiveRequest
from services.gateway.observe.answer_observer import AnswerObserver
from services.gateway.request.answer_usage import AnswerUsage, answer_usage
from services.gateway.request.events import Abandon, ClientGone, Deliver, FailRequest, Finish, Output, StopMatched
from services.gateway.request.job import Job
from services.gateway.request.mailbox import Mailbox
from services.gateway.requests import Requests


@dataclass(slots=True, eq=False)
class ChoiceText:
    """One choice's tokens as text. `hidden_ids` end an answer and are not shown."""

    detokenizer: Detokenizer
    matcher: StopMatcher
    hidden_ids: Collection[int]
    token_ids: list[int] = field(default_factory=list[int])
    parts: list[str] = field(default_factory=list[str])
    """The text of an answer that is not streamed."""
    finish_reason: FinishReason | None = None

    def deliver(self, tokens: tuple[int, ...]) -> str:
        """Return the text that is now certain."""
        self.token_ids += tokens
        shown = [token for token in tokens if token not in self.hidden_ids]
        return self.matcher.feed(self.detokenizer.feed(shown))

    def finish(self, reason: FinishReason) -> str:
        """Return the rest of the text. A stop string that only the rest completes counts as well."""
        text = self.matcher.feed(self.detokenizer.flush()) + self.matcher.flush()
        self.finish_reason = "stop" if self.matcher.matched else reason
        return text


@dataclass(slots=True, kw_only=True)
class Call:
    """One HTTP request to be answered."""

    style: Style
    options: Options
    jobs: list[Job]
    texts: list[ChoiceText]
    num_prompt_tokens: int
    timeout_s: float


class Answer:
    """The ASGI response of a generation.

    TTFT is as in `observe/ttft_parts.py`; of an answer that is not streamed, it ends when token 0 could be written.
    """

    def __init__(self, call: Call, observer: AnswerObserver, requests: Requests) -> None:
        self._call = call
        self._observer = observer
        self._requests = requests
        self._mailbox = Mailbox()
        self._lives: list[LiveRequest] = []
        self._status = 0
        self._outcome = "ok"
        self._error = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, observer = self._call, self._observer
        observer.tokenized(call.num_prompt_tokens)
        for number, job in enumerate(call.jobs):
            self._lives.append(self._requests.submit(job, number, self._mailbox))
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(self._watch(receive), name=f"watch client of {observer.request_id}")
            try:
                async with asyncio.timeout(call.timeout_s + limits.WRITE_GRACE_S):
                    await self._respond(send)
            except TimeoutError:
                self._outcome, self._error = "slow_client", "the client did not read its answer by the deadline"
            except asyncio.CancelledError:
                self._outcome = self._error = "cancelled"
                raise
            finally:
                watcher.cancel()
                self._abandon("the answer has ended")
                observer.ended(self._status, self._outcome, self._error, self._answer_usage())

    async def _watch(self, receive: Receive) -> None:
        """Cancel everywhere as soon as the client is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abandon("the client has disconnected")

    async def _respond(self, send: Send) -> None:
        """Write what the choices put out until all have ended, or one has failed."""
        num_open = len(self._lives)
        while num_open:
            events: list[bytes] = []
            items = await self._mailbox.take()
            for number, output in items:
                match self._settle(number, output):
                    case Deliver(tokens=tokens):
                        events += self._add(number, tokens)
                    case Finish(reason=reason):
                        num_open -= 1
                        events += self._finish(number, reason)
                    case FailRequest() as fail:
                        await self._write_events(send, events)
                        await self._fail(send, fail)
                        return
                    case Abandon(reason=reason):
                        self._outcome, self._error = "client_gone", reason
                        return
            await self._write_events(send, events)
            self._observer.wrote([self._lives[n].observer for n, output in items if isinstance(output, Deliver)])
        await (self._end_stream(send) if self._call.options.stream else self._write_whole(send))

    async def _end_stream(self, send: Send) -> None:
        if self._call.options.include_usage:
            await _send_body(send, self._call.style.usage_chunk(self._usage()), more=True)
        await _send_body(send, DONE, more=False)

    async def _write_whole(self, send: Send) -> None:
        wants_ids = self._call.options.return_token_ids
        answers = [
            FinishedChoice("".join(text.parts), text.finish_reason, tuple(text.token_ids) if wants_ids else None)
            for text in self._call.texts
        ]
        body = self._call.style.whole(answers, self._usage())
        await self._begin(send, 200, JSON_TYPE, {"content-length": str(len(body))})
        await _send_body(send, body, more=False)

    def _settle(self, number: int, output: Output) -> Output:
        """Once a choice's text has reached its stop string it is complete, even if the request fails after that."""
        if self._call.texts[number].matcher.matched and isinstance(output, FailRequest):
            return Finish("stop")
        return output

    def _add(self, number: int, tokens: tuple[int, ...]) -> list[bytes]:
        """Add tokens to a choice; return the event that brings them to the client, where its answer is streamed."""
        call, text = self._call, self._call.texts[number]
        is_first = not text.token_ids
        delta = text.deliver(tokens)
        if text.matcher.matched:
            self._requests.handle(self._lives[number], StopMatched())
        if not call.options.stream:
            text.parts.append(delta)
            return []
        token_ids = tokens if call.options.return_token_ids else None
        return [call.style.chunk(number, delta, first=is_first, token_ids=token_ids)]

    def _finish(self, number: int, reason: FinishReason) -> list[bytes]:
        """End a choice; return its last event, where its answer is streamed."""
        call, text = self._call, self._call.texts[number]
        rest = text.finish(reason)
        if not call.options.stream:
            text.parts.append(rest)
            return []
        return [call.style.chunk(number, rest, first=not text.token_ids, finish_reason=text.finish_reason)]

    async def _write_events(self, send: Send, events: list[bytes]) -> None:
        if not events:
            return
        if not self._status:
            await self._begin(send, 200, EVENT_STREAM_TYPE, {"cache-control": "no-cache"})
        await _send_body(send, b"".join(events), more=True)

    async def _begin(self, send: Send, status: int, content_type: bytes, headers: Mapping[str, str]) -> None:
        self._status = status
        observer = self._observer
        named = {"x-request-id": observer.request_id, "traceparent": observer.trace.traceparent, **headers}
        encoded = [(name.encode(), value.encode()) for name, value in named.items()]
        encoded.append((b"content-type", content_type))
        await send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _fail(self, send: Send, fail: FailRequest) -> None:
        """Answer with an error; in the middle of a stream, with an error event and no [DONE]."""
        self._outcome, self._error = fail.code, fail.message
        self._abandon("another choice has failed")
        reply = error_of_fail(fail)
        if self._status:
            await _send_body(send, event(reply), more=False)
            return
        body = encode_reply(reply)
        headers = {"content-length": str(len(body))}
        if retry_after := retry_after_of(fail):
            headers["retry-after"] = retry_after
        await self._begin(send, fail.status, JSON_TYPE, headers)
        await _send_body(send, body, more=False)

    def _abandon(self, reason: str) -> None:
        for live in self._lives:
            self._requests.handle(live, ClientGone(reason))

    def _answer_usage(self) -> AnswerUsage:
        call = self._call
        return answer_usage(
            [live.core for live in self._lives],
            call.options.n,
            call.num_prompt_tokens,
            sum(len(text.token_ids) for text in call.texts),
        )

    def _usage(self) -> UsageReply:
        return usage_of(self._observer.request_id, self._answer_usage())


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
