"""What a gateway asks of the scheduler and the workers, and what comes back."""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from schemas.ids import GatewayId, HandoffId, RequestId, TokenIds, WorkerId
from schemas.logprobs import Logprobs, NumTop
from schemas.message import Message, OpenEnum, RequestMessage
from schemas.numbers import Amount, Count, Ns, Number, Seed

MAX_GRAMMAR_CHARACTERS = 256 * 1024
CARRIED_GRAMMAR_BYTES = 4 * 1024
"""A grammar's text of up to so many bytes in JSON travels with each attempt; a longer one goes to each worker once."""


class FinishReason(OpenEnum):
    """Why an answer is complete."""

    STOP = "stop"
    LENGTH = "length"
    OTHER = "other"


class RefusalReason(OpenEnum):
    """Why a scheduler, a worker or a store does not take what it was asked for."""

    NO_WORKER = "no_worker"
    """The scheduler knows no ready worker of a role that is needed, or no two of one model."""
    DRAINING = "draining"
    """Whoever was asked is about to stop."""
    STARTING = "starting"
    """The worker's engine has died, and is being started again."""
    OVERLOADED = "overloaded"
    """Too much is waiting, or too many leases are open."""
    TOO_LONG = "too_long"
    """The prompt and its longest answer fit no worker, or not this one."""
    DEADLINE = "deadline"
    """The deadline has passed, or the requester waits for the answer no more."""
    FINGERPRINT = "fingerprint"
    """The reader's KV is of another model or layout than the holder's."""
    INVALID = "invalid"
    """The message makes no sense, or comes again once its attempt is over."""
    UNSIGNED = "unsigned"
    """No gateway has signed whose request it is, or no holder that it reads a copy."""
    GONE = "gone"
    """The holder does not have these blocks, or no more."""
    IN_FLIGHT = "in_flight"
    """The holder is computing these blocks, and has none yet: it may be asked again."""
    OTHER = "other"


Temperature = Annotated[float, Meta(ge=0, le=2)]
Mass = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Factor = Annotated[float, Meta(gt=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
GrammarText = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARACTERS)]
BadWord = Annotated[tuple[Number, ...], Meta(min_length=1)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How tokens are chosen. The gateway always fills `seed`, so that a second attempt gives the same tokens.

    What its fields may be is declared here for the API, the bus and the engine's process: whoever decodes checks it.
    Tokens that a model does not have are refused by its workers.

    A token depends on the prompt, these parameters, the answer before it and its index in the answer only: whatever
    counts or remembers is made of the answer's tokens again wherever an answer goes on.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 do not filter. The random number of a token depends on
    (`seed`, its index in the answer) only.
    """

    max_tokens: Number
    temperature: Temperature = 1.0
    top_p: Mass = 1.0
    top_k: Number = 0
    min_p: Share = 0.0
    """Only tokens at least this share as likely as the likeliest one."""
    seed: Seed = 0
    stop_token_ids: tuple[Number, ...] = ()
    ignore_eos: bool = False
    min_tokens: Number = 0
    """No token that ends the answer before it has so many."""
    presence_penalty: Penalty = 0.0
    """Off the logit of each token that the answer has."""
    frequency_penalty: Penalty = 0.0
    """The same, for each time that it has it."""
    repetition_penalty: Factor = 1.0
    """Divides a positive logit, multiplies a negative one, of each token that the prompt or the answer has."""
    logit_bias: tuple[tuple[Number, Bias], ...] = ()
    """Token ids, and what is added to their logits."""
    allowed_token_ids: tuple[Number, ...] = ()
    """No other tokens; empty: all."""
    bad_words: tuple[BadWord, ...] = ()
    """Tokens that may not follow each other in the answer."""
    grammar: GrammarText = ""
    """What the answer must be, in llguidance's Lark; empty: anything."""
    grammar_digest: bytes = b""
    """Of a longer text in place of it (`digest_of_grammar`); the gateway sends it to who asks (AskGrammar)."""
    logprobs: NumTop | None = None
    """The answer's logprobs are wanted, with so many of the likeliest tokens'."""
    prompt_logprobs: NumTop | None = None
    """The same of the prompt's tokens from its second on."""


def digest_of_grammar(text: str) -> bytes:
    """Return what a text is known by on the bus: blake2b, 16 bytes."""
    return blake2b(text.encode(), digest_size=16).digest()


class KVSource(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks [first_block, first_block + num_blocks) of the prompt are reported to lie with `worker_id`."""

    worker_id: WorkerId
    first_block: Count
    num_blocks: Count


class PlacementTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a decision was made of, in milliseconds and tokens, so that a person can see why."""

    ttft_ms: Amount = 0.0
    """The predicted time to first token: queue + pull + compute."""
    queue_ms: Amount = 0.0
    pull_ms: Amount = 0.0
    compute_ms: Amount = 0.0
    handover_ms: Amount = 0.0
    """What the hand-over is expected to expose beyond the prefill."""
    stall_ms: Amount = 0.0
    """What the prefill costs the requests that decode on the same worker."""
    cached_tokens: Number = 0
    pulled_tokens: Number = 0
    computed_tokens: Number = 0
    alternatives: str = ""
    """The best of the others and their costs, in words."""


class Reuse(OpenEnum):
    """What a placement makes of the KV that others are reported to have of a prompt. A worker may have some that
    nobody reported, or have it no more."""

    USED = "used"
    """A worker that was chosen has some of it, or is to read some."""
    COMPUTED_WHOLE = "computed_whole"
    """There is nothing to look for: the prompt has no full block, or its own logprobs are wanted."""
    NOT_ASKED = "not_asked"
    """The policy does not look at who has what."""
    WITHOUT_DIRECTORY = "without_directory"
    """No directory has answered in time who has what."""
    NOTHING_HELD = "nothing_held"
    """Nobody is reported to have any."""
    BELOW_THRESHOLD = "below_threshold"
    """Nobody has as many tokens of it as are read rather than computed (`scheduler.pull_tokens_min`)."""
    NOT_QUICKER = "not_quicker"
    """Somebody has some of it, who is not to be read from now, or the policy expects to be as quick without."""
    OTHER = "other"


class PlaceRequest(RequestMessage, frozen=True, kw_only=True):
    """Which workers should serve this? `block_hashes` are the prompt's, joined (`schemas.block`)."""

    num_prompt_tokens: Count
    max_tokens: Count
    block_hashes: bytes = b""
    excluded_workers: tuple[WorkerId, ...] = ()
    """Workers that failed an earlier attempt: to be used only where nobody else could serve."""
    tenant: str = ""
    """Whose request it is: KV is never shared between tenants."""
    moved_from: KVSource | None = None
    """Who has migrated the attempt before, and what it reports that it lends of the prompt."""
    must_split: bool = False
    """Two workers, or a refusal."""


class Placement(RequestMessage, frozen=True, kw_only=True):
    """The scheduler's decision. Without a `decode_worker` the request is not split: `prefill_worker`, of any role,
    computes the prompt and the answer."""

    prefill_worker: WorkerId
    decode_worker: WorkerId | None = None
    policy: str = ""
    sources: tuple[KVSource, ...] = ()
    """Whom the prefill worker should read from, in order; what none of them gives is computed."""
    terms: PlacementTerms | None = None
    replica: WorkerId | None = None
    """Who is offered the blocks that decoding completes, so that they outlive the worker that decodes."""
    spare_blocks: Number = 0
    """Where the decode worker seems to have no room: how many blocks another one has, for answers that it gives
    away."""
    reuse: Reuse | None = None
    """What comes of KV that others have of the prompt, so that a person can see why nothing was cached."""


class Refused(RequestMessage, frozen=True, kw_only=True):
    """A typed no, from the scheduler or a worker. `retry_after_ms` 0: asking again will not help."""

    reason: RefusalReason
    detail: str = ""
    retry_after_ms: Number = 0


def refuse(request: RequestMessage, reason: RefusalReason, detail: str, retry_after_ms: int = 0) -> Refused:
    """Return the refusal of this attempt."""
    return Refused(
        request_id=request.request_id,
        attempt=request.attempt,
        deadline_ms=request.deadline_ms,
        reason=reason,
        detail=detail,
        retry_after_ms=retry_after_ms,
    )


class OtherEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The worker at the other end of an attempt's hand-over, and what the hand-over is called."""

    worker_id: WorkerId
    handoff_id: HandoffId


class RunAttempt(RequestMessage, frozen=True, kw_only=True):
    """Serve an attempt, or one end of it. With neither `upstream` nor `downstream` the worker computes the prompt and
    the answer; none takes both.

    The last `num_answered_tokens` of `prompt` are tokens of the answer that an earlier attempt gave: the next token has
    that index, and `sampling.max_tokens` counts them.
    """

    gateway_id: GatewayId
    prompt: TokenIds
    sampling: SamplingParams
    upstream: OtherEnd | None = None
    """Who computes the prompt: make room for its KV and the answer's, read the KV when it is offered, and decode."""
    downstream: OtherEnd | None = None
    """Who decodes: compute the prompt, send the next token, and hand the KV over."""
    sources: tuple[KVSource, ...] = ()
    """Who else is reported to have KV of this prompt; with an `upstream`, should its own not arrive."""
    num_answered_tokens: Number = 0
    tenant: str = ""
    signature: bytes = b""
    """A gateway's word whose request it is, and for how long (`services.trust.credentials`)."""
    replica: WorkerId | None = None
    spare_blocks: Number = 0
    """As in Placement."""

    @property
    def other_end(self) -> OtherEnd | None:
        """The worker that it is handed over from, or to; None: it is not handed over."""
        return self.upstream or self.downstream


class AttemptAccepted(RequestMessage, frozen=True, kw_only=True):
    """The worker has taken the attempt, and may yet wait for blocks, until the deadline at most. `accepted_ns`: when, a
    date of the mesh's clock; 0: unknown."""

    worker_id: WorkerId
    accepted_ns: Ns = 0


class SourceTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens whose KV was read from this worker or store."""

    worker_id: WorkerId
    num_tokens: Number


class FirstTokenTimes(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker came to an attempt's first token, in dates of the mesh's clock."""

    accepted_ns: Ns
    first_step_ns: Ns
    """The first engine step of it began."""
    computed_ns: Ns


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where the prompt's KV on one worker came from: cached + transferred + recomputed = the prompt.

    `is_prefill`: sent by the prefill worker of a split request; else by the worker that decodes.
    """

    transferred_tokens: Number = 0
    recomputed_tokens: Number = 0
    cached_tokens: Number = 0
    carrier: str = ""
    transferred_from: tuple[SourceTokens, ...] = ()
    """The transferred tokens by the worker that they were read from."""
    is_prefill: bool = False
    first_token: FirstTokenTimes | None = None
    """The times of the worker that computed the prompt."""


class AttemptFailure(OpenEnum):
    """Why an attempt has failed on a worker."""

    TRANSFER_FAILED = "transfer_failed"
    """The prompt's KV did not come."""
    DEADLINE = "deadline"
    """The request's deadline has passed."""
    WORKER_FAILED = "worker_failed"
    ENGINE_FAILED = "engine_failed"
    """The engine has given the attempt up."""
    DRAINING = "draining"
    """The worker is about to stop."""
    ENGINE_DIED = "engine_died"
    """The worker's engine has died, and is started again. What was computed before can be read there."""
    PREEMPTED = "preempted"
    """The worker is full, and another one has room for this answer."""
    ORPHANED = "orphaned"
    """Nobody served the gateway's questions any more: the worker took it for dead, and has ended the attempt."""
    GRAMMAR = "grammar"
    """The answer cannot be what the request requires. No other worker can do better."""
    OTHER = "other"


class RequestFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Why an attempt has failed on a worker. `retryable`: another worker may do better."""

    code: AttemptFailure
    detail: str
    retryable: bool
    in_step: bool = False
    """With `engine_died`: the engine was computing it."""
    held_blocks: Number = 0
    """So many full blocks of the prompt and the answer, from the first on, can be read there by whoever goes on."""


class RequestTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One request's share of an engine step. `index` is the answer's index of the first token in `tokens`."""

    request_id: str
    attempt: Number
    index: Number
    tokens: TokenIds = TokenIds(b"")
    logprobs: Logprobs | None = None
    """Of `tokens`, where they are wanted."""
    prompt_logprobs: Logprobs | None = None
    """Of the prompt's second token to its last, where they are wanted: with the answer's first token."""
    finish_reason: FinishReason | None = None
    failure: RequestFailure | None = None
    report: TransferReport | None = None


class TokensEmitted(Message, frozen=True, kw_only=True):
    """What one engine step (or failure) means for one gateway's requests."""

    worker_id: WorkerId
    requests: tuple[RequestTokens, ...]


class AttemptEnd(OpenEnum):
    """Why an attempt ends on a worker before it has come to its own end there."""

    COMPLETE = "complete"
    """The answer is complete: the rest is not needed."""
    CANCELLED = "cancelled"
    """Nobody wants it any more, or it goes on elsewhere."""
    DEADLINE = "deadline"
    """The request's deadline has passed."""
    FAILED = "failed"
    OTHER = "other"


class CancelRequest(RequestMessage, frozen=True, kw_only=True):
    """Stop working on this attempt and give its blocks back. `reason` is for people."""

    reason: str
    end: AttemptEnd = AttemptEnd.CANCELLED


class AskProgress(RequestMessage, frozen=True, kw_only=True):
    """What has come of this attempt? The gateway asks where tokens are missing or nothing has been received for a
    while: the bus may lose a message. `index`: the first token of the answer that it lacks."""

    index: Number


class Progress(RequestMessage, frozen=True, kw_only=True):
    """What a worker knows of an attempt. `known` False: it has never received it, or has forgotten it; it will send
    nothing. `tokens` None: nothing from the asked index on yet. `is_waiting`: it is in line here, for room or for
    its KV: there is no hurry to ask again."""

    worker_id: WorkerId
    known: bool
    tokens: RequestTokens | None = None
    is_waiting: bool = False


class AskGrammar(RequestMessage, frozen=True, kw_only=True):
    """What must the answer be? A worker asks the gateway for the text of a digest that it does not know."""


class GrammarSent(RequestMessage, frozen=True, kw_only=True):
    """The text. Empty: this request is not under way there."""

    grammar: GrammarText


class AttemptId(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one request; the first is 1."""

    request_id: RequestId
    attempt: Number


class AskWanted(Message, frozen=True, kw_only=True):
    """Does anybody still want these attempts? A worker asks the gateway now and then: a cancel may have been lost, or
    the gateway may have died, in which case nobody serves this subject."""

    worker_id: WorkerId
    attempts: tuple[AttemptId, ...]


class Wanted(Message, frozen=True, kw_only=True):
    """Those of the attempts that have ended for the gateway: the worker lets go of them."""

    unwanted: tuple[AttemptId, ...]
