"""Every subject of the mesh: what it carries, who may publish it and who may receive it. The broker's permissions
(`schemas.permissions`) and the tables in docs/protocol.md and docs/security.md are generated from SUBJECTS.

A name in braces is a token that an id fills. It is the message's field of that name, which must be the same; `to` is
whom the message is for, and `id` is of no field.
"""

import enum
import re
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar

from schemas.directory import (
    AskHeat,
    BlockHeat,
    BlocksEvicted,
    BlocksLocated,
    BlocksStored,
    DescribeDirectory,
    DirectoryDescribed,
    Inventory,
    LocateBlocks,
    ReadInventory,
)
from schemas.handoff import BlocksReserved, HandoffAborted, KVLanded, KVOffered, KVReleased, KVStreaming
from schemas.kv import (
    BlocksPurged,
    EvictionCandidates,
    LeaseGranted,
    PurgeBlocks,
    ReplicateBlocks,
    RequestLease,
    ReturnLease,
)
from schemas.message import Message
from schemas.observe import (
    DescribeRequest,
    DescribeWorker,
    FirstTokenReceived,
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
    AskGrammar,
    AskProgress,
    AskWanted,
    AttemptAccepted,
    CancelRequest,
    GrammarSent,
    Placement,
    PlaceRequest,
    Progress,
    Refused,
    RunAttempt,
    TokensEmitted,
    Wanted,
)
from schemas.worker import (
    AskTime,
    ClaimName,
    DescribeFleet,
    DrainAnswered,
    DrainWorker,
    FleetDescribed,
    LeaveAnswered,
    LeaveMesh,
    PingWorker,
    TimeAnswered,
    TryWay,
    WayTried,
    WorkerAlive,
    WorkerBeat,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLoad,
)

CarriesT = TypeVar("CarriesT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message | None)


class Role(enum.StrEnum):
    """What a member of the bus is. Each instance has an identity of one role, bound to its name."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    DIRECTORY = "directory"
    HOLDER = "holder"
    """Prefill, decode and aggregated workers, and stores: whoever holds KV. A holder may change what it does."""
    OBSERVER = "observer"
    """A person who may see what happens, but no prompt, no token, no hash of a prompt and no ticket."""
    OPERATOR = "operator"
    """A person who may receive everything."""
    INDEXER = "indexer"
    """A program from outside that keeps its own index of who holds which block: it receives no prompt, no token, no
    answer and no tenant's name."""


class Permit(NamedTuple):
    """Members of this role may publish or receive a subject. `own`: only where this id of it is their own name."""

    role: Role
    own: str = ""


@dataclass(frozen=True)
class Subject(Generic[CarriesT, ReplyT]):
    """One subject: its pattern, what is published or asked there, what may be answered, and between whom.

    The type says the same: `Subject[PlaceRequest, Placement | Refused]` is a request that has two kinds of reply,
    `Subject[WorkerLeft, None]` is an event. `pattern` has `{}` for each of `ids`. Who receives a request answers it:
    only whom a request has reached may send something to where its reply is awaited. `queue`: the group of which one
    member answers, where there are several. `may_be_empty`: a message without a payload stands for what it `carries`,
    so that any client may ask.
    """

    pattern: str
    ids: tuple[str, ...]
    carries: type[CarriesT]
    reply: tuple[type[ReplyT], ...]
    published_by: tuple[Permit, ...]
    received_by: tuple[Permit, ...]
    queue: str = ""
    may_be_empty: bool = False

    def of(self, *ids: str) -> str:
        """Return the concrete subject. Raises ValueError unless there is exactly one id (or `*`) per token."""
        if len(self.ids) != len(ids):
            raise ValueError(f"{self.pattern} takes {len(self.ids)} ids, not {len(ids)}")
        return self.pattern.format(*ids)

    @property
    def named(self) -> str:
        """The pattern with the names of its ids."""
        return self.pattern.format(*(f"{{{name}}}" for name in self.ids))

    def disagreement(self, subject: str, message: CarriesT) -> str:
        """Return which id of a concrete subject is another one than the message's; empty where they agree."""
        tokens = [
            token for token, shape in zip(subject.split("."), self.pattern.split("."), strict=True) if shape == "{}"
        ]
        for name, token in zip(self.ids, tokens, strict=True):
            if name not in ADDRESSES and (own := attrgetter(name)(message)) != token:
                return f"{name} is {own!r}, and the subject says {token!r}"
        return ""


ADDRESSES = ("to", "id")
"""Ids of a subject that its message does not repeat."""

GATEWAYS, SCHEDULERS, DIRECTORIES, HOLDERS = (
    Permit(Role.GATEWAY), Permit(Role.SCHEDULER), Permit(Role.DIRECTORY), Permit(Role.HOLDER),
)  # fmt: skip
OBSERVERS = Permit(Role.OBSERVER)
OPERATORS = Permit(Role.OPERATOR)
INDEXERS = Permit(Role.INDEXER)
ADDRESSED_HOLDER, ADDRESSED_GATEWAY = Permit(Role.HOLDER, "to"), Permit(Role.GATEWAY, "to")
WORKER_ITSELF = Permit(Role.HOLDER, "worker_id")
SOURCE, TARGET = Permit(Role.HOLDER, "source_worker"), Permit(Role.HOLDER, "target_worker")
READER = Permit(Role.HOLDER, "reader")
PEOPLE = (OBSERVERS, OPERATORS)

Grants = tuple[Permit, ...] | Permit


def _event(pattern: str, carries: type[CarriesT], published_by: Grants, received_by: Grants) -> Subject[CarriesT, None]:
    """Return the subject of an event: nobody answers it, asking it is a type error. Operators receive all events."""
    return Subject(*_unnamed(pattern), carries, (), _grants(published_by), (*_grants(received_by), OPERATORS))


def _question(
    pattern: str,
    carries: type[CarriesT],
    reply: tuple[type[ReplyT], ...],
    published_by: Grants,
    received_by: Grants,
    queue: str = "",
    may_be_empty: bool = False,
) -> Subject[CarriesT, ReplyT]:
    """Return the subject of a request. Operators receive the questions, and no answer."""
    return Subject(
        *_unnamed(pattern),
        carries,
        reply,
        _grants(published_by),
        (*_grants(received_by), OPERATORS),
        queue,
        may_be_empty,
    )


def _unnamed(pattern: str) -> tuple[str, tuple[str, ...]]:
    return re.sub(r"{[^{}]*}", "{}", pattern), tuple(re.findall(r"{([^{}]*)}", pattern))


def _grants(grants: Grants) -> tuple[Permit, ...]:
    return (grants,) if isinstance(grants, Permit) else grants


PLACE = _question("mesh.v1.schedule.place", PlaceRequest, (Placement, Refused), GATEWAYS, SCHEDULERS, "scheduler")
FLEET = _question(
    "mesh.v1.scheduler.status",
    DescribeFleet,
    (FleetDescribed,),
    (GATEWAYS, HOLDERS, *PEOPLE),
    SCHEDULERS,
    "scheduler",
    True,
)
_KNOW_THE_FLEET = (SCHEDULERS, DIRECTORIES, GATEWAYS, OBSERVERS, INDEXERS)
JOINED = _event(
    "mesh.v1.worker.{worker.worker_id}.joined",
    WorkerJoined,
    Permit(Role.HOLDER, "worker.worker_id"),
    (*_KNOW_THE_FLEET, HOLDERS),
)
LOAD = _event(
    "mesh.v1.worker.{worker.worker_id}.load", WorkerLoad, Permit(Role.HOLDER, "worker.worker_id"), _KNOW_THE_FLEET
)
BEAT = _event("mesh.v1.worker.{worker_id}.beat", WorkerBeat, WORKER_ITSELF, SCHEDULERS)
DRAINING = _event("mesh.v1.worker.{worker_id}.draining", WorkerDraining, WORKER_ITSELF, (SCHEDULERS, OBSERVERS))
LEFT = _event("mesh.v1.worker.{worker_id}.left", WorkerLeft, (WORKER_ITSELF, SCHEDULERS), (*_KNOW_THE_FLEET, HOLDERS))
LEAVE = _question(
    "mesh.v1.worker.{worker_id}.leave", LeaveMesh, (LeaveAnswered,), WORKER_ITSELF, SCHEDULERS, "scheduler"
)
DRAIN = _question("mesh.v1.worker.{to}.drain", DrainWorker, (DrainAnswered,), OPERATORS, ADDRESSED_HOLDER)
PING = _question("mesh.v1.worker.{to}.ping", PingWorker, (WorkerAlive,), SCHEDULERS, ADDRESSED_HOLDER)
WAY = _question("mesh.v1.worker.{to}.{reader}.way", TryWay, (WayTried,), READER, ADDRESSED_HOLDER)
_MEMBERS = tuple(Permit(role, "name") for role in (Role.SCHEDULER, Role.DIRECTORY, Role.HOLDER))
CLAIM = _question("mesh.v1.member.{name}.claim", ClaimName, (ClaimName,), _MEMBERS, _MEMBERS)
_SERVICES = (GATEWAYS, SCHEDULERS, DIRECTORIES, HOLDERS)
TIME = _question("mesh.v1.scheduler.time", AskTime, (TimeAnswered,), _SERVICES, SCHEDULERS, "scheduler")
PROGRESS = _question("mesh.v1.worker.{to}.progress", AskProgress, (Progress,), GATEWAYS, ADDRESSED_HOLDER)
WORKER_STATUS = _question(
    "mesh.v1.worker.{to}.status", DescribeWorker, (WorkerDescribed,), PEOPLE, ADDRESSED_HOLDER, may_be_empty=True
)
RUN = _question("mesh.v1.worker.{to}.run", RunAttempt, (AttemptAccepted, Refused), GATEWAYS, ADDRESSED_HOLDER)
# With both workers in the subject each end listens once, for all its hand-overs, and no event can arrive before its
# reader has subscribed.
_HANDOFF = "mesh.v1.handoff.{source_worker}.{target_worker}.{handoff_id}"
RESERVED = _event(f"{_HANDOFF}.reserved", BlocksReserved, TARGET, (SOURCE, OBSERVERS))
OFFERED = _event(f"{_HANDOFF}.offered", KVOffered, SOURCE, TARGET)  # it has the ticket
STREAMING = _event(f"{_HANDOFF}.streaming", KVStreaming, TARGET, OBSERVERS)
LANDED = _event(f"{_HANDOFF}.landed", KVLanded, TARGET, (SOURCE, OBSERVERS))
RELEASED = _event(f"{_HANDOFF}.released", KVReleased, SOURCE, OBSERVERS)
ABORTED = _event(f"{_HANDOFF}.aborted", HandoffAborted, (SOURCE, TARGET), (SOURCE, TARGET, OBSERVERS))
TOKENS = _event("mesh.v1.tokens.{worker_id}.{to}", TokensEmitted, WORKER_ITSELF, ADDRESSED_GATEWAY)
WANTED = _question("mesh.v1.gateway.{to}.wanted", AskWanted, (Wanted,), HOLDERS, ADDRESSED_GATEWAY)
GRAMMAR = _question("mesh.v1.gateway.{to}.grammar", AskGrammar, (GrammarSent,), HOLDERS, ADDRESSED_GATEWAY)
CANCEL = _event("mesh.v1.request.{request_id}.cancel", CancelRequest, GATEWAYS, (HOLDERS, OBSERVERS))
# A request's story, for people. One gateway answers where it is; where it does not know, it seeks who does.
ACCEPTED = _event("mesh.v1.request.{request_id}.accepted", RequestAccepted, GATEWAYS, OBSERVERS)
PLACED = _event("mesh.v1.request.{request_id}.placed", RequestPlaced, GATEWAYS, OBSERVERS)
FIRST_TOKEN = _event("mesh.v1.request.{request_id}.first_token", FirstTokenReceived, GATEWAYS, OBSERVERS)
RESUMED = _event("mesh.v1.request.{request_id}.resumed", RequestResumed, GATEWAYS, OBSERVERS)
FINISHED = _event("mesh.v1.request.{request_id}.finished", RequestFinished, GATEWAYS, OBSERVERS)
FAILED = _event("mesh.v1.request.{request_id}.failed", RequestFailed, GATEWAYS, OBSERVERS)
CANCELLED = _event("mesh.v1.request.{request_id}.cancelled", RequestCancelled, GATEWAYS, OBSERVERS)
REQUEST_STATUS = _question(
    "mesh.v1.request.{id}.status", DescribeRequest, (RequestDescribed,), PEOPLE, GATEWAYS, "gateway", may_be_empty=True
)
REQUEST_SOUGHT = _question("mesh.v1.request.{id}.sought", DescribeRequest, (RequestDescribed,), GATEWAYS, GATEWAYS)
LOCATE = _question(
    "mesh.v1.directory.locate",
    LocateBlocks,
    (BlocksLocated,),
    (SCHEDULERS, GATEWAYS, HOLDERS),
    DIRECTORIES,
    "directory",
)
DIRECTORY_STATUS = _question(
    "mesh.v1.directory.status", DescribeDirectory, (DirectoryDescribed,), PEOPLE, DIRECTORIES, "directory", True
)
HEAT = _question("mesh.v1.directory.{worker_id}.heat", AskHeat, (BlockHeat,), WORKER_ITSELF, DIRECTORIES, "directory")
STORED = _event("mesh.v1.kv.{worker_id}.stored", BlocksStored, WORKER_ITSELF, (DIRECTORIES, INDEXERS))
EVICTED = _event("mesh.v1.kv.{worker_id}.evicted", BlocksEvicted, WORKER_ITSELF, (DIRECTORIES, INDEXERS))
INVENTORY = _question(
    "mesh.v1.kv.{to}.inventory", ReadInventory, (Inventory,), (DIRECTORIES, INDEXERS), ADDRESSED_HOLDER
)
PURGE = _question("mesh.v1.kv.{to}.purge", PurgeBlocks, (BlocksPurged,), OPERATORS, ADDRESSED_HOLDER)
LEASE = _question("mesh.v1.kv.{to}.{reader}.lease", RequestLease, (LeaseGranted, Refused), READER, ADDRESSED_HOLDER)
RETURNED = _event("mesh.v1.kv.{to}.{reader}.returned", ReturnLease, READER, ADDRESSED_HOLDER)
REPLICATE = _event(
    "mesh.v1.kv.{to}.{source}.replicate", ReplicateBlocks, Permit(Role.HOLDER, "source"), ADDRESSED_HOLDER
)
EVICTION_CANDIDATES = _event("mesh.v1.kv.{worker_id}.eviction_candidates", EvictionCandidates, WORKER_ITSELF, HOLDERS)
KEEP = _event("mesh.v1.trace.{trace_id}.keep", KeepTrace, GATEWAYS, _SERVICES)

SUBJECTS: tuple[Subject[Any, Any], ...] = (
    PLACE, FLEET, JOINED, LOAD, BEAT, DRAINING, LEAVE, DRAIN, LEFT, PING, WAY, CLAIM, TIME, PROGRESS, WORKER_STATUS,
    RUN, RESERVED, OFFERED, STREAMING, LANDED, RELEASED, ABORTED, TOKENS, WANTED, GRAMMAR, CANCEL, ACCEPTED,
    PLACED, FIRST_TOKEN, RESUMED, FINISHED, FAILED, CANCELLED, REQUEST_STATUS, REQUEST_SOUGHT, LOCATE, DIRECTORY_STATUS,
    HEAT, STORED, EVICTED, INVENTORY, LEASE, RETURNED, REPLICATE, EVICTION_CANDIDATES, PURGE, KEEP,
)  # fmt: skip
