"""What workers report of themselves. The scheduler's whole view of the fleet is made of these."""

import msgspec

from schemas.handoff import Endpoint
from schemas.ids import WorkerId
from schemas.message import Message, OpenEnum
from schemas.numbers import Amount, BlockSize, Count, Ns, Number, Rate


class WorkerRole(OpenEnum):
    """What a scheduler sends to a worker, or, `store`, reads from it. What it does not know it uses for nothing."""

    PREFILL = "prefill"
    DECODE = "decode"
    AGGREGATED = "aggregated"
    STORE = "store"
    OTHER = "other"


class WorkerState(OpenEnum):
    """Whether a worker takes requests. What it holds it lends in any state."""

    READY = "ready"
    STARTING = "starting"
    """Its engine is being started."""
    DRAINING = "draining"
    OTHER = "other"


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who a worker is. A restart keeps the id and changes the incarnation."""

    worker_id: WorkerId
    incarnation: str
    role: WorkerRole
    model: str
    fingerprint: str
    """`KVLayout.fingerprint`: KV moves only between equal ones."""
    num_blocks: Count
    """For how many its arena or memory has room."""
    block_size: BlockSize
    context_length: Count
    carriers: tuple[str, ...] = ()
    endpoint: Endpoint | None = None
    """Where this incarnation serves reads: a reader connects to nothing else. None: it serves none."""
    device: str = ""
    """Where its model runs and its KV lies, for people: `cpu`, or `cuda:0` and what the card is called."""
    num_blocks_behind: Count | None = None
    """For how many the tier behind a store's memory has room. None: not reported."""


class BlockCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The conservation law: total = free + cached + running + leased, at all times, and `orphaned` is 0.

    `cached`: kept for their content only, and given up when room is needed. `orphaned`: of those that count as running,
    the blocks that no request of this worker knows of: a leak.
    """

    total: Count
    free: Count
    running: Count
    leased: Count
    cached: Count = 0
    orphaned: Count = 0


class PrefillRate(msgspec.Struct, frozen=True, kw_only=True):
    """How quickly prompt tokens are computed whose context begins at `context_tokens` or later (up to the next)."""

    context_tokens: Count
    tokens_per_s: Rate


class TransferRate(msgspec.Struct, frozen=True, kw_only=True):
    """How quickly this worker reads from `source`. `latency_ms`: from asking for a lease to the first byte."""

    source: WorkerId
    carrier: str
    bytes_per_s: Rate
    latency_ms: Amount


class WorkerRates(msgspec.Struct, frozen=True, kw_only=True):
    """Moving averages of what happened on this worker; what has not happened yet is left out."""

    prefill: tuple[PrefillRate, ...] = ()
    transfers: tuple[TransferRate, ...] = ()
    decode_step_ms: Amount = 0.0
    kv_token_bytes: Count = 0
    """Bytes of one token's KV over all layers."""


class WorkerJoined(Message, frozen=True, kw_only=True):
    """A worker, or a new incarnation of one, takes work from now on."""

    worker: WorkerInfo


class EngineLives(msgspec.Struct, frozen=True, kw_only=True):
    """How many engines a worker has had, and how many of them have died."""

    num_starts: Count = 0
    num_deaths: Count = 0
    ready_ms: Count = 0
    """From when the last one was wanted until it was ready."""
    num_spares: Count = 0
    """Engines that are loaded, and take over where this one dies."""
    spare_bytes: Count = 0
    """Memory that they have of their own."""


class TenantLine(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant has in line on a worker: requests that wait for room, and prompt tokens that are to be computed
    there."""

    tenant: str
    num_queued: Count = 0
    num_uncomputed_tokens: Count = 0


class WorkerLoad(Message, frozen=True, kw_only=True):
    """Sent when it has changed, a few times a second at most, and about every 0.6 s else. Names the worker whole, so
    that a scheduler that has just started knows the fleet after one round."""

    worker: WorkerInfo
    state: WorkerState
    blocks: BlockCounts
    num_running: Count
    num_queued: Count
    """Those that wait for room; the others run, or wait for what they do not hold."""
    num_waiting_for_duplicate: Count = 0
    """Of `num_running`: those that wait for blocks that another request of the same prompt fills."""
    num_uncomputed_tokens: Count
    """Prompt tokens accepted here and not yet computed or received."""
    num_unreceived_tokens: Count = 0
    """Those of them that another worker computes: here they wait for their KV only."""
    lines: tuple[TenantLine, ...] = ()
    """Whose that is, of the tenants that have most of it: they take turns."""
    num_tokens: Count = 0
    """Tokens of answers that this incarnation has given."""
    num_dropped_messages: Count = 0
    num_refused_reads: Count = 0
    engine: EngineLives = EngineLives()
    rates: WorkerRates = WorkerRates()
    clock_ahead_ms: Number = 0
    """By how much its machine's clock is ahead of the scheduler's; 0: by less than a second."""


class WorkerBeat(Message, frozen=True, kw_only=True):
    """The worker lives, and has the load that it published last. It publishes this or its load about every 0.3 s."""

    worker_id: WorkerId
    incarnation: str


class WorkerDraining(Message, frozen=True, kw_only=True):
    """A worker takes no new work, and ends once what it has is done."""

    worker_id: WorkerId
    incarnation: str


class LeaveMesh(Message, frozen=True, kw_only=True):
    """May this worker leave? It is given nothing new once it may, or where it leaves whatever the answer is
    (`forced`)."""

    worker_id: WorkerId
    incarnation: str
    forced: bool = False


class LeaveAnswered(Message, frozen=True, kw_only=True):
    """`refusal`: why it had better stay, for people; "": it may leave. `is_last`: nobody could go on with what it
    does."""

    refusal: str = ""
    is_last: bool = False


class DrainWorker(Message, frozen=True, kw_only=True):
    """Leave the mesh: migrate what runs, take nothing new, end. `forced`: also where nobody could go on with it.
    `again`: be started again then."""

    forced: bool = False
    again: bool = False


class DrainAnswered(Message, frozen=True, kw_only=True):
    """`refusal`: why the worker stays, for people; "": it leaves. `is_leaving`: it was asked to before."""

    worker_id: WorkerId
    incarnation: str
    refusal: str = ""
    is_leaving: bool = False


class LeftReason(OpenEnum):
    """Why an incarnation of a worker counts no more."""

    DIED = "died"
    """Its process has ended: nobody serves its questions."""
    SILENT = "silent"
    """Nothing was received from it for too long."""
    RESTARTED = "restarted"
    """Another incarnation speaks under its name."""
    STOPPED = "stopped"
    """It reports so itself: it was asked to stop, and has left in order."""
    OTHER = "other"


class WorkerLeft(Message, frozen=True, kw_only=True):
    """This incarnation of a worker is over: it reports so itself, or a scheduler has declared it lost."""

    worker_id: WorkerId
    incarnation: str
    reason: LeftReason


class PingWorker(Message, frozen=True, kw_only=True):
    """Are you there? Where the process has died the broker answers, at once, that nobody serves this."""


class WorkerAlive(Message, frozen=True, kw_only=True):
    """The worker's event loop runs. `lag_ms`: how late its event loop last was for a timer."""

    worker_id: WorkerId
    incarnation: str
    lag_ms: Count = 0


class TryWay(Message, frozen=True, kw_only=True):
    """Can you read from me, where I am going to announce that I serve? Asked by a holder before it joins."""

    reader: WorkerId
    endpoint: Endpoint


class WayTried(Message, frozen=True, kw_only=True):
    """What came of it. `error`: for people; empty: so many bytes a second came."""

    error: str = ""
    bytes_per_s: Rate = 0.0


class ClaimName(Message, frozen=True, kw_only=True):
    """I live by this name: who else does? Asked by a service that starts, and after each reconnection; whoever else
    lives by the name answers with the claim that keeps it: the settled one, or else the lower token.

    `token` is the claim's own, `where` names the machine and the process, for people.
    """

    name: str
    token: str
    where: str
    settled: bool
    """No other claim that keeps the name has come for as long as an answer may take."""


class AskTime(Message, frozen=True, kw_only=True):
    """What time is it on a scheduler's machine?"""


class TimeAnswered(Message, frozen=True, kw_only=True):
    """The Unix time that the mesh goes by. `age_ms`, `token`: of the scheduler that answers. Of several the oldest
    counts."""

    unix_ns: Ns
    age_ms: Count
    token: str


class DescribeFleet(Message, frozen=True, kw_only=True):
    """Asks a scheduler what it sees (`kvmesh status`, `/health`, `/v1/models`). `after`: of the workers those whose ids
    come after this one."""

    after: str = ""


class FleetDescribed(Message, frozen=True, kw_only=True):
    """`ready`: at least one request could be placed now. `workers`: by their ids, as many as fit into a message;
    `more`: there are others after the last."""

    policy: str
    ready: bool
    workers: tuple[WorkerLoad, ...]
    more: bool = False
