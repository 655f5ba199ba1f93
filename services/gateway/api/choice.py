"""One choice of an answer: its tokens as a client gets to see them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from schemas.logprobs import TokenLogprob
from schemas.request import FinishReason
from services.gateway.api.pieces import CallBegin, Content, Piece, Reasoning, Splitter
from services.gateway.api.text import Detokenizer, PromptEnd, StopMatcher
from services.gateway.request.events import Deliver

ShownReason = FinishReason | Literal["tool_calls"]


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """`hidden_ids` end an answer and are not shown. `splitter` None: all text is content.

    `shows_none`: only the prompt was asked for; the mesh computes a token all the same.
    """

    prompt: Sequence[int]
    prompt_end: PromptEnd
    prompt_text: str
    detokenizer: Detokenizer
    matcher: StopMatcher
    hidden_ids: Collection[int]
    splitter: Splitter | None = None
    shows_none: bool = False
    has_named_call: bool = False
    """The client named the call that it is to get: an answer that has it just stops."""
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Of all these tokens, where they are wanted."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    num_sent: int = 0
    """So many of the tokens belong to events that were made."""
    num_characters: int = 0
    """So long are the texts of the tokens whose logarithms were told."""
    has_begun: bool = False
    """An event was made of it."""
    pieces: list[Piece] = field(default_factory=list[Piece])
    """The text of an answer that is not streamed."""
    num_reasoning: int = 0
    """So many of the tokens are thoughts, with what marks their beginning."""
    finish_reason: ShownReason | None = None
    _has_calls: bool = False

    def deliver(self, output: Deliver) -> list[Piece]:
        """Return the text that is now certain."""
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        if self.shows_none:
            return []
        self.token_ids += output.tokens
        self.logprobs += output.logprobs
        if self.splitter is None:
            shown = [token for token in output.tokens if token not in self.hidden_ids]
            return self._split(self.matcher.feed(self.detokenizer.add_tokens(shown)))
        pieces: list[Piece] = []
        for number, token in enumerate(output.tokens, len(self.token_ids) - len(output.tokens) + 1):
            shown = [] if token in self.hidden_ids else [token]
            found = self._split(self.matcher.feed(self.detokenizer.add_tokens(shown)))
            if any(isinstance(piece, Reasoning) for piece in found):
                self.num_reasoning = number
            pieces += found
        return pieces

    def finish(self, reason: FinishReason) -> list[Piece]:
        """Return the rest of the text. A stop string that only the rest completes counts as well."""
        pieces = self._split(self.matcher.feed(self.detokenizer.rest()) + self.matcher.flush())
        if self.splitter is not None:
            pieces += self._noted(self.splitter.finish())
        self.finish_reason = "stop" if self.matcher.matched else reason
        if self.finish_reason == "stop" and self._has_calls and not self.has_named_call:
            self.finish_reason = "tool_calls"
        return pieces

    @property
    def is_over(self) -> bool:
        """No more tokens are needed: what comes behind is not shown."""
        return self.matcher.matched or (self.splitter is not None and self.splitter.is_over)

    @property
    def prompt_before(self) -> str:
        """The prompt's text, as far as it is not part of the answer's."""
        return self.prompt_text[: len(self.prompt_text) - self.detokenizer.num_respelled]

    @property
    def has_unsent(self) -> bool:
        """There are tokens for an event that is not the last."""
        return any(token not in self.hidden_ids for token in self.token_ids[self.num_sent :])

    def next_tokens(self, *, is_last: bool) -> slice:
        """Return where among the tokens those are that belong to the next event: a hidden one to the last."""
        end = len(self.token_ids)
        if end > self.num_sent and not is_last and self.token_ids[-1] in self.hidden_ids:
            end -= 1
        taken, self.num_sent = slice(self.num_sent, end), end
        return taken

    def _split(self, text: str) -> list[Piece]:
        if self.splitter is None:
            return [Content(text)] if text else []
        return self._noted(self.splitter.feed(text)) if text else []

    def _noted(self, pieces: list[Piece]) -> list[Piece]:
        self._has_calls = self._has_calls or any(isinstance(piece, CallBegin) for piece in pieces)
        return pieces
