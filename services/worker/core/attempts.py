"""What a worker knows of one attempt: one record, from its acceptance until its blocks are given back. Pure.

The role's core owns it and keeps it in its `attempts`. Whoever acts on an attempt (the holder of blocks, the spans,
the reads) is given the record, or what it needs of it, and keeps no copy.
"""

from array import array
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from dataplane.blocks.layout import BlockTables
from schemas.block import BlockHasher, pack_tokens, unpack_tokens
from schemas.handoff import KVOffered
from schemas.ids import BlockHash, RequestId, WorkerId
from schemas.logprobs import Logprobs, TokenLogprob, num_message_bytes, pack_logprobs, unpack_logprobs
from schemas.observe import HeldRequest, RunStage
from schemas.request import (
    AttemptEnd,
    FinishReason,
    FirstTokenTimes,
    RefusalReason,
    Refused,
    RequestFailure,
    RequestTokens,
    RunAttempt,
    TransferReport,
    refuse,
)
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.worker.core.checks import num_kv_tokens
from services.worker.core.content import AttemptKey, PromptKV
from services.worker.core.replica_offer import ReplicaOffer
from services.worker.limits import MAX_PAST_ATTEMPTS


@dataclass(slots=True, frozen=True)
class WantedLease:
    """A lease to ask for: on the blocks from `first_block` of a sequence on, as far as the holder has them.

    `deadline_ms`: of the request that they are read for.
    """

    first_block: int
    block_hashes: tuple[BlockHash, ...]
    deadline_ms: int
    tenant: str = ""
    proof: bytes = b""
    """The gateway's, of the request that they are read for."""
    is_copy: bool = False
    """There is no such request: they are to be kept here as well."""


@dataclass(slots=True, frozen=True, eq=False)
class KVRead:
    """One read of KV from `holder` into the blocks of `tables`: from `first_token` of a hand-over that was offered, or
    under a lease that is asked for first. Until `ReadEnded` comes, the blocks may still be written."""

    key: AttemptKey
    holder: WorkerId
    lease: KVOffered | WantedLease
    tables: BlockTables
    first_token: int = 0
    traceparent: str = ""
    """The trace of the request that it belongs to."""

    @property
    def is_hand_over(self) -> bool:
        return isinstance(self.lease, KVOffered)


@dataclass(slots=True, frozen=True, eq=False)
class Twin:
    """An attempt whose prompt begins alike, and which fills the blocks up to `end_block` of it; the last of these is
    `last_block` of the arena."""

    attempt: "Attempt"
    end_block: int
    last_block: int


@dataclass(slots=True)
class TwinWait:
    """An attempt's wait for what others fill. `twin`: whom it waits for; None: it waits no more, and keeps nothing of
    who has ended. `request_id`: whom it waited for last."""

    twin: Twin | None
    request_id: RequestId
    began_ms: int
    until_ms: int
    """It goes on then, whatever has come."""
    ended_ms: int = 0


@dataclass(slots=True)
class AttemptTimes:
    """When what happened to an attempt, in ns; 0: not yet. Kept by its role's core; what spans need besides, by
    those who record them."""

    accepted_ns: int = 0
    is_sampled: bool = False
    ahead_ns: int = 0
    """What makes dates of the mesh's clock of them, for others."""
    num_prompt_tokens: int = 0
    submitted_ns: int = 0
    computes_prompt: bool = False
    decodes: bool = False
    """All of the answer is to be decoded here, not its first token alone."""
    first_step_ns: int = 0
    first_token_ns: int = 0
    last_step_ns: int = 0
    num_tokens: int = 0
    compute: str = ""
    """The traceparent of the span of the prompt's computation, which engine steps are linked to."""
    stream: str = ""
    """The same of the answer's."""
    compute_steps: list[str] = field(default_factory=list[str])
    stream_steps: list[str] = field(default_factory=list[str])
    has_prefill: bool = False
    """The span of the prompt's computation is recorded."""
    has_decode: bool = False
    """The span of the answer's is."""

    def stepped(self, started_ns: int, ended_ns: int) -> None:
        """An engine step has computed something of it."""
        self.first_step_ns = self.first_step_ns or started_ns
        self.last_step_ns = ended_ns

    def sampled(self, ended_ns: int) -> None:
        """An engine step has chosen a token of it."""
        self.first_token_ns = self.first_token_ns or ended_ns
        self.num_tokens += 1

    def first_token(self) -> FirstTokenTimes | None:
        """Return how the attempt came to its first token; None: its prompt was not computed here."""
        if not (self.computes_prompt and self.first_token_ns):
            return None
        return FirstTokenTimes(
            accepted_ns=self.accepted_ns + self.ahead_ns,
            first_step_ns=self.first_step_ns + self.ahead_ns,
            computed_ns=self.first_token_ns + self.ahead_ns,
        )


@dataclass(slots=True)
class SentAnswer:
    """What an attempt has sent to its gateway, for a gateway that has missed some of it. `first_index`: the answer's
    index of `token_ids[0]`."""

    first_index: int = 0
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    """Of all these tokens, or of none."""
    prompt_logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None
    report: TransferReport | None = None

    def extend(self, tokens: RequestTokens) -> None:
        """Add the tokens that are sent now."""
        if tokens.tokens:
            if tokens.index != self.first_index + len(self.token_ids):  # the first ones
                self.first_index, self.token_ids, self.logprobs = tokens.index, array("I"), []
            self.token_ids.extend(unpack_tokens(tokens.tokens))
        if tokens.logprobs is not None:
            self.logprobs += unpack_logprobs(tokens.logprobs)
        self.prompt_logprobs = tokens.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = tokens.finish_reason or self.finish_reason
        self.failure = tokens.failure or self.failure
        self.report = tokens.report or self.report

    @property
    def is_empty(self) -> bool:
        """Nothing was sent."""
        return not self.token_ids and not self._has_more

    @property
    def _has_more(self) -> bool:
        """More than tokens was sent."""
        return self.finish_reason is not None or self.failure is not None or self.report is not None

    def since(self, key: AttemptKey, index: int, max_bytes: int = MAX_PAYLOAD_BYTES) -> RequestTokens | None:
        """Return what was sent from the answer's token `index` on, as much as a third of a message of `max_bytes`
        holds, and with the last of it the answer's end, if it has one; None: nothing."""
        last = self.first_index + len(self.token_ids)
        start = min(max(index, self.first_index), last)
        num_top = len(self.logprobs[0].top) if self.logprobs else 0
        end = min(last, start + max_bytes // 3 // (num_message_bytes(1, num_top) + num_message_bytes(1, 0)))
        is_last = end == last
        part = slice(start - self.first_index, end - self.first_index)
        tokens, logprobs = self.token_ids[part], self.logprobs[part]
        if not tokens and not self._has_more:
            return None
        return RequestTokens(
            request_id=key[0],
            attempt=key[1],
            index=start,
            tokens=pack_tokens(tokens),
            logprobs=pack_logprobs(logprobs) if logprobs else None,
            prompt_logprobs=self.prompt_logprobs if start == 0 else None,
            finish_reason=self.finish_reason if is_last else None,
            failure=self.failure if is_last else None,
            report=self.report,
        )


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt on this worker. `tables` are its own reference to its blocks: empty before it has any, and once they
    are given back. `traceparent`: of the request that it belongs to; "": of none."""

    part: ClassVar[Literal["prefill", "decode"]]
    """Which role it is of."""

    request: RunAttempt
    prompt: list[int]
    hasher: BlockHasher
    """Of its full blocks: the prompt's, and the answer's as they fill up."""
    times: AttemptTimes
    traceparent: str = ""
    key: AttemptKey = field(init=False)
    hands_over: bool = field(init=False)
    """Its prompt is computed here, and its answer decoded elsewhere."""
    num_kv_tokens: int = field(init=False)
    """Tokens that need room here."""
    stage: RunStage = "queued"
    """How far it is."""
    answer: SentAnswer = field(default_factory=SentAnswer)
    wait: TwinWait | None = None
    """Its wait for others' blocks; None: it has not waited."""
    tables: BlockTables = ()
    kv: PromptKV | None = None
    """What of the prompt is in place, until the engine computes the rest; None while it is queued."""
    awaits_grammar: bool = False
    """The engine does not compute it yet: what its answer must be is still being understood."""
    num_stored_blocks: int = 0
    """How many of its full blocks this worker has stored under their hashes."""
    read: KVRead | None = None
    """What may still write its blocks, beside the engine."""
    replica_offer: ReplicaOffer | None = None
    """What its replica has been offered of its blocks; None: it has no replica, or fills no blocks (any more)."""
    moving: str = ""
    """Why it goes on elsewhere as soon as the engine has let go of it, for people; "": it does not."""
    outcome: str = ""
    """Why it was ended early, for people."""
    end: AttemptEnd = AttemptEnd.FAILED
    """The same for code, once it was ended early."""

    def __post_init__(self) -> None:
        self.key = (self.request.request_id, self.request.attempt)
        self.hands_over = self.request.downstream is not None
        self.num_kv_tokens = num_kv_tokens(self.request, len(self.prompt))

    @property
    def has_ended(self) -> bool:
        """Nothing more comes of it; its blocks wait for whoever may still write them."""
        return self.stage == "ending"

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whoever computes its answer's first token is to compute all of its prompt."""
        return self.request.sampling.prompt_logprobs is not None and not self.request.num_answered_tokens

    @property
    def owes_tokens(self) -> bool:
        """Its gateway waits for more from this worker."""
        return self.stage not in ("handing_over", "ending")

    @property
    def num_awaited_tokens(self) -> int:
        """Prompt tokens whose KV is neither here nor the engine's to compute, yet."""
        if self.stage in ("computing", "handing_over", "ending"):
            return 0
        if self.wait is not None and self.wait.twin is not None:
            return len(self.prompt) - self.wait.twin.end_block * self.hasher.block_size
        return len(self.prompt) - (self.kv.num_present_tokens if self.kv else 0)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens that are to be computed here, about."""
        if self.stage == "computing" and not self.times.num_tokens:
            return max(0, len(self.prompt) - self.num_stored_blocks * self.hasher.block_size)
        return self.num_awaited_tokens if self.part == "prefill" else 0

    def held(self, now_ms: int) -> HeldRequest:
        """Return how far it is, for people."""
        return HeldRequest(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            part=self.part,
            stage=self.stage,
            age_ms=max(0, now_ms - self.times.accepted_ns // 1_000_000),
            num_prompt_tokens=len(self.prompt),
            reading_from=self.read.holder if self.read else "",
            waiting_for=self.wait.request_id if self.wait is not None and self.wait.twin is not None else "",
        )


class PastAttempts:
    """The attempts that have ended here, or were cancelled before they came: a cancel may overtake what it cancels, and
    a message may come again after all is over. What those that ended have sent is kept for `retain_ms`. Bounded."""

    def __init__(self, retain_ms: int, max_attempts: int = MAX_PAST_ATTEMPTS) -> None:
        self._max_attempts = max_attempts
        self._retain_ms = retain_ms
        self._keys: dict[AttemptKey, None] = {}
        self._answers: dict[AttemptKey, tuple[SentAnswer, int]] = {}
        """With the time of the attempt's end; the one that ended first in front."""

    def __contains__(self, key: AttemptKey) -> bool:
        return key in self._keys

    def remember(self, key: AttemptKey) -> None:
        """This attempt is not to begin (again)."""
        self._keys[key] = None
        if len(self._keys) > self._max_attempts:
            del self._keys[next(iter(self._keys))]

    def ended(self, key: AttemptKey, answer: SentAnswer, now_ms: int) -> None:
        """This attempt has ended, and has sent this."""
        self.remember(key)
        if not answer.is_empty:
            self._answers[key] = (answer, now_ms)
        if len(self._answers) > self._max_attempts:
            del self._answers[next(iter(self._answers))]

    def answer(self, key: AttemptKey) -> SentAnswer | None:
        """Return what an ended attempt has sent, if that is still known."""
        entry = self._answers.get(key)
        return entry[0] if entry else None

    def forget_old(self, now_ms: int) -> None:
        """Drop the answers whose time is over."""
        while self._answers:
            key, (_, ended_ms) = next(iter(self._answers.items()))
            if ended_ms + self._retain_ms > now_ms:
                return
            del self._answers[key]

    def forget_answers(self) -> None:
        """Drop all answers: their gateways have been told that this worker is dead."""
        self._answers.clear()

    def refuse(self, request: RunAttempt) -> Refused | None:
        """Return the refusal of an attempt that is over."""
        if (request.request_id, request.attempt) not in self._keys:
            return None
        return refuse(request, RefusalReason.INVALID, "this attempt has ended here, or was cancelled before it came")
