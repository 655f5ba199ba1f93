"""CuPy's bindings over the host's memory: what cuda.py says to a card is carried out by the host, with move.cu compiled
as C++. It shows that the kernel copies and counts right, and that cuda.py hands it what it expects; of a real driver,
of its streams and of what happens at once, it shows nothing."""

import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.cards.cuda.cuda_driver import Cuda, CudaDevice, import_cupy
from dataplane.cards.cuda.kernel import SOURCE

HOST_THREADS = 32
"""Per block, instead of what is asked for: each is a thread of the host's, and the kernel takes more turns."""
KERNELS = ("move_rows_8", "move_rows_16")
_LAUNCH = """
extern "C" void launch_{name}(unsigned int num_blocks, unsigned int num_threads, void** p) {{
    launch(num_blocks, num_threads, [=] {{
        {name}(*(const char**)p[0], *(char**)p[1], *(Table**)p[2], *(u64*)p[3], *(u64*)p[4], *(u64*)p[5], *(u64*)p[6],
               *(u64*)p[7], *(u64**)p[8]);
    }});
}}
"""


def why_no_compiler() -> str:
    """Say why the kernel cannot be compiled for the host here; empty: it can."""
    return "" if shutil.which("g++") else "there is no g++"


@functools.cache
def host_kernels(source: str | None = None) -> ctypes.CDLL:
    """Return move.cu, or another text of it, as a library of the host's."""
    text = SOURCE.read_text() if source is None else source
    header = Path(__file__).with_name("host_cuda.h")
    with tempfile.TemporaryDirectory() as folder:
        code, library = Path(folder) / "move.cpp", Path(folder) / "move.so"
        code.write_text(f'#include "{header}"\n{text}\n' + "".join(_LAUNCH.format(name=name) for name in KERNELS))
        command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"]
        subprocess.run([*command, "-o", str(library), str(code)], check=True, capture_output=True)
        return ctypes.CDLL(str(library))


class HostRuntime:
    """`open`: how many addresses and handles were made and not freed, by kind."""

    hostAllocPortable = 1
    hostAllocMapped = 2
    streamNonBlocking = 1
    eventDisableTiming = 2
    eventInterprocess = 4
    memcpyHostToDevice = 1
    memcpyDeviceToHost = 2
    cudaIpcMemLazyEnablePeerAccess = 1

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.open: Counter[str] = Counter()
        self.num_cards = 1
        self.peers: set[tuple[int, int]] = set()
        self._memory: dict[int, Any] = {}
        self._registered: set[int] = set()
        self._handles = itertools.count(1000)
        self._current = threading.local()

    def getDeviceCount(self) -> int:
        return self.num_cards

    def deviceCanAccessPeer(self, index: int, other: int) -> int:
        return int((index, other) in self.peers)

    def getDevice(self) -> int:
        return getattr(self._current, "index", 0)

    def setDevice(self, index: int) -> None:
        self._current.index = index

    def getDeviceProperties(self, index: int) -> dict[str, Any]:
        return {"name": b"a host", "multiProcessorCount": 2, "major": 9, "minor": 0, "uuid": b"\x01\x02"}

    def deviceGetPCIBusId(self, index: int) -> str:
        return f"0000:0{index}:00.0"

    def malloc(self, size: int) -> int:
        return self._new("malloc", size, 0xCC)

    def hostAlloc(self, size: int, flags: int) -> int:
        return self._new("hostAlloc", size, 0xCC)

    def free(self, address: int) -> None:
        self._drop("malloc", address)

    def freeHost(self, address: int) -> None:
        self._drop("hostAlloc", address)

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        ctypes.memset(address, value, size)

    def memcpyAsync(self, target: int, source: int, size: int, kind: int, stream: int) -> None:
        assert kind in (self.memcpyHostToDevice, self.memcpyDeviceToHost)
        ctypes.memmove(target, source, size)

    def hostRegister(self, address: int, size: int, flags: int) -> None:
        if address in self._registered:
            raise self.CUDARuntimeError("cudaErrorHostMemoryAlreadyRegistered")
        self._registered.add(address)
        self.open["hostRegister"] += 1

    def hostUnregister(self, address: int) -> None:
        self._registered.remove(address)
        self.open["hostRegister"] -= 1

    def streamCreateWithFlags(self, flags: int) -> int:
        assert flags == self.streamNonBlocking
        return self._made("stream")

    def streamDestroy(self, stream: int) -> None:
        self.open["stream"] -= 1

    def streamSynchronize(self, stream: int) -> None:
        pass

    def streamWaitEvent(self, stream: int, event: int) -> None:
        pass

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags & self.eventDisableTiming
        return self._made("event")

    def eventDestroy(self, event: int) -> None:
        self.open["event"] -= 1

    def eventRecord(self, event: int, stream: int) -> None:
        pass

    def eventQuery(self, event: int) -> int:
        return 0

    def _made(self, kind: str) -> int:
        self.open[kind] += 1
        return next(self._handles)

    def _new(self, kind: str, size: int, filled_with: int) -> int:
        memory = np.full(size + 64, filled_with, np.uint8)
        address = -(-memory.ctypes.data // 64) * 64
        self._memory[address] = memory
        self.open[kind] += 1
        return address

    def _drop(self, kind: str, address: int) -> None:
        del self._memory[address]
        self.open[kind] -= 1


class HostDriver:
    """`launches`: name, blocks and threads of each."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.launches: list[tuple[str, int, int]] = []
        self.num_loaded = 0
        self._library = library
        self._lock = threading.Lock()  # the host is a card that does one thing at a time

    def moduleLoadData(self, image: bytes) -> int:
        self.num_loaded += 1
        return 1

    def moduleUnload(self, module: int) -> None:
        self.num_loaded -= 1

    def moduleGetFunction(self, module: int, name: str) -> int:
        return KERNELS.index(name)

    def launchKernel(self, kernel: int, *arguments: int) -> None:
        num_blocks, grid_y, grid_z, num_threads, block_y, block_z, shared_bytes, _stream, parameters, extra = arguments
        assert (grid_y, grid_z, block_y, block_z, shared_bytes, extra) == (1, 1, 1, 1, 0, 0)
        self.launches.append((KERNELS[kernel], num_blocks, num_threads))
        launch = getattr(self._library, f"launch_{KERNELS[kernel]}")
        with self._lock:
            launch(num_blocks, HOST_THREADS, ctypes.c_void_p(parameters))


def host_device(library: ctypes.CDLL | None = None) -> CudaDevice:
    """Return a CudaDevice whose card is the host."""
    runtime, driver = HostRuntime(), HostDriver(host_kernels() if library is None else library)
    return CudaDevice(Cuda(None, runtime, driver, import_cupy().nvrtc), 0)
