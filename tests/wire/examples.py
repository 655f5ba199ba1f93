"""One message of every type, with every field filled: what the golden files hold."""

from schemas.block import hash_blocks, join_hashes, pack_tokens
from schemas.directory import (
    BlocksEvicted,
    BlocksLocated,
    BlocksStored,
    HolderPrefix,
    Inventory,
    LocateBlocks,
    ReadInventory,
)
from schemas.handoff import (
    BlocksReserved,
    Endpoint,
    HandoffAborted,
    KVLanded,
    KVOffered,
    KVReleased,
    KVStreaming,
    PairOffer,
)
from schemas.ids import GatewayId, HandoffId, LeaseId, RequestId, WorkerId
from schemas.kv import BlocksCooling, LeaseGranted, ReplicateBlocks, RequestLease, ReturnLease
from schemas.message import Message
from schemas.observe import (
    DescribeRequest,
    DescribeWorker,
    FirstTokenHeard,
    HeldLease,
    HeldRequest,
    KeepTrace,
    RequestAccepted,
    RequestCancelled,
    RequestDescribed,
    RequestFailed,
    RequestFinished,
    RequestPlaced,
    RequestResumed,
    WorkerDescribed,
)
from schemas.request import (
    AskProgress,
    AskWanted,
    AttemptEnd,
    AttemptFailure,
    AttemptId,
    CancelRequest,
    FirstTokenTimes,
    KVSource,
    Placement,
    PlacementTerms,
    PlaceRequest,
    PrefillAccepted,
    Progress,
    RefusalReason,
    Refused,
    RequestFailure,
    RequestTokens,
    ReservationQueued,
    ReserveBlocks,
    RunPrefill,
    SamplingParams,
    SourceTokens,
    TokensEmitted,
    TransferReport,
    Wanted,
)
from schemas.subjects import SUBJECTS
from schemas.worker import (
    BlockCounts,
    DescribeFleet,
    FleetDescribed,
    LeftReason,
    PingWorker,
    PrefillRate,
    TransferRate,
    WorkerAlive,
    WorkerDraining,
    WorkerInfo,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
    WorkerRates,
)

REQUEST = {"request_id": RequestId("req-9f86d081884c7d65"), "attempt": 2, "deadline_ms": 1_790_000_000_123}
SOURCE, TARGET, GATEWAY = WorkerId("prefill-0"), WorkerId("decode-0"), GatewayId("gateway-1")
STORY = REQUEST | {"gateway_id": GATEWAY, "age_ms": 25}
HANDOFF = {"handoff_id": HandoffId("req-9f86d081884c7d65-2"), "source_worker": SOURCE, "target_worker": TARGET}
LEASE = LeaseId("lease-5e884898da280471")
HOLDER = {"worker_id": SOURCE, "incarnation": "inc-1"}
PROMPT = pack_tokens([0, 1, 255, 65_536, 2**32 - 1])
HASHES = join_hashes(hash_blocks(range(8), 4, model_fingerprint="f", tenant="t"))
SAMPLING = SamplingParams(
    max_tokens=16, temperature=0.5, top_p=0.875, top_k=40, seed=7, stop_token_ids=(1, 2), ignore_eos=True
)
INFO = WorkerInfo(
    worker_id=SOURCE,
    incarnation="inc-1",
    role="prefill",
    model="demo_model",
    fingerprint="f00d",
    num_blocks=4096,
    block_size=16,
    context_length=8192,
    carriers=("shm", "tcp"),
    device="cuda:0 NVIDIA H200",
)
RATES = WorkerRates(
    prefill=(PrefillRate(context_tokens=1024, tokens_per_s=3500.5),),
    transfers=(TransferRate(source=TARGET, carrier="tcp", bytes_per_s=1.5e9, latency_ms=2.5),),
    decode_step_ms=8.25,
    kv_token_bytes=6144,
)
SOURCES = (
    KVSource(worker_id=TARGET, first_block=0, num_blocks=4),
    KVSource(worker_id=SOURCE, first_block=4, num_blocks=1),
)
TERMS = PlacementTerms(
    ttft_ms=31.5,
    queue_ms=1.5,
    pull_ms=10.0,
    compute_ms=20.0,
    handover_ms=2.0,
    stall_ms=3.0,
    cached_tokens=16,
    pulled_tokens=64,
    computed_tokens=20,
    alternatives="decode-0 alone 40.0 ms",
)
LOAD = WorkerLoad(
    worker=INFO,
    state="draining",
    blocks=BlockCounts(total=4096, free=3900, running=90, leased=6, cached=100, orphaned=1),
    rates=RATES,
    num_unreceived_tokens=32,
    num_running=3,
    num_queued=2,
    num_uncomputed_tokens=1000,
    num_tokens=70_000,
    num_dropped_messages=1,
    num_refused_reads=4,
)
ENDPOINT = Endpoint(
    host="10.0.0.7",
    port=7001,
    carriers=("cuda", "nccl", "shm", "tcp"),
    arena="kvmesh-a1",
    arena_nonce="n0nce",
    card="GPU-5e88",
    pair=PairOffer(unique_id=b"an id of NCCL's", generation=3),
)
TOKENS = (
    RequestTokens(
        request_id="req-1",
        attempt=1,
        index=0,
        tokens=PROMPT,
        finish_reason="stop",
        report=TransferReport(
            transferred_tokens=512,
            recomputed_tokens=16,
            cached_tokens=32,
            carrier="shm",
            transferred_from=(SourceTokens(worker_id=SOURCE, num_tokens=48),),
            is_prefill=True,
            first_token=FirstTokenTimes(accepted_ns=1_800_000_000_000_000_001, first_step_ns=2, computed_ns=3),
        ),
    ),
    RequestTokens(
        request_id="req-2",
        attempt=1,
        index=3,
        failure=RequestFailure(
            code=AttemptFailure.TRANSFER_FAILED, detail="the source is gone – naïve 東京", retryable=True
        ),
    ),
)

EXAMPLES: tuple[Message, ...] = (
    PlaceRequest(
        **REQUEST, num_prompt_tokens=100, max_tokens=16, block_hashes=HASHES, excluded_workers=(TARGET,), tenant="t"
    ),
    Placement(
        **REQUEST,
        prefill_worker=SOURCE,
        decode_worker=TARGET,
        policy="cost",
        sources=SOURCES,
        terms=TERMS,
        replica=TARGET,
    ),
    Refused(**REQUEST, reason=RefusalReason.NO_WORKER, detail="no decode worker is ready", retry_after_ms=1000),
    DescribeFleet(),
    FleetDescribed(policy="least_loaded", ready=True, workers=(LOAD,)),
    WorkerJoined(worker=INFO),
    LOAD,
    WorkerDraining(**HOLDER),
    WorkerLeft(**HOLDER, reason=LeftReason.SILENT),
    RunPrefill(
        **REQUEST,
        gateway_id=GATEWAY,
        prompt=PROMPT,
        sampling=SAMPLING,
        handoff_id=HANDOFF["handoff_id"],
        decode_worker=TARGET,
        sources=SOURCES,
        num_answered_tokens=3,
        tenant="t",
        replica=TARGET,
    ),
    PrefillAccepted(**REQUEST, worker_id=SOURCE, accepted_ns=1_800_000_000_000_000_001),
    ReserveBlocks(
        **REQUEST,
        gateway_id=GATEWAY,
        handoff_id=HANDOFF["handoff_id"],
        prefill_worker=SOURCE,
        prompt=PROMPT,
        sampling=SAMPLING,
        sources=SOURCES,
        num_answered_tokens=3,
        tenant="t",
        replica=SOURCE,
    ),
    BlocksReserved(**REQUEST, **HANDOFF, num_blocks=7),
    ReservationQueued(**REQUEST, worker_id=TARGET),
    KVOffered(
        **REQUEST,
        **HANDOFF,
        lease_id=LEASE,
        epoch=3,
        lease_ms=30_000,
        ticket="dGlja2V0.c2lnbmF0dXJl",
        endpoint=ENDPOINT,
        fingerprint="f00d",
        num_tokens=100,
    ),
    KVStreaming(**REQUEST, **HANDOFF, carrier="shm"),
    KVLanded(**REQUEST, **HANDOFF, lease_id=LEASE, carrier="shm", num_tokens=100, num_bytes=1_048_576),
    KVReleased(**REQUEST, **HANDOFF, lease_id=LEASE, num_blocks=7),
    HandoffAborted(**REQUEST, **HANDOFF, reason="the deadline has passed", lease_id=LEASE, end=AttemptEnd.DEADLINE),
    TokensEmitted(worker_id=TARGET, requests=TOKENS),
    CancelRequest(**REQUEST, reason="a stop string was reached", end=AttemptEnd.COMPLETE),
    LocateBlocks(**REQUEST, block_hashes=HASHES),
    BlocksLocated(**REQUEST, holders=(HolderPrefix(**HOLDER, num_blocks=2, first_block=1, tier="disk"),)),
    BlocksStored(**HOLDER, sequence=1, block_hashes=HASHES, tier="memory"),
    BlocksEvicted(**HOLDER, sequence=2, block_hashes=HASHES[:16], tier="memory"),
    ReadInventory(offset=100_000),
    Inventory(**HOLDER, sequence=2, block_hashes=HASHES[16:], next_offset=100_001, tier="remote"),
    RequestLease(
        **REQUEST, reader=TARGET, fingerprint="f00d", first_block=3, block_hashes=HASHES, tenant="t", answer_by_ms=9
    ),
    ReturnLease(**REQUEST, reader=TARGET, lease_id=LEASE),
    LeaseGranted(
        **REQUEST,
        worker_id=SOURCE,
        lease_id=LEASE,
        epoch=3,
        lease_ms=5_000,
        ticket="dGlja2V0.c2lnbmF0dXJl",
        endpoint=ENDPOINT,
        first_token=48,
        num_tokens=80,
    ),
    BlocksCooling(**HOLDER, block_hashes=HASHES),
    KeepTrace(trace_id="0af7651916cd43dd8448eb211c80319c", reason="failed"),
    ReplicateBlocks(**REQUEST, source=SOURCE, fingerprint="f00d", first_block=3, block_hashes=HASHES, tenant="t"),
    PingWorker(),
    WorkerAlive(**HOLDER, lag_ms=12),
    AskProgress(**REQUEST, index=4),
    Progress(**REQUEST, worker_id=TARGET, known=True, tokens=TOKENS[0], is_waiting=True),
    RequestAccepted(**STORY, num_prompt_tokens=100, max_tokens=16, tenant="t"),
    RequestPlaced(**STORY, prefill_worker=SOURCE, decode_worker=TARGET),
    FirstTokenHeard(**STORY),
    RequestResumed(**STORY, num_answered_tokens=3, reason="decode-0 has left: died"),
    RequestFinished(**STORY, finish_reason="stop", num_tokens=16),
    RequestFailed(**STORY, code="deadline", detail="the deadline has passed", status=504, num_tokens=3),
    RequestCancelled(**STORY, reason="the client has disconnected", num_tokens=3),
    DescribeWorker(),
    WorkerDescribed(
        load=LOAD,
        requests=(
            HeldRequest(
                request_id=REQUEST["request_id"],
                attempt=2,
                part="decode",
                stage="receiving",
                age_ms=40,
                num_prompt_tokens=100,
                reading_from=SOURCE,
            ),
        ),
        leases=(HeldLease(lease_id=LEASE, reader=TARGET, num_blocks=7, age_ms=30, left_ms=29_970),),
        num_requests=1,
        num_leases=1,
    ),
    DescribeRequest(),
    RequestDescribed(
        request_id=REQUEST["request_id"],
        phase="decode",
        phase_age_ms=900,
        age_ms=1_000,
        left_ms=599_000,
        gateway_id=GATEWAY,
        attempt=2,
        prefill_worker=SOURCE,
        decode_worker=TARGET,
        num_prompt_tokens=100,
        num_tokens=9,
        max_tokens=16,
        detail="attempt 1: decode-0 has left: died",
    ),
    AskWanted(worker_id=TARGET, attempts=(AttemptId(request_id=RequestId("req-1"), attempt=2),)),
    Wanted(unwanted=(AttemptId(request_id=RequestId("req-1"), attempt=2),)),
)

MESSAGE_TYPES = sorted({t for s in SUBJECTS for t in (s.carries, *s.reply)}, key=lambda t: t.__name__)
