"""Every subject of the mesh and what it carries, on one screen. `{}` marks a token that an id fills.

A subject's `reply` is empty for an event. The table in ARCHITECTURE.md is generated from SUBJECTS.
"""

from typing import NamedTuple

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


class Subject(NamedTuple):
    """One subject: its pattern, what is published or asked there, what may be answered, and who listens.

    `may_be_empty`: a message without a payload stands for what it `carries`, so that any client may ask.
    """

    pattern: str
    carries: type[Message]
    reply: tuple[type[Message], ...] = ()
    listener: str = ""
    queue: str = ""
    may_be_empty: bool = False

    def of(self, *ids: str) -> str:
        """Return the concrete subject. Raises ValueError unless there is exactly one id (or `*`) per token."""
        if self.pattern.count("{}") != len(ids):
            raise ValueError(f"{self.pattern} takes {self.pattern.count('{}')} ids, not {len(ids)}")
        return self.pattern.format(*ids)


PLACE = Subject("mesh.v1.schedule.place", PlaceRequest, (Placement, Refused), "scheduler", "scheduler")
FLEET = Subject("mesh.v1.scheduler.status", DescribeFleet, (FleetDescribed,), "scheduler", "scheduler", True)
JOINED = Subject("mesh.v1.worker.{}.joined", WorkerJoined, (), "scheduler, directory, gateway")
LOAD = Subject("mesh.v1.worker.{}.load", WorkerLoad, (), "scheduler, directory, gateway")
DRAINING = Subject("mesh.v1.worker.{}.draining", WorkerDraining, (), "scheduler")
LEFT = Subject("mesh.v1.worker.{}.left", WorkerLeft, (), "scheduler, directory, gateway, workers")
PING = Subject("mesh.v1.worker.{}.ping", PingWorker, (WorkerAlive,), "worker")
PROGRESS = Subject("mesh.v1.worker.{}.progress", AskProgress, (Progress,), "worker")
WORKER_STATUS = Subject("mesh.v1.worker.{}.status", DescribeWorker, (WorkerDescribed,), "KV holder", "", True)
RUN = Subject("mesh.v1.prefill.{}.run", RunPrefill, (PrefillAccepted, Refused), "prefill worker")
RESERVE = Subject(
    "mesh.v1.decode.{}.reserve", ReserveBlocks, (BlocksReserved, ReservationQueued, Refused), "decode worker"
)
# Source, target, hand-over: with both workers in the subject each end listens once, for all its hand-overs, and no
# event can arrive before its reader has subscribed.
RESERVED = Subject("mesh.v1.handoff.{}.{}.{}.reserved", BlocksReserved, (), "prefill worker")
OFFERED = Subject("mesh.v1.handoff.{}.{}.{}.offered", KVOffered, (), "decode worker")
STREAMING = Subject("mesh.v1.handoff.{}.{}.{}.streaming", KVStreaming, (), "people")
LANDED = Subject("mesh.v1.handoff.{}.{}.{}.landed", KVLanded, (), "prefill worker")
RELEASED = Subject("mesh.v1.handoff.{}.{}.{}.released", KVReleased, (), "people")
ABORTED = Subject("mesh.v1.handoff.{}.{}.{}.aborted", HandoffAborted, (), "both workers")
TOKENS = Subject("mesh.v1.tokens.{}", TokensEmitted, (), "gateway")
WANTED = Subject("mesh.v1.gateway.{}.wanted", AskWanted, (Wanted,), "gateway")
CANCEL = Subject("mesh.v1.request.{}.cancel", CancelRequest, (), "workers")
# A request's story, for people. One gateway answers where it is; where it does not know, it seeks who does.
ACCEPTED = Subject("mesh.v1.request.{}.accepted", RequestAccepted, (), "people")
PLACED = Subject("mesh.v1.request.{}.placed", RequestPlaced, (), "people")
FIRST_TOKEN = Subject("mesh.v1.request.{}.first_token", FirstTokenHeard, (), "people")
RESUMED = Subject("mesh.v1.request.{}.resumed", RequestResumed, (), "people")
FINISHED = Subject("mesh.v1.request.{}.finished", RequestFinished, (), "people")
FAILED = Subject("mesh.v1.request.{}.failed", RequestFailed, (), "people")
CANCELLED = Subject("mesh.v1.request.{}.cancelled", RequestCancelled, (), "people")
REQUEST_STATUS = Subject(
    "mesh.v1.request.{}.status", DescribeRequest, (RequestDescribed,), "gateway", "gateway", may_be_empty=True
)
REQUEST_SOUGHT = Subject("mesh.v1.request.{}.sought", DescribeRequest, (RequestDescribed,), "every gateway")
LOCATE = Subject("mesh.v1.directory.locate", LocateBlocks, (BlocksLocated,), "directory", "directory")
STORED = Subject("mesh.v1.kv.{}.stored", BlocksStored, (), "directory")
EVICTED = Subject("mesh.v1.kv.{}.evicted", BlocksEvicted, (), "directory")
INVENTORY = Subject("mesh.v1.kv.{}.inventory", ReadInventory, (Inventory,), "KV holder")
LEASE = Subject("mesh.v1.kv.{}.lease", RequestLease, (LeaseGranted, Refused), "KV holder")
RETURNED = Subject("mesh.v1.kv.{}.returned", ReturnLease, (), "KV holder")
REPLICATE = Subject("mesh.v1.kv.{}.replicate", ReplicateBlocks, (), "KV holder")
COOLING = Subject("mesh.v1.kv.{}.cooling", BlocksCooling, (), "store")
KEEP = Subject("mesh.v1.trace.{}.keep", KeepTrace, (), "gateway, worker, store")

SUBJECTS: tuple[Subject, ...] = (
    PLACE, FLEET, JOINED, LOAD, DRAINING, LEFT, PING, PROGRESS, WORKER_STATUS, RUN, RESERVE, RESERVED, OFFERED,
    STREAMING, LANDED, RELEASED, ABORTED, TOKENS, WANTED, CANCEL, ACCEPTED, PLACED, FIRST_TOKEN, RESUMED, FINISHED,
    FAILED, CANCELLED, REQUEST_STATUS, REQUEST_SOUGHT, LOCATE, STORED, EVICTED, INVENTORY, LEASE, RETURNED, REPLICATE,
    COOLING, KEEP,
)  # fmt: skip
