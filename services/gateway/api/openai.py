"""OpenAI's API as it is asked: bodies, their limits, and the errors that name the field at fault.

The fields of the bodies are the parameters that are honoured; `parameters.py` has the others. What is in neither is
refused: nothing that a client asks for is passed over in silence.
"""

import contextlib
import functools
import re
from collections.abc import Generator, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from schemas.logprobs import NumTop
from schemas.numbers import Seed
from schemas.request import Bias, Factor, Mass, Penalty, SamplingParams, Share, Temperature
from services.gateway import limits
from services.gateway.api.constraints import ResponseFormat, StructuredOutputs
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.json_schema import Schema
from services.gateway.api.messages import MessageBody
from services.gateway.api.nesting import doubled_name
from services.gateway.api.parameters import Route, find_problem
from services.gateway.api.template import ChatOptions

BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def about(description: str, origin: str = "OpenAI") -> Meta:
    """Return what pages and the OpenAPI document say of a field. `origin`: whose parameter it is."""
    return Meta(description=description, extra={"origin": origin})


NumAnswers = Annotated[int, Meta(ge=1, le=limits.MAX_N)]
Tokens = Annotated[int, Meta(ge=0, le=limits.MAX_COUNT)]
TopK = Annotated[int, Meta(ge=-1, le=limits.MAX_COUNT)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI pads its events against who counts bytes; there is TLS for that, and no padding here, as it allows."""


class SharedBody(msgspec.Struct, frozen=True, kw_only=True):
    """What all kinds of body share."""

    model: Annotated[str, about("The model's name, as /v1/models gives it.")]
    stream: Annotated[bool | None, about("Send tokens as they come.")] = None
    stop: Annotated[str | list[str] | None, about("Texts before which an answer ends.")] = None
    seed: Annotated[Seed | None, about("Equal seeds draw equal tokens.")] = None
    temperature: Annotated[Temperature | None, about("0: the likeliest token; 1: as the model says.")] = None
    top_p: Annotated[Mass | None, about("Draw among the likeliest tokens that reach this mass.")] = None
    presence_penalty: Annotated[Penalty | None, about("Off the logit of each token that the answer has.")] = None
    frequency_penalty: Annotated[Penalty | None, about("The same for each time that it has it.")] = None
    logit_bias: Annotated[dict[str, Bias] | None, about("Token ids, and what is added to their logits.")] = None
    top_k: Annotated[TopK | None, about("Draw among so many; 0 or -1: among all.", "vLLM")] = None
    min_p: Annotated[Share | None, about("Draw among tokens this share as likely as the likeliest.", "vLLM")] = None
    min_tokens: Annotated[Tokens | None, about("No end of the answer before so many.", "vLLM")] = None
    repetition_penalty: Annotated[Factor | None, about("Over 1: what was said is less likely.", "vLLM")] = None
    stop_token_ids: Annotated[list[int] | None, about("Tokens that end an answer.", "vLLM")] = None
    ignore_eos: Annotated[bool | None, about("Go on behind the model's own end.", "vLLM")] = None
    allowed_token_ids: Annotated[list[int] | None, about("No other tokens.", "vLLM")] = None
    bad_words: Annotated[list[str] | None, about("Words that the answer does not have.", "vLLM")] = None
    include_stop_str_in_output: Annotated[bool | None, about("The stop text is part of the answer.", "vLLM")] = None
    no_stop_trim: Annotated[bool | None, about("The same.", "SGLang")] = None
    skip_special_tokens: Annotated[bool | None, about("False: the text shows special tokens.", "vLLM")] = None
    structured_outputs: Annotated[StructuredOutputs | None, about("What the answer must be.", "vLLM")] = None


class CommonBody(SharedBody, frozen=True, kw_only=True):
    """What completions and chats share."""

    n: Annotated[NumAnswers | None, about("Answers to each prompt; their seeds follow each other.")] = None
    max_tokens: Annotated[Tokens | None, about("Tokens of an answer at most.")] = None
    stream_options: Annotated[StreamOptions | None, about("Usage in the last event, or in every one.")] = None
    prompt_logprobs: Annotated[NumTop | None, about("Logprobs of the prompt's tokens, and the top.", "vLLM")] = None
    return_token_ids: Annotated[bool | None, about("The answer's token ids beside its text.", "vLLM")] = None
    return_tokens_as_token_ids: Annotated[bool | None, about("In logprobs, `token_id:7` for a text.", "vLLM")] = None
    response_format: Annotated[ResponseFormat | None, about("Any text, any JSON object, or a JSON Schema's.")] = None
    guided_json: Annotated[Schema | str | None, about("`structured_outputs.json`.", "vLLM")] = None
    guided_regex: Annotated[str | None, about("`structured_outputs.regex`.", "vLLM")] = None
    guided_choice: Annotated[list[str] | None, about("`structured_outputs.choice`.", "vLLM")] = None
    guided_grammar: Annotated[str | None, about("`structured_outputs.grammar`.", "vLLM")] = None


class CompletionBody(CommonBody, frozen=True, kw_only=True):
    prompt: Annotated[str | list[str | int | list[int]], about("A text, token ids, or several of either.")]
    logprobs: Annotated[NumTop | None, about("Logprobs of the answer's tokens, and of so many likeliest.")] = None
    echo: Annotated[bool | None, about("The prompt before the answer; with `logprobs` its logprobs too.")] = None
    add_special_tokens: Annotated[bool | None, about("False: the tokens of the prompt's text alone.", "vLLM")] = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    messages: Annotated[list[MessageBody], about("The conversation so far.")]
    tools: Annotated[list[dict[str, Any]] | None, about("Functions that the model may call.")] = None
    tool_choice: Annotated[str | dict[str, Any] | None, about("none, auto, required, or one function.")] = None
    parallel_tool_calls: Annotated[bool | None, about("False: an answer has one call at most.")] = None
    max_completion_tokens: Annotated[Tokens | None, about("As `max_tokens`, which it replaced.")] = None
    logprobs: Annotated[bool | None, about("Logprobs of the answer's tokens.")] = None
    top_logprobs: Annotated[NumTop | None, about("With those of so many likeliest tokens.")] = None
    reasoning_effort: Annotated[str | None, about("How long to think, where the template knows the word.")] = None
    include_reasoning: Annotated[bool | None, about("False: what the model thought is not returned.", "vLLM")] = None
    separate_reasoning: Annotated[bool | None, about("False: it stays in the text, with its marks.", "SGLang")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, about("Variables of the model's template.", "vLLM")] = None
    documents: Annotated[list[dict[str, Any]] | None, about("What the template may quote from.", "vLLM")] = None
    add_generation_prompt: Annotated[bool | None, about("False: the assistant's turn is not begun.", "vLLM")] = None
    continue_final_message: Annotated[bool | None, about("The answer goes on with the last message.", "vLLM")] = None


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How an answer is to be made, checked: all kinds of body come to this. `sampling` lacks what differs between the
    choices: `max_tokens` and `seed`."""

    model: str
    n: int
    max_tokens: int | None
    """None: the rest of the context. 0: only the prompt is wanted back."""
    max_tokens_param: str
    sampling: SamplingParams
    seed: int | None
    stops: tuple[str, ...]
    keeps_stop: bool
    """The stop string is part of the answer."""
    shows_special: bool
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    shows_ids: bool
    """Logprobs name tokens by their ids, not by their texts."""
    prompt_logprobs: bool
    """The prompt's logprobs are returned by themselves, beside what `echo` returns."""


Prompt = str | list[int]


def decode_body(payload: bytes, *, is_chat: bool) -> CompletionBody | ChatBody:
    """Return the body of /v1/chat/completions, or that of /v1/completions. Raises InvalidRequestError."""
    if is_chat:
        return decode_as(payload, ChatBody, Route.CHAT)
    return decode_as(payload, CompletionBody, Route.COMPLETIONS)


def decode_as(payload: bytes, kind: type[BodyT], route: Route) -> BodyT:
    """Return a body of this kind. Raises InvalidRequestError."""
    with _naming_fields():
        found = find_problem(payload, kind.__struct_fields__, route)
    if found is not None:
        raise InvalidRequestError(found.message, found.name, found.code)
    return decode_strictly(payload, kind)


def decode_strictly(payload: bytes, kind: type[BodyT]) -> BodyT:
    """Return a body of a kind that forbids unknown fields, or whose fields were looked at. Raises
    InvalidRequestError."""
    with _naming_fields():
        name = doubled_name(payload)
        if name is not None:
            message = f"the body has the name {name!r:.80} twice in one object"
            raise InvalidRequestError(message, name[:80], "invalid_json")
        return _decoder(kind).decode(payload)


@contextlib.contextmanager
def _naming_fields() -> Generator[None]:
    try:
        yield
    except msgspec.ValidationError as error:
        text = str(error)
        at = re.search(r"at `\$\.([^`]+)`", text) or re.search(r"field `([^`]+)`", text)
        raise InvalidRequestError(text, at[1] if at else None, "invalid_type") from error
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the body is no valid JSON: {error}", code="invalid_json") from error


def options_of(body: CompletionBody | ChatBody, vocab_size: int) -> Options:
    """Return how the answer is to be made. Raises InvalidRequestError for what is absurd."""
    name, max_tokens = _max_tokens(body)
    logprobs = _logprobs(body)
    # Two fields ask for the prompt's logprobs: `prompt_logprobs`, and `echo` with `logprobs`. The larger number counts.
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    prompt_logprobs = body.prompt_logprobs
    if prompt_logprobs is not None and body.stream:
        raise InvalidRequestError(
            "`prompt_logprobs` come with whole answers only: not with `stream`", "prompt_logprobs"
        )
    if echo and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    # `max_tokens` and the seed differ between prompts and choices: `make_jobs` sets them.
    sampling = SamplingParams(
        max_tokens=0,
        temperature=_or(body.temperature, 1.0),
        top_p=_or(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        stop_token_ids=_token_ids("stop_token_ids", body.stop_token_ids, vocab_size, limits.MAX_STOP_TOKEN_IDS),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias, vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    # Refuse fields that contradict each other: vLLM's and SGLang's name of one option, or `stream` and its options.
    trims = {body.include_stop_str_in_output, body.no_stop_trim}
    if trims >= {True, False}:
        raise InvalidRequestError("`include_stop_str_in_output` and `no_stop_trim` differ", "no_stop_trim")
    options = body.stream_options
    if options not in (None, StreamOptions()) and not body.stream:
        raise InvalidRequestError("`stream_options` goes with `stream: true`", "stream_options")
    return Options(
        model=body.model,
        n=body.n or 1,
        max_tokens=max_tokens,
        max_tokens_param=name,
        sampling=sampling,
        seed=body.seed,
        stops=_stops(body.stop),
        keeps_stop=True in trims,
        shows_special=body.skip_special_tokens is False,
        echo=echo,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        shows_ids=bool(body.return_tokens_as_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
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


def chat_options_of(body: ChatBody, tools: Sequence[Mapping[str, Any]]) -> ChatOptions:
    """Return what the template is given beside the messages. `tools`: as it is to see them."""
    name, kwargs = "reasoning_effort", body.chat_template_kwargs or {}
    effort = {} if body.reasoning_effort is None else {name: body.reasoning_effort}
    if effort and kwargs.get(name, body.reasoning_effort) != body.reasoning_effort:
        raise InvalidRequestError(f"`{name}` and `chat_template_kwargs.{name}` differ", name)
    return ChatOptions(
        tools=tuple(tools),
        documents=tuple(body.documents or ()),
        template_kwargs=effort | kwargs,
        add_generation_prompt=(
            not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
        ),
        continue_final_message=bool(body.continue_final_message),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _max_tokens(body: CompletionBody | ChatBody) -> tuple[str, int | None]:
    name, value = "max_tokens", body.max_tokens
    other = body.max_completion_tokens if isinstance(body, ChatBody) else None
    if other is not None and (value is None or other <= value):  # both are bounds
        name, value = "max_completion_tokens", other
    if value == 0 and not (isinstance(body, CompletionBody) and body.echo):
        raise InvalidRequestError(f"`{name}` may be 0 only where `echo` asks for the prompt", name)
    if value is not None and (body.min_tokens or 0) > value:
        raise InvalidRequestError(f"`min_tokens` is over `{name}`", "min_tokens")
    return name, value


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("`top_logprobs` needs `logprobs: true`", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > limits.MAX_STOPS:
        raise InvalidRequestError(f"`stop` holds {len(stops)} strings, more than {limits.MAX_STOPS}", "stop")
    if any(not text or len(text) > limits.MAX_STOP_CHARACTERS for text in stops):
        raise InvalidRequestError(f"a `stop` string must have 1 to {limits.MAX_STOP_CHARACTERS} characters", "stop")
    return stops


def _token_ids(name: str, token_ids: list[int] | None, vocab_size: int, most: int) -> tuple[int, ...]:
    found = tuple(token_ids or ())
    if len(found) > most:
        raise InvalidRequestError(f"`{name}` holds more than {most} ids", name)
    check_vocabulary(found, vocab_size, name)
    return found


def _allowed(token_ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    name = "allowed_token_ids"
    if token_ids is not None and not token_ids:
        raise InvalidRequestError(f"`{name}` allows no token at all", name)
    return _token_ids(name, token_ids, vocab_size, limits.MAX_NAMED_TOKENS)


def _logit_bias(bias: Mapping[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    name = "logit_bias"
    if bias is None:
        return ()
    if len(bias) > limits.MAX_NAMED_TOKENS:
        raise InvalidRequestError(f"`{name}` names more than {limits.MAX_NAMED_TOKENS} tokens", name)
    if not all(map(_ID.fullmatch, bias)):  # int() would take "1_0", " 7 " and other scripts' digits as well
        raise InvalidRequestError(f"`{name}` must name tokens by their ids", name)
    found = {int(token_id): float(value) for token_id, value in bias.items()}
    check_vocabulary(tuple(found), vocab_size, name)
    return tuple(found.items())


def _text_prompt(text: str) -> str:
    if not text:
        raise InvalidRequestError("`prompt` is empty", "prompt")
    return text


def _token_prompt(token_ids: object, vocab_size: int) -> list[int]:
    ids = msgspec.convert(token_ids, list[int])
    if not ids:
        raise InvalidRequestError("`prompt` is empty", "prompt")
    check_vocabulary(ids, vocab_size, "prompt")
    return ids


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises InvalidRequestError for an id that no token has."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
        raise InvalidRequestError(f"token id {worst} in `{param}` is outside 0 … {vocab_size - 1}", param)


_ID = re.compile(r"(?:0|[1-9][0-9]{0,9})")
_decoder = functools.cache(msgspec.json.Decoder)
