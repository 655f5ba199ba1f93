"""A card that is none: the engine's runtime on the CPU, graphs that compute again, marks that count."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from dataplane.blocks.layout import ArenaShape, uniform_shape
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.cpu.attention import KVTensors
from services.engine.cpu.model import load_model
from services.engine.cuda.device_engine import DeviceEngine
from services.engine.cuda.protocol import HostBuffer
from services.engine.cuda.step_plan import StepLimits
from tests.engine.rig import BLOCK_SIZE, NUM_BLOCKS

STREAM = 77
LIMITS = StepLimits(num_tokens=8, num_sequences=4, sequence_tokens=64)


class HostRuntime:
    device = torch.device("cpu")
    stream_handle = STREAM

    def __init__(self) -> None:
        self.num_fetches = 0
        self.num_waits = 0
        self.failure: Exception | None = None

    def active(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        tensor = torch.full((num_bytes,), 0xEE, dtype=torch.uint8)  # what is not written is no number of ours
        return HostBuffer(tensor, tensor.numpy())

    def wait(self) -> None:
        self.num_waits += 1
        if self.failure is not None:
            raise self.failure

    def fetch(self, tensor: Tensor) -> list[int]:
        self.num_fetches += 1
        return tensor.tolist()


class CountedMarks:
    def __init__(self) -> None:
        self.count = 0

    def mark(self, stream_handle: int) -> int:
        assert stream_handle == STREAM
        self.count += 1
        return self.count


class EagerRecording:
    """As a graph: replaying computes again, into the same output."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self.output = torch.full_like(compute(), torch.nan)
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.output.copy_(self._compute())


class EagerRecorder:
    def __init__(self) -> None:
        self.recordings: list[EagerRecording] = []

    def start_afresh(self) -> None:
        """Nothing is shared."""

    def record(self, compute: Callable[[], Tensor]) -> EagerRecording:
        self.recordings.append(EagerRecording(compute))
        return self.recordings[-1]


def load_device_engine(
    folder: Path,
    *,
    shape: ArenaShape | None = None,
    dtype: str = "float32",
    recorder: EagerRecorder | None = None,
    limits: StepLimits = LIMITS,
) -> DeviceEngine:
    """Return an engine as on a card, over NaN in every float. It proves nothing first: that is tried by itself."""
    checkpoint = read_checkpoint(str(folder))
    shape = shape or uniform_shape(layout_of(checkpoint, dtype=dtype, block_size=BLOCK_SIZE), NUM_BLOCKS)
    arena = KVTensors(shape, torch.full((shape.num_bytes,), 0xFF, dtype=torch.uint8))
    engine = DeviceEngine(
        load_model(checkpoint, shape.layout.dtype),
        arena,
        vocab_size=checkpoint.vocab_size,
        runtime=HostRuntime(),
        marks=CountedMarks(),
        recorder=recorder,
        limits=limits,
    )
    assert recorder is None or engine.record_graphs()
    return engine
