"""An engine's process without a model: a test holds its steps, and has them fail. As a program it is that process."""

import mmap
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

from dataplane.blocks.layout import ArenaShape
from schemas.request import SamplingParams
from services.config import EngineConfig, WorkerConfig
from services.engine import child
from services.engine.batch import Batch
from services.engine.batch_steps import BatchSteps
from services.engine.checkpoint import Checkpoint
from services.engine.fake import FakeEngine
from services.engine.interface import EngineLostError, StepItem
from services.engine.ipc import LoadEngine
from services.engine.loading import AnswerRules, LoadedEngine
from services.errors import UserError
from services.sim.brackets import BracketGrammars

VOCAB = 256
CLOSED, FAILURE = 0, 1
"""Bytes of the page that both have: whether steps wait, and how the next one fails."""
RAISES, IS_LOST, DIES, BABBLES = 1, 2, 3, 4
GRAMMARS = BracketGrammars(VOCAB, eos=0)
REFUSED = "this model is not for us"


def order_of(shape: ArenaShape, arena: str, nonce: str, *, token_budget: int = 16, name: str = "fake") -> LoadEngine:
    checkpoint = Checkpoint(
        path="", name=name, model_type="", architecture="", num_layers=shape.layout.num_layers, num_kv_heads=1,
        head_dim=1, vocab_size=VOCAB, context_length=4096, windows=(), eos_token_ids=frozenset({0}), weights="",
        dtype="float32", num_bytes=0, weight_files=(), is_plain=True,
    )  # fmt: skip
    return LoadEngine(checkpoint, shape, arena, nonce, WorkerConfig(token_budget=token_budget), EngineConfig())


class Started(subprocess.Popen[bytes]):
    """As `ForkedEngine`."""

    def wait_forked(self, timeout_s: float) -> None: ...


class Control:
    """The test's hand on the steps of one process. `gate` and `in_step` are as `threading.Event`."""

    def __init__(self) -> None:
        self._memory = os.memfd_create("control")
        os.ftruncate(self._memory, mmap.PAGESIZE)
        self._page = mmap.mmap(self._memory, mmap.PAGESIZE)
        self._ours, self._theirs = socket.socketpair()
        self.gate = self.in_step = self

    def spawn(self, name: str, fds: tuple[int, int, int]) -> Any:
        passed = (*fds, self._memory, self._theirs.fileno())
        return Started(
            [sys.executable, "-m", "tests.engine.fake_child", name, *map(str, passed)],
            stdin=subprocess.DEVNULL, pass_fds=passed, cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def clear(self) -> None:
        """Let steps wait from now on."""
        self._page[CLOSED] = 1

    def set(self) -> None:
        self._page[CLOSED] = 0
        self._ours.send(b"g")

    def wait(self, timeout: float) -> bool:
        """Wait until a step waits."""
        self._ours.settimeout(timeout)
        return self._ours.recv(1) == b"s"

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()
        self._page.close()
        os.close(self._memory)

    def fail(self, how: int) -> None:
        """Let the next step fail."""
        self._page[FAILURE] = how


class _Held:
    """The other side of `Control`."""

    def __init__(self, page: int, control: int, channel: int) -> None:
        self._page = mmap.mmap(page, mmap.PAGESIZE)
        self._control = socket.socket(fileno=control)
        self._channel = channel

    def before_step(self, _items: Seq[StepItem]) -> None:
        if self._page[CLOSED]:
            self._control.send(b"s")
        while self._page[CLOSED]:
            self._control.recv(1)
        how, self._page[FAILURE] = self._page[FAILURE], 0
        match how:
            case 1:
                raise RuntimeError("out of luck")
            case 2:
                raise EngineLostError("the card fails")
            case 3:
                os._exit(7)
            case 4:
                os.write(self._channel, b"\x03\x00\x00\x00abc")
                threading.Event().wait()  # it is killed in this step, however soon
            case _:
                pass

    def load(
        self, checkpoint: Checkpoint, shape: ArenaShape, arena: memoryview, settings: WorkerConfig, _engine: Any
    ) -> LoadedEngine:
        if checkpoint.name == "refused":
            raise UserError(REFUSED)
        assert checkpoint.name == "fake", "a mistake of ours, as it loads"
        engine = FakeEngine(shape, arena, vocab_size=VOCAB, before_step=self.before_step)
        steps = BatchSteps(engine, Batch(settings.token_budget, context_length=checkpoint.context_length))
        return LoadedEngine(steps, AnswerRules(checkpoint.eos_token_ids, GRAMMARS.compile), "fake, nowhere")


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)


if __name__ == "__main__":
    channel, table, bell, page, control = map(int, sys.argv[2:])
    child.load_host_engine = _Held(page, control, channel).load
    code = child.main(sys.argv[1], channel, table, bell)
    os._exit(code)
