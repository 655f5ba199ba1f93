"""Writes one HTTP request's answer, whole or streamed."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from litestar.types import Receive, Scope, Send

from schemas.request import FinishReason
from services.gateway import limits
from services.gateway.api.choice import Choice
from services.gateway.api.openai import Options
from services.gateway.api.replies import (
    EVENT_STREAM_TYPE,
    JSON_TYPE,
    KEEP_ALIVE,
    CountsReply,
    UsageReply,
    encode_reply,
    error_of_fail,
    retry_after_of,
    usage_of,
)
from services.gateway.api.styles import Style
from services.gateway.observe.answer_observer import AnswerObserver
from services.gateway.request.answer_usage import AnswerUsage, answer_usage
from services.gateway.request.events import Abandon, ClientGone, Deliver, FailRequest, Finish, Output, StopMatched
from services.gateway.request.job import Job
from services.gateway.request.live import LiveRequest
from services.gateway.request.mailbox import Mailbox
from services.gateway.requests import Requests
from services.times import GatewayTimes


@dataclass(slots=True, kw_only=True)
class Call:
    """One HTTP request to be answered."""

    style: Style
    options: Options
    jobs: list[Job]
    choices: list[Choice]
    num_prompt_tokens: int
    timeout_s: float


class Answer:
    """The ASGI response of a generation.

    TTFT is as in `observe/ttft_parts.py`; of an answer that is not streamed, it ends when token 0 could be written.
    """

    def __init__(self, call: Call, observer: AnswerObserver, requests: Requests, times: GatewayTimes) -> None:
        self._call = call
        self._observer = observer
        self._requests = requests
        self._times = times
        self._mailbox = Mailbox()
        self._lives: list[LiveRequest] = []
        self._status = 0
        self._outcome = "ok"
        self._error = ""
        self._opening = b""
        """The events that the stream begins with."""
        self._silent_until_s = 0.0
        """By the event loop's clock: a stream has its headers, or another comment, by then."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, observer = self._call, self._observer
        self._silent_until_s = asyncio.get_running_loop().time() + self._times.first_output_s
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(self._watch(receive), name=f"watch client of {observer.request_id}")
            try:
                async with asyncio.timeout(call.timeout_s + self._times.write_grace_s):
                    await self._submit_all()
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

    async def _submit_all(self) -> None:
        """Start all choices; others have their turn between some of them and the next."""
        for number, job in enumerate(self._call.jobs):
            if number and number % limits.SUBMITTED_AT_ONCE == 0:
                await asyncio.sleep(0)
            self._lives.append(self._requests.submit(job, number, self._mailbox))
        self._observer.submitted(self._call.num_prompt_tokens, self._lives[0].times.submitted_ns)

    async def _respond(self, send: Send) -> None:
        """Write what the choices put out until all have ended, or one has failed."""
        num_open = len(self._lives)
        self._opening = self._call.style.begin() if self._call.options.stream else b""
        while num_open:
            events = b""
            items = await (self._take_or_comment(send) if self._call.options.stream else self._mailbox.collect())
            for number, output in items:
                match self._settle(number, output):
                    case Deliver() as tokens:
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
            self._observer.wrote([self._lives[n] for n, output in items if isinstance(output, Deliver)])
        await (self._end_stream(send) if self._call.options.stream else self._write_whole(send))

    async def _take_or_comment(self, send: Send) -> list[tuple[int, Output]]:
        """Return what the choices have put out; while that is nothing, keep the stream open."""
        while True:
            try:
                async with asyncio.timeout_at(self._silent_until_s):
                    return await self._mailbox.collect()
            except TimeoutError:
                await (self._send_events(send, KEEP_ALIVE) if self._status else self._begin_stream(send))

    async def _end_stream(self, send: Send) -> None:
        await _send_body(send, self._call.style.end(self._call.choices, self._usage()), more=False)

    async def _write_whole(self, send: Send) -> None:
        body = self._call.style.whole(self._call.choices, self._usage())
        await self._begin(send, 200, JSON_TYPE, {"content-length": str(len(body))})
        await _send_body(send, body, more=False)

    def _settle(self, number: int, output: Output) -> Output:
        """Once a choice's text has reached its stop string it is complete, even if the request fails after that."""
        if self._call.choices[number].is_over and isinstance(output, FailRequest):
            return Finish(FinishReason.STOP)
        return output

    def _add(self, number: int, output: Deliver) -> bytes:
        """Add tokens to a choice; return the events that bring them to the client, where its answer is streamed and
        there is something to be seen of them."""
        call, choice = self._call, self._call.choices[number]
        pieces = choice.deliver(output)
        if choice.is_over:
            self._requests.handle(self._lives[number], StopMatched())
        if call.options.stream:
            return call.style.some(number, choice, pieces, self._counts())
        choice.pieces += pieces
        return b""

    def _finish(self, number: int, reason: FinishReason) -> bytes:
        """End a choice; return its last events, where its answer is streamed: the rest of its text, and its end."""
        call, choice = self._call, self._call.choices[number]
        pieces = choice.finish(reason)
        if call.options.stream:
            return call.style.last(number, choice, pieces, self._counts())
        choice.pieces += pieces
        return b""

    async def _write_events(self, send: Send, events: bytes) -> None:
        if not events:
            return
        if not self._status:
            await self._begin_stream(send)
        await self._send_events(send, events)

    async def _begin_stream(self, send: Send) -> None:
        # nginx would otherwise gather the events, and hand them on late and many at a time.
        await self._begin(send, 200, EVENT_STREAM_TYPE, {"cache-control": "no-cache", "x-accel-buffering": "no"})
        if self._opening:
            await _send_body(send, self._opening, more=True)
        self._silent_until_s = asyncio.get_running_loop().time() + self._times.silence_s

    async def _send_events(self, send: Send, events: bytes) -> None:
        await _send_body(send, events, more=True)
        self._silent_until_s = asyncio.get_running_loop().time() + self._times.silence_s

    async def _begin(self, send: Send, status: int, content_type: bytes, headers: Mapping[str, str]) -> None:
        self._status = status
        observer = self._observer
        named = {"x-request-id": observer.request_id, "traceparent": observer.trace, **headers}
        encoded = [(name.encode(), value.encode()) for name, value in named.items()]
        encoded.append((b"content-type", content_type))
        await send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _fail(self, send: Send, fail: FailRequest) -> None:
        """Answer with an error; in the middle of a stream, with an error event and no [DONE]."""
        self._outcome, self._error = fail.code, fail.message
        self._abandon("another choice has failed")
        reply = error_of_fail(fail)
        if self._status:
            await _send_body(send, self._call.style.failed(reply), more=False)
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
            sum(len(choice.token_ids) for choice in call.choices),
        )

    def _counts(self) -> CountsReply:
        num_prompt, num_answer = (
            self._call.num_prompt_tokens,
            sum(len(choice.token_ids) for choice in self._call.choices),
        )
        return CountsReply(prompt_tokens=num_prompt, completion_tokens=num_answer, total_tokens=num_prompt + num_answer)

    def _usage(self) -> UsageReply:
        return usage_of(self._observer.request_id, self._answer_usage())


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
