"""The steps of an engine that computes what we plan: a `Batch` decides, the engine computes."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from services.engine.batch import Batch
from services.engine.interface import Engine, Outcome, Sequence, StepFailedError, StepItem
from services.engine.messages import StepResult


class BatchSteps:
    """As `Steps`. A step that raises costs the sequences that were in it, and no others."""

    def __init__(self, engine: Engine, batch: Batch) -> None:
        self.engine = engine
        self._batch = batch
        self.on_begin: Callable[[Seq[int]], None] = lambda _: None

    def __len__(self) -> int:
        return len(self._batch)

    def add(self, sequence: Sequence) -> None:
        self._batch.check(sequence, self.engine)
        self._batch.add(sequence)

    def remove(self, number: int) -> bool:
        return self._batch.remove(number) is not None

    def clear(self) -> None:
        self._batch.clear()

    def run_step(self) -> StepResult | None:
        items = self._batch.plan()
        if not items:
            return None
        numbers = [item.sequence.number for item in items]
        self.on_begin(numbers)
        started_ns = time.monotonic_ns()
        try:
            outcomes = self._compute(items)
            return self._batch.commit(items, outcomes, started_ns, time.monotonic_ns())
        except Exception as error:
            for number in numbers:
                self._batch.remove(number)
            raise StepFailedError(numbers, error) from error

    def close(self) -> None:
        self.engine.close()

    def _compute(self, items: list[StepItem]) -> list[Outcome]:
        return self.engine.compute(items)
