"""What the plane needs of a graphics card: memory, streams, events, one kernel. `cuda_driver.py` has the real
one, `fake_device.py` one of numpy and threads whose streams run late, as a card's do. Both pass
tests/plane/test_device.py.

A call that takes a stream returns before its work is done; work of one stream is done in order. Nothing is ever put
behind an event of another process: a holder that dies would leave a write pending that nobody can call back. What
another process records is asked for (`Event.is_done`) until it has come, and only then is anything begun.
"""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataplane.carriers.carrier import MemoryFailedError
from dataplane.memory.arena import ByteArray

ALIGNMENT = 8
"""Rows, offsets and strides are multiples of it: a digest's word."""


class DeviceError(MemoryFailedError):
    """The card, its driver or its library failed. `what` was being done."""

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}")
        self.what = what


class Moves(NamedTuple):
    """Rows to be copied by one kernel; the digest is over them in this order.

    `runs`: int64 [run, 3], per run of rows the byte offset of its first row in the source, in the target, and that
    row's number among all rows. Within a run rows are `source_stride` and `target_stride` bytes apart.
    """

    runs: npt.NDArray[np.int64]
    num_rows: int
    row_bytes: int
    source_stride: int
    target_stride: int

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def check(self, source_bytes: int, target_bytes: int | None) -> None:
        """Raises ValueError when a row lies outside memory of these sizes, or is not aligned: a kernel does not ask."""
        if self.runs.ndim != 2 or self.runs.shape[1] != 3 or self.runs.dtype != np.int64:
            raise ValueError(f"runs of {self.runs.dtype} {self.runs.shape}")
        if not len(self.runs):
            if self.num_rows:
                raise ValueError(f"{self.num_rows} rows in no run")
            return
        first_rows = self.runs[:, 2]
        num_rows = np.diff(first_rows, append=self.num_rows)
        if first_rows[0] or num_rows.min() < 0:
            raise ValueError("the runs are not in the order of their rows")
        if self.row_bytes <= 0 or min(self.source_stride, self.target_stride) < self.row_bytes:
            raise ValueError(f"rows of {self.row_bytes} bytes at {self.source_stride} and {self.target_stride}")
        sides = ((0, self.source_stride, source_bytes), (1, self.target_stride, target_bytes))
        for side, stride, num_bytes in sides:
            if num_bytes is None:
                continue
            first = self.runs[:, side]
            ends = first + (num_rows - 1) * stride + self.row_bytes
            if first.min() < 0 or ends[num_rows > 0].max(initial=0) > num_bytes:
                raise ValueError(f"rows outside memory of {num_bytes} bytes")
            if (stride | self.row_bytes | int(np.bitwise_or.reduce(first))) % ALIGNMENT:
                raise ValueError(f"rows that do not lie at multiples of {ALIGNMENT} bytes")


class SupportsDLPack(Protocol):
    """What torch and CuPy take over without a copy. One dimension of bytes."""

    def __dlpack__(self, *, stream: object = None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...


class Stream(Protocol):
    """Work that is done in order, beside other streams."""

    @property
    def handle(self) -> int:
        """The driver's name of it."""
        ...

    def wait_for(self, event: "Event") -> None:
        """Let what comes next on this stream wait for the event's last record. Only events of this process."""
        ...

    def close(self) -> None:
        """Give it back once its work is done; does not wait. Idempotent."""
        ...


class Event(Protocol):
    """A point on a stream, recorded again and again. One that was never recorded is done."""

    def record(self, stream: Stream) -> None: ...

    def is_done(self) -> bool:
        """Say whether all that came before the last record is done. Raises DeviceError."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done, other threads running; say whether it is. Raises DeviceError."""
        ...

    def close(self) -> None: ...


class DeviceMemory(Protocol):
    """Memory of the card, or another process's that is mapped here. `pointer`: where it begins, as the card sees it."""

    @property
    def pointer(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def exported(self) -> SupportsDLPack:
        """The same memory as other libraries take it. It must not be used once this is closed."""
        ...

    def close(self) -> None:
        """Free or unmap it: nothing uses it any more. Idempotent."""
        ...


class DigestSlot(Protocol):
    """Room for a digest (`checksum.py`) that a kernel computes."""

    def value(self) -> int:
        """Return it. Only once an event that was recorded behind the kernel is done."""
        ...

    def close(self) -> None:
        """Give it back, to be used again."""
        ...


class Device(Protocol):
    """One card. Thread-safe."""

    @property
    def uuid(self) -> str:
        """The card's name, the same in every process that sees it."""
        ...

    @property
    def name(self) -> str:
        """What people call it."""
        ...

    def allocate(self, num_bytes: int) -> DeviceMemory:
        """Return zeroed memory. Raises DeviceError when there is too little."""
        ...

    def new_stream(self) -> Stream: ...

    def foreign_stream(self, handle: int) -> Stream:
        """Return the stream that another library of this process calls so. It stays that library's."""
        ...

    def new_event(self, *, shared: bool = False) -> Event:
        """`shared`: other processes may open it."""
        ...

    def new_digest(self) -> DigestSlot: ...

    def pin(self, array: ByteArray) -> None:
        """Let the card copy from and to this host memory asynchronously. Raises DeviceError."""
        ...

    def unpin(self, array: ByteArray) -> None: ...

    def move(
        self, stream: Stream, moves: Moves, source: DeviceMemory, target: DeviceMemory | None, digest: DigestSlot | None
    ) -> None:
        """Copy rows and digest them, in one kernel. Without a `target` they are only digested."""
        ...

    def download(self, stream: Stream, source: DeviceMemory, first_byte: int, target: ByteArray) -> None:
        """Copy from the card into pinned host memory."""
        ...

    def upload(self, stream: Stream, source: ByteArray, target: DeviceMemory, first_byte: int) -> None:
        """Copy from pinned host memory to the card."""
        ...

    # Between processes of one host.

    def export_memory(self, memory: DeviceMemory) -> bytes:
        """Return the name by which another process opens memory that `allocate` returned."""
        ...

    def open_memory(self, handle: bytes, num_bytes: int) -> DeviceMemory:
        """Map another process's memory. Raises DeviceError: the process has gone, or is this one."""
        ...

    def export_event(self, event: Event) -> bytes: ...

    def open_event(self, handle: bytes) -> Event:
        """Open a shared event of another process. Raises DeviceError."""
        ...

    def can_map(self, uuid: str) -> bool:
        """Say whether this card reads the memory of the card of this name: itself, or a peer that is seen here."""
        ...

    def close(self) -> None:
        """Let go of what is kept for use again: no stream runs any more."""
        ...
