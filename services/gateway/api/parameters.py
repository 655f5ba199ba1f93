"""The parameters of OpenAI's API, and of vLLM's and SGLang's, that change no answer here or are refused by name.

Those that are honoured are the fields of the bodies in `openai.py` and `responses.py`. What is in neither is refused
too: nothing that a client asks for is passed over in silence. Pure.
"""

import difflib
import enum
import functools
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple, cast

import msgspec

from services.gateway import limits


class Route(enum.StrEnum):
    """The routes that take parameters."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"


class Treatment(enum.StrEnum):
    """What becomes of a parameter."""

    HONOURED = "honoured"
    NEUTRAL = "neutral"
    """Any value is taken, as none can change an answer."""
    REFUSED = "refused"
    """Only `null` and the values that ask for nothing are taken."""


class Parameter(NamedTuple):
    """A parameter that is not honoured. `why`: for whom reads the table, and in the error. `harmless`: the values that
    ask for nothing."""

    name: str
    origin: str
    treatment: Treatment
    routes: frozenset[Route]
    why: str
    harmless: tuple[object, ...] = ()


class Part(NamedTuple):
    """A part of a parameter that is honoured, which is not always. `path`: its name in errors. `values`: those that
    `treatment` is about; none: all."""

    path: str
    origin: str
    treatment: Treatment
    routes: frozenset[Route]
    why: str
    values: tuple[object, ...] = ()


class Problem(NamedTuple):
    """A parameter that cannot be taken."""

    name: str
    code: str
    message: str


_ALL = frozenset(Route)
_CHAT = frozenset({Route.CHAT})
_TALKS = frozenset({Route.CHAT, Route.RESPONSES})
_TEXTS = frozenset({Route.COMPLETIONS})
_CLASSIC = frozenset({Route.COMPLETIONS, Route.CHAT})
_RESPONSES = frozenset({Route.RESPONSES})


def _neutral(origin: str, routes: frozenset[Route], why: str, *names: str) -> list[Parameter]:
    return [Parameter(name, origin, Treatment.NEUTRAL, routes, why) for name in names]


def _refused(
    origin: str, routes: frozenset[Route], why: str, *names: str, harmless: tuple[object, ...] = ()
) -> list[Parameter]:
    return [Parameter(name, origin, Treatment.REFUSED, routes, why, harmless) for name in names]


_AFFINITY = "who asks, or how a cache may find it: caches here go by content"
_NO_MEDIA = "only text is understood and written"
_ONE_DRAW = "tokens are drawn one after another, by one sampler for all engines"
_CLIENTS_PLACE_NOTHING = "a client names no worker, no address and no transfer: the scheduler places requests"

UNHONOURED: tuple[Parameter, ...] = (
    *_neutral("OpenAI", _ALL, _AFFINITY, "user"),
    *_neutral("OpenAI", _TALKS, _AFFINITY, "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *_neutral("OpenAI", _TALKS, _AFFINITY, "prompt_cache_options"),
    *_neutral("OpenAI", _CHAT, "kept with a stored answer, and none is stored", "metadata"),
    *_neutral("OpenAI", _CHAT, "a hint that makes an answer quicker, never another one", "prediction"),
    *_neutral("SGLang", _CLASSIC, "names of series in SGLang's own metrics", "custom_labels"),
    *_neutral("vLLM", _CLASSIC, "how vLLM decodes with a slow tokenizer", "spaces_between_special_tokens"),
    *_neutral("vLLM", _ALL, "which of vLLM's libraries holds a grammar", "guided_decoding_backend"),
    *_refused("OpenAI", _TALKS, "no answer is stored", "store", harmless=(False,)),
    *_refused("OpenAI", _TALKS, "there is one tier", "service_tier", harmless=("auto", "default")),
    *_refused("OpenAI", _CHAT, "no template knows it", "verbosity", harmless=("medium",)),
    *_refused("OpenAI", _CHAT, _NO_MEDIA, "modalities", harmless=(["text"],)),
    *_refused("OpenAI", _CHAT, _NO_MEDIA, "audio", "web_search_options"),
    *_refused("OpenAI", _TALKS, "nothing is moderated here", "moderation"),
    *_refused("OpenAI", _CHAT, "use `tools`", "functions", harmless=([],)),
    *_refused("OpenAI", _CHAT, "use `tool_choice`", "function_call", harmless=("none", "auto")),
    *_refused("OpenAI", _TEXTS, "the models here write on, they do not fill in", "suffix", harmless=("",)),
    *_refused("OpenAI", _CLASSIC, "every answer is returned: use `n`", "best_of", harmless=(1,)),
    *_refused("vLLM", _CLASSIC, _ONE_DRAW, "use_beam_search", "early_stopping", harmless=(False,)),
    *_refused("vLLM", _CLASSIC, _ONE_DRAW, "length_penalty", harmless=(1, 1.0)),
    *_refused("vLLM", _ALL, _ONE_DRAW, "watermarking", "vllm_xargs", "repetition_detection", harmless=(False, {})),
    *_refused("vLLM", _CLASSIC, "prompts are taken whole or refused", "truncate_prompt_tokens", "truncation_side"),
    *_refused("vLLM", _CLASSIC, "ask for `logprobs`", "logprob_token_ids"),
    *_refused("vLLM", _CLASSIC, "no code of clients runs here", "logits_processors", harmless=([],)),
    *_refused("vLLM", _CHAT, "for training: ask /tokenize", "return_assistant_tokens_mask", harmless=(False,)),
    *_refused("vLLM", _CHAT, "no template knows it", "template_drafts"),
    *_refused("vLLM", _TEXTS, "a prompt is text or tokens", "prompt_embeds"),
    *_refused("vLLM", _CHAT, "a template is part of the model: no client sends one", "chat_template"),
    *_refused("vLLM", _CHAT, "on /v1/completions only", "echo", harmless=(False,)),
    *_refused("vLLM", _CHAT, "the template writes all special tokens", "add_special_tokens", harmless=(False,)),
    *_refused("vLLM", _CLASSIC, "use `max_tokens`", "thinking_token_budget"),
    *_refused("vLLM", _ALL, "all requests have one priority", "priority", harmless=(0,)),
    *_refused("vLLM", _ALL, "the gateway makes the id: the header x-request-id", "request_id"),
    *_refused("vLLM", _ALL, "requests have no sessions: what is cached is found by content", "session_id"),
    *_refused("vLLM", _ALL, "KV is shared within a tenant: give an API key of another one", "cache_salt"),
    *_refused("vLLM", _ALL, _CLIENTS_PLACE_NOTHING, "kv_transfer_params", "ec_transfer_params"),
    *_refused("vLLM", _CLASSIC, "tokens are sent as they come", "stream_interval", harmless=(1,)),
    *_refused("vLLM", _CLASSIC, "ask for `return_token_ids`", "return_token_offsets", harmless=(False,)),
    *_refused("vLLM", _CHAT, "ask /tokenize", "return_prompt_text", harmless=(False,)),
    *_refused("vLLM", _ALL, _NO_MEDIA, "mm_processor_kwargs", "media_io_kwargs", "mm_payload", harmless=({},)),
    *_refused("vLLM", _ALL, _NO_MEDIA, "return_mm_kwargs", harmless=(False,)),
    *_refused("vLLM", _CLASSIC, "a model's experts are not returned", "routed_experts_prompt_start", harmless=(0,)),
    *_refused("vLLM", _CLASSIC, "white space in JSON is a blank, or a line's indent", "guided_whitespace_pattern"),
    *_refused("SGLang", _CLASSIC, "use `structured_outputs`", "regex", "ebnf", "json_schema"),
    *_refused("SGLang", _CLASSIC, "use `stop`", "stop_regex"),
    *_refused("SGLang", _CLASSIC, "use prompts of token ids on /v1/completions", "input_ids"),
    *_refused("SGLang", _CLASSIC, "adapters are not served", "lora_path"),
    *_refused("SGLang", _CLASSIC, "no code of clients runs here", "custom_logit_processor", "custom_params"),
    *_refused("SGLang", _CLASSIC, "requests have no sessions", "session_params"),
    *_refused("SGLang", _CLASSIC, "the gateway makes the id: the header x-request-id", "rid"),
    *_refused("SGLang", _CLASSIC, "KV is shared within a tenant: give an API key of another one", "extra_key"),
    *_refused("SGLang", _CLASSIC, _CLIENTS_PLACE_NOTHING, "bootstrap_host", "bootstrap_port", "bootstrap_room"),
    *_refused("SGLang", _CLASSIC, _CLIENTS_PLACE_NOTHING, "routed_dp_rank", "disagg_prefill_dp_rank"),
    *_refused("SGLang", _CLASSIC, _CLIENTS_PLACE_NOTHING, "data_parallel_rank"),
    *_refused("SGLang", _CLASSIC, "what a model thinks in is not returned", "return_hidden_states", harmless=(False,)),
    *_refused("SGLang", _CLASSIC, "a model's experts are not returned", "return_routed_experts", harmless=(False,)),
    *_refused("SGLang", _CLASSIC, "a model's experts are not returned", "routed_experts_start_len", harmless=(0,)),
    *_refused("SGLang", _CLASSIC, "`usage.kvmesh` says it", "return_cached_tokens_details", harmless=(False,)),
    *_refused("SGLang", _CHAT, "ask /tokenize", "return_prompt_token_ids", harmless=(False,)),
    *_refused("SGLang", _CHAT, "`usage.kvmesh` says what there is to say", "return_meta_info", harmless=(False,)),
    *_refused("SGLang", _CHAT, "it is streamed as it comes", "stream_reasoning", harmless=(True,)),
    *_refused("SGLang", _CHAT, _NO_MEDIA, "max_dynamic_patch", "min_dynamic_patch"),
    *_refused("SGLang", _CLASSIC, _NO_MEDIA, "images_config"),
    *_refused("SGLang", _CHAT, _NO_MEDIA, "use_audio_in_video", harmless=(False,)),
    *_refused("SGLang", _CHAT, "no template knows it", "task"),
    *_refused("SGLang", _CLASSIC, "tokens are not guessed ahead", "ngram_corpus_id"),
    *_refused("OpenRouter", _CHAT, "use `reasoning_effort` or `chat_template_kwargs`", "reasoning", "thinking"),
    *_refused("OpenAI", _RESPONSES, "no answer is stored: send the whole conversation", "previous_response_id"),
    *_refused("OpenAI", _RESPONSES, "no answer is stored: send the whole conversation", "conversation"),
    *_refused("OpenAI", _RESPONSES, "no answer is stored", "background", harmless=(False,)),
    *_refused("OpenAI", _RESPONSES, "no prompts are stored: use `input`", "prompt"),
    *_refused("OpenAI", _RESPONSES, "prompts are taken whole or refused", "truncation", harmless=("disabled",)),
    *_refused("OpenAI", _RESPONSES, "prompts are taken whole or refused", "context_management", harmless=([],)),
    *_refused("OpenAI", _RESPONSES, "the tools here are the client's own", "max_tool_calls"),
    *_refused("OpenAI", _RESPONSES, "OpenAI's own programs", "access_programs"),
    *_refused("OpenAI", _RESPONSES, _NO_MEDIA, "image"),
    *_refused("OpenAI", _RESPONSES, "use `max_output_tokens`", "max_tokens", "max_completion_tokens"),
    *_refused("OpenAI", _RESPONSES, "use `text`", "response_format"),
    *_refused("vLLM", _RESPONSES, "an answer is returned once", "enable_response_messages", harmless=(False,)),
    *_refused("vLLM", _RESPONSES, "use `input`", "previous_input_messages"),
)
"""Every parameter that is known and not honoured."""

_SENT_BACK = "clients send it with each message: a template that does not read it leaves it out"

PARTS: tuple[Part, ...] = (
    Part("messages[].name", "OpenAI", Treatment.NEUTRAL, _CHAT, _SENT_BACK),
    Part("messages[].tool_call_id", "OpenAI", Treatment.NEUTRAL, _CHAT, _SENT_BACK),
    Part("messages[].reasoning_content", "vLLM", Treatment.NEUTRAL, _CHAT, _SENT_BACK),
    Part("input[].content", "OpenAI", Treatment.NEUTRAL, _RESPONSES, f"of `reasoning`: {_SENT_BACK}"),
    Part(
        "reasoning.summary",
        "OpenAI",
        Treatment.NEUTRAL,
        _RESPONSES,
        "the best summary that there is: there is none, and what was thought is returned whole",
        ("auto",),
    ),
    *(
        Part(
            path, "OpenAI", Treatment.REFUSED, _RESPONSES, "what was thought is returned whole", ("concise", "detailed")
        )
        for path in ("reasoning.summary", "reasoning.generate_summary")
    ),
    Part("text.verbosity", "OpenAI", Treatment.REFUSED, _RESPONSES, "no template knows it", ("low", "high")),
    Part(
        "response_format.type",
        "vLLM",
        Treatment.REFUSED,
        _CLASSIC,
        "use `structured_outputs.grammar`",
        ("structural_tag",),
    ),
    Part("prompt_logprobs", "vLLM", Treatment.REFUSED, _CLASSIC, "a vocabulary is too long for a message", (-1,)),
    Part("logprobs", "vLLM", Treatment.REFUSED, _TEXTS, "a vocabulary is too long for a message", (-1,)),
    Part("top_logprobs", "vLLM", Treatment.REFUSED, _TALKS, "a vocabulary is too long for a message", (-1,)),
)
"""The parts of honoured parameters that change nothing, or are refused by name."""

_BY_ROUTE: Mapping[Route, Mapping[str, Parameter]] = {
    route: {parameter.name: parameter for parameter in UNHONOURED if route in parameter.routes} for route in Route
}


def find_problem(payload: bytes, honoured: tuple[str, ...], route: Route) -> Problem | None:
    """Return the first parameter of a body that is too long, or neither honoured nor harmless; None: there is none.
    No value is decoded that is long: none of the harmless ones is. Raises msgspec.DecodeError for what is no object."""
    known = _BY_ROUTE[route]
    # Split the body into raw fields. Only the decoder's error has the name of a field that is unknown.
    try:
        body = _fields_of(honoured, route).decode(payload)
    except msgspec.ValidationError as error:
        unknown = re.match(r"Object contains unknown field `(.*)`", str(error), re.DOTALL)
        if unknown is None:
            raise
        return Problem(unknown[1], "unknown_parameter", _unknown(unknown[1], (*honoured, *known), route))
    for name in body.__struct_fields__:
        # Measure before decoding anything: a long JSON object takes seconds, for which nobody else is answered.
        raw: msgspec.Raw = getattr(body, name)
        num_bytes = memoryview(raw).nbytes
        if not num_bytes:
            continue
        if num_bytes > (bound := limits.LONG_FIELDS.get(name, limits.MAX_FIELD_BYTES)):
            return Problem(name, "too_large", f"`{name}` has {num_bytes} bytes, and at most {bound} are taken")
        # Parts of an honoured field may be refused. A refused field may still have a value that asks for nothing.
        if name in honoured:
            if (found := _find_part(name, raw, route)) is not None:
                return found
            continue
        parameter = known[name]
        if parameter.treatment is Treatment.REFUSED and not _asks_for_nothing(parameter, raw):
            return Problem(name, "unsupported_parameter", f"`{name}` is not supported: {parameter.why}")
    return None


@functools.cache
def _fields_of(honoured: tuple[str, ...], route: Route) -> "msgspec.json.Decoder[msgspec.Struct]":
    """Return what decodes a body into its fields, none of which is decoded itself: empty where there is none."""
    names = dict.fromkeys((*honoured, *_BY_ROUTE[route]))
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, forbid_unknown_fields=True))


def _find_part(name: str, raw: msgspec.Raw, route: Route) -> Problem | None:
    """Return the first part of an honoured parameter that has a value which is refused by name."""
    for part in PARTS:
        first, *rest = part.path.split(".")
        if part.treatment is not Treatment.REFUSED or first != name or route not in part.routes:
            continue
        value = _decoded(raw)
        for step in rest:
            value = cast(dict[str, object], value).get(step) if isinstance(value, dict) else None
        if any(type(value) is type(other) and value == other for other in part.values):
            message = f"`{part.path}: {msgspec.json.encode(value).decode()}` is not supported: {part.why}"
            return Problem(part.path, "unsupported_parameter", message)
    return None


def _asks_for_nothing(parameter: Parameter, raw: msgspec.Raw) -> bool:
    if memoryview(raw).nbytes > limits.MAX_HARMLESS_BYTES:
        return False
    value = _decoded(raw)
    return value is None or any(type(value) is type(other) and value == other for other in parameter.harmless)


def _decoded(raw: msgspec.Raw) -> object:
    """Return a JSON value; of invalid JSON, something that equals nothing."""
    try:
        return cast(object, msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ...


def _unknown(name: str, known: Collection[str], route: Route) -> str:
    near = difflib.get_close_matches(name[:64], known, n=1)
    return f"there is no parameter `{name}` on {route.value}" + (f": did you mean `{near[0]}`?" if near else "")
