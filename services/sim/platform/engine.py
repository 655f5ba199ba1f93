"""The engine of a simulated worker: the real code in a cooperative thread, with steps that take virtual time."""

import asyncio
import contextvars
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.client import EngineCallbacks
from services.engine.fake import FakeEngine
from services.engine.interface import CompileGrammar, Engine, Outcome, StepItem
from services.engine.loop import EngineLoop
from services.engine.thread import EngineThread
from services.sim.limits import RESTART_S, STEP_TIMEOUT_S
from services.sim.platform.threads import CoCondition, CoThread, now_s, pause, spawn


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
        self.hangs_until_s = 0.0
        """What is computed stands still until then."""
        self._has_layers = isinstance(engine, FakeEngine)
        if isinstance(engine, FakeEngine):
            engine.before_layer = self._compute_layer

    def _compute(self, items: list[StepItem]) -> list[Outcome]:
        step_s = self._pace.step_s(items)
        if self._has_layers:
            self._layer_s = step_s / (self.engine.layout.num_layers + 1)
        else:
            self._pass(step_s)
        return super()._compute(items)

    def _compute_layer(self, _items: Seq[StepItem], _layer: int) -> None:
        self._pass(self._layer_s)

    def _pass(self, for_s: float) -> None:
        pause(for_s)
        while (left_s := self.hangs_until_s - now_s()) > 0:
            pause(left_s)


class SimEngineThread(EngineThread):
    """Runs steps in a cooperative thread, which can be killed as an engine's process can, and hang as one."""

    def __init__(self, steps: SimSteps, start_grammar: CompileGrammar, callbacks: EngineCallbacks) -> None:
        super().__init__(steps, start_grammar, callbacks)
        self._sim_steps = steps

    _cooperative: CoThread | None = None
    _in_step: tuple[int, ...] = ()

    def start_engine(self) -> None:
        self._context = contextvars.copy_context()
        self._cooperative = spawn(self._run, "engine")

    def stop_engine(self, timeout: float) -> bool:
        """As the real one. Called on the loop itself it cannot wait: the thread ends as the loop goes on."""
        self._ask_to_stop()
        if self._cooperative is None:
            return True
        self._cooperative.join(timeout)
        return not self._cooperative.is_alive()

    def kill_engine(self, start_s: float) -> None:
        """End it where it stands; there is another one after so many seconds."""
        if self._cooperative is None or not self._is_ready or self._stopping.is_set():
            return
        self._is_ready = False
        self._cooperative.abandon()
        asyncio.get_running_loop().call_soon(self._die, start_s, context=self._context)

    def hang_engine(self, for_s: float) -> None:
        """Let it stand still for so long. Where its step takes longer than one may, it is killed then."""
        self._sim_steps.hangs_until_s = now_s() + for_s
        self._end_hung(())

    def _end_hung(self, seen: tuple[int, ...]) -> None:
        if self._sim_steps.hangs_until_s <= now_s():
            return
        if self._in_step and self._in_step is seen:
            self.kill_engine(RESTART_S)
            return
        look, context = self._end_hung, self._context
        asyncio.get_running_loop().call_later(STEP_TIMEOUT_S, look, self._in_step, context=context)

    def _die(self, start_s: float) -> None:
        """In the worker's own process: the one that stands still sees it later."""
        self._steps.clear()
        self._report_death("the engine was killed", self._in_step)
        asyncio.get_running_loop().call_later(start_s, self._come_back)

    def _come_back(self) -> None:
        if self._stopping.is_set():
            return
        self._is_ready, self._in_step, self._sim_steps.hangs_until_s = True, (), 0.0
        self._loop = self._new_loop()
        self._cooperative = spawn(self._run, "engine")
        self._callbacks.on_back()

    def _note_step_of(self, numbers: Seq[int]) -> None:
        self._in_step = tuple(numbers)

    def _new_loop(self) -> EngineLoop:
        return self._loop_with(CoCondition())
