"""Reasoning, split off an answer: what stands between `<think>` and `</think>`.

Such a block is at an answer's beginning, or nowhere. White space at its ends is part of the format, and in neither
text.
"""

import enum

from services.gateway.api.pieces import Content, Piece, Reasoning, overlap

BEGIN, END = "<think>", "</think>"
MARKERS = (BEGIN, END)
"""What a detokenizer must show of special tokens, for a splitter to see it."""

TAIL_TOKENS = 32
"""So many of a prompt's last tokens, as text, show whether its block is open. A marker may be a token for each byte."""

_SPACE = " \t\r\n"


class ReasoningState(enum.Enum):
    """Where an answer begins."""

    MAY_COME = enum.auto()
    """The model writes `<think>` itself, or does not think."""
    BEGUN = enum.auto()
    """The prompt ends in `<think>`."""
    GOES_ON = enum.auto()
    """The prompt ends in the middle of a block."""
    OVER = enum.auto()
    """The prompt ends in a closed block, or in an answer that goes on: there is no more reasoning."""


def reasons(template: str) -> bool:
    """Return whether a chat template is of a model whose reasoning can be split off."""
    return END in template


def state_of(prompt_end: str, continued: str | None = None) -> ReasoningState:
    """Return where the answer to a prompt begins.

    `prompt_end`: the text of its last `TAIL_TOKENS` tokens, with special tokens shown. `continued`: the content of the
    assistant's message that the answer goes on with, if it does.
    """
    written = prompt_end if continued is None else continued
    written = written.rstrip(_SPACE)
    if written.endswith(BEGIN):
        return ReasoningState.BEGUN
    if written.endswith(END):
        return ReasoningState.OVER
    if continued is None:
        return ReasoningState.MAY_COME
    return ReasoningState.GOES_ON if continued.rfind(BEGIN) > continued.rfind(END) else ReasoningState.OVER


class ReasoningSplitter:
    """The splitter of one answer. `keeps`: the markers, and white space at a block's ends, are part of the reasoning.

    `has_begun`: there is reasoning. `is_over`: there is no more.
    """

    def __init__(self, state: ReasoningState, *, keeps: bool = False) -> None:
        self._state = state
        self._keeps = keeps
        self._held = ""
        self.has_begun = state in (ReasoningState.BEGUN, ReasoningState.GOES_ON)
        self._trims = state is ReasoningState.BEGUN and not keeps
        """White space that comes next belongs to a marker."""

    @property
    def is_over(self) -> bool:
        return self._state is ReasoningState.OVER

    def feed(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._state is ReasoningState.MAY_COME:
            self._look_for_begin()
        if self._state in (ReasoningState.BEGUN, ReasoningState.GOES_ON):
            pieces += self._reasoning()
        if self._state is ReasoningState.OVER:
            pieces += self._content()
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if not held:
            return []
        return [Reasoning(held) if self._state in (ReasoningState.BEGUN, ReasoningState.GOES_ON) else Content(held)]

    def _look_for_begin(self) -> None:
        text = self._held.lstrip(_SPACE)
        if text.startswith(BEGIN):
            self._held = self._held if self._keeps else text.removeprefix(BEGIN)
            self._state, self._trims, self.has_begun = ReasoningState.BEGUN, not self._keeps, True
        elif not BEGIN.startswith(text):
            self._state = ReasoningState.OVER

    def _reasoning(self) -> list[Piece]:
        if self._trims:
            self._held = self._held.lstrip(_SPACE)
        self._trims = self._trims and not self._held
        before, end, behind = self._held.partition(END)
        if end:
            sure, self._held = before + end if self._keeps else before.rstrip(_SPACE), behind
            self._state, self._trims = ReasoningState.OVER, not self._keeps
        else:
            sure = self._held[: len(self._held) - overlap(self._held, END)]
            sure = sure if self._keeps else sure.rstrip(_SPACE)
            self._held = self._held[len(sure) :]
        return [Reasoning(sure)] if sure else []

    def _content(self) -> list[Piece]:
        sure, self._held = self._held.lstrip(_SPACE) if self._trims else self._held, ""
        self._trims = self._trims and not sure
        return [Content(sure)] if sure else []
