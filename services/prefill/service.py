"""The prefill role: which messages are events to its core. What the core decides the worker's shell carries out."""

from dataplane.blocks.cache import BlockCache
from schemas import subjects
from schemas.request import RunPrefill
from services.bus.typed import Received
from services.prefill.core import PrefillCore
from services.worker.core.checks import WorkerLimits
from services.worker.core.events import RunAsked
from services.worker.core.leases import LeaseTable
from services.worker.observe.spans import times_of
from services.worker.roles import Role, RoleSubject, message_of


def prefill_role(limits: WorkerLimits, cache: BlockCache, leases: LeaseTable) -> Role:
    """Return the role that computes prompts, and hands over or decodes."""
    me = limits.worker_id
    subscriptions = (
        RoleSubject(subjects.RUN, (me,), _run_asked, "run"),
        RoleSubject(subjects.RESERVED, (me, "*", "*"), message_of),
        RoleSubject(subjects.LANDED, (me, "*", "*"), message_of),
        RoleSubject(subjects.ABORTED, (me, "*", "*"), message_of),
    )
    return Role(PrefillCore(limits, cache, leases), subscriptions)


def _run_asked(received: Received[RunPrefill]) -> RunAsked:
    return RunAsked(received.message, times_of(received.traceparent))
