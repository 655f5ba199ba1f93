"""How an answer is written: completions and chats, whole or as events. The Responses API is in `responses.py`."""

from collections.abc import Sequence
from typing import Generic, Literal, Protocol, TypeVar

import msgspec

from services.gateway.api.choice import Choice, ShownReason
from services.gateway.api.logprobs import ChatLogprobs, PromptLogprobs, TextLogprobs, TokenTexts
from services.gateway.api.openai import Options
from services.gateway.api.pieces import CallArguments, CallBegin, Content, Piece, Reasoning
from services.gateway.api.replies import DONE, CountsReply, ErrorReply, UsageReply, encode_reply, event

Unset = msgspec.UnsetType
ChoiceT = TypeVar("ChoiceT")


class Style(Protocol):
    """Writes one HTTP request's answer."""

    def begin(self) -> bytes:
        """Return the events that a stream begins with."""
        ...

    def some(self, number: int, choice: Choice, pieces: Sequence[Piece], counts: CountsReply) -> bytes:
        """Return the events that bring these pieces of a choice."""
        ...

    def last(self, number: int, choice: Choice, pieces: Sequence[Piece], counts: CountsReply) -> bytes:
        """Return a choice's last events, with the rest of its pieces."""
        ...

    def end(self, choices: Sequence[Choice], usage: UsageReply) -> bytes:
        """Return the events that a stream ends with."""
        ...

    def failed(self, error: ErrorReply) -> bytes:
        """Return the event of a stream that breaks off."""
        ...

    def whole(self, choices: Sequence[Choice], usage: UsageReply) -> bytes:
        """Return the JSON of the whole answer."""
        ...


class Function(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: Function
    type: Literal["function"] = "function"


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | Unset = msgspec.UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    id: str | Unset = msgspec.UNSET
    type: Literal["function"] | Unset = msgspec.UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | Unset = msgspec.UNSET
    content: str | Unset = msgspec.UNSET
    reasoning_content: str | Unset = msgspec.UNSET
    tool_calls: tuple[ToolCallDelta, ...] | Unset = msgspec.UNSET


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str | None
    reasoning_content: str | Unset = msgspec.UNSET
    tool_calls: tuple[ToolCall, ...] | Unset = msgspec.UNSET
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: ShownReason | None = None
    token_ids: tuple[int, ...] | Unset = msgspec.UNSET
    """vLLM's extension: where the request has `return_token_ids`."""
    prompt_logprobs: PromptLogprobs | Unset = msgspec.UNSET
    """vLLM's too."""


class DeltaChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ShownReason | None = None
    token_ids: tuple[int, ...] | Unset = msgspec.UNSET


class MessageChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ShownReason | None = None
    token_ids: tuple[int, ...] | Unset = msgspec.UNSET


class Reply(msgspec.Struct, Generic[ChoiceT], frozen=True, kw_only=True):
    """A whole answer, or one chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[ChoiceT, ...]
    usage: CountsReply | Unset | None = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | Unset = msgspec.UNSET
    """vLLM's extension, of a chat."""


class ClassicStyle:
    """What completions and chats have in common."""

    kind: str
    chunk_kind: str

    def __init__(self, options: Options, texts: TokenTexts, *, answer_id: str, created: int) -> None:
        self._options = options
        self._texts = texts
        self._id = answer_id
        self._created = created

    def begin(self) -> bytes:
        return b""

    def some(self, number: int, choice: Choice, pieces: Sequence[Piece], counts: CountsReply) -> bytes:
        tells_tokens = self._options.return_token_ids or self._options.sampling.logprobs is not None
        has_tokens = tells_tokens and choice.has_unsent
        owes_prompt = self._owes_prompt(choice)
        if not pieces and (not (has_tokens or owes_prompt) or (owes_prompt and not choice.prompt_end.is_certain)):
            return b""
        return self._chunk(number, choice, pieces, counts)

    def last(self, number: int, choice: Choice, pieces: Sequence[Piece], counts: CountsReply) -> bytes:
        return self.some(number, choice, pieces, counts) + self._chunk(number, choice, (), counts, is_last=True)

    def end(self, choices: Sequence[Choice], usage: UsageReply) -> bytes:
        return (self._event((), usage) if self._options.include_usage else b"") + DONE

    def failed(self, error: ErrorReply) -> bytes:
        return event(error)

    def whole(self, choices: Sequence[Choice], usage: UsageReply) -> bytes:
        whole = tuple(self._whole(number, choice) for number, choice in enumerate(choices))
        return encode_reply(self._reply(self.kind, whole, usage, self._prompt_logprobs_of_all(choices)))

    def _chunk(
        self, number: int, choice: Choice, pieces: Sequence[Piece], counts: CountsReply, *, is_last: bool = False
    ) -> bytes:
        part = self._part(number, choice, pieces, choice.next_tokens(is_last=is_last), is_last=is_last)
        choice.has_begun = True
        usage = counts if self._options.continuous_usage else None if self._options.include_usage else msgspec.UNSET
        return self._event((part,), usage)

    def _event(self, choices: tuple[TextChoice | DeltaChoice, ...], usage: CountsReply | Unset | None) -> bytes:
        return event(self._reply(self.chunk_kind, choices, usage))

    def _reply(
        self,
        kind: str,
        choices: tuple[TextChoice | DeltaChoice | MessageChoice, ...],
        usage: CountsReply | Unset | None,
        prompt_logprobs: PromptLogprobs | Unset = msgspec.UNSET,
    ) -> Reply[TextChoice | DeltaChoice | MessageChoice]:
        return Reply(
            id=self._id,
            object=kind,
            created=self._created,
            model=self._options.model,
            choices=choices,
            usage=usage,
            prompt_logprobs=prompt_logprobs,
        )

    def _ids(self, choice: Choice, part: slice) -> tuple[int, ...] | Unset:
        return tuple(choice.token_ids[part]) if self._options.return_token_ids else msgspec.UNSET

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs | Unset:
        if not self._options.prompt_logprobs:
            return msgspec.UNSET
        return self._texts.prompt(choice.prompt, choice.prompt_logprobs)

    def _prompt_logprobs_of_all(self, choices: Sequence[Choice]) -> PromptLogprobs | Unset:
        return msgspec.UNSET

    def _owes_prompt(self, choice: Choice) -> bool:
        """Return whether the next event brings the prompt."""
        return False

    def _part(
        self, number: int, choice: Choice, pieces: Sequence[Piece], part: slice, *, is_last: bool
    ) -> TextChoice | DeltaChoice:
        """Return what of a choice an event brings: these pieces and these tokens."""
        raise NotImplementedError

    def _whole(self, number: int, choice: Choice) -> TextChoice | MessageChoice:
        raise NotImplementedError


class CompletionStyle(ClassicStyle):
    kind = chunk_kind = "text_completion"

    def _owes_prompt(self, choice: Choice) -> bool:
        return self._options.echo and not choice.has_begun

    def _part(self, number: int, choice: Choice, pieces: Sequence[Piece], part: slice, *, is_last: bool) -> TextChoice:
        echoed = self._owes_prompt(choice)
        return TextChoice(
            index=number,
            text=(choice.prompt_before if echoed else "") + content_of(pieces),
            logprobs=self._logprobs(choice, part, echoed=echoed),
            finish_reason=choice.finish_reason if is_last else None,
            token_ids=self._ids(choice, part),
        )

    def _whole(self, number: int, choice: Choice) -> TextChoice:
        every = choice.next_tokens(is_last=True)
        return TextChoice(
            index=number,
            text=(choice.prompt_before if self._options.echo else "") + content_of(choice.pieces),
            logprobs=self._logprobs(choice, every, echoed=self._options.echo),
            finish_reason=choice.finish_reason,
            token_ids=self._ids(choice, every),
            prompt_logprobs=self._prompt_logprobs(choice),
        )

    def _logprobs(self, choice: Choice, part: slice, *, echoed: bool) -> TextLogprobs | None:
        """Return the logprobs of these tokens, with the prompt's before them where it is part of the text."""
        if self._options.sampling.logprobs is None:
            return None
        token_ids, logprobs = choice.token_ids[part], choice.logprobs[part]
        first = (echoed or not choice.prompt_end.token_ids) and part.start == 0
        if echoed:
            token_ids, logprobs = [*choice.prompt, *token_ids], [None, *choice.prompt_logprobs, *logprobs]
        shown_ids = choice.prompt_end.shown_ids if first else ()
        found = self._texts.completion(token_ids, logprobs, choice.num_characters, begin_ids=shown_ids)
        choice.num_characters += sum(map(len, found.tokens))
        return found


class ChatStyle(ClassicStyle):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _part(self, number: int, choice: Choice, pieces: Sequence[Piece], part: slice, *, is_last: bool) -> DeltaChoice:
        delta = Delta(
            role=msgspec.UNSET if choice.has_begun else "assistant",
            content=content_of(pieces) or msgspec.UNSET,
            reasoning_content=reasoning_of(pieces) or msgspec.UNSET,
            tool_calls=tuple(_call_delta(piece) for piece in joined_calls(pieces)) or msgspec.UNSET,
        )
        return DeltaChoice(
            index=number,
            delta=delta,
            logprobs=self._logprobs(choice, part),
            finish_reason=choice.finish_reason if is_last else None,
            token_ids=self._ids(choice, part),
        )

    def _whole(self, number: int, choice: Choice) -> MessageChoice:
        every = choice.next_tokens(is_last=True)
        calls = calls_of(choice.pieces)
        message = AssistantMessage(
            content=content_of(choice.pieces) or (None if calls else ""),
            reasoning_content=reasoning_of(choice.pieces) or msgspec.UNSET,
            tool_calls=calls or msgspec.UNSET,
        )
        return MessageChoice(
            index=number,
            message=message,
            logprobs=self._logprobs(choice, every),
            finish_reason=choice.finish_reason,
            token_ids=self._ids(choice, every),
        )

    def _prompt_logprobs_of_all(self, choices: Sequence[Choice]) -> PromptLogprobs | Unset:
        return self._prompt_logprobs(choices[0])

    def _logprobs(self, choice: Choice, part: slice) -> ChatLogprobs | None:
        if self._options.sampling.logprobs is None:
            return None
        return self._texts.chat(choice.token_ids[part], choice.logprobs[part])


def content_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


def reasoning_of(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))


def joined_calls(pieces: Sequence[Piece]) -> list[tuple[CallBegin | None, CallArguments]]:
    """Return for each call among the pieces its beginning, if it is among them, and all of its arguments there."""
    found: dict[int, tuple[CallBegin | None, CallArguments]] = {}
    for piece in pieces:
        if isinstance(piece, CallBegin):
            found[piece.number] = (piece, CallArguments(piece.number, ""))
        elif isinstance(piece, CallArguments):
            begin, before = found.get(piece.number, (None, CallArguments(piece.number, "")))
            found[piece.number] = (begin, CallArguments(piece.number, before.text + piece.text))
    return list(found.values())


def calls_of(pieces: Sequence[Piece]) -> tuple[ToolCall, ...]:
    """Return the calls of a whole answer."""
    return tuple(
        ToolCall(id=begin.id, function=Function(name=begin.name, arguments=arguments.text))
        for begin, arguments in joined_calls(pieces)
        if begin is not None
    )


def _call_delta(call: tuple[CallBegin | None, CallArguments]) -> ToolCallDelta:
    begin, arguments = call
    if begin is None:
        return ToolCallDelta(index=arguments.number, function=FunctionDelta(arguments=arguments.text))
    function = FunctionDelta(name=begin.name, arguments=arguments.text)
    return ToolCallDelta(index=begin.number, id=begin.id, type="function", function=function)
