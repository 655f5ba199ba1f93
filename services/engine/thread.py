"""An engine on a thread of its worker: on a card, whose memory and streams belong to the process that has made them; in
the simulator; and wherever `engine.process` is off."""

import threading
from collections.abc import Sequence as Seq

from services.engine.client import EngineCallbacks, EngineClient
from services.engine.interface import CompileGrammar, LayerListener, Steps
from services.engine.loop import Changes, EngineLoop
from services.engine.messages import StopEngine, ToEngine


class EngineThread(EngineClient):
    """Its messages are given from hand to hand: callbacks run on the engine's thread, between its steps."""

    def __init__(self, steps: Steps, start_grammar: CompileGrammar, callbacks: EngineCallbacks) -> None:
        super().__init__(callbacks)
        self._steps = steps
        self._start_grammar = start_grammar
        self._listeners: dict[int, LayerListener] = {}
        self._loop = self._new_loop()
        self._thread: threading.Thread | None = None

    def start_engine(self) -> None:
        # A daemon, so that a step that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def stop_engine(self, timeout: float) -> bool:
        self._ask_to_stop()
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        self._steps.close()

    def _ask_to_stop(self) -> None:
        self._stopping.set()
        self._loop.put_message(StopEngine())

    def _send(self, message: ToEngine) -> None:
        self._loop.put_message(message)

    def _listen(self, row: int, listener: LayerListener) -> None:
        self._listeners[row] = listener

    def _unlisten(self, row: int) -> None:
        del self._listeners[row]

    def _new_loop(self) -> EngineLoop:
        return self._loop_with(threading.Condition())

    def _loop_with(self, changed: Changes) -> EngineLoop:
        return EngineLoop(
            self._steps,
            self._start_grammar,
            self._take,
            self._listeners.__getitem__,
            on_step=self._note_step_of,
            changed=changed,
        )

    def _note_step_of(self, numbers: Seq[int]) -> None:
        """A step computes these now; none: it has ended."""

    def _run(self) -> None:
        self.has_failed = not self._loop.run_steps()
        self._fail_left()
