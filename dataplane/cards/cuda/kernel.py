"""The kernel of move.cu: compiled on the machine it runs on, loaded, launched. Its errors are CuPy's: RuntimeError."""

from pathlib import Path
from typing import Any

import numpy as np

from dataplane.cards.cuda.run_tables import Tables
from dataplane.cards.device import DeviceError, DeviceMemory, Moves

SOURCE = Path(__file__).with_name("move.cu")
NUM_THREADS = 256
VECTORS_PER_THREAD = 4
"""As in move.cu."""
BLOCKS_PER_PROCESSOR = 8
"""More would only add to what the digest waits for: blocks add to it one after another."""
MAX_VECTORS = 1 << 31
"""The kernel counts in 32 bits."""


class MoveKernel:
    """`runtime`, `driver`: CuPy's, with the card as the calling thread's. Thread-safe."""

    def __init__(self, runtime: Any, driver: Any, image: bytes, num_processors: int) -> None:
        self._driver = driver
        self._max_blocks = num_processors * BLOCKS_PER_PROCESSOR
        self._tables = Tables(runtime)
        self._module: int = driver.moduleLoadData(image)
        self._kernels: dict[int, int] = {
            size: driver.moduleGetFunction(self._module, f"move_rows_{size}") for size in (8, 16)
        }

    def launch(
        self, stream: int, moves: Moves, source: DeviceMemory, target: DeviceMemory | None, digest_address: int
    ) -> None:
        """Put it on the stream. `digest_address`: eight bytes of pinned memory; 0: no digest. Raises ValueError when
        rows lie outside their memory, or are too many for one launch."""
        moves.check(source.num_bytes, None if target is None else target.num_bytes)
        size = vector_bytes(moves, with_target=target is not None)
        num_vectors = moves.num_bytes // size
        if num_vectors >= MAX_VECTORS:
            raise ValueError(f"{moves.num_bytes} bytes in one move")
        num_blocks = max(1, min(-(-num_vectors // (NUM_THREADS * VECTORS_PER_THREAD)), self._max_blocks))
        with self._tables.uploaded(moves.runs, stream) as table:
            parameters = np.array(
                (
                    source.pointer,
                    0 if target is None else target.pointer,
                    table,
                    len(moves.runs),
                    moves.num_rows,
                    moves.row_bytes // size,
                    moves.source_stride,
                    moves.target_stride,
                    digest_address,
                ),
                np.uint64,
            )
            addresses = parameters.ctypes.data + np.arange(len(parameters)) * parameters.itemsize
            self._driver.launchKernel(
                self._kernels[size], num_blocks, 1, 1, NUM_THREADS, 1, 1, 0, stream, addresses.ctypes.data, 0
            )

    def close(self) -> None:
        """No kernel runs any more."""
        self._tables.close()
        self._driver.moduleUnload(self._module)


def compile_kernels(nvrtc: Any, capability: int) -> bytes:
    """Return move.cu as a card of this compute capability (90: 9.0) loads it. Raises DeviceError."""
    supported: tuple[int, ...] = nvrtc.getSupportedArchs()
    older = [arch for arch in supported if arch <= capability]
    if not older:
        raise DeviceError("compile move.cu", f"a card of compute capability {capability / 10} is too old")
    is_known = capability in supported
    # for a card that is newer than the compiler the driver translates what suits the newest that is known
    arch = f"-arch={'sm' if is_known else 'compute'}_{max(older)}"
    program = nvrtc.createProgram(SOURCE.read_text("utf-8"), SOURCE.name, (), ())
    try:
        nvrtc.compileProgram(program, (arch, "-std=c++17"))
        image: bytes | str = nvrtc.getCUBIN(program) if is_known else nvrtc.getPTX(program)
    except RuntimeError as error:
        raise DeviceError("compile move.cu", f"{error}\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)
    return image if isinstance(image, bytes) else image.encode()


def vector_bytes(moves: Moves, *, with_target: bool) -> int:
    """Return what a thread may load and store at once: 16 bytes where everything lies at multiples of 16, else 8."""
    bits = moves.row_bytes | moves.source_stride | int(np.bitwise_or.reduce(moves.runs[:, 0], initial=0))
    if with_target:
        bits |= moves.target_stride | int(np.bitwise_or.reduce(moves.runs[:, 1], initial=0))
    return 8 if bits % 16 else 16
