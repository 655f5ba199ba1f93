"""What a worker knows of one attempt: one record, from its acceptance until its blocks are given back. Pure.

`Attempts` owns it (`attempts.py`). Whoever acts on an attempt (the holder of blocks, the spans, the reads) is given the
record, or what it needs of it, and keeps no copy.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from dataplane.blocks.layout import BlockTables
from schemas.block import BlockHasher, pack_tokens, unpack_tokens
from schemas.handoff import HandoffState, KVOffered
from schemas.ids import HandoffId, RequestId, WorkerId
from schemas.kv import RequestLease
from schemas.logprobs import Logprobs, TokenLogprob, num_message_bytes, pack_logprobs, unpack_logprobs
from schemas.observe import HeldRequest, Part, RunStage
from schemas.request import (
    AttemptEnd,
    FinishReason,
    FirstTokenTimes,
    RequestFailure,
    RequestTokens,
    RunAttempt,
    TransferReport,
)
from services.bus.limits import MAX_PAYLOAD_BYTES
from services.holder.core.checks import num_kv_tokens
from services.holder.core.content import AttemptKey, PromptKV
from services.holder.core.leases import Grant
from services.holder.core.replica_offer import ReplicaOffer


@dataclass(slots=True, frozen=True, eq=False)
class KVRead:
    """One read of KV from `holder` into the blocks of `tables`: from `first_token` of a hand-over that was offered, or
    under a lease that is asked for first. Until `ReadEnded` comes, the blocks may still be written."""

    key: AttemptKey
    holder: WorkerId
    lease: KVOffered | RequestLease
    tables: BlockTables
    first_token: int = 0
    traceparent: str = ""
    """The trace of the request that it belongs to."""

    @property
    def is_hand_over(self) -> bool:
        return isinstance(self.lease, KVOffered)


@dataclass(slots=True, frozen=True, eq=False)
class InFlightDuplicate:
    """An attempt whose prompt begins alike, and which fills the blocks up to `end_block` of it; the last of these is
    `last_block` of the arena."""

    attempt: "Attempt"
    end_block: int
    last_block: int


@dataclass(slots=True)
class DuplicateWait:
    """An attempt's wait for blocks that others fill. `duplicate`: the attempt that it waits for; None: it waits no
    more. `request_id`: the request that it waited for last."""

    duplicate: InFlightDuplicate | None
    request_id: RequestId
    began_ms: int
    until_ms: int
    """It goes on then, whatever has come."""
    ended_ms: int = 0


@dataclass(slots=True)
class AttemptTimes:
    """When what happened to an attempt, in ns; 0: not yet. Kept by the core; what spans need besides, by
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


STAGES_AFTER: Mapping[RunStage, frozenset[RunStage]] = {
    RunStage.QUEUED: frozenset(
        {RunStage.WAITING, RunStage.RESERVED, RunStage.FETCHING, RunStage.COMPUTING, RunStage.ENDING}
    ),
    RunStage.WAITING: frozenset({RunStage.QUEUED, RunStage.ENDING}),
    RunStage.RESERVED: frozenset({RunStage.RECEIVING, RunStage.FETCHING, RunStage.COMPUTING, RunStage.ENDING}),
    RunStage.RECEIVING: frozenset({RunStage.FETCHING, RunStage.COMPUTING, RunStage.ENDING}),
    RunStage.FETCHING: frozenset({RunStage.COMPUTING, RunStage.ENDING}),
    RunStage.COMPUTING: frozenset({RunStage.HANDING_OVER, RunStage.ENDING}),
    RunStage.HANDING_OVER: frozenset({RunStage.ENDING}),
    RunStage.ENDING: frozenset(),
}
"""Which stages may follow each."""


@dataclass(slots=True)
class Upstream:
    """The hand-over from which an attempt awaits its prompt's KV, and who computes it. `state`: of the hand-over."""

    worker_id: WorkerId
    handoff_id: HandoffId
    state: HandoffState = HandoffState.NEW
    reserved_ms: int | None = None
    """When that worker was last notified that there is room; None until the first tick after the first time."""
    has_left: bool = False
    lost_reason: str = ""
    """Why no offer will come, learnt while the attempt was waiting for blocks; "": it may come."""
    num_migrated: int = 0
    """Blocks of other attempts that go on elsewhere so that this one has room."""


@dataclass(slots=True)
class Downstream:
    """The hand-over to which an attempt gives its prompt's KV, and who decodes the answer."""

    worker_id: WorkerId
    handoff_id: HandoffId
    lease: Grant | None = None
    """Under which the KV is read; None: not granted yet, or ended."""
    has_room: bool = False
    """That worker has reported that it has reserved its blocks."""
    offer_again: bool = False
    """It has reported so again: the offer may have been lost."""
    offered_again_ms: int = 0


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt on this worker. `tables` are its own reference to its blocks: empty before it has any, and once they
    are given back. `traceparent`: of the request that it belongs to; "": of none."""

    request: RunAttempt
    token_ids: list[int]
    """Its prompt, and the tokens of the answer that follow here: the only copy of the worker."""
    hasher: BlockHasher
    """Of its full blocks: the prompt's, and the answer's as they fill up."""
    times: AttemptTimes
    traceparent: str = ""
    key: AttemptKey = field(init=False)
    upstream: Upstream | None = field(init=False)
    """Its prompt is computed elsewhere, and its answer decoded here."""
    downstream: Downstream | None = field(init=False)
    """Its prompt is computed here, and its answer decoded elsewhere."""
    num_prompt_tokens: int = field(init=False)
    """Of these, what an attempt before this one has answered included."""
    num_kv_tokens: int = field(init=False)
    """Tokens that need room here."""
    number: int = 0
    """By which the engine knows it, from its submission on."""
    num_computed_tokens: int = 0
    """So many of its first tokens have their KV here, as far as the engine has reported."""
    stage: RunStage = RunStage.QUEUED
    """How far it is."""
    answer: SentAnswer = field(default_factory=SentAnswer)
    wait: DuplicateWait | None = None
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
        above, below = self.request.upstream, self.request.downstream
        self.upstream = Upstream(above.worker_id, above.handoff_id) if above is not None else None
        self.downstream = Downstream(below.worker_id, below.handoff_id) if below is not None else None
        self.num_prompt_tokens = len(self.token_ids)
        self.num_kv_tokens = num_kv_tokens(self.request, self.num_prompt_tokens)

    def enter(self, stage: RunStage) -> None:
        """Go on to this stage, or stay in it. Asserts that it may follow."""
        assert stage is self.stage or stage in STAGES_AFTER[self.stage], f"no attempt goes from {self.stage} to {stage}"
        self.stage = stage

    @property
    def part(self) -> Part:
        """What it is called for people: what this worker does first of it."""
        return Part.PREFILL if self.upstream is None else Part.DECODE

    @property
    def lease(self) -> Grant | None:
        """The lease under which its KV is handed over; None: there is none (any more)."""
        return self.downstream.lease if self.downstream is not None else None

    @property
    def runs_ahead(self) -> bool:
        """Nobody has room for what is computed yet."""
        return self.downstream is not None and not self.downstream.has_room

    @property
    def has_ended(self) -> bool:
        """Nothing more comes of it; its blocks wait for whoever may still write them."""
        return self.stage is RunStage.ENDING

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whoever computes its answer's first token is to compute all of its prompt."""
        return self.request.sampling.prompt_logprobs is not None and not self.request.num_answered_tokens

    @property
    def owes_tokens(self) -> bool:
        """Its gateway waits for more from this worker."""
        return self.stage not in (RunStage.HANDING_OVER, RunStage.ENDING)

    @property
    def num_awaited_tokens(self) -> int:
        """Prompt tokens whose KV is neither here nor the engine's to compute, yet."""
        if self.stage in (RunStage.COMPUTING, RunStage.HANDING_OVER, RunStage.ENDING):
            return 0
        if self.wait is not None and self.wait.duplicate is not None:
            return self.num_prompt_tokens - self.wait.duplicate.end_block * self.hasher.block_size
        return self.num_prompt_tokens - (self.kv.num_present_tokens if self.kv else 0)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Prompt tokens that are to be computed here, about."""
        if self.stage is RunStage.COMPUTING and not self.times.num_tokens:
            return max(0, self.num_prompt_tokens - self.num_stored_blocks * self.hasher.block_size)
        return self.num_awaited_tokens if self.upstream is None else 0

    def held(self, now_ms: int) -> HeldRequest:
        """Return how far it is, for people."""
        return HeldRequest(
            request_id=self.request.request_id,
            attempt=self.request.attempt,
            part=self.part,
            stage=self.stage,
            age_ms=max(0, now_ms - self.times.accepted_ns // 1_000_000),
            num_prompt_tokens=self.num_prompt_tokens,
            reading_from=self.read.holder if self.read else "",
            waiting_for=self.wait.request_id if self.wait is not None and self.wait.duplicate is not None else "",
        )
