"""The steps of an engine that computes what we plan: a `Batch` decides, the engine computes."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from schemas.ids import RequestId
from services.engine.batch import Batch
from services.engine.interface import Engine, EngineLoad, Outcome, Sequence, StepFailedError, StepItem, StepResult


class BatchSteps:
    """As `Steps`. A step that raises costs the sequences that were in it, and no others."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self.engine = engine
        self._batch = batch
        self.on_begin: Callable[[Seq[Sequence]], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._batch)

    def check(self, sequence: Sequence) -> None:
        self._batch.check(sequence, self.engine)

    def add(self, sequence: Sequence) -> None:
        self._batch.add(sequence)

    def remove(self, request_id: RequestId, attempt: int) -> Sequence | None:
        return self._batch.remove(request_id, attempt)

    def clear(self) -> list[Sequence]:
        return self._batch.clear()

    def load(self) -> EngineLoad:
        return self._batch.load()

    def run_step(self) -> StepResult | None:
        items = self._batch.plan()
        if not items:
            return None
        self.on_begin([item.sequence for item in items])
        started_ns = time.monotonic_ns()
        try:
            outcomes = self._compute(items)
            return self._batch.commit(items, outcomes, started_ns, time.monotonic_ns())
        except Exception as error:
            sequences = [item.sequence for item in items]
            for sequence in sequences:
                self._batch.remove(sequence.request_id, sequence.attempt)
            raise StepFailedError(sequences, error) from error

    def close(self) -> None:
        self.engine.close()

    def _compute(self, items: list[StepItem]) -> list[Outcome]:
        return self.engine.compute(items)
