"""OpenAI's Responses API as it answers: items, one after another, and the events that build them."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from services.gateway.api.choice import Choice, ShownReason
from services.gateway.api.constraints import JsonObjectFormat, TextFormat
from services.gateway.api.logprobs import ContentLogprob, TokenTexts
from services.gateway.api.openai import Options
from services.gateway.api.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from services.gateway.api.replies import CountsReply, ErrorReply, MeshUsageReply, UsageReply, encode_reply, event
from services.gateway.api.responses import ResponsesBody, SchemaFormat

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[ContentLogprob, ...] = ()


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    content: tuple[OutputText, ...]
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: Status
    content: tuple[ReasoningText, ...]
    summary: tuple[()] = ()


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ReasoningReply(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None
    summary: None = None


class TextReply(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | JsonObjectFormat | SchemaFormat
    verbosity: Literal["medium"] = "medium"


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0
    """Those that a cache keeps for a set time. Here none does: workers keep what they have room for."""


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    kvmesh: MeshUsageReply


class ResponseReply(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, and what has come of it."""

    id: str
    created_at: int
    status: Status
    model: str
    output: tuple[MessageItem | ReasoningItem | CallItem, ...]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: ReasoningReply
    temperature: float
    text: TextReply
    tool_choice: str | dict[str, Any]
    tools: tuple[dict[str, Any], ...]
    top_logprobs: int
    top_p: float
    usage: ResponseUsage | None
    object: Literal["response"] = "response"
    background: Literal[False] = False
    max_tool_calls: None = None
    previous_response_id: None = None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"


class _Item:
    """One item of an answer as it grows: `reasoning`, `message` or `function_call`."""

    def __init__(self, kind: str, item_id: str, call: CallBegin | None = None) -> None:
        self.kind = kind
        self.id = item_id
        self.text = ""
        self.logprobs: list[ContentLogprob] = []
        self._call = call

    @property
    def part(self) -> OutputText | ReasoningText:
        """What is in it: a message and a thought have one part."""
        return self._thought if self.kind == "reasoning" else self._message

    @property
    def name(self) -> str:
        return "" if self._call is None else self._call.name

    def shown(self, status: Status) -> MessageItem | ReasoningItem | CallItem:
        if (call := self._call) is not None:
            return CallItem(id=self.id, status=status, call_id=call.id, name=call.name, arguments=self.text)
        is_begun = bool(self.text) or status != "in_progress"
        if self.kind == "reasoning":
            return ReasoningItem(id=self.id, status=status, content=(self._thought,) if is_begun else ())
        return MessageItem(id=self.id, status=status, content=(self._message,) if is_begun else ())

    @property
    def _message(self) -> OutputText:
        return OutputText(text=self.text, logprobs=tuple(self.logprobs))

    @property
    def _thought(self) -> ReasoningText:
        return ReasoningText(text=self.text)


class ResponsesStyle:
    """Writes one answer. Errors in the middle of a stream are sent twice, as OpenAI's clients look for either event."""

    def __init__(
        self, options: Options, texts: TokenTexts, body: ResponsesBody, *, answer_id: str, created: int
    ) -> None:
        self._options = options
        self._texts = texts
        self._body = body
        self._id = answer_id
        self._created = created
        self._sequence = 0
        self._items: list[_Item] = []
        self._statuses: list[Status] = []
        """Of the items that are complete."""
        self._logprobs: list[ContentLogprob] = []
        """Of tokens whose text is still to come, but for thoughts: theirs are not sent."""

    def begin(self) -> bytes:
        started = self._response("in_progress")
        return self._event("response.created", response=started) + self._event("response.in_progress", response=started)

    def some(self, number: int, choice: Choice, pieces: Sequence[Piece], counts: CountsReply) -> bytes:
        self._take_logprobs(choice, is_last=False)
        return b"".join(self._piece(piece) for piece in pieces)

    def last(self, number: int, choice: Choice, pieces: Sequence[Piece], counts: CountsReply) -> bytes:
        self._take_logprobs(choice, is_last=True)
        events = b"".join(self._piece(piece) for piece in pieces)
        if not self._items:  # an answer without a word is still a message
            events += self._open("message")
        is_cut = choice.reader.is_cut and self._items[-1].kind == "function_call"
        is_half = is_cut or choice.finish_reason is ShownReason.LENGTH
        return events + self._close("incomplete" if is_half else "completed")

    def end(self, choices: Sequence[Choice], usage: UsageReply) -> bytes:
        status = self._status(choices)
        return self._event(f"response.{status}", response=self._response(status, choices, usage))

    def failed(self, error: ErrorReply) -> bytes:
        body = error.error
        failed = self._event("error", code=body.code or body.type, message=body.message, param=body.param)
        error_of = ResponseError(code=body.code or body.type, message=body.message)
        return failed + self._event("response.failed", response=self._response("failed", failure=error_of))

    def whole(self, choices: Sequence[Choice], usage: UsageReply) -> bytes:
        self.last(0, choices[0], choices[0].pieces, usage)
        return encode_reply(self._response(self._status(choices), choices, usage))

    def _status(self, choices: Sequence[Choice]) -> Status:
        return "incomplete" if any(choice.finish_reason is ShownReason.LENGTH for choice in choices) else "completed"

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text=text):
                return self._text("message", text)
            case Reasoning(text=text):
                return self._text("reasoning", text)
            case CallBegin():
                return self._open("function_call", piece)
            case CallArguments(text=text):
                return self._text("function_call", text)

    def _text(self, kind: str, text: str) -> bytes:
        events = b"" if self._is_open and self._items[-1].kind == kind else self._open(kind)
        item = self._items[-1]
        item.text += text
        if kind == "function_call":
            return events + self._of_item("response.function_call_arguments.delta", delta=text)
        if kind == "reasoning":
            return events + self._of_part("response.reasoning_text.delta", delta=text)
        logprobs, self._logprobs = self._logprobs, []
        item.logprobs += logprobs
        return events + self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)

    @property
    def _is_open(self) -> bool:
        return len(self._items) > len(self._statuses)

    def _open(self, kind: str, call: CallBegin | None = None) -> bytes:
        events = self._close("completed")
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item = _Item(kind, f"{prefix}_{self._id.partition('_')[2]}_{len(self._items)}", call)
        self._items.append(item)
        shown = item.shown("in_progress")
        events += self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)
        return events if call else events + self._of_part("response.content_part.added", part=item.part)

    def _close(self, status: Status) -> bytes:
        if not self._is_open:
            return b""
        item = self._items[-1]
        match item.kind:
            case "function_call":
                self._logprobs.clear()
                name, text = item.name, item.text
                events = self._of_item("response.function_call_arguments.done", name=name, arguments=text)
            case "reasoning":
                events = self._of_part("response.reasoning_text.done", text=item.text)
                events += self._of_part("response.content_part.done", part=item.part)
            case _:
                item.logprobs += self._logprobs
                self._logprobs.clear()
                events = self._of_part("response.output_text.done", text=item.text, logprobs=item.logprobs)
                events += self._of_part("response.content_part.done", part=item.part)
        self._statuses.append(status)
        shown = item.shown(status)
        return events + self._event("response.output_item.done", output_index=len(self._items) - 1, item=shown)

    def _of_item(self, kind: str, **fields: object) -> bytes:
        return self._event(kind, item_id=self._items[-1].id, output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind: str, **fields: object) -> bytes:
        return self._of_item(kind, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **fields}, kind)

    def _take_logprobs(self, choice: Choice, *, is_last: bool) -> None:
        part = choice.next_tokens(is_last=is_last)
        if self._options.sampling.logprobs is not None:
            shown = self._texts.chat(choice.token_ids[part], choice.logprobs[part])
            self._logprobs += shown.content
            num_before = part.stop - len(self._logprobs)
            del self._logprobs[: max(0, choice.num_reasoning - num_before)]

    def _response(
        self,
        status: Status,
        choices: Sequence[Choice] = (),
        usage: UsageReply | None = None,
        failure: ResponseError | None = None,
    ) -> ResponseReply:
        body, sampling = self._body, self._options.sampling
        asked = body.text.format if body.text else None
        return ResponseReply(
            id=self._id,
            created_at=self._created,
            status=status,
            model=body.model,
            # Only closed items have a status: an item that is still open is left out.
            output=tuple(item.shown(each) for item, each in zip(self._items, self._statuses, strict=False)),
            error=failure,
            incomplete_details=IncompleteDetails("max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=ReasoningReply(effort=body.reasoning.effort if body.reasoning else None),
            temperature=sampling.temperature,
            text=TextReply(format=TextFormat() if asked is None else asked),
            tool_choice=body.tool_choice or "auto",
            tools=tuple({"strict": None, "parameters": None, **tool} for tool in body.tools or ()),
            top_logprobs=body.top_logprobs or 0,
            top_p=sampling.top_p,
            usage=None if usage is None else _usage(usage, sum(choice.num_reasoning for choice in choices)),
        )


def _usage(usage: UsageReply, num_reasoning: int) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputDetails(num_reasoning),
        total_tokens=usage.total_tokens,
        kvmesh=usage.kvmesh,
    )
