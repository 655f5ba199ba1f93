"""The engine of a simulated worker: the real code in a cooperative thread, with steps that take virtual time."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.fake import FakeEngine
from services.engine.interface import Engine, Outcome, StepItem
from services.engine.thread import Changes, EngineThread
from services.sim.platform.threads import CoCondition, CoThread, pause, spawn


class StepPace(Protocol):
    def step_s(self, items: Seq[StepItem]) -> float:
        """Return how long a step takes, in seconds."""
        ...


@dataclass(frozen=True, slots=True)
class Pace:
    """Every token takes as long as any other of its kind."""

    base_s: float = 0.001
    prefill_token_s: float = 0.0001
    decode_token_s: float = 0.0005

    def step_s(self, items: Seq[StepItem]) -> float:
        num_decode = sum(item.num_tokens == 1 for item in items)
        num_prefill = sum(item.num_tokens for item in items) - num_decode
        return self.base_s + self.prefill_token_s * num_prefill + self.decode_token_s * num_decode


class SimSteps(BatchSteps):
    """Steps as long as `pace` says. With a FakeEngine the time is spread over its layers."""

    def __init__(self, engine: Engine, batch: Batch, pace: StepPace) -> None:
        super().__init__(engine, batch)
        self._pace = pace
        self._layer_s = 0.0
        self._has_layers = isinstance(engine, FakeEngine)
        if isinstance(engine, FakeEngine):
            engine.before_layer = self._compute_layer

    def _compute(self, items: list[StepItem]) -> list[Outcome]:
        step_s = self._pace.step_s(items)
        if self._has_layers:
            self._layer_s = step_s / (self.engine.layout.num_layers + 1)
        else:
            pause(step_s)
        return super()._compute(items)

    def _compute_layer(self, _items: Seq[StepItem], _layer: int) -> None:
        pause(self._layer_s)


class SimEngineThread(EngineThread):
    """Runs steps in a cooperative thread."""

    _cooperative: CoThread | None = None

    def start(self) -> None:
        self._cooperative = spawn(self.run_steps, "engine")

    def stop_engine(self, timeout: float) -> bool:
        """As the real one. Called on the loop itself it cannot wait: the thread ends as the loop goes on."""
        self._ask_to_stop()
        if self._cooperative is None:
            return True
        self._cooperative.join(timeout)
        return not self._cooperative.is_alive()

    def _new_condition(self) -> Changes:
        return CoCondition()
