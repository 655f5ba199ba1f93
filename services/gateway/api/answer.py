"""Writes one HTTP request's answer, whole or streamed, and ends its span and metrics."""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from litestar.types import Receive, Scope, Send

from schemas.ids import RequestId, WorkerId
from schemas.request import FinishReason, TransferReport
from services.gateway import limits
from services.gateway.api.replies import (
    DONE,
    EVENT_STREAM_TYPE,
    JSON_TYPE,
    FinishedChoice,
    MeshUsageReply,
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
from services.gateway.observe.metrics import EndedRequest, GatewayMetrics
from services.gateway.request.events import Abandon, Deliver, FailRequest, Finish, Output
from services.gateway.request.job import Job
from services.gateway.request.mailbox import Mailbox
from services.gateway.request.prompt_sources import sources_of
from services.gateway.requests import Requests
from services.telemetry import Key, OpenSpan


@dataclass(slots=True, eq=False)
class ChoiceText:
    """One choice's tokens as text. `hidden_ids` end an answer and are not shown."""

    detokenizer: Detokenizer
    matcher: StopMatcher
    hidden_ids: Collection[int]
    token_ids: list[int] = field(default_factory=list[int])
    parts: list[str] = field(default_factory=list[str])
    finish_reason: FinishReason | None = None
    written_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

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

    request_id: RequestId
    route: str
    root: OpenSpan
    """It began when the HTTP body had been read."""
    tokenize: OpenSpan
    read_s: float
    """When that was, by the monotonic clock."""
    style: Style
    stream: bool
    include_usage: bool
    jobs: list[Job]
    texts: list[ChoiceText]
    num_prompt_tokens: int
    choices_per_prompt: int
    return_token_ids: bool
    timeout_s: float


class Answer:
    """The ASGI response of a generation.

    TTFT is as in `observe/ttft_parts.py`; of an answer that is not streamed, it ends when token 0 could be written.
    """

    def __init__(self, call: Call, requests: Requests, metrics: GatewayMetrics) -> None:
        self._call = call
        self._requests = requests
        self._metrics = metrics
        self._mailbox = Mailbox()
        self._lives: list[LiveRequest] = []
        self._ttft_s: float | None = None
        self._status = 0
        self._outcome = "ok"
        self._error = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call
        call.tokenize.end()
        for number, job in enumerate(call.jobs):
            self._lives.append(self._requests.submit(job, number, self._mailbox))
        async with asyncio.TaskGroup() as tasks:
            watcher = tasks.create_task(self._watch(receive), name=f"watch client of {call.request_id}")
            try:
                async with asyncio.timeout(call.timeout_s + limits.WRITE_GRACE_S):
                    await (self._stream(send) if call.stream else self._whole(send))
            except TimeoutError:
                self._outcome, self._error = "slow_client", "the client did not read its answer by the deadline"
            except asyncio.CancelledError:
                self._outcome = self._error = "cancelled"
                raise
            finally:
                watcher.cancel()
                self._abandon("the answer has ended")
                self._close()

    async def _watch(self, receive: Receive) -> None:
        """Cancel everywhere as soon as the client is gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._abandon("the client has disconnected")

    async def _stream(self, send: Send) -> None:
        num_open = len(self._lives)
        while num_open:
            chunks: list[bytes] = []
            items = await self._mailbox.take()
            for number, output in items:
                match self._settle(number, output):
                    case Deliver(tokens=tokens):
                        chunks.append(self._text_chunk(number, tokens))
                    case Finish(reason=reason):
                        num_open -= 1
                        chunks.append(self._last_chunk(number, reason))
                    case FailRequest() as fail:
                        await self._write_stream(send, chunks)
                        await self._fail(send, fail)
                        return
                    case Abandon(reason=reason):
                        self._outcome, self._error = "client_gone", reason
                        return
            await self._write_stream(send, chunks)
            self._observe_writes(items)
        if self._call.include_usage:
            await _send_body(send, self._call.style.usage_chunk(self._usage()), more=True)
        await _send_body(send, DONE, more=False)

    async def _whole(self, send: Send) -> None:
        num_open = len(self._lives)
        while num_open:
            items = await self._mailbox.take()
            for number, output in items:
                text = self._call.texts[number]
                match self._settle(number, output):
                    case Deliver(tokens=tokens):
                        text.parts.append(text.deliver(tokens))
                        self._check_stop(number)
                    case Finish(reason=reason):
                        num_open -= 1
                        text.parts.append(text.finish(reason))
                    case FailRequest() as fail:
                        await self._fail(send, fail)
                        return
                    case Abandon(reason=reason):
                        self._outcome, self._error = "client_gone", reason
                        return
            self._observe_writes(items)
        wants_ids = self._call.return_token_ids
        answers = [
            FinishedChoice("".join(text.parts), text.finish_reason, tuple(text.token_ids) if wants_ids else None)
            for text in self._call.texts
        ]
        body = self._call.style.whole(answers, self._usage())
        await self._begin(send, 200, JSON_TYPE, {"content-length": str(len(body))})
        await _send_body(send, body, more=False)

    def _settle(self, number: int, output: Output) -> Output:
        """Once a choice's text has reached its stop string it is complete, whatever else became of the request."""
        if self._call.texts[number].matcher.matched and isinstance(output, FailRequest):
            return Finish("stop")
        return output

    def _text_chunk(self, number: int, tokens: tuple[int, ...]) -> bytes:
        text = self._call.texts[number]
        first = text.num_tokens == 0
        delta = text.deliver(tokens)
        self._check_stop(number)
        return self._call.style.chunk(
            number, delta, first=first, token_ids=tokens if self._call.return_token_ids else None
        )

    def _last_chunk(self, number: int, reason: FinishReason) -> bytes:
        text = self._call.texts[number]
        rest = text.finish(reason)
        return self._call.style.chunk(number, rest, first=text.num_tokens == 0, finish_reason=text.finish_reason)

    def _check_stop(self, number: int) -> None:
        if self._call.texts[number].matcher.matched:
            self._requests.stop_matched(self._lives[number])

    def _observe_writes(self, items: list[tuple[int, Output]]) -> None:
        now_s = time.monotonic()
        for number, output in items:
            if not isinstance(output, Deliver):
                continue
            text = self._call.texts[number]
            if 0.0 < text.written_s < now_s:
                self._metrics.token_gap(now_s - text.written_s)
            text.written_s = now_s
            if self._ttft_s is None:
                self._ttft_s = now_s - self._call.read_s
                self._metrics.first_token(self._call.route, self._ttft_s, self._call.root.traceparent)
                self._record_first_token(self._lives[number])

    def _record_first_token(self, live: LiveRequest) -> None:
        core, root = live.core, self._call.root
        reports = (core.prefill_report, core.report)
        times = next((r.first_token for r in reports if r is not None and r.first_token is not None), None)
        parts = self._requests.spans.first_token(
            live.job, live.clock, times, root.start_ns, core.prefill_worker or WorkerId("")
        )
        root.attributes |= {f"{Key.TTFT_PART}.{part}_ms": seconds * 1000 for part, seconds in parts.items()}
        self._metrics.observe_ttft_parts(parts, root.traceparent)

    async def _write_stream(self, send: Send, chunks: list[bytes]) -> None:
        if not chunks:
            return
        if not self._status:
            await self._begin(send, 200, EVENT_STREAM_TYPE, {"cache-control": "no-cache"})
        await _send_body(send, b"".join(chunks), more=True)

    async def _begin(self, send: Send, status: int, content_type: bytes, headers: Mapping[str, str]) -> None:
        self._status = status
        named = {"x-request-id": self._call.request_id, "traceparent": self._call.root.traceparent, **headers}
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
            self._requests.abandon(live, reason)

    def _reports(self) -> tuple[list[TransferReport], list[TransferReport]]:
        """Return what the decoding and the prefill workers say of each prompt's first choice. An answer that ended
        before its decode worker could say anything is reported by its prefill worker."""
        cores = [live.core for live in self._lives[:: self._call.choices_per_prompt]]
        decoding = [core.report or core.prefill_report for core in cores]
        return [r for r in decoding if r is not None], [c.prefill_report for c in cores if c.prefill_report is not None]

    def _usage(self) -> UsageReply:
        (reports, prefills), last = self._reports(), self._lives[-1].core
        sources = sources_of(reports)
        mesh = MeshUsageReply(
            request_id=self._call.request_id,
            cached_tokens=sources.cached_tokens,
            transferred_tokens=sources.transferred_tokens,
            recomputed_tokens=sources.recomputed_tokens,
            transferred_from=sources.transferred_from,
            prefill=sources_of(prefills) if prefills else None,
            carrier=next((report.carrier for report in reports if report.carrier), ""),
            prefill_worker=last.prefill_worker or "",
            decode_worker=last.decode_worker or last.prefill_worker or "",
            num_retries=self._num_retries(),
            resumed_tokens=sum(live.core.num_answered for live in self._lives),
        )
        return usage_of(self._call.num_prompt_tokens, self._num_completion_tokens(), mesh)

    def _num_completion_tokens(self) -> int:
        return sum(text.num_tokens for text in self._call.texts)

    def _num_retries(self) -> int:
        return sum(live.core.attempt - 1 for live in self._lives)

    def _close(self) -> None:
        """Count the request and end its span."""
        call, num_completion = self._call, self._num_completion_tokens()
        last_written_s = max(text.written_s for text in call.texts)
        self._metrics.ended(
            EndedRequest(
                route=call.route,
                status=self._status,
                outcome=self._outcome,
                traceparent=call.root.traceparent,
                duration_s=time.monotonic() - call.read_s,
                ttft_s=self._ttft_s,
                last_s=last_written_s - call.read_s,
                num_prompt_tokens=call.num_prompt_tokens,
                num_completion_tokens=num_completion,
                num_choices=len(call.jobs),
                num_retries=self._num_retries(),
                sources=sources_of(self._reports()[0]),
            )
        )
        last = self._lives[-1].core
        attributes: dict[str, str | int | float] = {
            Key.INPUT_TOKENS: call.num_prompt_tokens,
            Key.OUTPUT_TOKENS: num_completion,
            Key.PREFILL_WORKER: last.prefill_worker or "",
            Key.DECODE_WORKER: last.decode_worker or "",
            Key.ATTEMPT: last.attempt,
            Key.OUTCOME: self._outcome,
        }
        if self._ttft_s is not None:
            attributes[Key.TTFT_MS] = self._ttft_s * 1000
        if kept := self._keeps():
            attributes[Key.KEPT] = kept
            self._requests.keep_trace(call.root.trace_id, kept)
        call.root.end(attributes, self._error)

    def _keeps(self) -> str:
        """Return why this request's trace is kept though it was not sampled; empty where it is not."""
        limits = self._requests.telemetry.config
        story = {
            "failed": bool(self._error) and self._outcome != "client_gone",
            "resumed": self._num_retries() > 0,
            "slow first token": self._ttft_s is not None and self._ttft_s * 1000 > limits.slow_ttft_ms,
            "slow": (time.monotonic() - self._call.read_s) * 1000 > limits.slow_request_ms,
        }
        return self._requests.spans.keeps(self._call.root, story)


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
