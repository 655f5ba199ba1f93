"""What a step on a card needs of the card's driver. `cuda_runtime.py` has the real one."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class HostBuffer(NamedTuple):
    """Host memory (uint8) that is copied from asynchronously: the same bytes for torch and for numpy."""

    tensor: Tensor
    array: npt.NDArray[np.uint8]


class MarkSource(Protocol):
    """Makes points on an engine's stream which other streams and processes can wait for (`DeviceArena`)."""

    def mark(self, stream_handle: int) -> int:
        """Record the next point, behind all that the stream was given so far, and return its number."""
        ...


class Runtime(Protocol):
    @property
    def device(self) -> torch.device: ...
    @property
    def stream_handle(self) -> int:
        """The driver's name of the stream that steps run on."""
        ...

    def active(self) -> AbstractContextManager[object]:
        """Within it the calling thread's work goes to the device and the stream of the engine."""
        ...

    def host_buffer(self, num_bytes: int) -> HostBuffer: ...

    def wait(self) -> None:
        """Wait until all the stream's work is done."""
        ...

    def fetch(self, tensor: Tensor) -> list[int]:
        """Copy a tensor of int64 to the host and return it, once all the stream's work is done."""
        ...


class Recording(Protocol):
    """Computes, when replayed, what was recorded, from what lies in the same memory now, into `output`."""

    @property
    def output(self) -> Tensor: ...
    def replay(self) -> None: ...


class Recorder(Protocol):
    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Call `compute` and return it as a recording. All recordings of a recorder share their working memory."""
        ...

    def start_afresh(self) -> None:
        """All recordings so far are gone, and with them that memory."""
        ...
