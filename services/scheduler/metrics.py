"""What a scheduler measures: what it decides, and the fleet that it knows."""

from collections import Counter

from schemas.message import Message
from schemas.request import Placement, Refused
from schemas.worker import WorkerLeft
from services import metric_names as names
from services.metrics import Metrics
from services.runtime import now_ms
from services.scheduler.core import SchedulerCore

ROLES = ("prefill", "decode", "aggregated")


class SchedulerMetrics:
    def __init__(self, metrics: Metrics, core: SchedulerCore) -> None:
        self._metrics = metrics
        self._core = core
        metrics.on_sample(self._sample)

    def placed(self, reply: Placement | Refused, traceparent: str) -> None:
        """A request was placed, or refused."""
        self._metrics.inc(names.DECISIONS, kind_of(reply), trace=traceparent)
        if isinstance(reply, Refused):
            self._metrics.inc(names.REFUSALS, "place", reply.reason, trace=traceparent)

    def fell_back(self) -> None:
        """A policy was of no use, and another one chose."""
        self._metrics.inc(names.POLICY_FALLBACKS)

    def left(self, left: WorkerLeft) -> None:
        """It was reported of a worker that it has left."""
        self._metrics.inc(names.WORKERS_LEFT, left.reason)

    def _sample(self) -> None:
        known = Counter((worker.role, worker.state) for worker in self._core.standing(now_ms()))
        # A role that nobody has is reported as 0: what is not there cannot raise an alert.
        self._metrics.set_series(names.WORKERS_KNOWN, {**{(role, "ready"): 0 for role in ROLES}, **known})


def kind_of(reply: Message) -> str:
    """Return what kind of decision this is (`metric_names.DECISIONS`)."""
    if not isinstance(reply, Placement):
        return "refused"
    kind = "split" if reply.decode_worker else "alone"
    return f"{kind}_reading" if reply.sources else kind
