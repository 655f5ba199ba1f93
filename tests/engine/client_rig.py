"""A fake engine as its worker has it, on a thread or in a process of its own; its steps can be held and failed."""

import queue
import threading
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any

from dataplane.blocks.layout import BlockTable, KVLayout, Segment, uniform_shape
from dataplane.carriers.host import HostArena
from schemas.block import pack_tokens
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.client import EngineCallbacks, EngineClient, EngineDeath
from services.engine.fake import FakeEngine
from services.engine.interface import EngineLostError, LayerListener, StepItem
from services.engine.messages import SampledToken, StepResult, SubmitSequence
from services.engine.process import EngineProcess
from services.engine.spawn import EngineChild, SpareEngines
from services.engine.thread import EngineThread
from tests.engine import fake_child

VOCAB = 256
LAYOUT = KVLayout(weights="fake", dtype="float32", num_layers=2, num_kv_heads=1, head_dim=4, block_size=8)
NUM_BLOCKS = 400
TIMEOUT = 30.0


class Rig:
    """Sequences go by the names that tests give them."""

    def __init__(
        self,
        *,
        in_process: bool = False,
        token_budget: int = 16,
        step_timeout_s: float = TIMEOUT,
        num_spares: int = 0,
    ) -> None:
        self.events: queue.Queue[tuple[str, str, str]] = queue.Queue()
        self.names: dict[int, str] = {}
        self.tokens: dict[str, list[SampledToken]] = {}
        self.threads: set[str] = set()
        self.next_block = 0
        self.in_process = in_process
        self.deaths: list[EngineDeath] = []
        callbacks = EngineCallbacks(self.on_step, self.on_failure, self.on_removed, self.on_died, self.on_back)
        shape = uniform_shape(LAYOUT, NUM_BLOCKS)
        if in_process:
            self.arena = HostArena.create(shape)
            self.control = fake_child.Control()
            self.gate: Any = self.control
            self.in_step: Any = self.control
            order = fake_child.order_of(shape, self.arena.name, self.arena.nonce, token_budget=token_budget)
            self.start_child = partial(EngineChild, order, "decode-0", self.control.spawn)
            self.child = self.start_child()
            self.child.wait_ready()
            self.started = [self.child]
            self.has_room = True
            self.spares = SpareEngines(self.next_child, num_spares, lambda: self.has_room, lambda: None)
            self.engine: EngineClient = EngineProcess(self.child, self.spares, step_timeout_s, callbacks)
            return
        self.gate, self.in_step = threading.Event(), threading.Event()
        self.gate.set()
        self._error: Exception | None = None
        memory = memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes))
        steps = BatchSteps(
            FakeEngine(shape, memory, before_step=self.before_step), Batch(token_budget, context_length=4096)
        )
        self.engine = EngineThread(steps, fake_child.GRAMMARS.compile, callbacks)

    def before_step(self, items: Seq[StepItem]) -> None:
        self.in_step.set()
        assert self.gate.wait(TIMEOUT)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def next_child(self) -> EngineChild:
        self.child = self.start_child()
        self.started.append(self.child)
        return self.child

    def fail(self, how: int) -> None:
        """Let the next step raise (`fake_child`)."""
        if self.in_process:
            self.control.fail(how)
        else:
            lost = how == fake_child.IS_LOST
            self._error = EngineLostError("the card fails") if lost else RuntimeError("out of luck")

    def close(self) -> None:
        self.gate.set()
        assert self.engine.stop_engine(TIMEOUT)
        self.engine.close()
        if self.in_process:
            self.control.close()
            self.arena.close()

    def answer(self, name: str) -> list[int]:
        return [token.token_id for token in self.tokens.get(name, [])]

    def on_step(self, result: StepResult) -> None:
        self.threads.add(threading.current_thread().name)
        assert result.started_ns <= result.ended_ns
        for token in result.sampled:
            name = self.names[token.number]
            self.tokens.setdefault(name, []).append(token)
            if token.local_end:
                self.events.put(("ended", name, token.finish_reason or ""))
        for number, reason, _ in result.failed:
            self.events.put(("failed", self.names[number], reason))

    def on_failure(self, numbers: Seq[int], reason: str) -> None:
        for number in numbers:
            self.events.put(("failed", self.names[number], reason))

    def on_died(self, death: EngineDeath) -> None:
        self.deaths.append(death)
        self.on_failure(sorted(death.had), death.reason)

    def on_back(self) -> None:
        self.events.put(("back", "", ""))

    def on_removed(self, number: int) -> None:
        self.events.put(("removed", self.names[number], ""))

    def submit(
        self,
        name: str,
        length: int = 20,
        max_tokens: int = 5,
        *,
        token_ids: Seq[int] | None = None,
        listener: LayerListener | None = None,
        **more: Any,
    ) -> int:
        """Return the number by which the engine knows it."""
        token_ids = range(length) if token_ids is None else token_ids
        count = -(-(len(token_ids) + max_tokens) // LAYOUT.block_size)
        number = len(self.names) + 1
        fields: dict[str, Any] = {
            "num_prompt_tokens": len(token_ids),
            "sampling": SamplingParams(max_tokens=max_tokens, temperature=0.0),
            "tables": (BlockTable((Segment(self.next_block, count),)),),
        }
        self.next_block += count
        self.names[number] = name
        sequence = SubmitSequence(
            number=number, request_id=RequestId(name), tokens=pack_tokens(token_ids), **(fields | more)
        )
        self.engine.submit(sequence, listener)
        return number

    def cancel(self, name: str) -> None:
        (number,) = (number for number, known in self.names.items() if known == name)
        self.engine.cancel(number)

    def next(self) -> tuple[str, str, str]:
        return self.events.get(timeout=TIMEOUT)
