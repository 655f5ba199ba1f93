"""From a body to jobs: render, tokenize, check lengths, hash blocks."""

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import msgspec

from dataplane.blocks.layout import KVLayout
from schemas.block import BLOCK_HASH_BYTES, TOKEN_BYTES
from schemas.ids import RequestId
from schemas.logprobs import num_message_bytes
from schemas.request import CARRIED_GRAMMAR_BYTES
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.config import ToolFormat
from services.gateway import limits
from services.gateway.api.constraints import Constraint, StructuredOutputs, check_together, constraint_of
from services.gateway.api.conversation import Chat, OutputParser, answer_to, chat_of
from services.gateway.api.grammars import GrammarReader
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.openai import (
    ChatBody,
    CompletionBody,
    Options,
    options_of,
    prompts_of,
)
from services.gateway.api.replies import CONTEXT_LENGTH_EXCEEDED, too_long
from services.gateway.api.template import ChatTemplateError, texts_of
from services.gateway.api.text import PromptEnd, TextCodec
from services.gateway.request.job import BlockKey, Job, pack_prompt

SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayModel:
    """What the gateway needs to know of the checkpoint. `names`: all that clients may call it."""

    name: str
    names: frozenset[str]
    codec: TextCodec
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    layout: KVLayout
    num_worker_tokens: int
    """How many tokens one worker's arena holds."""
    grammars: GrammarReader
    tool_format: ToolFormat | None
    """How the model writes calls of tools; None: that is not known."""

    @property
    def max_text_bytes(self) -> int:
        """A text of more bytes is not even tokenized: its tokens could not fit into the context."""
        return min(self.context_length * self.codec.longest_token_bytes, limits.MAX_TEXT_BYTES)

    def max_body_bytes(self, num_prompts: int) -> int:
        """A longer body has more than prompts of this context, however their JSON is written, and all that may be
        asked beside them."""
        text_bytes = limits.JSON_BYTES_A_BYTE * self.max_text_bytes * num_prompts
        return min(limits.MAX_BODY_BYTES, text_bytes + limits.MAX_BESIDE_BYTES)

    def key_of(self, tenant: str) -> BlockKey:
        layout = self.layout
        return BlockKey(block_size=layout.block_size, model_fingerprint=layout.fingerprint, tenant=tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An HTTP request, checked and tokenized: one prompt or several, each answered `options.n` times.

    `ends`: what the answers to each prompt stand behind. `texts`: the prompts', where they are to be echoed.
    `max_tokens`: of the answer to each, at least one. `parser`: how the answers' texts are taken apart. `constraint`
    is still to be understood.
    """

    options: Options
    prompts: tuple[list[int], ...]
    ends: tuple[PromptEnd, ...]
    texts: tuple[str, ...]
    max_tokens: tuple[int, ...]
    parser: OutputParser
    constraint: Constraint | None


def prepare(model: GatewayModel, body: CompletionBody | ChatBody, max_bytes: int = MAX_PAYLOAD_BYTES) -> Prepared:
    """Return what is to be computed. `max_bytes`: of a message on the bus. Raises InvalidRequestError."""
    options, codec = options_of(body, model.vocab_size), model.codec
    asked: list[str | list[int]] = []
    check_model(model, options.model)
    parser, constraint = OutputParser(), constraint_in(body)
    # Tokenize: a chat is one prompt, a completion may have several. A chat's tools and reasoning extend the constraint.
    if isinstance(body, ChatBody):
        param, chat = "messages", chat_of(body)
        token_ids = [encode_chat(model, chat)]
        parser, constraint = answer_to(chat, token_ids[0], codec, model.tool_format, constraint)
    else:
        param = "prompt"
        asked = prompts_of(body, model.vocab_size)
        if len(asked) * options.n > limits.MAX_CHOICES:
            raise InvalidRequestError(f"prompts times `n` is over {limits.MAX_CHOICES}", "prompt")
        special = body.add_special_tokens is not False
        token_ids = [
            encode_text(model, prompt, add_special_tokens=special) if isinstance(prompt, str) else prompt
            for prompt in asked
        ]
    # Complete the sampling options by what needs the tokenizer, and refuse options that contradict the constraint.
    default = None if isinstance(body, ChatBody) else limits.DEFAULT_COMPLETION_TOKENS
    bad_words = _bad_words(model, body.bad_words)
    if constraint is not None:
        ignore_eos, allowed = bool(body.ignore_eos), body.allowed_token_ids or ()
        check_together(constraint, ignore_eos=ignore_eos, allowed_token_ids=allowed)
    sampling = msgspec.structs.replace(options.sampling, bad_words=bad_words)
    options = msgspec.structs.replace(options, sampling=sampling)
    # Bound each answer: a resumed attempt carries prompt and answer so far in one message of the bus.
    num_fitting = _num_fitting(model, options, max_bytes, has_grammar=constraint is not None)
    max_tokens = [_max_tokens(model, options, len(ids), num_fitting, default, param, max_bytes) for ids in token_ids]
    # Detokenizing an answer starts from its prompt's last tokens: both show the same special tokens.
    shown_ids = codec.ids_shown(codec.added_ids if options.shows_special else parser.shown)
    ends = [codec.prompt_end(prompt, shown_ids) for prompt in token_ids]
    return Prepared(
        options=options,
        prompts=tuple(token_ids),
        ends=tuple(ends),
        texts=tuple(map(partial(_text, codec), asked, token_ids, ends)) if options.echo else (),
        max_tokens=tuple(max_tokens),
        parser=parser,
        constraint=constraint,
    )


def _text(codec: TextCodec, asked: str | list[int], prompt: Sequence[int], end: PromptEnd) -> str:
    """Return a prompt's text as it is echoed: as the client wrote it, or as its tokens spell it."""
    if isinstance(asked, str) and end.is_certain:
        return asked
    return codec.decode_shown([token for token in prompt if token in end.shown_ids])


def constraint_in(body: CompletionBody | ChatBody) -> Constraint | None:
    """Return what a body requires the text to be; None: nothing. Raises InvalidRequestError."""
    guided = StructuredOutputs(
        json=body.guided_json, regex=body.guided_regex, choice=body.guided_choice, grammar=body.guided_grammar
    )
    return constraint_of(body.response_format, body.structured_outputs, guided)


def make_jobs(
    key: BlockKey,
    prepared: Prepared,
    request_id: RequestId,
    deadline_ms: int,
    trace: str,
    *,
    must_split: bool = False,
) -> list[Job]:
    """Return one job per choice, in the order of their indexes; a prompt's choices differ by their seeds only. Raises
    InvalidRequestError where one must be split and cannot."""
    if must_split and 1 in prepared.max_tokens:
        message = "this request is to be split, and the first token of an answer comes with the prompt: ask for two"
        raise InvalidRequestError(message, prepared.options.max_tokens_param, "not_split")
    # Always set a seed: a later attempt must draw the same tokens. 62 random bits leave room to add a choice's number.
    options = prepared.options
    base_seed = secrets.randbits(62) if options.seed is None else options.seed
    jobs: list[Job] = []
    is_single = len(prepared.prompts) * options.n == 1
    # Pack and hash each prompt once for all its choices. Each choice is a request of the mesh, with an id of its own.
    for prompt, max_tokens in zip(prepared.prompts, prepared.max_tokens, strict=True):
        packed = pack_prompt(prompt, key)
        for number in range(options.n):
            job = Job(
                request_id=request_id if is_single else RequestId(f"{request_id}_c{len(jobs)}"),
                prompt=packed,
                key=key,
                sampling=msgspec.structs.replace(
                    options.sampling, max_tokens=max_tokens, seed=(base_seed + number) & SEED_MASK
                ),
                deadline_ms=deadline_ms,
                trace=trace,
                must_split=must_split,
            )
            jobs.append(job)
    return jobs


def check_model(model: GatewayModel, name: str) -> None:
    """Raises InvalidRequestError for a name that is not this model's."""
    if name not in model.names:
        raise InvalidRequestError(f"there is no model {name!r} here", "model", "model_not_found", 404)


def encode_chat(model: GatewayModel, chat: Chat) -> list[int]:
    """Return the prompt that the template makes of a chat. Raises InvalidRequestError."""
    _check_length(model, texts_of(chat.messages, chat.options), "messages")
    try:
        token_ids = model.codec.encode_chat(chat.messages, chat.options)
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), error.param) from error
    return _known(model, token_ids, "messages")


def encode_text(model: GatewayModel, prompt: str, *, add_special_tokens: bool) -> list[int]:
    """Return a text's tokens. Raises InvalidRequestError for one that is far too long."""
    _check_length(model, (prompt,), "prompt")
    return _known(model, model.codec.encode(prompt, add_special_tokens=add_special_tokens), "prompt")


def _known(model: GatewayModel, token_ids: list[int], param: str) -> list[int]:
    """Return a text's tokens. Raises InvalidRequestError where the model does not know one that its tokenizer does."""
    beyond = max(token_ids, default=0)
    if beyond >= model.vocab_size:
        text = model.codec.decode_shown([beyond])
        message = (
            f"`{param}` holds {text!r:.80}, token {beyond} of the tokenizer: the model knows 0 … {model.vocab_size - 1}"
        )
        raise InvalidRequestError(message, param)
    return token_ids


def _bad_words(model: GatewayModel, words: Sequence[str] | None) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, as they are within a text, with and without a space before."""
    found: dict[tuple[int, ...], None] = {}
    for word in words or ():
        for text in (word.lstrip(), f" {word.lstrip()}"):
            token_ids = model.codec.encode_within(text) if text.strip() else []
            if token_ids and max(token_ids) < model.vocab_size:  # else the model cannot write it
                found[tuple(token_ids)] = None
        if not word.strip():
            raise InvalidRequestError("a word in `bad_words` is empty", "bad_words")
    if sum(map(len, found)) > limits.MAX_NAMED_TOKENS:
        message = f"`bad_words` come to more than {limits.MAX_NAMED_TOKENS} tokens"
        raise InvalidRequestError(message, "bad_words")
    return tuple(found)


def _check_length(model: GatewayModel, texts: Iterable[str], param: str) -> None:
    """Raises InvalidRequestError where texts are so long that they need not be tokenized to see that they do not
    fit."""
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > model.max_text_bytes:
        message = too_long(
            f"{model.context_length} tokens",
            f"`{param}` has {num_bytes} bytes of text, and at most {model.max_text_bytes} are taken: a token has up to "
            f"{model.codec.longest_token_bytes} bytes, and no text may be over {limits.MAX_TEXT_BYTES} bytes",
        )
        raise InvalidRequestError(message, param, CONTEXT_LENGTH_EXCEEDED)


def _check_prompt_logprobs(num_prompt: int, num_top: int, max_bytes: int) -> None:
    if (num_bytes := num_message_bytes(num_prompt, num_top)) > max_bytes // 2:
        message = (
            f"the logprobs of a prompt of {num_prompt} tokens with {num_top} likeliest ones each take {num_bytes} "
            f"bytes, and at most {max_bytes // 2} fit into a message: ask for fewer"
        )
        raise InvalidRequestError(message, "prompt_logprobs", "request_too_large", 413)


def _num_fitting(model: GatewayModel, options: Options, max_bytes: int, *, has_grammar: bool) -> int:
    """Return how many tokens a message of the bus holds, as they are or as the hashes of their blocks, in base64."""
    num_grammar = CARRIED_GRAMMAR_BYTES if has_grammar else 0
    left = max_bytes - len(msgspec.json.encode(options.sampling)) - num_grammar - limits.ENVELOPE_BYTES
    num_bytes = max(0, left) // 4 * 3
    return min(num_bytes // TOKEN_BYTES, num_bytes // BLOCK_HASH_BYTES * model.layout.block_size)


def _max_tokens(
    model: GatewayModel,
    options: Options,
    num_prompt: int,
    num_fitting: int,
    default: int | None,
    param: str,
    max_bytes: int,
) -> int:
    """Return how many tokens this prompt's answer may have. Raises InvalidRequestError where there is no room."""
    # Check the prompt: its tokens, and its logprobs where they are wanted, must fit into a message of the bus.
    if num_prompt == 0:
        raise InvalidRequestError(f"`{param}` comes to no tokens", param)
    asked = options.max_tokens
    if num_prompt > num_fitting:
        _refuse_too_large(f"a prompt of {num_prompt} tokens does", num_fitting, max_bytes, param)
    if (num_top := options.sampling.prompt_logprobs) is not None:
        _check_prompt_logprobs(num_prompt, num_top, max_bytes)
    # Check the context length. The error names the answer's field only where a shorter answer would fit.
    rest = model.context_length - num_prompt
    if rest < max(1, asked or 1):
        message = too_long(
            f"{model.context_length} tokens",
            f"you requested {num_prompt + (asked or 1)} tokens: {num_prompt} in the {param}, {asked or 1} in the "
            f"completion. Please reduce the length of the {param} or completion",
        )
        field = options.max_tokens_param if asked is not None and rest >= 1 else param
        raise InvalidRequestError(message, field, CONTEXT_LENGTH_EXCEEDED)
    # Take an explicit number as it is: the scheduler refuses what no worker has room for. For 0 only the prompt is
    # wanted, and the mesh computes one token all the same.
    if asked is not None:
        if num_prompt + asked > num_fitting:  # an answer is resumed with what there is of it
            what = f"a prompt of {num_prompt} tokens and an answer of {asked} do"
            _refuse_too_large(what, num_fitting, max_bytes, options.max_tokens_param)
        return max(1, asked)
    # Without a number the answer may fill what the context, one worker's arena and a message leave.
    room = max(1, min(rest, model.num_worker_tokens - num_prompt, num_fitting - num_prompt))
    if (least := options.sampling.min_tokens) > room:
        raise InvalidRequestError(f"`min_tokens` is over {room}, for which there is room", "min_tokens")
    return room if default is None else min(room, max(default, least))


def _refuse_too_large(what: str, num_fitting: int, max_bytes: int, param: str) -> NoReturn:
    message = (
        f"{what} not fit into a message of {max_bytes} bytes, which is what the broker takes (max_payload): "
        f"{num_fitting} tokens do"
    )
    raise InvalidRequestError(message, param, "request_too_large", 413)
