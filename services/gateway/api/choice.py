"""One choice of an answer: its tokens as a client gets to see them."""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from schemas.logprobs import TokenLogprob
from schemas.request import FinishReason
from services.gateway.api.pieces import CallBegin, Content, Piece, Reasoning
from services.gateway.api.reasoning import ReasoningSplitter
from services.gateway.api.text import Detokenizer, PromptEnd, StopMatcher
from services.gateway.api.tools.parser import ToolParser
from services.gateway.request.events import Deliver


class ShownReason(enum.StrEnum):
    """Why an answer is complete, in the API's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class TextReader:
    """Takes an answer's text apart: reasoning is split off, what is left ends at a stop string, and calls are found in
    that. `keeps`: reasoning is part of the content, and has no stop string all the same."""

    def __init__(
        self,
        thoughts: ReasoningSplitter | None,
        matcher: StopMatcher,
        calls: ToolParser | None,
        *,
        keeps: bool = False,
    ) -> None:
        self.thoughts = thoughts
        self._matcher = matcher
        self._calls = calls
        self._keeps = keeps

    @property
    def has_matched(self) -> bool:
        return self._matcher.matched

    @property
    def is_over(self) -> bool:
        """No more text is needed."""
        return self._matcher.matched or (self._calls is not None and self._calls.is_over)

    @property
    def is_cut(self) -> bool:
        """The answer ended within a call."""
        return self._calls is not None and self._calls.is_cut

    def feed(self, text: str, *, may_stop: bool = True) -> list[Piece]:
        """Return what is now certain. `may_stop`: stop strings are looked for in it."""
        if self.thoughts is not None:
            return self._pass_on(self.thoughts.feed(text), may_stop=may_stop)
        return self._parse(self._matcher.feed(text) if may_stop else text)

    def finish(self) -> list[Piece]:
        """Return the rest: the answer has ended."""
        pieces = self._pass_on(self.thoughts.finish()) if self.thoughts else []
        pieces += self._parse(self._matcher.flush())
        return pieces + (self._calls.finish() if self._calls else [])

    def _pass_on(self, found: Sequence[Piece], *, may_stop: bool = True) -> list[Piece]:
        passed: list[Piece] = []
        for piece in found:
            if isinstance(piece, Content):
                passed += self._parse(self._matcher.feed(piece.text) if may_stop else piece.text)
            elif isinstance(piece, Reasoning) and self._keeps:
                passed += self._parse(piece.text)
            else:
                passed.append(piece)
        return passed

    def _parse(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Content(text)] if self._calls is None else self._calls.feed(text)


@dataclass(slots=True, kw_only=True, eq=False)
class Choice:
    """`hidden_ids` end an answer and are not shown. In the text of the first `min_tokens` no stop string is looked for.

    `returns_reasoning`: else neither it nor its tokens are shown. `shows_none`: only the prompt was asked for; the mesh
    computes a token all the same.
    """

    prompt: Sequence[int]
    prompt_end: PromptEnd
    prompt_text: str
    detokenizer: Detokenizer
    reader: TextReader
    hidden_ids: Collection[int]
    min_tokens: int = 0
    returns_reasoning: bool = True
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
    """So long are the texts of the tokens whose logprobs were returned."""
    has_begun: bool = False
    """An event was made of it."""
    pieces: list[Piece] = field(default_factory=list[Piece])
    """The text of an answer that is not streamed."""
    num_reasoning: int = 0
    """So many of the tokens are thoughts, with what marks their beginning and end."""
    finish_reason: ShownReason | None = None
    _has_calls: bool = False

    def deliver(self, output: Deliver) -> list[Piece]:
        """Return the text that is now certain."""
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        if self.shows_none:
            return []
        number = len(self.token_ids)
        self.token_ids += output.tokens
        self.logprobs += output.logprobs
        thoughts, pieces = self.reader.thoughts, list[Piece]()
        for run in self._runs(output.tokens, self.min_tokens - number):
            number += len(run)
            may_think = thoughts is not None and not thoughts.is_over
            text = self.detokenizer.add_tokens([token for token in run if token not in self.hidden_ids])
            pieces += self._shown(self.reader.feed(text, may_stop=number > self.min_tokens))
            if may_think and thoughts is not None and thoughts.has_begun:
                self.num_reasoning = number
        return pieces

    def finish(self, reason: FinishReason) -> list[Piece]:
        """Return the rest of the text. A stop string that only the rest completes counts as well."""
        may_stop = len(self.token_ids) > self.min_tokens
        pieces = self._shown(self.reader.feed(self.detokenizer.rest(), may_stop=may_stop) + self.reader.finish())
        shown = ShownReason.STOP if self.reader.has_matched else ShownReason(reason)
        is_call = self._has_calls and not self.has_named_call and not self.reader.is_cut
        self.finish_reason = ShownReason.TOOL_CALLS if shown is ShownReason.STOP and is_call else shown
        return pieces

    @property
    def is_over(self) -> bool:
        """No more tokens are needed: what comes behind is not shown."""
        return self.reader.is_over

    @property
    def prompt_before(self) -> str:
        """The prompt's text, as far as it is not part of the answer's."""
        return self.prompt_text[: len(self.prompt_text) - self.detokenizer.num_respelled]

    @property
    def has_unsent(self) -> bool:
        """There are tokens for an event that is not the last."""
        if self._may_be_thoughts:
            return False
        return any(token not in self.hidden_ids for token in self.token_ids[self._next_unsent :])

    def next_tokens(self, *, is_last: bool) -> slice:
        """Return where among the tokens those are that belong to the next event: a hidden one to the last."""
        if self._may_be_thoughts:
            return slice(0, 0)
        begin, end = self._next_unsent, len(self.token_ids)
        if end > begin and not is_last and self.token_ids[-1] in self.hidden_ids:
            end -= 1
        self.num_sent = end
        return slice(begin, end)

    @property
    def _next_unsent(self) -> int:
        """Where among the tokens the first one is that no event has yet, and that is sent at all."""
        return self.num_sent if self.returns_reasoning else max(self.num_sent, self.num_reasoning)

    @property
    def _may_be_thoughts(self) -> bool:
        """The tokens are not sent, or not yet: that they are no thoughts is not certain."""
        thoughts = self.reader.thoughts
        return not self.returns_reasoning and thoughts is not None and not thoughts.is_over and not self.finish_reason

    def _runs(self, tokens: Sequence[int], num_first: int) -> Sequence[Sequence[int]]:
        """Return tokens in the runs whose texts are taken together; one ends behind the first so many."""
        if self.reader.thoughts is not None:
            return [tokens[at : at + 1] for at in range(len(tokens))]
        return [tokens[:num_first], tokens[num_first:]] if 0 < num_first < len(tokens) else [tokens]

    def _shown(self, pieces: list[Piece]) -> list[Piece]:
        self._has_calls = self._has_calls or any(isinstance(piece, CallBegin) for piece in pieces)
        return [piece for piece in pieces if self.returns_reasoning or not isinstance(piece, Reasoning)]
