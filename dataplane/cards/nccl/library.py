"""NCCL's communicators by CuPy, the only place that knows either. CuPy lets other threads run during every call of the
library, an abort may so end a call that another thread is in.

NCCL is not asked for time-outs: its settings (NCCL_SOCKET_RETRY_CNT and the like) bound single steps of making a
communicator, none of them bounds a wait for a rank that has not come. Non-blocking communicators, which NCCL has, say
"in progress" with a status that CuPy does not know.
"""

import contextlib
import importlib
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager
from typing import Any, cast

from dataplane.cards.device import Device, DeviceMemory, Stream
from dataplane.cards.nccl.communicator import UNIQUE_ID_BYTES, CommunicatorError, LibraryThreads
from dataplane.cards.nccl.pair import PairParts


class NcclLibrary:
    """NCCL on the card `ordinal`, as this process counts them. Thread-safe."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._nccl, self._refusal = _load()

    def refusal(self) -> str | None:
        """Return why no communicator can be made here, if so."""
        return self._refusal

    def new_id(self) -> bytes:
        """Return a fresh unique id. Raises CommunicatorError."""
        self._check("making an id")
        with _failing_as("making an id"):
            return self._nccl.get_unique_id()

    def make(self, unique_id: bytes, num_ranks: int, rank: int) -> "NcclCommunicator":
        """Return the communicator once all ranks have come. Raises CommunicatorError."""
        self._check("making a communicator")
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise CommunicatorError("making a communicator", f"an id of {len(unique_id)} bytes")
        with _failing_as("making a communicator"):
            _use_card(self._ordinal)
            handle = self._nccl.NcclCommunicator(num_ranks, unique_id, rank)
        return NcclCommunicator(self._nccl, handle, num_ranks - 1 - rank, self._ordinal)

    def _check(self, what: str) -> None:
        if self._refusal is not None:
            raise CommunicatorError(what, self._refusal)


class NcclCommunicator:
    """One end. `peer`: the other rank, or this one where there is no other."""

    def __init__(self, nccl: Any, handle: Any, peer: int, ordinal: int) -> None:
        self._nccl = nccl
        self._handle = handle
        self._peer = peer
        self._ordinal = ordinal

    def group(self) -> AbstractContextManager[None]:
        """Begin the operations inside together when it ends. Raises CommunicatorError."""
        return self._group()

    def send(self, memory: DeviceMemory, first_byte: int, num_bytes: int, stream: Stream) -> None:
        """Send bytes to the peer. Raises CommunicatorError."""
        with _failing_as("sending"):
            pointer = memory.pointer + first_byte
            self._handle.send(pointer, num_bytes, self._nccl.NCCL_UINT8, self._peer, stream.handle)

    def receive(self, memory: DeviceMemory, first_byte: int, num_bytes: int, stream: Stream) -> None:
        """Receive bytes from the peer. Raises CommunicatorError."""
        with _failing_as("receiving"):
            pointer = memory.pointer + first_byte
            self._handle.recv(pointer, num_bytes, self._nccl.NCCL_UINT8, self._peer, stream.handle)

    def failure(self) -> str | None:
        """Return the communicator's asynchronous error, if it has one."""
        try:
            with _failing_as("an operation under way"):
                self._handle.check_async_error()
        except CommunicatorError as error:
            return str(error)
        return None

    def abort(self) -> None:
        """End what is under way and free the communicator; may block."""
        with contextlib.suppress(CommunicatorError), _failing_as("aborting"):
            _use_card(self._ordinal)
            self._handle.abort()

    @contextlib.contextmanager
    def _group(self) -> Generator[None]:
        with _failing_as("a group"):
            _use_card(self._ordinal)
            self._nccl.groupStart()
        try:
            yield
        finally:  # whatever was raised inside, this thread's group must not stay open
            with _failing_as("a group"):
                self._nccl.groupEnd()


def pair_parts(device: Device, ordinal: int) -> PairParts:
    """Return with what a worker on the card `ordinal` makes its communicators."""
    return PairParts(device, NcclLibrary(ordinal), LibraryThreads())


def _load() -> tuple[Any, str | None]:
    """Return CuPy's module of NCCL, and why it cannot be used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a missing library CuPy makes a warning of five lines
        try:
            nccl = cast(Any, importlib.import_module("cupy.cuda.nccl"))
        except ImportError as error:
            return None, f"cupy: {error}"
    return nccl, None if nccl.available else "the NCCL library is not installed"


def _use_card(ordinal: int) -> None:
    """Make the card this thread's: NCCL takes it from there."""
    cast(Any, importlib.import_module("cupy")).cuda.Device(ordinal).use()


@contextlib.contextmanager
def _failing_as(what: str) -> Generator[None]:
    try:
        yield
    except (RuntimeError, KeyError) as error:  # KeyError: a status that CuPy has no name for
        raise CommunicatorError(what, str(error)) from error
