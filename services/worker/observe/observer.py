"""The one hook on which observation hangs: of each event, and of what was decided on it, spans, metrics, measured rates
and the record of the last steps are made. It is called once all was carried out, and decides nothing."""

import time
from collections.abc import Sequence

from services.engine.interface import StepResult
from services.telemetry import Telemetry
from services.worker.core.actions import AttemptEnded, CloseLease, Submit
from services.worker.core.events import StreamEnded, TimePassed
from services.worker.observe.journal import Journal
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.observe.metrics import HolderMetrics, WorkerMetrics
from services.worker.observe.spans import WorkerSpans
from services.worker.observe.transfers import HolderSpans
from services.worker.roles import Cores


class HolderObserver:
    """What a worker and a store have in common."""

    def __init__(self, telemetry: Telemetry, worker_id: str, measured: HolderMetrics) -> None:
        self.journal = Journal()
        self._lease_spans = HolderSpans(telemetry, worker_id)
        self._measured = measured

    def saw(self, cause: str, event: object, actions: Sequence[object]) -> None:
        """See one step. `cause`: the subject of the message, or the part of this process that the event is of."""
        if actions or not isinstance(event, TimePassed):
            self.journal.note(cause, event, actions)
        for action in actions:
            if isinstance(action, CloseLease):
                self._measured.lease_ended(action.lease)
                self._lease_spans.lease_ended(action.lease)
        if isinstance(event, StreamEnded):
            self._lease_spans.stream_ended(event.lease, event.stats, event.error)


class WorkerObserver(HolderObserver):
    """One worker's."""

    def __init__(
        self, telemetry: Telemetry, worker_id: str, measured: WorkerMetrics, rates: MeasuredRates, cores: Cores
    ) -> None:
        super().__init__(telemetry, worker_id, measured)
        self._spans = WorkerSpans(telemetry, worker_id)
        self._worker_measured = measured
        self._rates = rates
        self._cores = cores

    def saw(self, cause: str, event: object, actions: Sequence[object]) -> None:
        """See one step."""
        if isinstance(event, StepResult):
            self._stepped(event, actions)
        for action in actions:
            if isinstance(action, Submit):
                action.attempt.times.submitted_ns = time.monotonic_ns()
            elif isinstance(action, AttemptEnded):
                self._spans.ended(action.attempt)
        super().saw(cause, event, actions)

    def _stepped(self, result: StepResult, actions: Sequence[object]) -> None:
        ended = {action.attempt.key: action.attempt for action in actions if isinstance(action, AttemptEnded)}
        self._spans.stepped(result, lambda key: ended.get(key) or self._cores.find(key))
        self._rates.stepped(result)
        self._worker_measured.stepped(result)
