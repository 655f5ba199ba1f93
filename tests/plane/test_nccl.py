"""Reads over pairs, from end to end: what becomes of them when a pair cannot be made, breaks, or is knocked at by
strangers; two workers that read from each other. And the library behind, as far as that goes without a card."""

import asyncio
import contextlib
import gc
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.cards import limits
from dataplane.cards.nccl import library as nccl
from dataplane.cards.nccl.communicator import CommunicatorError
from dataplane.cards.nccl.library import NcclCommunicator, NcclLibrary
from dataplane.cards.nccl.pair import BUFFER_BYTES
from dataplane.cards.nccl.pair_core import ReaderCore
from dataplane.carriers.kv_arena import AUTO
from dataplane.ends.reader import PlaneReader, ReadRequest
from dataplane.protocol.stream import (
    Header,
    Kind,
    PairOpen,
    TransferFailedError,
    encode_frame,
    encode_header,
)
from schemas.ids import WorkerId
from tests import gpu
from tests.plane.harness import (
    DEADLINE_S,
    SECRETS,
    Holder,
    Target,
    now_ms,
    random_kv,
    read_kv,
    running,
    use_cards,
)
from tests.plane.pair_world import memory, wait_until
from tests.plane.test_faults import Midway, fails

OFFERED = ("nccl", "shm", "tcp")


@pytest.fixture(autouse=True)
def two_cards(monkeypatch: pytest.MonkeyPatch, simulated: bool) -> None:
    """Holders and targets are on cards that do not see each other; limits of time are short."""
    use_cards(holder=True, target=True, kind="apart")
    monkeypatch.setattr(limits, "WATCH_S", 0.05)


@pytest.fixture
def holder(make_holder: Callable[..., Holder]) -> Holder:
    return make_holder(OFFERED)


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.cards.nccl.paired.PairedHolder.frame_bytes", 4096)


def right(target: Target, holder: Holder, end: int = 300) -> bool:
    return np.array_equal(target.landed(end), holder.kv[:, :, :end])


def shut(*ends: Holder | Target) -> None:
    for end in ends:
        assert end.card is not None
        end.card.library.shut()


# The choice.


def test_auto_takes_it_between_cards_that_do_not_see_each_other(holder: Holder, target: Target) -> None:
    holder.compute_all()
    stats = target.read_from(holder, AUTO).stats
    assert (stats.carrier, stats.reason) == ("nccl", "two cards")
    assert right(target, holder)


def test_without_an_offer_another_is_taken(holder: Holder, target: Target) -> None:
    holder.compute_all()
    endpoint = msgspec.structs.replace(holder.endpoint, pair=None)
    landed = target.reader.read_blocking(target.request(endpoint, holder.ticket(), AUTO, 300))
    assert landed.stats.carrier == "shm"


def card_of(end: Holder | Target) -> Any:
    assert end.card is not None
    return end.card


UNMADE: dict[str, Callable[[Holder, Target], object]] = {
    "the holder's library fails": lambda h, t: card_of(h).library.fail_next("make"),
    "the reader's library fails": lambda h, t: card_of(t).library.fail_next("make"),
    "the holder's library stalls": lambda h, t: card_of(h).library.stall_next("make"),
    "the reader's library stalls": lambda h, t: card_of(t).library.stall_next("make"),
    "the holder has no memory": lambda h, t: card_of(h).device.fail_next("allocate"),
    "the reader has no memory": lambda h, t: card_of(t).device.fail_next("allocate"),
}


@pytest.mark.parametrize("fault", UNMADE)
def test_a_pair_that_cannot_be_made_costs_no_read(
    holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The same read goes another way, and so do those that follow; the one that asked for it alone fails."""
    monkeypatch.setattr(limits, "JOIN_S", 0.3)
    monkeypatch.setattr(limits, "INIT_TIMEOUT_S", 0.3)
    holder.compute_all()
    UNMADE[fault](holder, target)
    stats = target.read_from(holder, AUTO).stats
    assert (stats.carrier, stats.reason.partition(",")[0]) == ("shm", "one host")
    assert right(target, holder)
    target.array[:] = 0
    assert target.read_from(holder, AUTO).stats.carrier == "shm", "it is not tried again at once"
    assert right(target, holder)
    shut(holder, target)


def test_asked_for_alone_it_fails_as_a_carrier(holder: Holder, target: Target) -> None:
    holder.compute_all()
    card_of(target).library.fail_next("make")
    error = fails(lambda: target.read_from(holder, "nccl"))
    assert error.code == "carrier" and "failed as it was told to" in error.detail
    assert wait_until(lambda: _reads(target, holder)), "the next offer is as good as new"
    shut(holder)  # its library waits for the reader's rank of the first offer still, as NCCL does


def _reads(target: Target, holder: Holder) -> bool:
    with contextlib.suppress(TransferFailedError):
        return target.read_from(holder, "nccl").stats.carrier == "nccl" and right(target, holder)
    return False


# In mid-stream.

BREAKS: dict[str, Callable[[Holder, Target], object]] = {
    "an error at the holder": lambda h, t: setattr(card_of(h).library.made[-1], "error", "a link went down"),
    "an error at the reader": lambda h, t: setattr(card_of(t).library.made[-1], "error", "a link went down"),
    "the holder's group fails": lambda h, t: card_of(h).library.fail_next("group"),
    "the reader's group fails": lambda h, t: card_of(t).library.fail_next("group"),
    "the holder's group stalls": lambda h, t: card_of(h).library.stall_next("group"),
    "the reader's group stalls": lambda h, t: card_of(t).library.stall_next("group"),
    "nothing crosses any more": lambda h, t: setattr(card_of(t).library.made[-1], "is_lost", True),
}


@pytest.mark.parametrize("fault", BREAKS)
@pytest.mark.parametrize("num_reads", [1, 3])
def test_a_pair_that_breaks_in_mid_stream(
    holder: Holder, target: Target, small_frames: None, monkeypatch: pytest.MonkeyPatch, fault: str, num_reads: int
) -> None:
    """All reads over it fail in bounded time, with what is right of them; the next ones read over another."""
    monkeypatch.setattr(limits, "SLOT_TIMEOUT_S", 0.5)
    holder.compute(300, end=100)
    started, errors = threading.Semaphore(0), list[TransferFailedError]()

    def read() -> None:
        errors.append(fails(lambda: target.read_from(holder, "nccl", lambda _: started.release())))

    with contextlib.ExitStack() as stack:
        for _ in range(num_reads):
            stack.enter_context(running(read))
        for _ in range(num_reads):
            assert started.acquire(timeout=DEADLINE_S)
        BREAKS[fault](holder, target)
        holder.compute(50, start=100)
    assert len(errors) == num_reads
    for error in errors:
        assert error.code in ("closed", "device"), error
        assert right(target, holder, error.num_landed_tokens)
    monkeypatch.undo()
    use_cards(holder=True, target=True, kind="apart")
    holder.progress.finish(b"")
    target.array[:] = 0
    assert wait_until(lambda: _reads(target, holder))
    shut(holder, target)


@pytest.mark.parametrize("end", ["holder", "reader"])
def test_a_card_that_dies(holder: Holder, target: Target, end: str) -> None:
    midway = Midway(holder, target, "nccl")
    with running(midway.run):
        assert midway.started.wait(DEADLINE_S)
        card_of(holder if end == "holder" else target).device.die()
        for layer in range(holder.layout.num_layers):  # what has been computed is sent, or would be
            holder.progress.advance(layer, 300)
    assert midway.error is not None and midway.error.code in ("device", "closed")
    assert right(target, holder, midway.error.num_landed_tokens)


def test_a_reader_that_comes_back_as_another(
    holder: Holder, target: Target, make_holder: Callable[..., Holder]
) -> None:
    """It died and was started again: a name as before, a card's memory of its own, the pair it was offered is spent."""
    holder.compute_all()
    target.read_from(holder, "nccl")
    successor = Target()
    try:
        assert wait_until(lambda: _reads(successor, holder))
        assert wait_until(lambda: _reads(target, holder)), "and so may the first, if it lives after all"
    finally:
        successor.close()


def test_a_holder_that_goes(holder: Holder, target: Target) -> None:
    midway = Midway(holder, target, "nccl")
    with running(midway.run):
        assert midway.started.wait(DEADLINE_S)
        holder.server.close()
    assert midway.error is not None and midway.error.code == "closed"
    assert wait_until(lambda: not card_of(target).library.num_alive), "the reader's end has ended as well"


# Cancelled.


async def start_read(target: Target, holder: Holder, on_started: Callable[[str], None]) -> asyncio.Task[Any]:
    request = target.request(holder.endpoint, holder.ticket(), "nccl", 300)
    return asyncio.create_task(target.reader.read(request, on_started))


async def test_cancelled_while_the_pair_is_made(holder: Holder, target: Target) -> None:
    card_of(target).library.stall_next("make")
    task = await start_read(target, holder, lambda _: None)
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [t for t in threading.enumerate() if t.name == "kv-read"], "the thread has ended first"
    shut(holder, target)


@pytest.mark.parametrize("held_up", ["holder", "reader"])
async def test_cancelled_while_a_frame_is_under_way(
    holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch, held_up: str
) -> None:
    """Another read over the pair, before and after, has its bytes; the one that was cancelled writes no more."""
    started = asyncio.Event()
    task = await start_read(target, holder, lambda _: started.set())
    holder.compute(300, end=20)
    await started.wait()
    card = card_of(holder if held_up == "holder" else target)
    card.device.stall()
    compute = asyncio.create_task(asyncio.to_thread(holder.compute, 300, 20))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.sleep(0.05)
    card.device.resume()
    with pytest.raises(asyncio.CancelledError):
        await task
    await compute
    target.array[:] = 0xAB
    await asyncio.to_thread(holder.gate.wait_outcome)
    assert (target.array == 0xAB).all(), "no late write"
    holder.progress.finish(b"")
    landed = await asyncio.to_thread(target.read_from, holder, "nccl")
    assert landed.stats.carrier == "nccl" and right(target, holder)
    assert len(card_of(target).library.made) == 1, "the pair is the same"


async def test_cancelled_while_the_card_writes(holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame is being scattered, and not committed yet: the read ends when it has been, however often it is
    cancelled."""
    go_on = threading.Event()
    holder.gate.before_recheck = lambda _: go_on.wait(DEADLINE_S) and None
    loop, scattering, take = asyncio.get_running_loop(), asyncio.Event(), ReaderCore.take

    def stalls(core: ReaderCore, *args: Any) -> int | None:
        buffer = take(core, *args)
        if buffer is not None:
            card_of(target).device.stall()
            loop.call_soon_threadsafe(scattering.set)
        return buffer

    monkeypatch.setattr(ReaderCore, "take", stalls)
    holder.compute_all()
    task = await start_read(target, holder, lambda _: None)
    await scattering.wait()
    for _ in range(5):
        task.cancel()
        await asyncio.sleep(0.05)
    assert not task.done(), "the card may still write"
    card_of(target).device.resume()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
    assert right(target, holder), "it did"


# Beside each other.


def test_two_workers_that_read_from_each_other(make_holder: Callable[..., Holder], small_frames: None) -> None:
    """Each serves out of its arena and reads into it at once: a pair each way, over one card at each end."""
    workers = [make_holder(("nccl",), kv=random_kv(300, seed=seed)) for seed in (1, 2)]
    readers = [PlaneReader(worker.arena, worker.shape, SECRETS) for worker in workers]
    free = (BlockTable((Segment(42, 6), Segment(10, 10), Segment(21, 9))),)
    with contextlib.ExitStack() as stack:
        for reader, other in zip(readers, reversed(workers), strict=True):
            request = ReadRequest(other.endpoint, other.ticket(), "nccl", free, 0, 300, DEADLINE_S)
            stack.enter_context(running(lambda reader=reader, request=request: reader.read_blocking(request)))
        for worker in workers:
            stack.enter_context(running(worker.compute_all))
    for reader, worker, other in zip(readers, workers, reversed(workers), strict=True):
        assert np.array_equal(read_kv(worker.array, worker.shape, free, 0, 300), other.kv)
        assert np.array_equal(read_kv(worker.array, worker.shape, worker.tables, 0, 300), worker.kv)
        reader.close()


def test_reads_of_several_leases_share_a_pair(holder: Holder, target: Target, small_frames: None) -> None:
    leases = [holder.grant(f"lease-{number}") for number in range(1, 5)]

    def read(lease: Any) -> None:
        target.read_from(holder, "nccl", ticket=holder.ticket(lease))

    with contextlib.ExitStack() as stack:
        for lease, _ in leases:
            stack.enter_context(running(lambda lease=lease: read(lease)))
        holder.compute(64)
        for _, progress in leases:
            for layer in range(holder.layout.num_layers):
                progress.advance(layer, 300)
            card_of(holder).wait()
            progress.finish(b"")
    assert right(target, holder)
    assert len(card_of(holder).library.made) == 1


# Strangers at the port.


@contextlib.contextmanager
def knock(holder: Holder) -> Iterator[socket.socket]:
    with socket.create_connection((holder.endpoint.host, holder.endpoint.port), timeout=DEADLINE_S) as sock:
        sock.settimeout(DEADLINE_S)
        yield sock


def hears(sock: socket.socket) -> bytes:
    heard = b""
    with contextlib.suppress(ConnectionError):
        while chunk := sock.recv(4096):
            heard += chunk
    return heard


@pytest.mark.parametrize(
    ("ticket", "generation", "code"),
    [
        (lambda holder: holder.ticket(secret=b"another"), 1, b'"ticket"'),
        (lambda holder: holder.ticket(expires_at_ms=now_ms() - 1), 1, b'"ticket"'),
        (lambda _: "junk", 1, b'"ticket"'),
        (lambda holder: holder.ticket(reader=WorkerId("decode-9")), 1, b'"lease"'),
        (lambda holder: holder.ticket(lease_id="another"), 1, b'"lease"'),
        (Holder.ticket, 0, b'"carrier"'),
        (Holder.ticket, 2, b'"carrier"'),
        (Holder.ticket, -1, b'"carrier"'),
    ],
)
def test_pairs_that_are_not_theirs(
    holder: Holder, target: Target, ticket: Callable[[Holder], str], generation: int, code: bytes
) -> None:
    holder.compute_all()
    with knock(holder) as sock:
        sock.sendall(encode_frame(Kind.PAIR_OPEN, PairOpen(ticket=ticket(holder), generation=generation)))
        assert code in hears(sock)
    assert target.read_from(holder, "nccl").stats.carrier == "nccl"
    assert right(target, holder)


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n" + bytes(64), encode_header(Header(Kind.SLOT, length=8, tag=1, at=1)), b"K"]
)
def test_a_reader_that_talks_on_a_pair_s_wire(holder: Holder, target: Target, said: bytes) -> None:
    """Only the holder says slots. The pair ends, the next is whole."""
    generation = holder.endpoint.pair.generation if holder.endpoint.pair else 0
    with knock(holder) as sock:
        sock.sendall(encode_frame(Kind.PAIR_OPEN, PairOpen(ticket=holder.ticket(), generation=generation)) + said)
        sock.shutdown(socket.SHUT_WR)
        hears(sock)
    holder.compute_all()
    assert wait_until(lambda: _reads(target, holder))
    shut(holder, target)


def test_reads_over_a_pair_that_is_not_theirs(holder: Holder, target: Target) -> None:
    """A read names its pair; a read of another name, or of a pair that is not open, is refused."""
    holder.compute_all()
    request = target.request(holder.endpoint, holder.ticket(), "nccl", 300)
    joined = target.reader._side.pairs
    assert joined is not None
    original = joined.join

    def another_generation(*args: Any) -> Any:
        pair = original(*args)
        return SimpleNamespace(decide=pair.decide, leave=pair.leave, generation=pair.generation + 1)

    joined.join = another_generation  # type: ignore[method-assign]
    error = fails(lambda: target.reader.read_blocking(request))
    assert error.code == "carrier" and "no such pair" in error.detail
    joined.join = original  # type: ignore[method-assign]
    assert target.read_from(holder, "nccl").stats.carrier == "nccl"


# Bytes.


def test_damage_between_the_kernels_is_found(holder: Holder, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit of a pair's buffer changes after it was received and before it is scattered."""
    holder.compute_all()
    target.read_from(holder, "nccl")
    assert target.reader._side.pairs is not None
    (pair,) = target.reader._side.pairs._pairs.values()
    take = ReaderCore.take

    def damaged(core: ReaderCore, *args: Any) -> int | None:
        buffer = take(core, *args)
        if buffer is not None:
            memory(pair).array[buffer * BUFFER_BYTES + 5000] ^= 16
        return buffer

    monkeypatch.setattr(ReaderCore, "take", damaged)
    error = fails(lambda: target.read_from(holder, "nccl"))
    assert (error.code, error.num_landed_tokens) == ("digest", 0)


# The library, without a card.


def test_it_imports_quietly_and_says_why_it_cannot_be_had() -> None:
    code = """
import sys, warnings
warnings.simplefilter("error")
from dataplane.cards.nccl import library as nccl
assert "cupy" not in sys.modules
print(nccl.NcclLibrary(0).refusal())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("None", "the NCCL library is not installed") or "cupy" in done.stdout
    assert not done.stderr


class Handle:
    """Stands for CuPy's communicator and its module: notes what it is asked."""

    NCCL_UINT8 = 1
    available = True

    def __init__(self, *args: Any) -> None:
        self.said: list[tuple[Any, ...]] = [("make", *args)]
        self.error: Exception | None = None

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    def NcclCommunicator(self, *args: Any) -> "Handle":
        self.said.append(("make", *args))
        return self

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any) -> None:
            self.said.append((name, *args))
            if self.error is not None:
                raise self.error

        return call


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> Handle:
    made = Handle()
    monkeypatch.setattr(nccl, "_load", lambda: (made, None))
    monkeypatch.setattr(nccl, "_use_card", lambda ordinal: made.said.append(("use", ordinal)))
    return made


@pytest.mark.parametrize(("num_ranks", "rank", "peer"), [(2, 0, 1), (2, 1, 0), (1, 0, 0)])
def test_what_cupy_is_asked(handle: Handle, num_ranks: int, rank: int, peer: int) -> None:
    library = NcclLibrary(3)
    unique_id = library.new_id()
    communicator = library.make(unique_id, num_ranks, rank)
    assert handle.said[-1] == ("make", num_ranks, bytes(range(128)), rank)
    memory, stream = SimpleNamespace(pointer=1000), SimpleNamespace(handle=77)
    del handle.said[:]
    with communicator.group():
        communicator.send(memory, 24, 8, stream)  # type: ignore[arg-type]
        communicator.receive(memory, 48, 16, stream)  # type: ignore[arg-type]
    assert handle.said == [
        ("use", 3), ("groupStart",), ("send", 1024, 8, 1, peer, 77), ("recv", 1048, 16, 1, peer, 77), ("groupEnd",),
    ]  # fmt: skip


def test_a_group_is_ended_whatever_happens_in_it(handle: Handle) -> None:
    communicator = NcclLibrary(0).make(bytes(128), 2, 0)
    with pytest.raises(RuntimeError, match="ours"), communicator.group():
        raise RuntimeError("ours")
    assert handle.said[-1] == ("groupEnd",)


@pytest.mark.parametrize("error", [RuntimeError("NCCL_ERROR_SYSTEM_ERROR: unhandled"), KeyError(6)])
def test_every_failure_of_the_library_is_one_error(handle: Handle, error: Exception) -> None:
    communicator = NcclLibrary(0).make(bytes(128), 2, 0)
    assert communicator.failure() is None
    handle.error = error
    memory, stream = SimpleNamespace(pointer=0), SimpleNamespace(handle=0)
    assert communicator.failure() is not None
    communicator.abort()
    for call in (
        lambda: communicator.send(memory, 0, 8, stream),  # type: ignore[arg-type]
        lambda: communicator.receive(memory, 0, 8, stream),  # type: ignore[arg-type]
        lambda: communicator.group().__enter__(),
    ):
        with pytest.raises(CommunicatorError):
            call()


def test_no_library_no_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_load", lambda: (None, "the NCCL library is not installed"))
    library = NcclLibrary(0)
    for call in (library.new_id, lambda: library.make(bytes(128), 2, 0)):
        with pytest.raises(CommunicatorError, match="not installed"):
            call()
    with pytest.raises(CommunicatorError, match="5 bytes"):
        monkeypatch.setattr(nccl, "_load", lambda: (Handle(), None))
        NcclLibrary(0).make(bytes(5), 2, 0)


# On a card.


@gpu.needs_gpu
def test_one_rank_sends_to_itself_on_a_card() -> None:
    library = NcclLibrary(0)
    if (refusal := library.refusal()) is not None:
        pytest.skip(refusal)
    with contextlib.closing(gpu.card()) as device:
        communicator = library.make(library.new_id(), 1, 0)
        assert isinstance(communicator, NcclCommunicator)
        source, target, stream = device.allocate(1 << 20), device.allocate(1 << 20), device.new_stream()
        done, staging = device.new_event(), np.zeros((2, 1 << 20), np.uint8)
        staging[0] = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
        device.pin(staging.reshape(-1))
        device.upload(stream, staging[0], source, 0)
        for first, size in ((0, 8), (8, 4096), (4104, (1 << 20) - 4104)):
            with communicator.group():
                communicator.send(source, first, size, stream)
                communicator.receive(target, first, size, stream)
        device.download(stream, target, 0, staging[1])
        done.record(stream)
        assert done.wait(DEADLINE_S) and communicator.failure() is None
        assert np.array_equal(*staging)
        communicator.abort()
        device.unpin(staging.reshape(-1))
        for part in (source, target, stream, done):
            part.close()
    gc.collect()


@gpu.needs_gpu
def test_a_rank_that_does_not_come_is_given_up_on_a_card() -> None:
    """The making of a communicator does not return; the thread that makes it is left, and the process goes on."""
    library = NcclLibrary(0)
    if (refusal := library.refusal()) is not None:
        pytest.skip(refusal)
    code = """
import threading, time
from dataplane.cards.nccl.library import NcclLibrary
library = NcclLibrary(0)
unique_id = library.new_id()
thread = threading.Thread(target=lambda: library.make(unique_id, 2, 0), daemon=True)
thread.start()
time.sleep(2)
assert thread.is_alive(), "it came back"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_S)


@gpu.needs_gpu
def test_two_ranks_on_two_cards() -> None:
    from dataplane.cards.cuda.cuda_driver import count_devices

    if count_devices() < 2:
        pytest.skip("two ranks need two cards: NCCL does not let two share one")
    libraries = [NcclLibrary(ordinal) for ordinal in range(2)]
    unique_id, made = libraries[0].new_id(), dict[int, NcclCommunicator]()
    threads = [
        threading.Thread(target=lambda rank=rank: made.__setitem__(rank, libraries[rank].make(unique_id, 2, rank)))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(made) == 2
    started = time.monotonic()
    for communicator in made.values():
        communicator.abort()
    assert time.monotonic() - started < DEADLINE_S
