"""Logprobs as clients get them: OpenAI's forms for chats and completions, and vLLM's for prompts."""

from collections.abc import Callable, Collection, Sequence

import msgspec

from schemas.logprobs import TokenLogprob

LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have; vLLM's number."""


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: tuple[int, ...]


class ContentLogprob(TopLogprob, frozen=True, kw_only=True):
    top_logprobs: tuple[TopLogprob, ...]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry a token of the answer."""

    content: tuple[ContentLogprob, ...]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One entry a token. A prompt's first token has no logprob. `text_offset`: where each token's text begins,
    in characters of the tokens' texts."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float | None, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]
    text_offset: tuple[int, ...]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    decoded_token: str
    rank: int | None = None
    """The likeliest token has 1; null: it is not among those that were asked for."""


PromptLogprobs = tuple[dict[int, PromptLogprob] | None, ...]
"""By token id; null for the prompt's first token."""


class TokenTexts:
    """How tokens are named. `shows_ids`: as `token_id:7`."""

    def __init__(
        self, bytes_of: Callable[[int], bytes], first_bytes_of: Callable[[int], bytes], *, shows_ids: bool
    ) -> None:
        self._bytes_of = bytes_of
        self._first_bytes_of = first_bytes_of
        self._shows_ids = shows_ids

    def text(self, token_id: int, *, is_first: bool = False) -> str:
        """`is_first`: the token begins a text, where it may have no space before it."""
        if self._shows_ids:
            return f"token_id:{token_id}"
        return (self._first_bytes_of if is_first else self._bytes_of)(token_id).decode(errors="replace")

    def chat(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
        pairs = zip(token_ids, logprobs, strict=True)
        return ChatLogprobs(content=tuple(self._content(token_id, found) for token_id, found in pairs))

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        offset: int,
        begin_ids: Collection[int] = (),
    ) -> TextLogprobs:
        """Return the logprobs of tokens, the first of which begins at this character. The first of `begin_ids` among
        them begins a text."""
        begin = next((at for at, token_id in enumerate(token_ids) if token_id in begin_ids), None)
        texts = [self.text(token_id, is_first=at == begin) for at, token_id in enumerate(token_ids)]
        offsets: list[int] = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return TextLogprobs(
            tokens=tuple(texts),
            token_logprobs=tuple(None if found is None else _finite(found.logprob) for found in logprobs),
            top_logprobs=tuple(
                None if found is None else self._by_text(text, found, is_first=at == begin)
                for at, (text, found) in enumerate(zip(texts, logprobs, strict=True))
            ),
            text_offset=tuple(offsets),
        )

    def prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> PromptLogprobs:
        """Return the logprobs of a prompt's tokens; `logprobs` begins with its second."""
        return (None, *(self._ranked(token_id, found) for token_id, found in zip(token_ids[1:], logprobs, strict=True)))

    def _content(self, token_id: int, found: TokenLogprob) -> ContentLogprob:
        return ContentLogprob(
            token=self.text(token_id),
            logprob=_finite(found.logprob),
            bytes=tuple(self._bytes_of(token_id)),
            top_logprobs=tuple(
                TopLogprob(token=self.text(other), logprob=_finite(logprob), bytes=tuple(self._bytes_of(other)))
                for other, logprob in found.top
            ),
        )

    def _by_text(self, text: str, found: TokenLogprob, *, is_first: bool) -> dict[str, float]:
        """Return the likeliest tokens and the token itself; of those that have one text, the likeliest."""
        named: dict[str, float] = {}
        for token_id, logprob in found.top:
            named.setdefault(self.text(token_id, is_first=is_first), _finite(logprob))
        named.setdefault(text, _finite(found.logprob))
        return named

    def _ranked(self, token_id: int, found: TokenLogprob) -> dict[int, PromptLogprob]:
        ranked = {
            other: PromptLogprob(logprob=_finite(logprob), decoded_token=self.text(other), rank=rank)
            for rank, (other, logprob) in enumerate(found.top, 1)
        }
        own = PromptLogprob(logprob=_finite(found.logprob), decoded_token=self.text(token_id))
        return {token_id: ranked.get(token_id, own)} | ranked


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
