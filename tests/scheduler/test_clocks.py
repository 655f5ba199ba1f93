"""The mesh's clock: what services learn of it from schedulers whose machines' clocks differ."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from schemas import subjects
from schemas.worker import AskTime, TimeAnswered
from services.bus.memory import MemoryBroker, MemoryBus
from services.bus.typed import Received, TypedBus
from services.clocks import FORGOTTEN_NS, NUM_OWN, NUM_SOON, OldestScheduler, keep_time
from services.config import MeshConfig
from services.metrics import Metrics
from services.scheduler.oldest import OldestClock
from services.scheduler.service import run_scheduler
from services.telemetry import MeshClock, Telemetry
from services.times import TelemetryTimes

pytestmark = pytest.mark.virtual_time

SECOND_NS = 1_000_000_000
NEAR_NS = 50_000_000
"""In real time (`make test-debug`) a machine's clock may be slewed, and two looks at it are never the same."""
TIMES = TelemetryTimes()
ASK = Received(AskTime(), "", subjects.TIME.of())


class Teller:
    """A scheduler on a machine whose clock is ahead of this one's."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    async def answer_time(self, _: Received[AskTime]) -> TimeAnswered:
        return TimeAnswered(unix_ns=time.time_ns() + round(self.ahead_s * SECOND_NS), age_ms=5, token="t")


@contextlib.asynccontextmanager
async def served(broker: MemoryBroker, teller: Teller) -> AsyncIterator[None]:
    bus = TypedBus(MemoryBus(broker), "scheduler")
    async with asyncio.TaskGroup() as tasks:
        await bus.serve(tasks, subjects.TIME, (), teller.answer_time)
        yield
        await bus.close()


@contextlib.asynccontextmanager
async def keeping(broker: MemoryBroker, clock: MeshClock) -> AsyncIterator[None]:
    task = asyncio.create_task(keep_time(MemoryBus(broker), clock, Metrics(), TIMES))
    try:
        yield
    finally:
        task.cancel()


@pytest.mark.parametrize("ahead_s", [-660.0, 5.0])
async def test_dates_are_the_scheduler_s(ahead_s: float) -> None:
    broker, clock = MemoryBroker(), MeshClock()
    async with keeping(broker, clock):
        await asyncio.sleep(100)
        assert clock.machine_ahead_ns == pytest.approx(0, abs=NEAR_NS), "nobody has told it anything yet"
        async with served(broker, Teller(ahead_s)):
            await asyncio.sleep(2 * TIMES.clock_interval_s)
    assert clock.machine_ahead_ns == pytest.approx(-ahead_s * SECOND_NS, abs=NEAR_NS)
    assert clock.at_ns(clock.date_ns(7)) == 7


async def test_a_wrong_clock_is_named_once_and_when_it_is_right_again(caplog: pytest.LogCaptureFixture) -> None:
    broker, clock, teller = MemoryBroker(), MeshClock(), Teller(0.9)
    said: list[str] = []
    async with served(broker, teller), keeping(broker, clock):
        for teller.ahead_s in (0.9, -660.0, -660.4, 3_600.0, 0.0):
            await asyncio.sleep(5 * TIMES.clock_interval_s)
            said += [str(clock.named_ms), *(record.getMessage().partition(": ")[0] for record in caplog.records)]
            caplog.clear()
    assert said == [
        "0",
        "660000", "this machine's clock is 660.0 s ahead of the scheduler's",
        "660400",
        "-3600000", "this machine's clock is 3600.0 s behind the scheduler's",
        "0", "this machine's clock agrees with the scheduler's again",
    ]  # fmt: skip


async def test_what_the_way_explains_is_no_difference() -> None:
    clock = MeshClock()
    before, asked_ns = clock.ahead_ns, time.monotonic_ns()
    await asyncio.sleep(0.2)
    clock.compare(time.time_ns() - 150_000_000, asked_ns)
    assert clock.ahead_ns == before
    clock.compare(time.time_ns() - 350_000_000, asked_ns)
    assert clock.ahead_ns < before - 200_000_000, "the way does not explain this"


async def test_of_two_schedulers_the_elder_s_clock_counts_until_it_is_gone() -> None:
    older = OldestClock(MeshClock())
    await asyncio.sleep(5)
    younger = OldestClock(MeshClock())
    older.clock.follow_machine = lambda: None  # type: ignore[method-assign]
    older.clock.ahead_ns += 40 * SECOND_NS
    told = await older.answer_time(ASK)
    assert younger.follows(told) and not older.follows(await younger.answer_time(ASK))
    younger.clock.compare(told.unix_ns, time.monotonic_ns())
    assert (await younger.answer_time(ASK)).unix_ns == pytest.approx(told.unix_ns, abs=NEAR_NS), "whoever is asked"
    await asyncio.sleep(FORGOTTEN_NS / SECOND_NS + 1)
    assert (await younger.answer_time(ASK)).unix_ns == pytest.approx(time.time_ns(), abs=NEAR_NS), "now the eldest"


async def test_of_two_that_began_together_one_follows() -> None:
    both = [OldestClock(MeshClock()), OldestClock(MeshClock())]
    told = [await each.answer_time(ASK) for each in both]
    assert sorted((both[0].follows(told[1]), both[1].follows(told[0]))) == [False, True]
    assert not any(each.follows(said) for each, said in zip(both, told, strict=True)), "nobody follows itself"


async def test_a_service_goes_by_the_eldest_that_it_has_heard() -> None:
    eldest, began_s = OldestScheduler(), time.monotonic()

    def told(age_s: float, token: str) -> bool:
        age_ms = round((age_s + time.monotonic() - began_s) * 1_000)
        return eldest.follows(TimeAnswered(unix_ns=0, age_ms=age_ms, token=token))

    assert told(10.0, "b"), "nobody else is known"
    assert not told(5.0, "c") and not told(9.9, "c"), "it is younger, or as old and the other one counts"
    assert told(10.1, "a") and not told(10.0, "b") and told(20.0, "z") and told(20.0, "z")
    await asyncio.sleep(FORGOTTEN_NS / 1e9)
    assert told(1.0, "y"), "the older is gone"


async def test_a_scheduler_whose_questions_come_to_itself_asks_on() -> None:
    broker, clock, teller = MemoryBroker(), MeshClock(), Teller(40.0)
    answers = iter([*["mine"] * 20, *["t"] * 1_000])

    async def answer_time(_: Received[AskTime]) -> TimeAnswered:
        answered = await teller.answer_time(ASK)
        return TimeAnswered(unix_ns=answered.unix_ns, age_ms=5, token=next(answers))

    def follows(answer: TimeAnswered) -> bool:
        return answer.token != "mine"

    bus = TypedBus(MemoryBus(broker), "scheduler")
    async with asyncio.TaskGroup() as tasks:
        await bus.serve(tasks, subjects.TIME, (), answer_time)
        asking = tasks.create_task(keep_time(MemoryBus(broker), clock, Metrics(), TIMES, follows, "mine"))
        await asyncio.sleep(TIMES.clock_soon_s / 2)
        assert clock.machine_ahead_ns == pytest.approx(-40 * SECOND_NS, abs=NEAR_NS), "at once"
        asking.cancel()
        await bus.close()


async def test_one_scheduler_alone_asks_itself_so_often_and_no_more() -> None:
    broker, asked = MemoryBroker(), list[float]()

    async def answer_time(_: Received[AskTime]) -> TimeAnswered:
        asked.append(time.monotonic())
        return TimeAnswered(unix_ns=time.time_ns(), age_ms=5, token="mine")

    bus = TypedBus(MemoryBus(broker), "scheduler")
    async with asyncio.TaskGroup() as tasks:
        await bus.serve(tasks, subjects.TIME, (), answer_time)
        asking = tasks.create_task(keep_time(MemoryBus(broker), MeshClock(), Metrics(), TIMES, own_token="mine"))
        await asyncio.sleep(100)
        asking.cancel()
        await bus.close()
    assert len(asked) <= NUM_OWN + NUM_SOON + 100 / TIMES.clock_interval_s


async def test_a_scheduler_answers_services() -> None:
    broker, clock, stop = MemoryBroker(), MeshClock(), asyncio.Event()
    clock.ahead_ns += 9 * SECOND_NS
    running = asyncio.create_task(run_scheduler(MeshConfig(), MemoryBus(broker), Telemetry("scheduler"), stop))
    async with keeping(broker, clock):
        await asyncio.sleep(1)
    stop.set()
    await running
    assert clock.machine_ahead_ns == pytest.approx(0, abs=NEAR_NS)
