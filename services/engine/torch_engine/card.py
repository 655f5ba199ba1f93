"""A graphics card as an engine uses it: whether there is one, and the stream that steps run on."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch

from services.errors import UserError

MIN_CAPABILITY = (8, 0)
"""Ampere: bfloat16."""


class DeviceUnusableError(UserError):
    """This machine's card cannot be used. One line that says what to do."""


def check_card(index: int) -> torch.device:
    """Return the card of this index as torch's device. Raises DeviceUnusableError."""
    if torch.version.cuda is None:
        raise DeviceUnusableError("this PyTorch has no CUDA: install a CUDA build of torch, or take --device cpu")
    if not torch.cuda.is_available():
        raise DeviceUnusableError("no NVIDIA card or driver is found (nvidia-smi): install it, or take --device cpu")
    if not 0 <= index < torch.cuda.device_count():
        raise DeviceUnusableError(f"there is no card cuda:{index}: this process sees {torch.cuda.device_count()}")
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CAPABILITY:
        name = torch.cuda.get_device_name(index)
        raise DeviceUnusableError(f"{name} is sm_{capability[0]}{capability[1]}: sm_80 (Ampere) or newer is needed")
    return torch.device("cuda", index)


class CardStream:
    """What an engine's steps are put in line on, apart from everybody else's work: it is done some time later.

    `mark`: records a point behind all that the stream of this handle was given so far (`CardArena.mark`).
    """

    def __init__(self, device: torch.device, mark: Callable[[int], int]) -> None:
        self.device = device
        self._mark = mark
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            # A wait that blocks leaves its core to the event loop; it wakes some microseconds later.
            self._done = torch.cuda.Event(blocking=True)

    def active(self) -> AbstractContextManager[object]:
        """Within it the calling thread's work goes to this stream: torch keeps device and stream per thread."""
        stack = ExitStack()
        stack.enter_context(torch.cuda.device(self.device))  # alone, the stream would end by making a context on card 0
        stack.enter_context(cast(AbstractContextManager[object], cast(Any, torch.cuda).stream(self._stream)))
        return stack

    def mark(self) -> int:
        """Return a mark behind all that was put in line so far."""
        return self._mark(int(self._stream.cuda_stream))

    def wait(self) -> None:
        """Wait until all that was put in line is done. Raises RuntimeError when the card has failed."""
        self._done.record(self._stream)
        self._done.synchronize()
