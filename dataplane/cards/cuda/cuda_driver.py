"""A CUDA card, by CuPy: its memory, streams and events as the driver has them, and the one kernel of move.cu.

CuPy is imported when a card is asked for: machines without it, or without a driver, import this module all the same.
Memory is the driver's own (cudaMalloc), not a pool's: another process can only map whole allocations. What a caller
waits for is asked for again and again, with other threads running: cudaEventSynchronize knows no end.
"""

import contextlib
import threading
import time
from collections.abc import Generator
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from dataplane.cards import limits
from dataplane.cards.cuda.kernel import MoveKernel, compile_kernels
from dataplane.cards.cuda.run_tables import host_array
from dataplane.cards.device import DeviceError, DeviceMemory, DigestSlot, Event, Moves, Stream, SupportsDLPack
from dataplane.memory.arena import ByteArray

HANDLE_BYTES = 64
ALLOCATION_BYTES = 2 << 20
"""What the driver hands out at least: of a smaller allocation another process would map its neighbours too."""
_DIGESTS_PER_PAGE = 512
_NOT_READY = 600
"""cudaErrorNotReady."""


class Cuda(NamedTuple):
    """CuPy's modules: they have no types."""

    cupy: Any
    runtime: Any
    driver: Any
    nvrtc: Any


def import_cupy() -> Cuda:
    """Return CuPy's modules. Raises DeviceError."""
    try:
        import cupy  # pyright: ignore[reportMissingTypeStubs] # noqa: PLC0415
        from cupy.cuda import driver, nvrtc, runtime  # pyright: ignore # noqa: PLC0415
    except ImportError as error:
        raise DeviceError("CUDA", f"CuPy is not installed: {error}") from error
    return Cuda(cast(Any, cupy), cast(Any, runtime), cast(Any, driver), cast(Any, nvrtc))


def count_devices(cuda: Cuda | None = None) -> int:
    """Return how many cards this process can use. Raises DeviceError: no CuPy, no driver, no card."""
    cuda = import_cupy() if cuda is None else cuda
    try:
        return cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise DeviceError("CUDA", f"no card can be used: {error}") from error


def find_device(index: int = 0) -> "CudaDevice":
    """Return this process's card of this number. Raises DeviceError, in one line: no CuPy, no driver, no such card."""
    cuda = import_cupy()
    num_devices = count_devices(cuda)
    if not 0 <= index < num_devices:
        raise DeviceError("CUDA", f"there is no card {index}: {num_devices} can be used")
    return CudaDevice(cuda, index)


class CudaStream:
    def __init__(self, device: "CudaDevice", handle: int, *, owned: bool) -> None:
        self._device = device
        self._handle = handle
        self._owned = owned

    @property
    def handle(self) -> int:
        return self._handle

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent), "an event of another kind of card"
        assert not event.is_foreign, "work that is queued behind another process's event is never called back"
        with self._device.doing("wait for an event on a stream") as cuda:
            cuda.runtime.streamWaitEvent(self._handle, event.handle)

    def close(self) -> None:
        if self._owned:
            self._owned = False
            with contextlib.suppress(DeviceError), self._device.doing("close a stream") as cuda:
                cuda.runtime.streamDestroy(self._handle)


class CudaEvent:
    def __init__(self, device: "CudaDevice", handle: int, *, is_foreign: bool) -> None:
        self.handle = handle
        self.is_foreign = is_foreign
        self.is_exported = False
        self._device = device
        self._is_closed = False

    def record(self, stream: Stream) -> None:
        if self.is_foreign:
            raise DeviceError("record an event", "it is another process's")
        with self._device.doing("record an event") as cuda:
            cuda.runtime.eventRecord(self.handle, stream.handle)

    def is_done(self) -> bool:
        if self._is_closed:
            raise DeviceError("ask for an event", "it is closed")
        with self._device.doing("ask for an event") as cuda:
            status = cuda.runtime.eventQuery(self.handle)
            if status not in (0, _NOT_READY):
                raise cuda.runtime.CUDARuntimeError(status)
            return status == 0

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        pause_s = limits.FIRST_PAUSE_S
        while not self.is_done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(pause_s, left_s))
            pause_s = min(pause_s * 1.5, limits.LAST_PAUSE_S)
        return True

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self.is_exported:  # another process may be asking for it: as with memory
                return
            with contextlib.suppress(DeviceError), self._device.doing("close an event") as cuda:
                cuda.runtime.eventDestroy(self.handle)


class CudaMemory:
    """`index`: of the card that it is on, or through which it is mapped."""

    def __init__(self, device: "CudaDevice", pointer: int, num_bytes: int, *, is_mapped: bool) -> None:
        self.index = device.index
        self._device = device
        self._pointer = pointer
        self._num_bytes = num_bytes
        self._is_mapped = is_mapped
        self.is_exported = False
        self._is_closed = False

    @property
    def pointer(self) -> int:
        return self._pointer

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def exported(self) -> SupportsDLPack:
        cupy = self._device.cuda.cupy
        memory = cupy.cuda.UnownedMemory(self._pointer, self._num_bytes, self, self.index)
        return cupy.ndarray((self._num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self.is_exported:  # to free what another process may have mapped is undefined: it goes with this process
            return
        with contextlib.suppress(DeviceError), self._device.doing("free memory") as cuda:
            if self._is_mapped:
                cuda.runtime.ipcCloseMemHandle(self._pointer)
            else:
                cuda.runtime.free(self._pointer)


class CudaDigest:
    """`address`: of the eight bytes of pinned memory to which the kernel's last block writes."""

    def __init__(self, device: "CudaDevice", page: npt.NDArray[np.uint64], index: int) -> None:
        self.address = page.ctypes.data + index * page.itemsize
        self._device = device
        self._page = page
        self._index = index
        self._is_closed = False

    def value(self) -> int:
        assert not self._is_closed, "the slot was given back"
        return int(self._page[self._index])

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._device.give_back(self._page, self._index)


class CudaDevice:
    """One card. Made by `find_device`. Raises DeviceError."""

    def __init__(self, cuda: Cuda, index: int) -> None:
        self.cuda = cuda
        self.index = index
        self._lock = threading.Lock()
        self._pinned: dict[int, int] = {}
        self._peers: set[int] = set()
        self._digest_pages: list[int] = []
        self._free_digests: list[tuple[npt.NDArray[np.uint64], int]] = []
        self._is_closed = False
        with self.doing("look at the card"):
            properties = cuda.runtime.getDeviceProperties(index)
            self._name: str = properties["name"].decode()
            others = (i for i in range(cuda.runtime.getDeviceCount()) if i != index)
            self._uuid = _uuid(cuda, index)
            self._peer_uuids = {_uuid(cuda, i) for i in others if cuda.runtime.deviceCanAccessPeer(index, i)}
            self._zeroing: int = cuda.runtime.streamCreateWithFlags(cuda.runtime.streamNonBlocking)
            image = compile_kernels(cuda.nvrtc, properties["major"] * 10 + properties["minor"])
            self._kernel = MoveKernel(cuda.runtime, cuda.driver, image, properties["multiProcessorCount"])

    @property
    def uuid(self) -> str:
        return self._uuid

    @property
    def name(self) -> str:
        return self._name

    def allocate(self, num_bytes: int) -> CudaMemory:
        rounded = -(-max(num_bytes, 1) // ALLOCATION_BYTES) * ALLOCATION_BYTES
        with self.doing(f"allocate {num_bytes} bytes") as cuda:
            pointer = cuda.runtime.malloc(rounded)
            try:
                # cudaMemset would be of the default stream, for which ours do not wait
                cuda.runtime.memsetAsync(pointer, 0, rounded, self._zeroing)
                cuda.runtime.streamSynchronize(self._zeroing)
            except RuntimeError:
                cuda.runtime.free(pointer)
                raise
        return CudaMemory(self, pointer, num_bytes, is_mapped=False)

    def new_stream(self) -> CudaStream:
        with self.doing("make a stream") as cuda:
            return CudaStream(self, cuda.runtime.streamCreateWithFlags(cuda.runtime.streamNonBlocking), owned=True)

    def foreign_stream(self, handle: int) -> CudaStream:
        return CudaStream(self, handle, owned=False)

    def new_event(self, *, shared: bool = False) -> CudaEvent:
        with self.doing("make an event") as cuda:
            flags = cuda.runtime.eventDisableTiming | (cuda.runtime.eventInterprocess if shared else 0)
            return CudaEvent(self, cuda.runtime.eventCreateWithFlags(flags), is_foreign=False)

    def new_digest(self) -> CudaDigest:
        with self._lock:
            if not self._free_digests:
                page, pointer = self._new_page()
                self._digest_pages.append(pointer)
                self._free_digests = [(page, index) for index in range(_DIGESTS_PER_PAGE)]
            return CudaDigest(self, *self._free_digests.pop())

    def give_back(self, page: npt.NDArray[np.uint64], index: int) -> None:
        """A digest's slot is free."""
        with self._lock:
            self._free_digests.append((page, index))

    def pin(self, array: ByteArray) -> None:
        with self.doing(f"pin {array.nbytes} bytes") as cuda:
            cuda.runtime.hostRegister(array.ctypes.data, array.nbytes, cuda.runtime.hostAllocPortable)
        with self._lock:
            self._pinned[array.ctypes.data] = array.nbytes

    def unpin(self, array: ByteArray) -> None:
        with self._lock:
            if self._pinned.pop(array.ctypes.data, None) is None:
                raise DeviceError("unpin", "the memory is not pinned")
        with self.doing("unpin") as cuda:
            cuda.runtime.hostUnregister(array.ctypes.data)

    def move(
        self, stream: Stream, moves: Moves, source: DeviceMemory, target: DeviceMemory | None, digest: DigestSlot | None
    ) -> None:
        assert digest is None or isinstance(digest, CudaDigest), "a digest of another kind of card"
        with self.doing(f"move {moves.num_rows} rows"):
            for memory in (source,) if target is None else (source, target):
                self._reach(memory)
            self._kernel.launch(stream.handle, moves, source, target, 0 if digest is None else digest.address)

    def download(self, stream: Stream, source: DeviceMemory, first_byte: int, target: ByteArray) -> None:
        self._check_copy("download", source, first_byte, target)
        with self.doing(f"download {target.nbytes} bytes") as cuda:
            kind = cuda.runtime.memcpyDeviceToHost
            at = source.pointer + first_byte
            cuda.runtime.memcpyAsync(target.ctypes.data, at, target.nbytes, kind, stream.handle)

    def upload(self, stream: Stream, source: ByteArray, target: DeviceMemory, first_byte: int) -> None:
        self._check_copy("upload", target, first_byte, source)
        with self.doing(f"upload {source.nbytes} bytes") as cuda:
            kind = cuda.runtime.memcpyHostToDevice
            at = target.pointer + first_byte
            cuda.runtime.memcpyAsync(at, source.ctypes.data, source.nbytes, kind, stream.handle)

    def export_memory(self, memory: DeviceMemory) -> bytes:
        assert isinstance(memory, CudaMemory), "memory of another kind of card"
        with self.doing("export memory") as cuda:
            handle = cuda.runtime.ipcGetMemHandle(memory.pointer)
        memory.is_exported = True
        return handle

    def open_memory(self, handle: bytes, num_bytes: int) -> CudaMemory:
        if len(handle) != HANDLE_BYTES:
            raise DeviceError("open memory", f"a handle of {len(handle)} bytes")
        with self.doing("open memory") as cuda:
            pointer = cuda.runtime.ipcOpenMemHandle(handle, cuda.runtime.cudaIpcMemLazyEnablePeerAccess)
        return CudaMemory(self, pointer, num_bytes, is_mapped=True)

    def export_event(self, event: Event) -> bytes:
        assert isinstance(event, CudaEvent), "an event of another kind of card"
        with self.doing("export an event") as cuda:
            handle = cuda.runtime.ipcGetEventHandle(event.handle)
        event.is_exported = True
        return handle

    def open_event(self, handle: bytes) -> CudaEvent:
        if len(handle) != HANDLE_BYTES:
            raise DeviceError("open an event", f"a handle of {len(handle)} bytes")
        with self.doing("open an event") as cuda:
            return CudaEvent(self, cuda.runtime.ipcOpenEventHandle(handle), is_foreign=True)

    def can_map(self, uuid: str) -> bool:
        return uuid == self._uuid or uuid in self._peer_uuids

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.suppress(DeviceError), self.doing("close the card") as cuda:
            self._kernel.close()
            for pointer in self._digest_pages:
                cuda.runtime.freeHost(pointer)
            cuda.runtime.streamDestroy(self._zeroing)

    @contextlib.contextmanager
    def doing(self, what: str) -> Generator[Cuda, None, None]:
        """Run the block with this card as the thread's, which it stays; what the libraries raise becomes a DeviceError.

        A fresh thread's card is 0: to set that again would make a context there, and take its memory.
        """
        try:
            self.cuda.runtime.setDevice(self.index)  # where it is this one already it makes the context this thread's
            yield self.cuda
        except RuntimeError as error:  # all errors of CuPy's bindings are
            raise DeviceError(what, str(error)) from error

    def _new_page(self) -> tuple[npt.NDArray[np.uint64], int]:
        num_bytes = _DIGESTS_PER_PAGE * 8
        with self.doing("make room for digests") as cuda:
            pointer = cuda.runtime.hostAlloc(num_bytes, cuda.runtime.hostAllocMapped | cuda.runtime.hostAllocPortable)
        return host_array(pointer, num_bytes).view(np.uint64), pointer

    def _reach(self, memory: DeviceMemory) -> None:
        """Let this card's kernels use memory of another one of this process."""
        assert isinstance(memory, CudaMemory), "memory of another kind of card"
        if memory.index != self.index and memory.index not in self._peers:
            try:
                self.cuda.runtime.deviceEnablePeerAccess(memory.index)
            except self.cuda.runtime.CUDARuntimeError as error:
                if "PeerAccessAlreadyEnabled" not in str(error):
                    raise
            self._peers.add(memory.index)

    def _check_copy(self, what: str, memory: DeviceMemory, first_byte: int, array: ByteArray) -> None:
        if first_byte < 0 or first_byte + array.nbytes > memory.num_bytes:
            raise ValueError(f"bytes {first_byte}+{array.nbytes} of {memory.num_bytes}")
        at = array.ctypes.data
        with self._lock:
            if not any(first <= at and at + array.nbytes <= first + size for first, size in self._pinned.items()):
                raise DeviceError(what, "the host's memory is not pinned: the copy would stop whoever asks for it")


def _uuid(cuda: Cuda, index: int) -> str:
    """Return what every process of the host calls a card: CuPy cuts the driver's name at its first zero byte, so the
    place on the bus is said too."""
    uuid: bytes = cuda.runtime.getDeviceProperties(index)["uuid"]
    return f"GPU-{bytes(uuid).hex()}-{cuda.runtime.deviceGetPCIBusId(index)}"
