"""Between a worker and its engine's process: the first messages of their channel, and, for each layer of a prompt that
is handed over, a number in memory that both have.
"""

import mmap
import os
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dataplane.blocks.layout import ArenaShape
from services.config import EngineConfig, WorkerConfig
from services.engine.checkpoint import Checkpoint
from services.engine.limits import LAYER_ROWS
from services.engine.messages import EngineMessage, ToEngine, ToWorker

MAX_IN_STEP = 1_024
"""Sequences of one step that are named: an engine computes no more at once."""


class LoadEngine(EngineMessage, frozen=True):
    """The first: make this engine, in this arena."""

    checkpoint: Checkpoint
    shape: ArenaShape
    arena: str
    nonce: str
    worker: WorkerConfig
    engine: EngineConfig


class EngineReady(EngineMessage, frozen=True):
    """`device`: what is reported of where it runs. `eos_token_ids`: what ends an answer."""

    device: str
    eos_token_ids: tuple[int, ...]


class EngineRefused(EngineMessage, frozen=True):
    """It cannot be made: a line for the user."""

    reason: str


ToProcess = LoadEngine | ToEngine
FromProcess = EngineReady | EngineRefused | ToWorker


class StepTable:
    """What the worker is to see of a step while it runs, in memory that both have; the engine's process writes.

    `rows`: how far each layer of each sequence that is handed over is written, [rows, layers]. Each process has a table
    of its own: what a dead one may have reported of its last step is nobody's.
    """

    def __init__(self, fd: int, num_layers: int) -> None:
        numbers = np.frombuffer(mmap.mmap(fd, 0), np.int64)
        self._step = numbers[: 1 + MAX_IN_STEP]
        self.rows: npt.NDArray[np.int64] = numbers[1 + MAX_IN_STEP :].reshape(-1, num_layers)

    def begin_step(self, numbers: Sequence[int]) -> None:
        """Note whom the step computes that begins now; none: it has ended."""
        shown = numbers[:MAX_IN_STEP]
        self._step[1 : 1 + len(shown)] = shown
        self._step[0] = len(shown)

    def in_step(self) -> list[int]:
        """Return whom the step computes that runs."""
        return self._step[1 : 1 + int(self._step[0])].tolist()


def table_memory(num_layers: int) -> int:
    """Return the file descriptor of a new table's memory, all zeros; pages are taken as rows are used."""
    fd = os.memfd_create("kvmesh-step", os.MFD_CLOEXEC)
    os.ftruncate(fd, (1 + MAX_IN_STEP + LAYER_ROWS * num_layers) * 8)
    return fd


class TableListener:
    """Announces the layers of one sequence by a row of the table (`LayerListener`)."""

    def __init__(self, row: npt.NDArray[np.int64], bell: int) -> None:
        self._row = row
        self._bell = bell
        self._fence = threading.Lock()

    def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
        # Two lock cycles keep any processor from showing the number before the KV that it speaks of.
        with self._fence:
            pass
        with self._fence:
            self._row[layer] = num_tokens
        os.eventfd_write(self._bell, 1)
