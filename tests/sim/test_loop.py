"""What a simulation runs on: virtual time, processes that are killed and paused, a bus with faults."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.bus.base import LOST, BusError, NoRespondersError, RequestTimedOutError
from services.sim.limits import MAX_BUFFERED_BYTES
from services.sim.platform.bus import BusConditions, SimBroker, SimBus
from services.sim.platform.clock import VirtualTime, installed
from services.sim.platform.loop import Process, SimLoop, SimulationStuckError
from services.sim.platform.meter import CpuMeter


def run(main: Callable[[SimLoop], Coroutine[Any, Any, Any]], seed: int = 0) -> Any:
    clock, rng = VirtualTime(), random.Random(seed)
    loop = SimLoop(clock, rng)
    with installed(clock, rng):
        return loop.run_to_end(main(loop))


def test_time_stands_still_while_anything_runs_and_jumps_to_the_next_timer() -> None:
    async def main(loop: SimLoop) -> list[float]:
        started = time.monotonic()
        for _ in range(1000):
            await asyncio.sleep(0)
        at_once = time.monotonic() - started
        await asyncio.sleep(3600)
        return [at_once, time.monotonic() - started, loop.time()]

    real = time.monotonic()
    assert run(main) == [0.0, 3600.0, 3600.0]
    assert time.monotonic() - real < 60


def test_chance_is_the_seeds() -> None:
    async def main(_loop: SimLoop) -> tuple[str, float]:
        return secrets.token_hex(8), random.random()

    assert run(main, 1) == run(main, 1) != run(main, 2)
    assert secrets.token_hex(8) != secrets.token_hex(8)


def test_a_killed_process_runs_nothing_any_more_not_even_its_finally() -> None:
    async def main(loop: SimLoop) -> list[str]:
        said: list[str] = []

        async def life() -> None:
            try:
                await asyncio.sleep(1)
                said.append("one")
                await asyncio.sleep(1)
                said.append("two")
            finally:
                said.append("finally")

        process = Process("p")
        process.on_kill.append(lambda: said.append("noticed"))
        loop.spawn(process, life())
        await asyncio.sleep(1.5)
        loop.kill(process)
        loop.kill(process)
        await asyncio.sleep(10)
        return list(said)

    assert run(main) == ["one", "noticed"]


def test_a_paused_process_wakes_up_late() -> None:
    async def main(loop: SimLoop) -> list[float]:
        woke: list[float] = []

        async def life() -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                woke.append(loop.time())

        process = Process("p")
        task = loop.spawn(process, life())
        await asyncio.sleep(1.5)
        loop.pause(process)
        await asyncio.sleep(5)
        loop.resume(process)
        await task
        return woke

    assert run(main) == [1.0, 6.5, 7.5]


def test_nothing_left_to_happen_is_said() -> None:
    async def main(_loop: SimLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(SimulationStuckError):
        run(main)


async def hear_all(bus: SimBus, pattern: str, into: list[int]) -> None:
    subscription = await bus.subscribe(pattern)
    async for delivery in subscription:
        into.append(int(delivery.payload))


def heard_under(conditions: BusConditions, num_messages: int = 400) -> list[int]:
    """Return what of 0, 1, 2 … reached a listener, in order."""

    async def main(loop: SimLoop) -> list[int]:
        broker, heard = SimBroker(random.Random(3), conditions), list[int]()
        speaker, listener = broker.connect("speaker"), broker.connect("listener")
        loop.spawn(Process("listener"), hear_all(listener, "a.b", heard))
        await asyncio.sleep(1)
        for number in range(num_messages):
            await speaker.publish("a.b", str(number).encode(), {})
        await asyncio.sleep(60)
        return heard

    return run(main)


def test_without_faults_order_is_kept() -> None:
    assert heard_under(BusConditions()) == list(range(400))


def test_loss_duplication_and_reordering() -> None:
    assert 0 < len(lost := heard_under(BusConditions(loss=0.3))) < 400
    assert lost == sorted(lost)
    doubled = heard_under(BusConditions(duplication=0.3))
    assert len(doubled) > 400
    assert set(doubled) == set(range(400))
    mixed = heard_under(BusConditions(reordering=0.3))
    assert sorted(mixed) == list(range(400)) != mixed


def test_a_client_that_is_cut_off_hears_all_later() -> None:
    async def main(loop: SimLoop) -> tuple[list[int], list[int]]:
        broker, heard = SimBroker(random.Random(3)), list[int]()
        speaker, listener = broker.connect("speaker"), broker.connect("listener")
        loop.spawn(Process("listener"), hear_all(listener, "a.b", heard))
        await asyncio.sleep(1)
        broker.conditions.held_until_s["listener"] = loop.time() + 5
        await speaker.publish("a.b", b"1", {})
        await asyncio.sleep(4)
        before = list(heard)
        await asyncio.sleep(2)
        return before, heard

    assert run(main) == ([], [1])


def test_a_broker_that_goes_and_comes_back() -> None:
    async def main(loop: SimLoop) -> None:
        broker, heard = SimBroker(random.Random(3)), list[int]()
        speaker, listener = broker.connect("speaker"), broker.connect("listener")
        loop.spawn(Process("listener"), hear_all(listener, "a.b", heard))
        await asyncio.sleep(1)
        broker.go_down()
        with pytest.raises(RequestTimedOutError):
            await speaker.request("a.c", b"", {}, 0.5)
        with pytest.raises(BusError):
            await speaker.flush()
        await speaker.publish("a.b", b"1", {})
        with pytest.raises(BusError, match="buffer"):
            await speaker.publish("a.b", b"1" * (MAX_BUFFERED_BYTES + 1), {})
        assert not heard
        broker.come_up()
        await asyncio.sleep(2)
        assert speaker.num_connects == listener.num_connects == 2
        await speaker.publish("a.b", b"2", {})
        await asyncio.sleep(1)
        assert heard[-1:] == [2]
        with pytest.raises(NoRespondersError):
            await speaker.request("a.c", b"", {}, 0.5)

    run(main)


def test_a_client_that_is_cut_off_loses_what_it_awaited_and_comes_back() -> None:
    async def main(loop: SimLoop) -> None:
        broker, heard = SimBroker(random.Random(3)), list[int]()
        speaker, listener = broker.connect("speaker"), broker.connect("listener")
        loop.spawn(Process("listener"), hear_all(listener, "a.b", heard))
        await listener.subscribe("a.mute")
        asked = asyncio.ensure_future(speaker.request("a.mute", b"", {}, 10.0))
        await asyncio.sleep(1)
        broker.cut("speaker")
        with pytest.raises(BusError, match=LOST):
            await asked
        await speaker.publish("a.b", b"1", {})
        broker.go_down()
        broker.come_up()
        await asyncio.sleep(1)
        assert not speaker.is_connected and listener.is_connected and not heard
        broker.restore("speaker")
        await asyncio.sleep(1)
        assert (speaker.num_connects, heard) == (2, [1])

    run(main)


def test_who_was_killed_while_the_broker_was_away_does_not_come_back_with_it() -> None:
    async def main(_: SimLoop) -> None:
        broker = SimBroker(random.Random(3))
        killed = broker.connect("killed")
        broker.go_down()
        await killed.publish("a.b", b"1", {})
        broker.come_up()
        broker.drop(killed)
        await asyncio.sleep(2)
        assert not killed.is_connected and killed.num_connects == 1
        assert not broker.num_messages

    run(main)


def test_what_is_asked_of_a_dead_process_has_no_responder() -> None:
    async def main(loop: SimLoop) -> None:
        broker = SimBroker(random.Random(3))
        requester, server = broker.connect("requester"), broker.connect("server")
        process = Process("server")
        process.on_kill.append(lambda: broker.drop(server))

        async def serve() -> None:
            async for delivery in await server.serve("s", "e", "a.c"):
                await delivery.respond(b"yes", {})

        loop.spawn(process, serve())
        await asyncio.sleep(1)
        assert (await requester.request("a.c", b"", {}, 1.0)).payload == b"yes"
        loop.pause(process)
        with pytest.raises(RequestTimedOutError):
            await requester.request("a.c", b"", {}, 1.0)
        loop.kill(process)
        with pytest.raises(NoRespondersError):
            await requester.request("a.c", b"", {}, 1.0)

    run(main)


def burn(cpu_s: float) -> None:
    until_s = time.thread_time() + cpu_s
    while time.thread_time() < until_s:
        pass


def test_a_meter_tells_whose_cpu_time_it_was() -> None:
    clock, rng, meter = VirtualTime(), random.Random(0), CpuMeter()
    loop = SimLoop(clock, rng, meter)
    busy, idle = Process("busy"), Process("idle")

    async def work(cpu_s: float) -> float:
        burn(cpu_s)
        await asyncio.sleep(1)
        return loop.time()

    async def main() -> list[float]:
        return await asyncio.gather(loop.spawn(busy, work(0.05)), loop.spawn(idle, work(0.0)))

    with installed(clock, rng):
        assert loop.run_to_end(main()) == [1.0, 1.0], "none of it passes unless it is charged"
    assert busy.cpu.taken_s >= 0.05 > idle.cpu.taken_s > 0


def test_what_a_charged_process_takes_keeps_it_busy_and_its_messages_back() -> None:
    clock, rng, meter = VirtualTime(), random.Random(0), CpuMeter()
    loop = SimLoop(clock, rng, meter)
    charged, other = Process("charged"), Process("other")
    charged.is_charged = True

    async def main() -> tuple[float, float, float]:
        broker = SimBroker(rng, BusConditions(delay_s=(0.0, 0.0)), meter)
        sender, receiver = broker.connect("sender"), broker.connect("receiver")
        subscription = await receiver.subscribe("said")

        async def hear() -> float:
            await anext(aiter(subscription))
            return loop.time()

        async def say() -> None:
            burn(0.05)
            await sender.publish("said", b"", {})

        async def look() -> float:
            return loop.time()

        heard = loop.spawn(other, hear())
        said = loop.spawn(charged, say())
        late, at_once = loop.spawn(charged, look()), loop.spawn(other, look())
        await said
        return await heard, await late, await at_once

    with installed(clock, rng):
        heard_s, late_s, at_once_s = loop.run_to_end(main())
    assert heard_s >= 0.05 and late_s >= 0.05 and at_once_s == 0.0
