"""The kernels as the operators launch them become machine code for each generation of cards, without a card."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import MockTensor

from services.engine.cuda import paged_kernel, paged_ops

SMALLEST_SHARED_BYTES = 99 << 10
"""What a block may have on sm_86 and sm_89; others have more."""


class Driver:
    """What compiling asks a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


class Placed(MockTensor):
    """A tensor's type and where it lies: Triton looks at the alignment."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.dtype)
        self._pointer = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._pointer


class Launch(NamedTuple):
    name: str
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def compiled(self) -> Any:
        arguments = [Placed(a) if isinstance(a, torch.Tensor) else a for a in self.arguments]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return paged_kernel.kernels()[self.name].warmup(*arguments, grid=self.grid, **self.options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Return where the operators' launches are noted, in place of being done."""
    noted: list[Launch] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **options: noted.append(Launch(self.name, grid, arguments, options))

    monkeypatch.setattr(paged_ops, "_kernel", Noting)
    return noted


@pytest.fixture
def on_card() -> Iterator[Callable[[int], None]]:
    before = driver._active
    yield lambda capability: driver.set_active(Driver(capability))
    driver._active = before


class Model(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype


QWEN = Model(16, 8, 128, torch.bfloat16)


def launch_all(model: Model, *, rows: int, window: int, singles: int = 3, chunks: int = 2, tiles: int = 5) -> None:
    """Call each operator once on tensors that have shapes and nothing else."""
    query, output = (torch.empty(rows, model.heads, model.dim, dtype=model.dtype) for _ in range(2))
    key, value = (torch.empty(rows, model.kv_heads, model.dim, dtype=model.dtype) for _ in range(2))
    keys, values = (torch.empty(32, model.kv_heads, model.dim, dtype=model.dtype) for _ in range(2))

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32)

    # A second cache group's lie behind the first one's, wherever that ends.
    paged_ops.write_kv(key, value, keys, values, ints(2, rows)[1])
    for bases, kind, attend in (
        (ints(2, chunks)[1], (ints(2, tiles), ints(3, chunks)), paged_ops.attend_chunks),
        (ints(2, singles)[1], (ints(2, singles),), paged_ops.attend_singles),
    ):
        attend(query, keys, values, output, ints(9), *kind, bases, 0.1, window, 16)


SMALL_HEADS = Model(32, 8, 64, torch.float32)
ODD_HEADS = Model(12, 12, 80, torch.float16)
LARGE_HEADS = Model(4, 1, 256, torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "capability", "window"),
    [
        pytest.param(
            model,
            capability,
            window,
            id=f"{model.dim}-{model.dtype}-sm_{capability}-{window}".replace("torch.", ""),
        )
        for model, capability in [
            (QWEN, 80), (QWEN, 90), (QWEN, 100), (SMALL_HEADS, 90), (ODD_HEADS, 80), (LARGE_HEADS, 90)
        ]
        for window in (0, 24)
    ],
)  # fmt: skip
def test_kernels_become_machine_code(
    model: Model, capability: int, window: int, launches: list[Launch], on_card: Callable[[int], None]
) -> None:
    on_card(capability)
    launch_all(model, rows=8, window=window)
    launch_all(model, rows=8, window=window, singles=paged_ops.TARGET_PROGRAMS)  # these are not cut into parts
    assert [launch.name for launch in launches].count("join_kernel") == 1
    for launch in launches:
        kernel = launch.compiled()
        assert kernel.asm["cubin"]
        assert kernel.metadata.shared <= SMALLEST_SHARED_BYTES


def test_no_step_waits_for_a_compiler(launches: list[Launch], on_card: Callable[[int], None]) -> None:
    """What changes from step to step, 1s and multiples of 16 included, is not compiled into a kernel."""
    on_card(90)
    sizes = [(1, 1, 1, 1), (7, 3, 2, 5), (16, 16, 16, 16), (33, 48, 1, 160)]
    for rows, singles, chunks, tiles in sizes:
        launch_all(QWEN, rows=rows, window=0, singles=singles, chunks=chunks, tiles=tiles)
    kernels: dict[str, set[str]] = {}
    for launch in launches:
        kernels.setdefault(launch.name, set()).add(launch.compiled().hash)
    assert {name: len(hashes) for name, hashes in kernels.items()} == {
        "write_kernel": 1,
        "chunks_kernel": 1,
        "singles_kernel": 1,
        "join_kernel": 1,
    }
