"""OpenAI's API as it is asked: bodies, their limits, and the errors that name the field at fault.

What would change an answer and is not supported is refused; fields that nobody knows are ignored.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from services.gateway import limits
from services.gateway.api.text import ChatMessage

NumberT = TypeVar("NumberT", int, float)


class InvalidRequestError(Exception):
    """The client asked for something it cannot have. `param` names the field, where there is one."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        cut = limits.MAX_ERROR_CHARACTERS
        self.message = message if len(message) <= cut else f"{message[: cut - 2]} …"
        super().__init__(self.message)
        self.param = param
        self.code = code
        self.status = status


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None


class CommonBody(msgspec.Struct, frozen=True, kw_only=True):
    """What both kinds of body share. `Any` stands where only a default is accepted."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    return_token_ids: bool | None = None
    logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: Any = None
    suffix: Any = None
    best_of: Any = None


class TextPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None


class MessageBody(msgspec.Struct, frozen=True):
    role: str
    content: str | list[TextPart] | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    messages: list[MessageBody]
    max_completion_tokens: int | None = None
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    top_logprobs: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is to be made, checked: both kinds of body come to this."""

    model: str
    n: int
    max_tokens: int | None
    """None: the rest of the context."""
    max_tokens_param: str
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stops: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    return_token_ids: bool


Prompt = str | list[int]

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may speak in a conversation. A template writes the role beside its special tokens, so that a free text would be
the client's way to write such a turn itself."""

# The values that mean "as if it were not there"; everything else in these fields is refused by name.
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "logprobs": (False,),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}


def decode_body(payload: bytes, *, is_chat: bool) -> CompletionBody | ChatBody:
    """Return the body of /v1/chat/completions, or that of /v1/completions. Raises InvalidRequestError."""
    try:
        return _chat_decoder.decode(payload) if is_chat else _completion_decoder.decode(payload)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.search(r"at `\$\.([^`]+)`", text) or re.search(r"required field `([^`]+)`", text)
        raise InvalidRequestError(text, found[1] if found else None, "invalid_type") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}", code="invalid_json") from error


def options_of(body: CompletionBody | ChatBody, vocab_size: int) -> Options:
    """Return how the answer is to be made. Raises InvalidRequestError for what is absurd or not supported."""
    for name, neutral in _NEUTRAL.items():
        value: object = getattr(body, name, None)
        if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
            raise InvalidRequestError(f"`{name}` is not supported", name, "unsupported_parameter")
    name, max_tokens = _max_tokens(body)
    return Options(
        model=body.model,
        n=_within("n", body.n, 1, 1, limits.MAX_N),
        max_tokens=max_tokens,
        max_tokens_param=name,
        temperature=_within("temperature", body.temperature, 1.0, 0.0, 2.0),
        top_p=_top_p(body.top_p),
        top_k=max(0, _within("top_k", body.top_k, 0, -1, limits.MAX_COUNT)),
        seed=_seed(body.seed),
        stops=_stops(body.stop),
        stop_token_ids=_stop_token_ids(body.stop_token_ids, vocab_size),
        ignore_eos=bool(body.ignore_eos),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        return_token_ids=bool(body.return_token_ids),
    )


def prompts_of(body: CompletionBody, vocab_size: int) -> list[Prompt]:
    """Return the prompts, each text or token ids. Raises InvalidRequestError."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [_text_prompt(prompt)]
    if not prompt:
        raise InvalidRequestError("`prompt` is empty", "prompt")
    kinds = {type(part) for part in prompt}
    if len(kinds) > 1:
        raise InvalidRequestError("`prompt` mixes texts, token ids and lists of them", "prompt")
    if kinds == {int}:
        return [_token_prompt(prompt, vocab_size)]
    if len(prompt) > limits.MAX_CHOICES:
        raise InvalidRequestError(f"`prompt` holds more than {limits.MAX_CHOICES} prompts", "prompt")
    return [_text_prompt(p) if isinstance(p, str) else _token_prompt(p, vocab_size) for p in prompt]


def messages_of(body: ChatBody) -> list[ChatMessage]:
    """Return the conversation. Raises InvalidRequestError."""
    if not body.messages:
        raise InvalidRequestError("`messages` is empty", "messages")
    if len(body.messages) > limits.MAX_MESSAGES:
        raise InvalidRequestError(f"`messages` holds more than {limits.MAX_MESSAGES}", "messages")
    return [ChatMessage(role=_role(m, index), content=_content(m, index)) for index, m in enumerate(body.messages)]


def _role(message: MessageBody, index: int) -> str:
    if message.role not in ROLES:
        where = f"messages[{index}].role"
        raise InvalidRequestError(f"`{where}` must be one of {', '.join(ROLES)}, not {message.role!r}", where)
    return message.role


def _content(message: MessageBody, index: int) -> str:
    where = f"messages[{index}].content"
    if message.content is None:
        raise InvalidRequestError(f"`{where}` is missing: only text is supported", where)
    if isinstance(message.content, str):
        return message.content
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise InvalidRequestError(f"`{where}` holds a part of type {part.type!r}: only text is supported", where)
    return "".join(part.text or "" for part in message.content)


def _within(name: str, value: float | int | None, default: NumberT, low: float, high: float) -> NumberT:
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequestError(f"`{name}` must be from {low:g} to {high:g}, not {value}", name)
    return type(default)(value)


def _top_p(value: float | None) -> float:
    if value is not None and not 0.0 < value <= 1.0:
        raise InvalidRequestError(f"`top_p` must be over 0 and at most 1, not {value}", "top_p")
    return 1.0 if value is None else value


def _max_tokens(body: CompletionBody | ChatBody) -> tuple[str, int | None]:
    name, value = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name, value = "max_completion_tokens", body.max_completion_tokens
    if value is not None and not 1 <= value <= limits.MAX_COUNT:
        raise InvalidRequestError(f"`{name}` must be from 1 to {limits.MAX_COUNT}, not {value}", name)
    return name, value


def _seed(seed: int | None) -> int | None:
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise InvalidRequestError("`seed` must fit into 64 bits", "seed")
    return seed


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.MAX_STOPS:
        raise InvalidRequestError(f"`stop` holds {len(stops)} strings, more than {limits.MAX_STOPS}", "stop")
    if any(not text or len(text) > limits.MAX_STOP_CHARACTERS for text in stops):
        raise InvalidRequestError(f"a `stop` string must have 1 to {limits.MAX_STOP_CHARACTERS} characters", "stop")
    return stops


def _stop_token_ids(token_ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    found = tuple(token_ids or ())
    if len(found) > limits.MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"`stop_token_ids` holds more than {limits.MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    _check_vocabulary(found, vocab_size, "stop_token_ids")
    return found


def _text_prompt(text: str) -> str:
    if not text:
        raise InvalidRequestError("`prompt` is empty", "prompt")
    return text


def _token_prompt(token_ids: object, vocab_size: int) -> list[int]:
    ids = msgspec.convert(token_ids, list[int])
    if not ids:
        raise InvalidRequestError("`prompt` is empty", "prompt")
    _check_vocabulary(ids, vocab_size, "prompt")
    return ids


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise InvalidRequestError(f"token id {worst} in `{param}` is outside 0 … {vocab_size - 1}", param)


_completion_decoder = msgspec.json.Decoder(CompletionBody)
_chat_decoder = msgspec.json.Decoder(ChatBody)
