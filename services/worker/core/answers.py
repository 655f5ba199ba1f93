"""What this worker has emitted for each attempt, for a gateway that has missed some of it. Pure."""

from array import array
from dataclasses import dataclass, field

from schemas.block import pack_tokens, unpack_tokens
from schemas.request import FinishReason, RequestFailure, RequestTokens, TransferReport
from services.worker.core.actions import AttemptKey

RETAIN_MS = 60_000
"""How long an attempt's words are kept after it has said its last."""
MAX_ENDED = 4_096


@dataclass(slots=True)
class AnswerSoFar:
    """The words of one attempt. `first_index`: of its first token; `last_ms`: when something was last said."""

    first_index: int
    last_ms: int
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None
    report: TransferReport | None = None


class Answers:
    """The words of the attempts that go on here, and of those that have ended, for a while."""

    def __init__(self, retain_ms: int = RETAIN_MS, max_ended: int = MAX_ENDED) -> None:
        self._retain_ms = retain_ms
        self._max_ended = max_ended
        self._going_on: dict[AttemptKey, AnswerSoFar] = {}
        self._ended: dict[AttemptKey, AnswerSoFar] = {}
        """The one that said its last first in front."""

    def __len__(self) -> int:
        return len(self._going_on) + len(self._ended)

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._going_on or key in self._ended

    def emitted(self, key: AttemptKey, tokens: RequestTokens, now_ms: int) -> None:
        """Take in what is sent now."""
        answer = self._going_on.get(key) or self._ended.pop(key, None)
        if answer is None:
            answer = AnswerSoFar(tokens.index, now_ms)
        self._going_on[key] = answer
        answer.last_ms = now_ms
        if tokens.tokens:
            if tokens.index != answer.first_index + len(answer.token_ids):  # its first, after a word without tokens
                answer.first_index, answer.token_ids = tokens.index, array("I")
            answer.token_ids.extend(unpack_tokens(tokens.tokens))
        answer.finish_reason = tokens.finish_reason or answer.finish_reason
        answer.failure = tokens.failure or answer.failure
        answer.report = tokens.report or answer.report

    def ended(self, key: AttemptKey, now_ms: int) -> None:
        """No core has this attempt any more: from now on its words are kept for a bounded time."""
        answer = self._going_on.pop(key, None)
        if answer is not None:
            answer.last_ms = now_ms
            self._ended[key] = answer
        while len(self._ended) > self._max_ended:
            del self._ended[next(iter(self._ended))]

    def going_on(self) -> list[AttemptKey]:
        """Return the attempts that have not been said to have ended."""
        return list(self._going_on)

    def forget_old(self, now_ms: int) -> None:
        while self._ended:
            key = next(iter(self._ended))
            if self._ended[key].last_ms + self._retain_ms > now_ms:
                return
            del self._ended[key]

    def since(self, key: AttemptKey, index: int) -> RequestTokens | None:
        """Return what was said from the answer's token `index` on, with its end, if it has one; None: nothing."""
        answer = self._going_on.get(key) or self._ended.get(key)
        if answer is None:
            return None
        end = answer.first_index + len(answer.token_ids)
        start = min(max(index, answer.first_index), end)
        tokens = answer.token_ids[start - answer.first_index :]
        if not tokens and answer.finish_reason is None and answer.failure is None and answer.report is None:
            return None
        return RequestTokens(
            request_id=key[0],
            attempt=key[1],
            index=start,
            tokens=pack_tokens(tokens),
            finish_reason=answer.finish_reason,
            failure=answer.failure,
            report=answer.report,
        )

    def clear(self) -> None:
        self._going_on.clear()
        self._ended.clear()
