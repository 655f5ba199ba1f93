"""What is seen of a worker beside what is seen of every holder: its attempts and its engine."""

import time
from collections.abc import Sequence

from services.engine.messages import StepResult
from services.holder.core.actions import AttemptEnded, Submit
from services.holder.core.attempts import Attempts
from services.telemetry import Telemetry
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.observe.metrics import WorkerMetrics
from services.worker.observe.spans import WorkerSpans


class WorkerObserver:
    """One worker's: spans and metrics of its attempts and its engine, and its measured rates."""

    def __init__(
        self, telemetry: Telemetry, worker_id: str, measured: WorkerMetrics, rates: MeasuredRates, core: Attempts
    ) -> None:
        self._spans = WorkerSpans(telemetry, worker_id)
        self._measured = measured
        self._rates = rates
        self._core = core

    def saw(self, event: object, actions: Sequence[object]) -> None:
        """See one step: what has happened, and what was decided on it and carried out."""
        if isinstance(event, StepResult):
            self._stepped(event, actions)
        for action in actions:
            if isinstance(action, Submit):
                action.attempt.times.submitted_ns = time.monotonic_ns()
            elif isinstance(action, AttemptEnded):
                self._spans.ended(action.attempt)
        self._measured.dropped_late(self._core.num_late)

    def _stepped(self, result: StepResult, actions: Sequence[object]) -> None:
        ended = {action.attempt.number: action.attempt for action in actions if isinstance(action, AttemptEnded)}
        self._spans.stepped(result, lambda number: ended.get(number) or self._core.of_engine.get(number))
        self._rates.stepped(result)
        self._measured.stepped(result)
