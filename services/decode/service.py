"""The decode role: which messages are events to its core. What the core decides the worker's shell carries out."""

from dataplane.blocks.cache import BlockCache
from schemas import subjects
from schemas.request import ReserveBlocks
from services.bus.typed import Received
from services.decode.core import DecodeCore
from services.worker.core.checks import WorkerLimits
from services.worker.core.events import ReserveAsked
from services.worker.core.leases import LeaseTable
from services.worker.observe.spans import times_of
from services.worker.roles import Role, RoleSubject, message_of


def decode_role(limits: WorkerLimits, cache: BlockCache, _leases: LeaseTable) -> Role:
    """Return the role that reads prompts' KV and decodes answers."""
    me = limits.worker_id
    subscriptions = (
        RoleSubject(subjects.RESERVE, (me,), _reserve_asked, "reserve"),
        RoleSubject(subjects.OFFERED, ("*", me, "*"), message_of),
        RoleSubject(subjects.ABORTED, ("*", me, "*"), message_of),
    )
    return Role(DecodeCore(limits, cache), subscriptions)


def _reserve_asked(received: Received[ReserveBlocks]) -> ReserveAsked:
    return ReserveAsked(received.message, times_of(received.traceparent))
