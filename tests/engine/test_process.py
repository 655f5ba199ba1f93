"""The engine's process: how it starts and ends, whatever it says, and the channel to it."""

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.blocks.layout import BlockTable, Segment, uniform_shape
from dataplane.carriers.host import HostArena
from schemas.block import pack_tokens
from schemas.ids import RequestId
from schemas.request import SamplingParams
from services.engine.channel import Channel, IpcError
from services.engine.client import EngineStoppedError
from services.engine.interface import GrammarError
from services.engine.ipc import LoadEngine, ToProcess
from services.engine.messages import EngineMessage, StartGrammar, StopEngine, SubmitSequence
from services.engine.spawn import EngineChild, ending
from services.engine.starter import KEEPS_MEMORY
from services.errors import UserError
from tests.engine import fake_child
from tests.engine.client_rig import LAYOUT, NUM_BLOCKS, TIMEOUT, Rig
from tests.waiting import wait_until

SHAPE = uniform_shape(LAYOUT, NUM_BLOCKS)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig(in_process=True)
    made.engine.start_engine()
    yield made
    made.close()


def in_step(rig: Rig, **more: object) -> None:
    """Return while a step of a sequence "a" waits."""
    rig.gate.clear()
    rig.submit("a", max_tokens=1000, **more)
    assert rig.in_step.wait(TIMEOUT)


def again(rig: Rig) -> LoadEngine:
    """What an engine is told once only."""
    return fake_child.order_of(SHAPE, rig.arena.name, rig.arena.nonce)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (lambda rig: rig.child.process.kill(), "the engine's process was killed by SIGKILL, as the kernel does where"),
        (lambda rig: rig.child.process.send_signal(signal.SIGSEGV), "the engine's process was killed by SIGSEGV"),
        (lambda rig: (rig.fail(fake_child.DIES), rig.gate.set()), "the engine's process ended with code 7"),
        (lambda rig: (rig.fail(fake_child.BABBLES), rig.gate.set()), "the engine's process sent what makes no sense"),
        (lambda rig: rig.child.channel.send_message(again(rig)), "the engine's process ended with code 1"),
    ],
    ids=["kill", "fault", "exit", "nonsense", "what it cannot hear"],
)
def test_a_process_that_ends_fails_all_that_it_had(rig: Rig, end: Callable[[Rig], object], reason: str) -> None:
    in_step(rig)
    rig.submit("b")
    end(rig)
    failed = [rig.next(), rig.next()]
    assert {(kind, name) for kind, name, _ in failed} == {("failed", "a"), ("failed", "b")}
    assert all(said.startswith(reason) for _, _, said in failed)
    (death,) = rig.deaths
    assert 1 in death.in_step and death.had == {1, 2}
    assert rig.engine.engine_load() == (0, 0, 0)
    rig.gate.set()
    assert rig.next() == ("back", "", "")
    rig.submit("c")
    assert rig.next() == ("ended", "c", "length")
    assert not rig.engine.has_failed


@pytest.fixture
def hurried() -> Iterator[Rig]:
    """A step must not take long."""
    made = Rig(in_process=True, step_timeout_s=0.5)
    made.engine.start_engine()
    yield made
    made.close()


HUNG = "the engine's process computed nothing for 0.5 s (engine.step_timeout_s)"


def test_a_step_that_hangs_is_ended_and_says_whom_it_computed(hurried: Rig, caplog: pytest.LogCaptureFixture) -> None:
    in_step(hurried)
    hurried.submit("b")
    assert {hurried.next(), hurried.next()} == {("failed", name, HUNG) for name in ("a", "b")}
    assert hurried.deaths[0].in_step == {1}
    assert f"{HUNG} while it computed a; it is started again" in caplog.text
    hurried.gate.set()
    assert hurried.next() == ("back", "", "")


def test_a_process_that_stands_still_hangs_once_it_has_something_to_compute(hurried: Rig) -> None:
    os.kill(hurried.child.process.pid, signal.SIGSTOP)
    hurried.engine._thread.join(1.0)  # type: ignore[attr-defined]
    assert not hurried.deaths, "it has nothing to do"
    hurried.submit("a")
    assert hurried.next() == ("failed", "a", HUNG)
    assert hurried.deaths[0].had == {1}
    assert hurried.next() == ("back", "", "")
    hurried.submit("b")
    assert hurried.next() == ("ended", "b", "length")


def test_a_process_that_stood_still_for_a_while_goes_on(rig: Rig) -> None:
    in_step(rig)
    os.kill(rig.child.process.pid, signal.SIGSTOP)
    rig.gate.set()
    rig.submit("b")
    os.kill(rig.child.process.pid, signal.SIGCONT)
    assert rig.next() == ("ended", "b", "length")
    assert not rig.deaths


def test_who_dies_between_steps_computed_nobody(rig: Rig) -> None:
    rig.submit("a")
    rig.next()
    rig.child.process.kill()
    assert rig.next() == ("back", "", "")
    assert rig.deaths[0].had == rig.deaths[0].in_step == frozenset()


def test_nothing_is_taken_while_there_is_none(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    may_start = threading.Event()
    start_child = rig.start_child

    def start_later() -> EngineChild:
        assert may_start.wait(TIMEOUT)
        return start_child()

    rig.start_child = start_later  # type: ignore[assignment]
    in_step(rig)
    understood = rig.engine.start_grammar("brackets 2")
    rig.child.process.kill()
    assert rig.next()[:2] == ("failed", "a")
    assert understood.exception(TIMEOUT) is None or isinstance(understood.exception(), GrammarError)
    with pytest.raises(EngineStoppedError, match="starting"):
        rig.submit("b")
    with pytest.raises(EngineStoppedError, match="starting"):
        rig.cancel("a")
    with pytest.raises(GrammarError):
        rig.engine.start_grammar("brackets 2").result(TIMEOUT)
    may_start.set()
    rig.gate.set()
    assert rig.next() == ("back", "", "")


def test_one_that_does_not_start_is_tried_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    orders = [fake_child.order_of(SHAPE, rig.arena.name, rig.arena.nonce, name=name) for name in ("refused", "fake")]
    rig.start_child = lambda: EngineChild(orders.pop(0), "decode-0", rig.control.spawn)  # type: ignore[assignment]
    rig.child.process.kill()
    assert rig.next() == ("back", "", "")
    assert f"the engine does not start: {fake_child.REFUSED}" in caplog.text and not orders


def no_process(name: str, fds: tuple[int, int, int]) -> "subprocess.Popen[bytes]":
    """As where the processes of a container are counted."""
    raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_where_no_process_is_to_be_had_it_is_tried_again(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    order, start_child, tried = fake_child.order_of(SHAPE, rig.arena.name, rig.arena.nonce), rig.start_child, [0]

    def try_to_start() -> EngineChild:
        tried[0] += 1
        return start_child() if tried[0] > 3 else EngineChild(order, "decode-0", no_process)

    rig.start_child = try_to_start  # type: ignore[assignment]
    rig.child.process.kill()
    assert rig.next() == ("back", "", "")
    assert "the engine does not start: [Errno 11] Resource temporarily unavailable" in caplog.text
    rig.submit("b")
    assert rig.next() == ("ended", "b", "length")


def test_a_failed_start_leaves_no_descriptor(rig: Rig) -> None:
    order = fake_child.order_of(SHAPE, rig.arena.name, rig.arena.nonce)
    gc.collect()  # what others have left
    before = num_descriptors()
    for _ in range(10):
        with pytest.raises(BlockingIOError):
            EngineChild(order, "decode-0", no_process)
    assert num_descriptors() <= before


def test_an_engine_that_does_not_load_in_time_is_ended(rig: Rig) -> None:
    child = rig.start_child()
    os.kill(child.process.pid, signal.SIGSTOP)
    with pytest.raises(UserError, match="has not loaded the model within 0 s"):
        child.wait_ready(0.1)
    assert child.has_ended


def test_what_a_group_is_told_is_not_for_the_engine(rig: Rig) -> None:
    """Of a terminal that is closed, or `systemctl kill`."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        rig.child.process.send_signal(number)
    rig.submit("a")
    assert rig.next() == ("ended", "a", "length")
    assert not rig.deaths and not rig.child.has_ended


def test_what_goes_wrong_here_is_the_engine_s_death_and_no_end(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    class BadListener:
        def advance(self, layer: int, num_tokens: int, mark: int = 0) -> None:
            raise RuntimeError("nobody foresaw this")

    rig.submit("a", listener=BadListener())
    assert rig.next()[:2] == ("failed", "a")
    assert "nobody foresaw this" in caplog.text
    assert rig.next() == ("back", "", "")
    rig.submit("b")
    assert rig.next() == ("ended", "b", "length")


def test_one_that_is_being_started_is_ended_too() -> None:
    made = Rig(in_process=True)
    made.engine.start_engine()
    started = threading.Event()
    start_child = made.start_child

    def start_slowly() -> EngineChild:
        child = start_child()
        os.kill(child.process.pid, signal.SIGSTOP)
        started.set()
        return child

    made.start_child = start_slowly  # type: ignore[assignment]
    made.child.process.kill()
    assert started.wait(TIMEOUT)
    assert made.engine.stop_engine(0.1)
    made.close()
    assert made.child.process.poll() is not None


def test_a_step_that_does_not_end_is_ended_with_its_process(rig: Rig) -> None:
    in_step(rig)
    rig.submit("b")
    assert rig.engine.stop_engine(0.01)
    assert {rig.next(), rig.next()} == {("failed", name, "the engine was stopped") for name in ("a", "b")}
    assert not rig.deaths
    with pytest.raises(EngineStoppedError):
        rig.submit("c")
    with pytest.raises(EngineStoppedError):
        rig.cancel("a")


def test_what_a_terminal_or_an_init_sends_to_all_does_not_end_it(rig: Rig) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        rig.child.process.send_signal(number)
    rig.submit("r")
    assert rig.next() == ("ended", "r", "length")


def test_it_writes_into_the_worker_s_arena(rig: Rig) -> None:
    before = rig.arena.array.copy()
    rig.submit("r")
    rig.next()
    assert not np.array_equal(rig.arena.array, before)


def test_an_engine_that_cannot_be_made_says_why_in_a_line() -> None:
    arena = HostArena.create(SHAPE)
    try:
        for name, reason in (("refused", fake_child.REFUSED), ("broken", "ended with code 1 while it loaded")):
            control = fake_child.Control()
            order = fake_child.order_of(SHAPE, arena.name, arena.nonce, name=name)
            with pytest.raises(UserError, match=reason):
                EngineChild(order, "decode-0", control.spawn).wait_ready()
            control.close()
    finally:
        arena.close()


PARENT = """
import signal
from dataplane.carriers.host import HostArena
from services.engine.spawn import EngineChild
from tests.engine import fake_child
from tests.engine.test_process import SHAPE
arena = HostArena.create(SHAPE)
order = fake_child.order_of(SHAPE, arena.name, arena.nonce)
child = EngineChild(order, "decode-0", fake_child.Control().spawn)
child.wait_ready()
print(child.process.pid, flush=True)
signal.pause()
"""


_STEPS = """
import resource
for step in range(4):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    freed = [bytearray(8 << 20) for _ in range(20)]
    del freed
    last = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
print(last)
"""


@pytest.mark.parametrize(("environment", "is_kept"), [({}, False), (KEEPS_MEMORY, True)])
def test_what_a_step_has_freed_is_there_for_the_next(environment: dict[str, str], is_kept: bool) -> None:
    told = subprocess.run([sys.executable, "-c", _STEPS], env=environment, capture_output=True, text=True, check=True)
    assert (int(told.stdout) < 1_000) == is_kept, "of 40,960 pages"


def test_it_ends_with_its_worker() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
    wait_until(lambda: not _is_running(pid))


def _is_running(pid: int) -> bool:
    """Say whether there is such a process; one that has ended waits for whoever may have inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Spares.


def rig_with_spare(*, is_ready: bool = True) -> Rig:
    made = Rig(in_process=True, num_spares=1)
    made.engine.start_engine()
    if is_ready:
        wait_until(lambda: made.spares.count_loaded()[0] == 1)
    return made


def test_a_spare_takes_over_and_another_one_is_loaded() -> None:
    rig = rig_with_spare()
    first, spare = rig.started
    assert rig.engine.lives.num_spares == 1 and rig.engine.lives.spare_bytes == spare.num_bytes > 1 << 20
    in_step(rig)
    first.process.kill()
    assert rig.next()[:2] == ("failed", "a")
    rig.gate.set()
    assert rig.next() == ("back", "", "")
    assert rig.engine._child is spare  # type: ignore[attr-defined]
    rig.submit("b")
    assert rig.next() == ("ended", "b", "length")
    wait_until(lambda: rig.spares.count_loaded()[0] == 1)
    assert rig.engine.lives.num_starts == 2 and len(rig.started) == 3
    rig.close()
    assert all(child.has_ended for child in rig.started)


def test_a_spare_that_is_being_loaded_is_waited_for() -> None:
    rig = rig_with_spare(is_ready=False)
    wait_until(lambda: len(rig.started) == 2)
    first, spare = rig.started
    os.kill(spare.process.pid, signal.SIGSTOP)
    if not rig.spares.count_loaded()[0]:
        first.process.kill()
        rig.engine._thread.join(0.2)  # type: ignore[attr-defined]
        assert rig.spares._loading is spare and len(rig.started) == 2
        os.kill(spare.process.pid, signal.SIGCONT)
        assert rig.next() == ("back", "", "")
        assert rig.engine._child is spare  # type: ignore[attr-defined]
    rig.close()


def test_a_spare_that_dies_is_replaced() -> None:
    rig = rig_with_spare()
    spare = rig.child
    spare.process.kill()
    wait_until(lambda: len(rig.started) == 3 and rig.spares.count_loaded()[0] == 1)
    assert not rig.deaths and spare.process.poll() is not None
    rig.close()


def test_a_spare_that_is_dead_does_not_take_over() -> None:
    rig = rig_with_spare()
    first, spare = rig.started
    spare.kill_process()
    first.process.kill()
    assert rig.next() == ("back", "", "")
    assert len(rig.deaths) == 1
    rig.close()


def test_without_memory_there_is_no_spare_and_the_engine_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(in_process=True, num_spares=1)
    rig.has_room = False
    rig.engine.start_engine()
    wait_until(lambda: "there is no memory for a spare engine" in caplog.text)
    rig.child.process.kill()
    assert rig.next() == ("back", "", "")
    assert rig.spares.count_loaded() == (0, 0) and len(rig.started) == 2
    rig.has_room = True
    wait_until(lambda: rig.spares.count_loaded()[0] == 1)
    rig.close()


def test_a_spare_that_does_not_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(in_process=True, num_spares=1)
    start_child = rig.start_child
    refused = fake_child.order_of(SHAPE, rig.arena.name, rig.arena.nonce, name="refused")

    def start_first() -> EngineChild:
        rig.start_child = start_child
        return EngineChild(refused, "decode-0", rig.control.spawn)

    rig.start_child = start_first  # type: ignore[assignment]
    rig.engine.start_engine()
    wait_until(lambda: rig.spares.count_loaded()[0] == 1)
    assert f"a spare engine does not start: {fake_child.REFUSED}" in caplog.text
    rig.close()


def test_a_spare_that_hangs_is_waited_for_no_longer_than_an_engine_takes() -> None:
    rig = rig_with_spare(is_ready=False)
    wait_until(lambda: len(rig.started) == 2)
    first, spare = rig.started
    os.kill(spare.process.pid, signal.SIGSTOP)
    if not rig.spares.count_loaded()[0]:
        first.process.kill()
        assert rig.next() == ("back", "", "")
        assert rig.engine._child is rig.started[2]  # type: ignore[attr-defined]
    rig.close()


def test_where_no_process_is_to_be_had_the_spare_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(in_process=True, num_spares=1)
    start_child = rig.start_child

    def start_first() -> EngineChild:
        rig.start_child = start_child
        return EngineChild(fake_child.order_of(SHAPE, rig.arena.name, rig.arena.nonce), "decode-0", no_process)

    rig.start_child = start_first  # type: ignore[assignment]
    rig.engine.start_engine()
    wait_until(lambda: rig.spares.count_loaded()[0] == 1)
    assert "a spare engine does not start: [Errno 11]" in caplog.text
    rig.close()


def test_a_spare_that_is_being_loaded_is_ended_too() -> None:
    rig = rig_with_spare(is_ready=False)
    wait_until(lambda: len(rig.started) == 2)
    os.kill(rig.child.process.pid, signal.SIGSTOP)
    rig.close()
    assert all(child.has_ended for child in rig.started)


def test_endings_in_words() -> None:
    assert ending(3) == "ended with code 3"
    assert ending(-9) == "was killed by SIGKILL, as the kernel does where memory is short"
    assert ending(-11) == "was killed by SIGSEGV"


# The channel.


End = Channel[ToProcess]


@pytest.fixture
def ends() -> Iterator[tuple[End, End, socket.socket]]:
    """Two ends, and the socket of the second."""
    ours, theirs = socket.socketpair()
    one, other = (End(sock, os.eventfd(0, os.EFD_NONBLOCK), ToProcess) for sock in (ours, theirs))
    yield one, other, theirs
    one.close()
    other.close()


def hear(end: End, count: int) -> list[ToProcess]:
    heard: list[ToProcess] = []
    while len(heard) < count:
        heard += end.wait_messages()
    return heard


def test_what_the_socket_does_not_take_waits_for_nobody_and_arrives_in_order(ends: tuple[End, End, Any]) -> None:
    one, other, _ = ends
    said: list[EngineMessage] = [StartGrammar(size, "x" * size) for size in (5, 3_000_000, 7, 70_000)]
    for message in said:  # nobody reads yet
        one.send_message(message)
        other.send_message(message)
    heard: list[ToProcess] = []
    is_over = threading.Event()

    def go_on() -> None:
        while not is_over.is_set():  # what it has to say goes out as it hears, and only then
            heard.extend(other.wait_messages(0.01))

    thread = threading.Thread(target=go_on)
    thread.start()
    assert hear(one, len(said)) == said
    while len(heard) < len(said):
        one.wait_messages(0.01)
    is_over.set()
    thread.join()
    assert heard == said


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        b"\x01\x00\x00\x00\xc0",
        b"\x0f\x00\x00\x00" + msgspec.msgpack.encode(["NoSuchMessage"]),
        b"\x10\x00\x00\x00" + msgspec.msgpack.encode(["CancelSequence"]),
    ],
    ids=["too long", "no msgpack", "nothing", "no such message", "a number is lacking"],
)
def test_nonsense_is_an_error(data: bytes, ends: tuple[End, End, socket.socket]) -> None:
    one, _, theirs = ends
    theirs.send(data)
    with pytest.raises(IpcError):
        hear(one, 1)


def test_the_end_is_heard_behind_what_was_said(ends: tuple[End, End, Any]) -> None:
    one, other, _ = ends
    other.send_message(StopEngine())
    other.close()
    assert hear(one, 1) == [StopEngine()]
    with pytest.raises(EOFError):
        hear(one, 1)


def test_an_order_crosses_as_it_is() -> None:
    order = fake_child.order_of(SHAPE, "kvmesh-1-0123456789abcdef", "nonce")
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(order), type=LoadEngine)
    assert decoded == order and decoded.shape.layout.fingerprint == LAYOUT.fingerprint


def test_blocks_of_windowed_layers_cross() -> None:
    tables = (BlockTable((Segment(0, 3), Segment(9, 1))), BlockTable((Segment(4, 2),), 2))
    sampling = SamplingParams(max_tokens=3, logit_bias=((5, 1.5),), bad_words=((1, 2),))
    message = SubmitSequence(
        number=4, request_id=RequestId("r"), tokens=pack_tokens([1, 2, 70_000]), num_prompt_tokens=3,
        sampling=sampling, tables=tables, stop_token_ids=(7,),
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=SubmitSequence) == message
