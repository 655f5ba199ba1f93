"""What an engine's process does, once it is forked (`forks.py`).

Its main thread is the engine's; another one reads what the worker sends.
"""

import ctypes
import gc
import logging
import os
import socket
import threading
from collections.abc import Iterable

from dataplane.memory.arena import Arena
from services.ending import ignore_signals
from services.engine.channel import Channel
from services.engine.ipc import EngineReady, EngineRefused, LoadEngine, StepTable, TableListener, ToProcess
from services.engine.loading import load_host_engine
from services.engine.loop import EngineLoop
from services.errors import UserError
from services.runtime import configure_logging

log = logging.getLogger(__name__)

_PR_SET_NAME = 15
SHOWN_BYTES = 15
"""Of a process's name, where processes are listed (prctl(2), PR_SET_NAME)."""


def serve_worker(channel: Channel[ToProcess], table: int, bell: int) -> int:
    """Make the engine that a worker wants, and serve until asked to stop; return the exit code. `table` and `bell`:
    file descriptors of the layers' table, and of what wakes who looks at it."""
    # Attach the worker's arena: the worker owns this memory, so the KV in it survives the end of this process.
    order, rest = _receive_first(channel)
    arena = Arena.attach(order.arena, order.nonce, writes=True)
    # Send a refusal as a message: its line says what the user has to change, which an exit code cannot.
    try:
        loaded = load_host_engine(order.checkpoint, order.shape, arena.buffer, order.worker, order.engine)
    except UserError as error:
        channel.send_message(EngineRefused(str(error)))
        channel.close()
        return 2
    # The worker reads in shared memory which sequences a step computes, even after this process has died.
    steps = StepTable(table, order.shape.layout.num_layers)
    loop = EngineLoop(
        loaded.steps,
        loaded.rules.start_grammar,
        channel.send_message,
        lambda row: TableListener(steps.rows[row], bell),
        on_step=steps.begin_step,
        changed=threading.Condition(),
    )
    gc.collect()
    gc.freeze()  # what was loaded stays: a collection would look it all through
    # EngineReady must be the first message to the worker, so the thread that answers requests starts after it.
    # That thread answers requests for grammars and metrics even while a step runs on this one.
    channel.send_message(EngineReady(loaded.device, tuple(sorted(loaded.rules.eos_token_ids))))
    threading.Thread(target=_listen, args=(channel, loop, rest), name="listen", daemon=True).start()
    has_ended_well = loop.run_steps()
    channel.close()
    return int(not has_ended_well)


def _receive_first(channel: Channel[ToProcess]) -> tuple[LoadEngine, list[ToProcess]]:
    """Return the order to load, and what came right behind it."""
    while not (received := channel.wait_messages()):
        pass
    order, *rest = received
    assert isinstance(order, LoadEngine), "that is said first"
    return order, rest


def _listen(channel: Channel[ToProcess], loop: EngineLoop, received: Iterable[ToProcess]) -> None:
    """Put what was received, and all that comes, into the loop."""
    try:
        while True:
            for message in received:
                assert not isinstance(message, LoadEngine), "that is said once"
                loop.put_message(message)
            received = channel.wait_messages()
    except EOFError:
        os._exit(0)  # nobody is there for whom to compute
    except BaseException:
        log.exception("reading from the worker has failed")
        os._exit(1)  # who receives nothing computes what nobody wants; the worker starts another one


def main(name: str, channel: int, table: int, bell: int) -> int:
    """Be the engine of the worker of this name; return the exit code. The others are file descriptors."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{name} engine".encode()[:SHOWN_BYTES])
    ignore_signals()
    configure_logging(name)
    ours: Channel[ToProcess] = Channel(socket.socket(fileno=channel), os.eventfd(0, os.EFD_CLOEXEC), ToProcess)
    return serve_worker(ours, table, bell)
