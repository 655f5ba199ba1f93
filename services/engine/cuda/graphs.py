"""Decode steps as recorded graphs: one launch instead of a thousand. Knows sizes and when to record, no CUDA.

A graph does again what it did when it was recorded, on the same memory. So there is one for each of a few batch sizes,
a step takes the next larger one, and its inputs are written where the recording read them. Rows that are too many are
padding: they belong to no sequence, write no KV, and nobody reads their logits.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable

from torch import Tensor

from services.engine import limits
from services.engine.cuda.protocol import Recorder, Recording

log = logging.getLogger(__name__)


def graph_sizes(max_rows: int) -> tuple[int, ...]:
    """Return the powers of two up to `max_rows`, and itself, none larger than MAX_GRAPH_ROWS."""
    most = min(max_rows, limits.MAX_GRAPH_ROWS)
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*sizes, most)


class GraphRunner:
    """The graphs of one engine. `compute(size)` computes the padded decode of so many rows that lies in the buffer."""

    def __init__(self, recorder: Recorder, compute: Callable[[int], Tensor], max_rows: int) -> None:
        self.sizes = graph_sizes(max_rows)
        self.is_disabled = False
        """Every step is computed without a graph."""
        self._recorder = recorder
        self._compute = compute
        self._recordings: dict[int, Recording] = {}

    def size_for(self, num_rows: int) -> int | None:
        """Return the graph's number of rows for a decode of `num_rows`; None: there is no graph for it."""
        at = bisect_left(self.sizes, num_rows)
        return None if self.is_disabled or at == len(self.sizes) else self.sizes[at]

    def record(self, size: int) -> bool:
        """Record the graph of this size; the buffer holds a decode of so many rows. False: it cannot be done."""
        try:
            self._compute(size)  # what a first call sets up must not be part of the graph
            self._recordings[size] = self._recorder.record(lambda: self._compute(size))
        except Exception as error:  # noqa: BLE001 - models raise whatever they like, and each step runs without
            log.warning("decode runs without CUDA graphs: recording failed (%s: %s)", type(error).__name__, error)
            self.disable()
        return not self.is_disabled

    def run(self, size: int) -> Tensor | None:
        """Compute the decode that lies in the buffer; return its logits `[size, vocab]`, overwritten by the next run.

        Records the graph if there is none yet. None: there is and will be none.
        """
        if size not in self._recordings and not self.record(size):
            return None
        recording = self._recordings[size]
        recording.replay()
        return recording.output

    def clear(self) -> None:
        """Let go of all recordings: the memory that they read moves. They are made again when they are needed."""
        self._recordings.clear()
        self._recorder.start_afresh()

    def disable(self) -> None:
        """Let go of all recordings, for good."""
        self.is_disabled = True
        self.clear()
