"""A conversation as a checkpoint's chat template writes it: turns, tools, and what else a template may be given.

Rendering follows transformers' `apply_chat_template`. A template comes with the checkpoint, so it runs in a sandbox.
"""

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import msgspec
from jinja2 import Template, TemplateError, meta, nodes

from services.gateway import limits
from services.gateway.api.nesting import levels

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that templates know by name."""

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak in a conversation. A template writes the role beside its special tokens, so that a free text would be
the client's way to write such a turn itself."""

_OURS = frozenset(SPECIAL_NAMES) | {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
}  # fmt: skip
"""What no client may set through `chat_template_kwargs`: each has a field of its own, or is the model's."""


ValueT = TypeVar("ValueT")
Sent = ValueT | None | msgspec.UnsetType
"""A field as a client sent it: there is none, it is null, or it has a value, which may be empty."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that an assistant made. `arguments` is JSON text, as OpenAI's API has it."""

    name: str
    arguments: str
    id: str = ""


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn. A template sees those of its fields that are there. What is null only one sees that asks for it, as
    none: others would fail at it, or write it out."""

    role: str
    content: Sent[str] = msgspec.UNSET
    name: Sent[str] = msgspec.UNSET
    reasoning_content: Sent[str] = msgspec.UNSET
    tool_calls: Sent[tuple[ToolCall, ...]] = msgspec.UNSET
    tool_call_id: Sent[str] = msgspec.UNSET


class ChatOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a template is given beside the turns. `tools` are JSON objects as OpenAI's API has them."""

    tools: tuple[Mapping[str, Any], ...] = ()
    documents: tuple[Mapping[str, Any], ...] = ()
    template_kwargs: Mapping[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """The answer goes on with the last message, an assistant's, which is not ended."""


class ChatTemplateError(ValueError):
    """The checkpoint has no chat template, or its template refuses what it is given. `param` names the field."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class Mask(Protocol):
    """Makes of a JSON value what the template may see of it (`services/gateway/api/special.py`)."""

    def __call__(self, value: Any, *, is_answer: bool = False) -> Any:
        """`is_answer`: the value is the content of an assistant's message."""
        ...


class ChatTemplate:
    """One checkpoint's template. Raises jinja2's TemplateError where it cannot be compiled."""

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        self.source = source
        self._special = dict(special)
        self._template = _compiled(source)
        tree = self._template.environment.parse(source)
        self._variables = meta.find_undeclared_variables(tree)
        self._texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        self._texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        self._knows_developers = "developer" in source
        self._asked = _asked_for_none(tree)

    def knows(self, name: str) -> bool:
        """Return whether the template reads a variable of this name."""
        return name in self._variables

    def writes(self, token: str) -> bool:
        """Return whether the template has this text to write, in one piece or around a role: `<|` + role + `|>`."""
        around = (token.partition(role) for role in ROLES)
        return any(token in text for text in self._texts) or any(
            any(text.endswith(left) for text in self._texts) and any(text.startswith(right) for text in self._texts)
            for left, _, right in around
            if left and right
        )

    def render(self, messages: Sequence[ChatMessage], options: ChatOptions, mask: Mask) -> str:
        """Return the prompt. Raises ChatTemplateError."""
        self._check(messages, options)
        mark = f"x{secrets.token_hex(8)}x " if options.continue_final_message else ""
        given: dict[str, Any] = {
            **self._special,
            **mask(dict(options.template_kwargs)),
            "tools": mask(list(options.tools)) or None,
            "documents": mask(list(options.documents)) or None,
            "add_generation_prompt": options.add_generation_prompt,
        }
        turns = self._turns(messages, mask, mark)
        try:
            try:
                text = self._template.render(messages=turns, **given)
            except TypeError:
                otherwise = self._render_otherwise(messages, mask, mark, given)
                if otherwise is None:
                    raise
                text = otherwise
        except (TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        return _cut_at(text, mark, turns[-1]["content"]) if mark else text

    def _render_otherwise(
        self, messages: Sequence[ChatMessage], mask: Mask, mark: str, given: dict[str, Any]
    ) -> str | None:
        """Return what a template makes of the turns that takes a call's arguments only as the text that they were, as
        DeepSeek's that joins them, or asks for a null in one place and cannot bear it in another; None: it is neither
        of these."""
        for as_text, has_nulls in ((True, True), (False, False), (True, False)):
            turns = self._turns(messages, mask, mark, as_text=as_text, has_nulls=has_nulls)
            with contextlib.suppress(TypeError):
                return self._template.render(messages=turns, **given)
        return None

    def _turns(
        self, messages: Sequence[ChatMessage], mask: Mask, mark: str, *, as_text: bool = False, has_nulls: bool = True
    ) -> list[dict[str, Any]]:
        """Return the turns as a template sees them, the mark behind the last content."""
        turns = [self._turn(message, mask, as_text=as_text) for message in messages]
        if not has_nulls:
            turns = [{name: value for name, value in turn.items() if value is not None} for turn in turns]
        if mark:
            turns[-1]["content"] += mark
        return turns

    def _turn(self, message: ChatMessage, mask: Mask, *, as_text: bool) -> dict[str, Any]:
        calls, reasoning = message.tool_calls, mask(message.reasoning_content)
        sent: dict[str, Any] = {
            "role": self._role(message.role),
            "content": mask(message.content, is_answer=message.role == "assistant"),
            "name": mask(message.name),
            "reasoning_content": reasoning,
            "thinking": msgspec.UNSET if reasoning is None else reasoning,
            "tool_calls": [mask(_call(call, as_text=as_text)) for call in calls] if calls else calls,
            "tool_call_id": mask(message.tool_call_id),
        }
        seen = {name: value for name, value in sent.items() if value is not None or name in self._asked}
        return {name: value for name, value in seen.items() if value is not msgspec.UNSET}

    def _role(self, role: str) -> str:
        """A template that does not know developers has them as its system role, which they replaced."""
        return "system" if role == "developer" and not self._knows_developers else role

    def _check(self, messages: Sequence[ChatMessage], options: ChatOptions) -> None:
        """Refuse what the template would ignore, and what no template should have to bear."""
        for name in options.template_kwargs:
            if name in _OURS:
                raise ChatTemplateError(f"`chat_template_kwargs` may not set `{name}`", "chat_template_kwargs")
            self._check_known(name, "chat_template_kwargs")
        for param, value in (("tools", options.tools), ("documents", options.documents)):
            if value:
                self._check_known(param, param)
                check_nesting(value, param)
        check_size(options.template_kwargs, limits.MAX_TEMPLATE_KWARGS_BYTES, "chat_template_kwargs")
        for index, message in enumerate(messages):
            if message.tool_calls and "tool_calls" not in self.source:
                where = f"messages[{index}].tool_calls"
                raise ChatTemplateError(f"the model's chat template does not know `{where}`", where)
        if options.continue_final_message:
            _check_continued(messages, options)
        elif not options.add_generation_prompt:
            self._check_known("add_generation_prompt", "add_generation_prompt")

    def _check_known(self, name: str, param: str) -> None:
        if not self.knows(name):
            raise ChatTemplateError(f"the model's chat template does not know `{name}`", param)


def _asked_for_none(tree: nodes.Template) -> frozenset[str]:
    """Return the names of all that a template compares with none: fields, and variables that were set to them."""

    def names_in(node: nodes.Node) -> set[str]:
        parts = [node, *node.find_all((nodes.Name, nodes.Getattr, nodes.Const))]
        named = {part.name for part in parts if isinstance(part, nodes.Name)}
        named |= {part.attr for part in parts if isinstance(part, nodes.Getattr)}
        return named | {part.value for part in parts if isinstance(part, nodes.Const) and isinstance(part.value, str)}

    compared = [test.node for test in tree.find_all(nodes.Test) if test.name == "none"]
    for compares in tree.find_all(nodes.Compare):
        compared += [compares] if any(const.value is None for const in compares.find_all(nodes.Const)) else []
    asked = set[str]().union(*map(names_in, compared))
    for assigned in tree.find_all(nodes.Assign):
        if isinstance(assigned.target, nodes.Name) and assigned.target.name in asked:
            asked |= names_in(assigned.node)
    return frozenset(asked)


def texts_of(messages: Sequence[ChatMessage], options: ChatOptions) -> Iterator[str]:
    """Return all that will be part of a prompt, as texts whose lengths can be added up."""
    for message in messages:
        fields = (message.content, message.name, message.reasoning_content, message.tool_call_id)
        yield from (text for text in fields if isinstance(text, str))
        for call in message.tool_calls or ():
            yield from (call.id, call.name, call.arguments)
    if options.tools or options.documents or options.template_kwargs:
        yield _json([options.tools, options.documents, options.template_kwargs])


def check_size(value: Any, num_bytes: int, param: str) -> None:
    """Raise ChatTemplateError where a JSON value is longer than so many bytes, or too deep."""
    check_nesting(value, param)
    if len(_json(value).encode()) > num_bytes:
        raise ChatTemplateError(f"`{param}` is over {num_bytes} bytes of JSON", param)


def check_nesting(value: Any, param: str) -> None:
    """Raise ChatTemplateError where a JSON value is nested deeper than our own recursion should go."""
    if any(depth > limits.MAX_JSON_DEPTH for depth, _ in enumerate(levels(value))):
        raise ChatTemplateError(f"`{param}` is nested deeper than {limits.MAX_JSON_DEPTH} levels", param)


def _check_continued(messages: Sequence[ChatMessage], options: ChatOptions) -> None:
    param = "continue_final_message"
    if options.add_generation_prompt:
        raise ChatTemplateError(f"`{param}` and `add_generation_prompt` exclude each other", param)
    if not messages or messages[-1].role != "assistant" or not isinstance(messages[-1].content, str):
        raise ChatTemplateError(f"`{param}` needs a last message that is an assistant's and has a content", param)


def _cut_at(text: str, mark: str, content: str) -> str:
    """Return the text before the mark, which stands at the end of the continued content."""
    at = text.rfind(mark.strip())
    if at < 0 or content.removesuffix(mark).strip() not in text:
        message = "the model's chat template does not write the last message as it is: it cannot be continued"
        raise ChatTemplateError(message, "continue_final_message")
    # The mark ends in a space: where that is gone the template has trimmed the content, and the mark hid its end.
    return text[:at] if text.startswith(mark, at) else text[:at].rstrip()


def _call(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    """Return a call as templates expect it: its arguments as an object, unless their text is no JSON object."""
    arguments = call.arguments if as_text else _object_of(call.arguments)
    identity = {"id": call.id} if call.id else {}
    return {**identity, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _object_of(text: str) -> Any:
    try:
        found = msgspec.json.decode(text)
        check_nesting(found, "tool_calls")
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ChatTemplateError):
        return text
    return cast(dict[str, Any], found) if isinstance(found, dict) else text


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _compiled(source: str) -> Template:
    """Return the template in the environment that transformers renders chat templates in, a sandbox."""
    from transformers.utils import chat_template_utils  # noqa: PLC0415  (a second of imports)

    return cast(Any, chat_template_utils)._compile_jinja_template(source)
