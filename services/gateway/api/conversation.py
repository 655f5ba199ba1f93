"""A chat as its model is to see it, and as it may answer: thoughts, calls of tools, text or a document."""

import secrets
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from services.gateway.api.choice import TextReader
from services.gateway.api.constraints import Calls, Constraint, Marker, Thoughts
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.messages import messages_of
from services.gateway.api.openai import ChatBody, chat_options_of
from services.gateway.api.reasoning import (
    BEGIN,
    END,
    MARKERS,
    TAIL_TOKENS,
    ReasoningSplitter,
    ReasoningState,
    reasons,
    state_of,
)
from services.gateway.api.template import ChatMessage, ChatOptions
from services.gateway.api.text import StopMatcher, TextCodec
from services.gateway.api.tools.asked import Tool, ToolChoice, tool_choice_of, tools_of
from services.gateway.api.tools.formats import PARSERS, ToolFormat
from services.gateway.api.tools.grammar import needs_grammar, tool_grammar


class Chat(NamedTuple):
    """What a chat's body asks: its turns, and what the model may do in the next one."""

    messages: Sequence[ChatMessage]
    options: ChatOptions
    tools: tuple[Tool, ...]
    choice: ToolChoice
    parallel: bool
    """An answer may have several calls."""
    splits_reasoning: bool
    returns_reasoning: bool


class OutputParser(NamedTuple):
    """How the text of an answer is taken apart. `state` None: there is no reasoning; `form` None: no calls."""

    state: ReasoningState | None = None
    form: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    only_one: bool = False
    """The answer is over with its first call."""
    keeps_reasoning: bool = False
    """It is not split off: it stays in the text."""
    returns_reasoning: bool = True
    has_named_call: bool = False

    @property
    def shown(self) -> tuple[str, ...]:
        """The special tokens that the text has to show."""
        reasoning = () if self.state is None else MARKERS
        return reasoning + (() if self.form is None else PARSERS[self.form].markers)

    def reader(self, matcher: StopMatcher) -> TextReader:
        """Return a new one, for one answer."""
        thoughts = None if self.state is None else ReasoningSplitter(self.state, keeps=self.keeps_reasoning)
        make_hex = partial(secrets.token_hex, 12)
        calls = self.form and PARSERS[self.form](self.tool_names, make_hex, only_one=self.only_one)
        return TextReader(thoughts, matcher, calls, keeps=self.keeps_reasoning)


def chat_of(body: ChatBody) -> Chat:
    """Return what a body asks, checked. Raises InvalidRequestError."""
    tools = tools_of(body.tools)
    if body.separate_reasoning is False and body.include_reasoning is False:
        message = "`include_reasoning: false` leaves out what `separate_reasoning: false` has in the text"
        raise InvalidRequestError(message, "include_reasoning")
    return Chat(
        messages=messages_of(body.messages),
        options=chat_options_of(body, [tool.shown for tool in tools]),
        tools=tools,
        choice=tool_choice_of(body.tool_choice, tools),
        parallel=body.parallel_tool_calls is not False,
        splits_reasoning=body.separate_reasoning is not False,
        returns_reasoning=body.include_reasoning is not False,
    )


def answer_to(
    chat: Chat, prompt: Sequence[int], codec: TextCodec, form: ToolFormat | None, document: Constraint | None
) -> tuple[OutputParser, Constraint | None]:
    """Return how the answer to a chat's prompt is taken apart, and what it must be; None: any text.

    `form`: in which the model writes calls. `document`: what the body asks of the answer's text. Raises
    InvalidRequestError.
    """
    # Where no call may come no form is needed. Where one may come, refuse a model whose form of calls is unknown.
    if chat.choice.mode == "none":
        form = None
    elif form is None:
        message = (
            "the model's chat template does not tell how it writes calls: set `gateway.tool_format` in the mesh's "
            "configuration, or ask for `tool_choice: none`"
        )
        raise InvalidRequestError(message, "tools", "unsupported_parameter")
    state = _state(chat, prompt, codec)
    parser = OutputParser(
        state=state,
        form=form,
        tool_names=frozenset(tool.name for tool in chat.tools if chat.choice.name in ("", tool.name)),
        # `auto` mode may have no grammar, so that the parser has to end the answer behind a single call. In `required`
        # mode the grammar allows no second one.
        only_one=not chat.parallel and chat.choice.mode == "auto",
        keeps_reasoning=not chat.splits_reasoning,
        returns_reasoning=chat.returns_reasoning,
        has_named_call=bool(chat.choice.name),
    )
    return parser, _constraint(chat, parser, codec, document, _thoughts(state, parser, codec))


def _state(chat: Chat, prompt: Sequence[int], codec: TextCodec) -> ReasoningState | None:
    """Return where the answer begins; None: this model does not reason in a way that is known here."""
    if not reasons(codec.tools_template if chat.options.tools else codec.template):
        return None
    last = chat.messages[-1].content
    continued = last if chat.options.continue_final_message and isinstance(last, str) else None
    return state_of(codec.decode_shown(prompt[-TAIL_TOKENS:]), continued)


def _thoughts(state: ReasoningState | None, parser: OutputParser, codec: TextCodec) -> Thoughts | None:
    """Return what may stand before what an answer must be; None: nothing."""
    begin, end = (Marker(text, codec.added_ids.get(text)) for text in (BEGIN, END))
    if state in (ReasoningState.BEGUN, ReasoningState.GOES_ON):
        return Thoughts(end)
    # Where reasoning is not split off, the client reads all of the text as what it asked for.
    may_come = state is ReasoningState.MAY_COME and not parser.keeps_reasoning
    return Thoughts(end, begin) if may_come else None


def _constraint(
    chat: Chat, parser: OutputParser, codec: TextCodec, document: Constraint | None, thoughts: Thoughts | None
) -> Constraint | None:
    """A call that must come goes before a document; where one may come, the answer is calls or the document."""
    choice = chat.choice
    if choice.mode == "required":
        document = None
    elif document is not None:
        choice = msgspec.structs.replace(choice, mode="required")
    calls = _calls(chat, parser.form, choice, codec) if parser.form is not None else None
    return None if document is None and calls is None else Constraint(document and document.document, calls, thoughts)


def _calls(chat: Chat, form: ToolFormat, choice: ToolChoice, codec: TextCodec) -> Calls | None:
    """Return what calls in the answer must be; None: anything."""
    if not needs_grammar(chat.tools, choice):
        return None
    grammar = tool_grammar(form, codec.tools_template, chat.tools, choice, codec.added_ids, parallel=chat.parallel)
    schemas: list[tuple[str, str]] = []
    for index, tool in enumerate(chat.tools):
        if choice.name in ("", tool.name) and (tool.strict or choice.mode == "required"):
            param = f"tools[{index}].function.parameters"
            schemas.append((param, msgspec.json.encode(tool.parameters).decode()))
    return Calls(grammar, tuple(schemas))
