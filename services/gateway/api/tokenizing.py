"""Texts to tokens and back, as vLLM's `/tokenize` and `/detokenize` have it."""

from typing import Any

import msgspec

from services.gateway.api.conversation import chat_of
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.messages import MessageBody
from services.gateway.api.openai import ChatBody, check_vocabulary, decode_strictly
from services.gateway.api.prepare import GatewayModel, check_model, encode_chat, encode_text
from services.gateway.api.replies import CONTEXT_LENGTH_EXCEEDED, too_long


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A text, or a conversation as the model's template writes it; the fields as those of the routes that answer."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: list[MessageBody] | None = None
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """`token_strs`: what each token adds to a text, where it was asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str


def tokenize(model: GatewayModel, payload: bytes) -> TokenizeReply:
    """Raises InvalidRequestError."""
    body = decode_strictly(payload, TokenizeBody)
    check_model(model, body.model or model.name)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either `prompt` or `messages`", "prompt")
    token_ids = tokens_of_prompt(model, body)
    texts = [model.codec.token_bytes(token).decode(errors="replace") for token in token_ids]
    return TokenizeReply(
        count=len(token_ids),
        max_model_len=model.context_length,
        tokens=token_ids,
        token_strs=texts if body.return_token_strs else None,
    )


def detokenize(model: GatewayModel, payload: bytes) -> DetokenizeReply:
    """Raises InvalidRequestError. Special tokens are shown."""
    body = decode_strictly(payload, DetokenizeBody)
    check_model(model, body.model or model.name)
    if len(body.tokens) > model.context_length:
        reason = f"{len(body.tokens)} tokens are more than that"
        message = too_long(f"{model.context_length} tokens", reason)
        raise InvalidRequestError(message, "tokens", CONTEXT_LENGTH_EXCEEDED)
    check_vocabulary(body.tokens, model.vocab_size, "tokens")
    return DetokenizeReply(prompt=model.codec.decode_shown(body.tokens))


def tokens_of_prompt(model: GatewayModel, body: PromptBody) -> list[int]:
    """Return the tokens of a text or a conversation, of which the body has one. Raises InvalidRequestError."""
    return _chat_tokens(model, body) if body.prompt is None else _text_tokens(model, body, body.prompt)


_OF_CHATS = ("tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


def _text_tokens(model: GatewayModel, body: PromptBody, prompt: str) -> list[int]:
    for name in _OF_CHATS:
        if getattr(body, name):
            raise InvalidRequestError(f"`{name}` goes with `messages`", name)
    return encode_text(model, prompt, add_special_tokens=body.add_special_tokens is not False)


def _chat_tokens(model: GatewayModel, body: PromptBody) -> list[int]:
    if body.add_special_tokens:
        message = "`add_special_tokens` goes with `prompt`: the template writes all special tokens"
        raise InvalidRequestError(message, "add_special_tokens", "unsupported_parameter")
    fields = {name: getattr(body, name) for name in _OF_CHATS}
    return encode_chat(model, chat_of(ChatBody(model=model.name, messages=body.messages or [], **fields)))
