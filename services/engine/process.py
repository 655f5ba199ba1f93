"""An engine in a process of its own: a worker's event loop, its plane and its leases never wait for a step.

One thread here receives what the process sends, looks at the table of layers, and starts another one where it dies.
"""

import logging
import time
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.lasting import lasting_thread
from schemas.worker import EngineLives
from services.engine.channel import IpcError
from services.engine.client import EngineCallbacks, EngineClient, call_back
from services.engine.interface import LayerListener
from services.engine.ipc import EngineReady, EngineRefused
from services.engine.limits import CLOSE_LOOK_S, LOOKS_A_TIMEOUT
from services.engine.messages import SequenceLeft, SequencesFailed, StepResult, StopEngine, ToEngine
from services.engine.spawn import EngineChild, SpareEngines, ending
from services.errors import UserError
from services.restarts import Restarts

log = logging.getLogger(__name__)

OF_STEPS = (StepResult, SequencesFailed, SequenceLeft)
"""What the thread sends that computes: others answer even while a step hangs."""


class _Listened(NamedTuple):
    """Who is notified of a row's layers, and how far each was announced."""

    listener: LayerListener
    announced: npt.NDArray[np.int64]


class EngineProcess(EngineClient):
    """Its engine runs in `child`; `spares` gives the one that follows it when it dies. One that has something to
    compute and ends no step for `step_timeout_s` hangs, and is killed."""

    def __init__(
        self, child: EngineChild, spares: SpareEngines, step_timeout_s: float, callbacks: EngineCallbacks
    ) -> None:
        super().__init__(callbacks)
        self._child = child
        """Of the lock, too."""
        self._spares = spares
        self._step_timeout_s = step_timeout_s
        self._lives = EngineLives(num_starts=1, ready_ms=child.ready_ms)
        self._listened: dict[int, _Listened] = {}
        """By row."""
        self._thread = lasting_thread(self._run, "engine", self._stopping.is_set)

    @property
    def lives(self) -> EngineLives:
        num_spares, spare_bytes = self._spares.count_loaded()
        return msgspec.structs.replace(self._lives, num_spares=num_spares, spare_bytes=spare_bytes)

    def start_engine(self) -> None:
        self._thread.start()
        self._spares.keep_loaded(self._child.ready_ms / 1000)

    def stop_engine(self, timeout: float) -> bool:
        """At the latest after `timeout` seconds it ends without regard to what runs."""
        self._stopping.set()
        self._child.channel.send_message(StopEngine())
        if self._thread.is_alive():
            self._thread.join(timeout)
        self.close()
        return True

    def close(self) -> None:
        """End the process, which lets go of the arena's memory. Idempotent."""
        self._stopping.set()
        self._spares.close()
        while True:
            with self._lock:
                child = self._child
            child.kill_process()
            if not self._thread.is_alive():
                break
            self._thread.join(CLOSE_LOOK_S)  # another one may just have been started
        self._child.channel.close()

    def _send(self, message: ToEngine) -> None:
        self._child.channel.send_message(message)

    def _listen(self, row: int, listener: LayerListener) -> None:
        self._child.table.rows[row] = 0
        self._listened[row] = _Listened(listener, np.zeros_like(self._child.table.rows[row]))

    def _unlisten(self, row: int) -> None:
        del self._listened[row]

    # On the thread.

    def _run(self) -> None:
        restarts = Restarts()
        started_s = time.monotonic()
        while True:
            reason = self._serve_child()
            if self._stopping.is_set():
                return self._fail_left()
            in_step = self._child.table.in_step()
            self._child.channel.close()
            self._report_death(reason, in_step)
            self._lives = msgspec.structs.replace(self._lives, num_deaths=self._lives.num_deaths + 1)
            is_back = False
            while not is_back:
                wait_s = restarts.ended(started_s, time.monotonic())
                has_spare = self._spares.count_loaded()[0] > 0
                if self._stopping.wait(0 if has_spare else wait_s):
                    return None
                started_s = time.monotonic()
                is_back = self._replace_child()
            call_back(self._callbacks.on_back)

    def _serve_child(self) -> str:
        """Receive what the engine sends until it has ended, which it has when this returns; return how."""
        # Wait in slices of the step timeout, and add up the slices in which the engine was busy and ended no step.
        child, silent_s, look_s = self._child, 0.0, self._step_timeout_s / LOOKS_A_TIMEOUT
        try:
            while silent_s < self._step_timeout_s:
                is_busy, began_s = bool(self._given), time.monotonic()
                messages = child.channel.wait_messages(look_s)
                self._announce_layers()  # these were written before what has come now
                for message in messages:
                    if isinstance(message, EngineReady | EngineRefused):
                        raise IpcError("it was ready before")
                    self._take(message)
                # An idle engine is not silent. A busy one must send something about its steps: its other thread answers
                # requests for grammars and metrics even while a step hangs.
                if not is_busy or any(isinstance(message, OF_STEPS) for message in messages):
                    silent_s = 0.0
                else:  # a time in which this process stood still itself counts as one look
                    silent_s += min(time.monotonic() - began_s, look_s)
            # Kill the process before its death is published: a live process could write to blocks that are reused then.
            child.kill_process()
            return f"the engine's process computed nothing for {self._step_timeout_s:g} s (engine.step_timeout_s)"
        except EOFError:
            return f"the engine's process {ending(child.process.wait())}"
        except (IpcError, LookupError) as error:
            log.exception("the engine's process sent what makes no sense")
            child.kill_process()
            return f"the engine's process sent what makes no sense: {error}"
        except Exception as error:
            log.exception("reading from the engine's process has failed")
            child.kill_process()
            return f"reading from the engine's process has failed: {type(error).__name__}: {error}"

    def _replace_child(self) -> bool:
        """Take another one, and return whether it is ready: the one before may have been ended by what it loads."""
        wanted_s = time.monotonic()
        try:
            child = self._spares.next_child()
            with self._lock:
                self._child = child
            child.wait_ready(self._spares.max_load_s)
        except (UserError, OSError) as error:
            log.error("the engine does not start: %s", error)
            return False
        num_starts, ready_ms = self._lives.num_starts + 1, round(1000 * (time.monotonic() - wanted_s))
        self._lives = msgspec.structs.replace(self._lives, num_starts=num_starts, ready_ms=ready_ms)
        with self._lock:
            self._is_ready = True
        return True

    def _announce_layers(self) -> None:
        for row, (listener, announced) in list(self._listened.items()):
            now = self._child.table.rows[row].copy()
            for layer in np.flatnonzero(now != announced):
                listener.advance(int(layer), int(now[layer]))
            announced[:] = now
