"""A CUDA card, by CuPy: its kernels, streams, events, memory that other processes map, NCCL. `card.py` says what each
does.

CuPy is imported when a card is asked for: machines without it, or without a driver, import this module all the same.
KV lies in the driver's own allocations (cudaMalloc), not in a pool's: another process can only map whole ones.
"""

import contextlib
import importlib
import warnings
from collections.abc import Callable, Generator
from typing import Any, cast

import numpy as np

from dataplane.cards.card import WORD_BYTES, CardError, CardMemory, CardStream, Communicator, PendingSum, Rows
from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import GOLDEN

ALLOCATION_BYTES = 2 << 20
"""What the driver hands out at least: of a smaller allocation another process would map its neighbours too."""
_COPY = (
    "raw uint64 source, int64 start, int64 target_start, int64 word",
    "raw uint64 target",
    "target[target_start + word] = source[start + word]",
    "kvmesh_copy_rows",
)
_SUM = (
    "raw uint64 memory, int64 start, int64 position, int64 word",
    "uint64 sums",
    f"kvmesh_mix(memory[start + word] ^ ((unsigned long long)(position + word + 1) * {GOLDEN:#x}ULL))",
    "a + b",
    "sums = a",
    "0",
    "kvmesh_sum64",
)
_MIX = """
__device__ unsigned long long kvmesh_mix(unsigned long long word) {
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ULL;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBULL;
    return word ^ (word >> 31);
}
"""
"""splitmix64's finalizer, as `mix` in `memory/checksum.py`."""


def import_cupy() -> Any:
    """Return CuPy, which has no types. Raises CardError."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise CardError("CUDA", f"CuPy is not installed: {error}") from error


def count_cards() -> int:
    """Return how many cards this process can use. Raises CardError: no CuPy, no driver, no card."""
    cupy = import_cupy()
    try:
        return cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise CardError("CUDA", f"no card can be used: {error}") from error


class CupyMemory:
    """`words`: CuPy's array over it."""

    def __init__(self, card: "CupyCard", pointer: int, num_bytes: int, *, is_mapped: bool) -> None:
        cupy = card.cupy
        self.card = card
        self.pointer = pointer
        self._num_bytes = num_bytes
        self._is_mapped = is_mapped
        self.is_exported = False
        self._is_closed = False
        memory = cupy.cuda.UnownedMemory(pointer, num_bytes, self, card.index)
        self.words: Any = cupy.ndarray((num_bytes // WORD_BYTES,), cupy.uint64, cupy.cuda.MemoryPointer(memory, 0))

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def exported(self) -> object:
        return self.words.view(self.card.cupy.uint8)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self.is_exported:  # to free what another process may have mapped is undefined: it goes with this process
            return
        with contextlib.suppress(CardError), self.card.doing("free memory"):
            runtime = self.card.cupy.cuda.runtime
            (runtime.ipcCloseMemHandle if self._is_mapped else runtime.free)(self.pointer)


class CupySum:
    """The sums of a frame's rows, on the card."""

    def __init__(self, sums: Any) -> None:
        self._sums = sums

    def value(self) -> int:
        return int(self._sums.get().sum(dtype=np.uint64))


class CupyStream:
    """A stream beside the engine's. Tables of rows go up with each call: CuPy keeps their memory until it is done."""

    def __init__(self, card: "CupyCard") -> None:
        self._card = card
        self._is_closed = False
        with card.doing("make a stream"):
            self.stream: Any = card.cupy.cuda.Stream(non_blocking=True)

    def copy(self, source: CardMemory, source_rows: Rows, target: CardMemory, target_rows: Rows) -> None:
        with self._doing("copy rows") as cupy:
            words = cupy.arange(source_rows.num_words)
            starts, target_starts = (cupy.asarray(rows.starts)[:, None] for rows in (source_rows, target_rows))
            self._card.copy_rows(_words(source), starts, target_starts, words, _words(target))

    def sum64(self, memory: CardMemory, rows: Rows) -> PendingSum:
        with self._doing("digest rows") as cupy:
            words, positions = cupy.arange(rows.num_words), cupy.asarray(rows.packed.starts)[:, None]
            starts = cupy.asarray(rows.starts)[:, None]
            return CupySum(self._card.sum_rows(_words(memory), starts, positions, words, axis=1))

    def download(self, memory: CardMemory, target: ByteArray) -> None:
        with self._doing("download") as cupy:
            kind = cupy.cuda.runtime.memcpyDeviceToHost
            source = _words(memory).data.ptr
            cupy.cuda.runtime.memcpyAsync(target.ctypes.data, source, target.nbytes, kind, self.stream.ptr)

    def upload(self, source: ByteArray, memory: CardMemory) -> None:
        with self._doing("upload") as cupy:
            kind = cupy.cuda.runtime.memcpyHostToDevice
            target = _words(memory).data.ptr
            cupy.cuda.runtime.memcpyAsync(target, source.ctypes.data, source.nbytes, kind, self.stream.ptr)

    def is_done(self) -> bool:
        with self._card.doing("ask for a stream"):
            return bool(self.stream.done)

    def close(self) -> None:
        self.stream = None

    @contextlib.contextmanager
    def _doing(self, what: str) -> Generator[Any]:
        with self._card.doing(what) as cupy, self.stream:
            yield cupy


class CupyCommunicator:
    """NCCL's. CuPy lets other threads run during every call, an abort may so end a call that another thread is in."""

    def __init__(self, card: "CupyCard", handle: Any, peer: int) -> None:
        self._card = card
        self._handle = handle
        self._peer = peer

    def send(self, memory: CardMemory, num_bytes: int, stream: CardStream) -> None:
        self._call(self._handle.send, memory, num_bytes, stream)

    def receive(self, memory: CardMemory, num_bytes: int, stream: CardStream) -> None:
        self._call(self._handle.recv, memory, num_bytes, stream)

    def abort(self) -> None:
        with contextlib.suppress(CardError), self._card.doing("abort a communicator"):
            self._handle.abort()

    def _call(self, function: Callable[..., None], memory: CardMemory, num_bytes: int, stream: CardStream) -> None:
        assert isinstance(stream, CupyStream)
        with self._card.doing("send or receive over NCCL") as cupy:
            kind = cupy.cuda.nccl.NCCL_UINT8
            function(_words(memory).data.ptr, num_bytes, kind, self._peer, stream.stream.ptr)


class CupyCard:
    """This process's card of this number. Raises CardError, in one line: no CuPy, no driver, no such card."""

    def __init__(self, index: int = 0) -> None:
        num_cards = count_cards()
        if not 0 <= index < num_cards:
            raise CardError("CUDA", f"there is no card {index}: {num_cards} can be used")
        self.cupy = cupy = import_cupy()
        self.index = index
        with self.doing("look at the card"):
            runtime = cupy.cuda.runtime
            self._name: str = runtime.getDeviceProperties(index)["name"].decode()
            others = (i for i in range(num_cards) if i != index)
            self._uuid = _uuid(runtime, index)
            self._peers = {_uuid(runtime, i) for i in others if runtime.deviceCanAccessPeer(index, i)}
            self._marks: Any = cupy.cuda.Event
            self.copy_rows: Any = cupy.ElementwiseKernel(*_COPY)
            self.sum_rows: Any = cupy.ReductionKernel(*_SUM, preamble=_MIX)

    @property
    def uuid(self) -> str:
        return self._uuid

    @property
    def name(self) -> str:
        return self._name

    def allocate(self, num_bytes: int) -> CupyMemory:
        rounded = -(-max(num_bytes, 1) // ALLOCATION_BYTES) * ALLOCATION_BYTES
        with self.doing(f"allocate {num_bytes} bytes") as cupy:
            memory = CupyMemory(self, cupy.cuda.runtime.malloc(rounded), num_bytes, is_mapped=False)
            memory.words.fill(0)
            cupy.cuda.runtime.deviceSynchronize()
            return memory

    def pinned(self, num_bytes: int) -> ByteArray:
        with self.doing(f"pin {num_bytes} bytes") as cupy:
            return np.frombuffer(cupy.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)

    def stream(self) -> CupyStream:
        return CupyStream(self)

    def mark(self, stream_handle: int) -> Callable[[], bool]:
        with self.doing("record an event") as cupy:
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.ExternalStream(stream_handle))

        def is_done() -> bool:
            with self.doing("ask for an event"):
                return bool(event.done)

        return is_done

    def can_map(self, uuid: str) -> bool:
        return uuid == self._uuid or uuid in self._peers

    def export(self, memory: CardMemory) -> bytes:
        assert isinstance(memory, CupyMemory), "memory of another kind of card"
        with self.doing("export memory") as cupy:
            name: bytes = cupy.cuda.runtime.ipcGetMemHandle(memory.pointer)
        memory.is_exported = True
        return name

    def map_memory(self, name: bytes, num_bytes: int) -> CupyMemory:
        with self.doing("open memory") as cupy:
            lazy = cupy.cuda.runtime.cudaIpcMemLazyEnablePeerAccess
            return CupyMemory(self, cupy.cuda.runtime.ipcOpenMemHandle(name, lazy), num_bytes, is_mapped=True)

    def no_communicators(self) -> str | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a missing library CuPy makes a warning of five lines
            try:
                nccl = importlib.import_module("cupy.cuda.nccl")
            except ImportError as error:
                return f"cupy: {error}"
        return None if cast(Any, nccl).available else "the NCCL library is not installed"

    def new_id(self) -> bytes:
        with self.doing("make a communicator's id") as cupy:
            return bytes(cupy.cuda.nccl.get_unique_id())

    def join(self, unique_id: bytes, rank: int, num_ranks: int = 2) -> Communicator:
        with self.doing("join a communicator") as cupy:
            handle = cupy.cuda.nccl.NcclCommunicator(num_ranks, unique_id, rank)
        return CupyCommunicator(self, handle, num_ranks - 1 - rank)

    def close(self) -> None:
        """What is left goes with the process."""

    @contextlib.contextmanager
    def doing(self, what: str) -> Generator[Any]:
        """Run the block with this card as the thread's, which it stays; what the libraries raise becomes a CardError.

        A fresh thread's card is 0: to set that again would make a context there, and take its memory.
        """
        try:
            self.cupy.cuda.runtime.setDevice(self.index)
            yield self.cupy
        except CardError:
            raise
        except (RuntimeError, MemoryError, KeyError, ValueError) as error:  # as CuPy's bindings raise
            raise CardError(what, str(error).partition("\n")[0]) from error


def _words(memory: CardMemory) -> Any:
    assert isinstance(memory, CupyMemory), "memory of another kind of card"
    return memory.words


def _uuid(runtime: Any, index: int) -> str:
    """Return what every process of the host calls a card: CuPy cuts the driver's name at its first zero byte, so the
    place on the bus is given too."""
    uuid: bytes = runtime.getDeviceProperties(index)["uuid"]
    return f"GPU-{bytes(uuid).hex()}-{runtime.deviceGetPCIBusId(index)}"
