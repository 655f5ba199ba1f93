"""Every subject of the mesh and what it carries, on one screen. `{}` marks a token that an id fills.

Of a request (`Subject`) the table says what may be answered; an event has no reply. The table in docs/protocol.md is
generated from SUBJECTS.
"""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from schemas.directory import BlocksEvicted, BlocksLocated, BlocksStored, Inventory, LocateBlocks, ReadInventory
from schemas.handoff import BlocksReserved, HandoffAborted, KVLanded, KVOffered, KVReleased, KVStreaming
from schemas.kv import BlocksCooling, LeaseGranted, ReplicateBlocks, RequestLease, ReturnLease
from schemas.message import Message
from schemas.observe import (
    DescribeRequest,
    DescribeWorker,
    FirstTokenHeard,
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
    CancelRequest,
    Placement,
    PlaceRequest,
    PrefillAccepted,
    Progress,
    Refused,
    ReservationQueued,
    ReserveBlocks,
    RunPrefill,
    TokensEmitted,
    Wanted,
)
from schemas.worker import (
    DescribeFleet,
    FleetDescribed,
    PingWorker,
    WorkerAlive,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
)

CarriesT = TypeVar("CarriesT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message | None)


@dataclass(frozen=True)
class Subject(Generic[CarriesT, ReplyT]):
    """One subject: its pattern, what is published or asked there, what may be answered, and who listens.

    The type says the same: `Subject[PlaceRequest, Placement | Refused]` is a request that has two kinds of reply,
    `Subject[WorkerLeft, None]` is an event. `queue`: the group of which one member answers, where there are several.
    `may_be_empty`: a message without a payload stands for what it `carries`, so that any client may ask.
    """

    pattern: str
    carries: type[CarriesT]
    reply: tuple[type[ReplyT], ...]
    listener: str
    queue: str = ""
    may_be_empty: bool = False

    def of(self, *ids: str) -> str:
        """Return the concrete subject. Raises ValueError unless there is exactly one id (or `*`) per token."""
        if self.pattern.count("{}") != len(ids):
            raise ValueError(f"{self.pattern} takes {self.pattern.count('{}')} ids, not {len(ids)}")
        return self.pattern.format(*ids)


def _event(pattern: str, carries: type[CarriesT], listener: str) -> Subject[CarriesT, None]:
    """Return the subject of an event: nobody answers it, and asking it is a type error."""
    return Subject(pattern, carries, (), listener)


PLACE = Subject("mesh.v1.schedule.place", PlaceRequest, (Placement, Refused), "scheduler", "scheduler")
FLEET = Subject("mesh.v1.scheduler.status", DescribeFleet, (FleetDescribed,), "scheduler", "scheduler", True)
JOINED = _event("mesh.v1.worker.{}.joined", WorkerJoined, "scheduler, directory, gateway")
LOAD = _event("mesh.v1.worker.{}.load", WorkerLoad, "scheduler, directory, gateway")
DRAINING = _event("mesh.v1.worker.{}.draining", WorkerDraining, "scheduler")
LEFT = _event("mesh.v1.worker.{}.left", WorkerLeft, "scheduler, directory, gateway, workers")
PING = Subject("mesh.v1.worker.{}.ping", PingWorker, (WorkerAlive,), "worker")
PROGRESS = Subject("mesh.v1.worker.{}.progress", AskProgress, (Progress,), "worker")
WORKER_STATUS = Subject("mesh.v1.worker.{}.status", DescribeWorker, (WorkerDescribed,), "KV holder", "", True)
RUN = Subject("mesh.v1.prefill.{}.run", RunPrefill, (PrefillAccepted, Refused), "prefill worker")
RESERVE = Subject(
    "mesh.v1.decode.{}.reserve", ReserveBlocks, (BlocksReserved, ReservationQueued, Refused), "decode worker"
)
# Source, target, hand-over: with both workers in the subject each end listens once, for all its hand-overs, and no
# event can arrive before its reader has subscribed.
RESERVED = _event("mesh.v1.handoff.{}.{}.{}.reserved", BlocksReserved, "prefill worker")
OFFERED = _event("mesh.v1.handoff.{}.{}.{}.offered", KVOffered, "decode worker")
STREAMING = _event("mesh.v1.handoff.{}.{}.{}.streaming", KVStreaming, "people")
LANDED = _event("mesh.v1.handoff.{}.{}.{}.landed", KVLanded, "prefill worker")
RELEASED = _event("mesh.v1.handoff.{}.{}.{}.released", KVReleased, "people")
ABORTED = _event("mesh.v1.handoff.{}.{}.{}.aborted", HandoffAborted, "both workers")
TOKENS = _event("mesh.v1.tokens.{}", TokensEmitted, "gateway")
WANTED = Subject("mesh.v1.gateway.{}.wanted", AskWanted, (Wanted,), "gateway")
CANCEL = _event("mesh.v1.request.{}.cancel", CancelRequest, "workers")
# A request's story, for people. One gateway answers where it is; where it does not know, it seeks who does.
ACCEPTED = _event("mesh.v1.request.{}.accepted", RequestAccepted, "people")
PLACED = _event("mesh.v1.request.{}.placed", RequestPlaced, "people")
FIRST_TOKEN = _event("mesh.v1.request.{}.first_token", FirstTokenHeard, "people")
RESUMED = _event("mesh.v1.request.{}.resumed", RequestResumed, "people")
FINISHED = _event("mesh.v1.request.{}.finished", RequestFinished, "people")
FAILED = _event("mesh.v1.request.{}.failed", RequestFailed, "people")
CANCELLED = _event("mesh.v1.request.{}.cancelled", RequestCancelled, "people")
REQUEST_STATUS = Subject(
    "mesh.v1.request.{}.status", DescribeRequest, (RequestDescribed,), "gateway", "gateway", may_be_empty=True
)
REQUEST_SOUGHT = Subject("mesh.v1.request.{}.sought", DescribeRequest, (RequestDescribed,), "every gateway")
LOCATE = Subject("mesh.v1.directory.locate", LocateBlocks, (BlocksLocated,), "directory", "directory")
STORED = _event("mesh.v1.kv.{}.stored", BlocksStored, "directory")
EVICTED = _event("mesh.v1.kv.{}.evicted", BlocksEvicted, "directory")
INVENTORY = Subject("mesh.v1.kv.{}.inventory", ReadInventory, (Inventory,), "KV holder")
LEASE = Subject("mesh.v1.kv.{}.lease", RequestLease, (LeaseGranted, Refused), "KV holder")
RETURNED = _event("mesh.v1.kv.{}.returned", ReturnLease, "KV holder")
REPLICATE = _event("mesh.v1.kv.{}.replicate", ReplicateBlocks, "KV holder")
COOLING = _event("mesh.v1.kv.{}.cooling", BlocksCooling, "store")
KEEP = _event("mesh.v1.trace.{}.keep", KeepTrace, "gateway, worker, store")

SUBJECTS: tuple[Subject[Any, Any], ...] = (
    PLACE, FLEET, JOINED, LOAD, DRAINING, LEFT, PING, PROGRESS, WORKER_STATUS, RUN, RESERVE, RESERVED, OFFERED,
    STREAMING, LANDED, RELEASED, ABORTED, TOKENS, WANTED, CANCEL, ACCEPTED, PLACED, FIRST_TOKEN, RESUMED, FINISHED,
    FAILED, CANCELLED, REQUEST_STATUS, REQUEST_SOUGHT, LOCATE, STORED, EVICTED, INVENTORY, LEASE, RETURNED, REPLICATE,
    COOLING, KEEP,
)  # fmt: skip
