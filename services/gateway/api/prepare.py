"""From a body to jobs: render, tokenize, check lengths, hash blocks."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from dataplane.blocks.layout import KVLayout
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.gateway import limits
from services.gateway.api.openai import (
    ChatBody,
    CompletionBody,
    InvalidRequestError,
    Options,
    Prompt,
    messages_of,
    options_of,
    prompts_of,
)
from services.gateway.api.text import ChatTemplateError, TextCodec
from services.gateway.request.job import BlockKey, Job, pack_prompt
from services.telemetry import TraceContext

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

    @property
    def max_text_bytes(self) -> int:
        """A text of more bytes is not even tokenized: its tokens could not fit into the context."""
        return min(self.context_length * self.codec.longest_token_bytes, limits.MAX_TEXT_BYTES)

    def key_of(self, tenant: str) -> BlockKey:
        layout = self.layout
        return BlockKey(block_size=layout.block_size, model_fingerprint=layout.fingerprint, tenant=tenant)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """An HTTP request, checked and tokenized: one prompt or several, each answered `options.n` times."""

    options: Options
    prompts: tuple[list[int], ...]
    max_tokens: tuple[int, ...]


def prepare(model: GatewayModel, body: CompletionBody | ChatBody) -> Prepared:
    """Return what is to be computed. Raises InvalidRequestError."""
    options = options_of(body, model.vocab_size)
    if options.model not in model.names:
        raise InvalidRequestError(f"there is no model {options.model!r} here", "model", "model_not_found", 404)
    if isinstance(body, ChatBody):
        param = "messages"
        token_ids = [_encode_chat(model, body)]
    else:
        param = "prompt"
        asked = prompts_of(body, model.vocab_size)
        if len(asked) * options.n > limits.MAX_CHOICES:
            raise InvalidRequestError(f"prompts times `n` is over {limits.MAX_CHOICES}", "prompt")
        token_ids = [_encode(model, prompt) for prompt in asked]
    default = None if isinstance(body, ChatBody) else limits.DEFAULT_COMPLETION_TOKENS
    max_tokens = [_max_tokens(model, options, len(ids), default, param) for ids in token_ids]
    return Prepared(options=options, prompts=tuple(token_ids), max_tokens=tuple(max_tokens))


def make_jobs(
    key: BlockKey, prepared: Prepared, request_id: RequestId, deadline_ms: int, trace: TraceContext
) -> list[Job]:
    """Return one job per choice, in the order of their indexes; a prompt's choices differ by their seeds only."""
    options = prepared.options
    base_seed = secrets.randbits(62) if options.seed is None else options.seed
    jobs: list[Job] = []
    is_single = len(prepared.prompts) * options.n == 1
    for prompt, max_tokens in zip(prepared.prompts, prepared.max_tokens, strict=True):
        packed = pack_prompt(prompt, key)
        for number in range(options.n):
            job = Job(
                request_id=request_id if is_single else RequestId(f"{request_id}_c{len(jobs)}"),
                prompt=packed,
                key=key,
                sampling=_sampling(options, max_tokens, (base_seed + number) & SEED_MASK),
                deadline_ms=deadline_ms,
                trace=trace,
            )
            jobs.append(job)
    return jobs


def _sampling(options: Options, max_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=seed,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
    )


def _encode_chat(model: GatewayModel, body: ChatBody) -> list[int]:
    messages = messages_of(body)
    _check_length(model, (message.content for message in messages), "messages")
    try:
        return model.codec.encode_chat(messages)
    except ChatTemplateError as error:
        raise InvalidRequestError(str(error), "messages") from error


def _encode(model: GatewayModel, prompt: Prompt) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    _check_length(model, (prompt,), "prompt")
    return model.codec.encode(prompt)


def _check_length(model: GatewayModel, texts: Iterable[str], param: str) -> None:
    """Raises InvalidRequestError where texts are so long that they need not be tokenized to see that they do not
    fit."""
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes > model.max_text_bytes:
        message = (
            f"`{param}` has {num_bytes} bytes of text, and at most {model.max_text_bytes} are taken: the model's "
            f"context holds {model.context_length} tokens of up to {model.codec.longest_token_bytes} bytes, "
            f"and no text may be over {limits.MAX_TEXT_BYTES} bytes"
        )
        raise InvalidRequestError(message, param, "context_length_exceeded")


def _max_tokens(model: GatewayModel, options: Options, num_prompt: int, default: int | None, param: str) -> int:
    """Return how many tokens this prompt's answer may have. Raises InvalidRequestError where there is no room."""
    if num_prompt == 0:
        raise InvalidRequestError(f"`{param}` comes to no tokens", param)
    num_bytes = -(-num_prompt * 4 // 3) * 4 + limits.ENVELOPE_BYTES  # four bytes a token, in base64
    if num_bytes > MAX_PAYLOAD_BYTES:
        message = f"a prompt of {num_prompt} tokens does not fit into a message of {MAX_PAYLOAD_BYTES} bytes"
        raise InvalidRequestError(message, param, "request_too_large", 413)
    rest = model.context_length - num_prompt
    asked = options.max_tokens
    if rest < max(1, asked or 1):
        message = (
            f"the model's context holds {model.context_length} tokens, and this asks for "
            f"{num_prompt + (asked or 1)}: {num_prompt} of prompt and {asked or 1} of answer"
        )
        field = options.max_tokens_param if asked is not None and rest >= 1 else param
        raise InvalidRequestError(message, field, "context_length_exceeded")
    if asked is not None:
        return asked
    room = max(1, min(rest, model.num_worker_tokens - num_prompt))
    return room if default is None else min(room, default)
