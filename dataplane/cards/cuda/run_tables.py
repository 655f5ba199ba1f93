"""The tables of runs that kernels read, on their way to the card: pinned host memory, uploaded on the kernel's stream,
and not used again before that kernel is done. Kept for the next ones: to free a card's memory is to wait for the card.
"""

import contextlib
import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.cards import limits
from dataplane.cards.device import DeviceError
from dataplane.memory.arena import ByteArray

HEAD_BYTES = 16
"""Two zeros, which the kernel adds up: `Table` in move.cu."""
MIN_TABLE_BYTES = 16 << 10


class _Table:
    """`host`, `card`: the addresses of its two copies. `event`: recorded behind the kernel that reads it."""

    def __init__(self, runtime: Any, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.host: int = runtime.hostAlloc(num_bytes, runtime.hostAllocPortable)
        self.card: int = runtime.malloc(num_bytes)
        self.event: int = runtime.eventCreateWithFlags(runtime.eventDisableTiming)
        self.array = host_array(self.host, num_bytes)
        self.array[:HEAD_BYTES] = 0


class Tables:
    """`runtime`: CuPy's, with the card as the calling thread's. Its errors come through. Thread-safe."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._lock = threading.Lock()
        self._made: defaultdict[int, int] = defaultdict(int)
        self._free: defaultdict[int, list[_Table]] = defaultdict(list)
        self._in_use: list[_Table] = []

    @contextlib.contextmanager
    def uploaded(self, runs: npt.NDArray[np.int64], stream: int) -> Generator[int, None, None]:
        """Yield where the card will have the table; the block launches its kernel on the same stream."""
        num_bytes = HEAD_BYTES + runs.nbytes
        table = self._take(1 << (max(MIN_TABLE_BYTES, num_bytes) - 1).bit_length())
        table.array[HEAD_BYTES:num_bytes] = np.ascontiguousarray(runs).reshape(-1).view(np.uint8)
        try:
            kind = self._runtime.memcpyHostToDevice
            self._runtime.memcpyAsync(table.card, table.host, num_bytes, kind, stream)
            yield table.card
        finally:  # also where the launch has failed: the upload may be under way
            self._runtime.eventRecord(table.event, stream)
            with self._lock:
                self._in_use.append(table)

    def close(self) -> None:
        """Free all; no kernel runs any more."""
        with self._lock:
            tables = [*self._in_use, *(table for free in self._free.values() for table in free)]
            self._in_use.clear()
            self._free.clear()
        for table in tables:
            self._runtime.eventDestroy(table.event)
            self._runtime.free(table.card)
            self._runtime.freeHost(table.host)

    def _take(self, num_bytes: int) -> _Table:
        deadline = time.monotonic() + limits.TABLE_WAIT_S
        while True:
            with self._lock:
                self._reclaim()
                if self._free[num_bytes]:
                    return self._free[num_bytes].pop()
                if self._made[num_bytes] < limits.MAX_TABLES:
                    table = _Table(self._runtime, num_bytes)
                    self._made[num_bytes] += 1
                    return table
            if time.monotonic() > deadline:
                raise DeviceError(
                    "launch a kernel", f"{limits.MAX_TABLES} have not ended within {limits.TABLE_WAIT_S:g} s"
                )
            time.sleep(limits.TABLE_PAUSE_S)

    def _reclaim(self) -> None:
        """Find the tables whose kernels are done."""
        in_use: list[_Table] = []
        for table in self._in_use:
            if self._runtime.eventQuery(table.event):  # not done; or an error, which the next call raises
                in_use.append(table)
            else:
                self._free[table.num_bytes].append(table)
        self._in_use = in_use


def host_array(address: int, num_bytes: int) -> ByteArray:
    """Return host memory that the driver has handed out."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
