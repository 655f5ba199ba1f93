"""The engine's runtime on an NVIDIA card: its stream, pinned memory, graphs. Imported only where a card is asked for.

What runs here cannot be tried without a card; it is kept to what torch's own calls do, one line each.
"""

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dataplane.blocks.layout import ArenaShape
from dataplane.cards.device import SupportsDLPack
from services.engine.checkpoint import Checkpoint
from services.engine.cpu.attention import KVTensors
from services.engine.cpu.model import load_model
from services.engine.cuda import paged_ops
from services.engine.cuda.backends import find_backend
from services.engine.cuda.device_engine import DeviceEngine
from services.engine.cuda.device_load import Card, make_device_engine
from services.engine.cuda.protocol import HostBuffer, MarkSource, Recording
from services.engine.cuda.step_plan import StepLimits
from services.errors import CheckpointError, UserError

MIN_CAPABILITY = (8, 0)
"""Ampere: bfloat16, and what Triton's compiler asks for."""
MAX_TOKENS = 4096
"""Room for the tokens of one step; more rows grow it."""
GIB = 1 << 30


class DeviceUnusableError(UserError):
    """This machine's card cannot be used. One line that says what to do."""


def check_card(index: int) -> torch.device:
    """Return the card of this index as torch's device. Raises DeviceUnusableError."""
    if importlib.util.find_spec("triton") is None:
        raise DeviceUnusableError("triton is not installed: install kvmesh[gpu], or take --device cpu")
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


class CudaRuntime:
    """A stream of its own: on the default stream, work would wait for that of others."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self.stream = torch.cuda.Stream(device)
            # A wait that blocks leaves its core to the event loop; it wakes some microseconds later.
            self._done = torch.cuda.Event(blocking=True)
        self._tokens = torch.empty(MAX_TOKENS, dtype=torch.int64, pin_memory=True)

    @property
    def stream_handle(self) -> int:
        return int(self.stream.cuda_stream)

    def active(self) -> AbstractContextManager[object]:
        """Both the device and the stream: torch keeps either per thread."""
        stack = ExitStack()
        stack.enter_context(torch.cuda.device(self.device))  # alone, the stream would end by making a context on card 0
        stack.enter_context(cast(AbstractContextManager[object], torch.cuda.stream(self.stream)))
        return stack

    def host_buffer(self, num_bytes: int) -> HostBuffer:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return HostBuffer(tensor, tensor.numpy())

    def wait(self) -> None:
        self._done.record(self.stream)
        self._done.synchronize()

    def fetch(self, tensor: Tensor) -> list[int]:
        count = tensor.numel()
        if count > len(self._tokens):
            self._tokens = torch.empty(1 << (count - 1).bit_length(), dtype=torch.int64, pin_memory=True)
        tokens = self._tokens[:count]
        tokens.copy_(tensor, non_blocking=True)
        self.wait()
        return cast(list[int], tokens.tolist())  # pyright: ignore[reportUnknownMemberType]


class CudaRecorder:
    """Records CUDA graphs on the engine's stream; they share one pool of memory."""

    def __init__(self, runtime: CudaRuntime) -> None:
        self._stream = runtime.stream
        self.start_afresh()

    def start_afresh(self) -> None:
        self._pool = cast(Any, torch.cuda).graph_pool_handle()

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        _prove_silent(compute)
        graph = torch.cuda.CUDAGraph()
        # The plane's threads allocate and ask for events meanwhile, which must not spoil this thread's recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = compute()
        return _CudaRecording(graph, output)


def _prove_silent(compute: Callable[[], Tensor]) -> None:
    """Run it once where each wait for the card raises: one in a recording would leave torch's allocator recording."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        compute()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, output: Tensor) -> None:
        self._graph = graph
        self.output = output

    def replay(self) -> None:
        self._graph.replay()


def load_cuda_engine(
    checkpoint: Checkpoint,
    *,
    arena: SupportsDLPack,
    shape: ArenaShape,
    marks: MarkSource,
    card: int = 0,
    token_budget: int = 512,
    max_sequences: int = 256,
) -> DeviceEngine:
    """Load the weights onto a card and return an engine that has proven itself against the library's own attention.

    `arena`: the bytes of an arena of `shape` on this card, nobody's yet: its first blocks are written to. `marks`:
    where the marks of layer listeners come from. `token_budget`: the most tokens of a step, `max_sequences`: the most
    sequences in one, whose decodes run as CUDA graphs.
    Raises DeviceUnusableError without a fit card, driver or compiler, CheckpointError as `load_engine`.
    """
    device = check_card(card)
    runtime = CudaRuntime(device)
    with runtime.active():
        _check_kernels(device)
        model = _to_card(load_model(checkpoint, shape.layout.dtype), checkpoint, device)
        parts = Card(runtime, marks, CudaRecorder(runtime), find_backend(shape.layout, device))
        kv = KVTensors(shape, torch.from_dlpack(arena))
        limits = StepLimits(token_budget, max_sequences, checkpoint.context_length)
        engine = make_device_engine(model, checkpoint, kv, parts, limits)
        runtime.wait()
    return engine


def _check_kernels(device: torch.device) -> None:
    """Compile and launch a small kernel. Raises DeviceUnusableError."""
    try:
        row = torch.zeros(1, 1, 16, device=device)
        paged_ops.write_kv(row, row, row.clone(), row.clone(), torch.zeros(1, dtype=torch.int32, device=device))
        torch.cuda.synchronize(device)
    except Exception as error:  # compilers, loaders and drivers fail each in their own way
        reason = str(error).partition("\n")[0][:200]
        raise DeviceUnusableError(
            f"Triton cannot run a kernel on {torch.cuda.get_device_name(device)} ({type(error).__name__}: {reason}): "
            "it needs a C compiler (gcc), Python's headers (python3-dev) and a driver for CUDA 13, or take --device cpu"
        ) from error


def _to_card(model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device) -> PreTrainedModel:
    """Move the weights to the card. Raises CheckpointError when there is no room."""
    try:
        return cast(PreTrainedModel, cast(Any, model).to(device))
    except torch.OutOfMemoryError as error:
        free, _ = torch.cuda.mem_get_info(device)
        raise CheckpointError(
            f"{checkpoint.name} does not fit on {torch.cuda.get_device_name(device)}, which has "
            f"{free / GIB:.1f} GiB left beside the KV: take less for it (--kv-mib), or a smaller model"
        ) from error
