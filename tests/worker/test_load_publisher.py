"""When a worker says its load, and when only that it lives."""

from typing import cast

import msgspec

from schemas.message import Message
from schemas.worker import WorkerBeat, WorkerLoad
from services.holder.outbox import Outbox
from services.holder.report import LoadPublisher
from services.times import Times
from tests.scheduler.test_scheduler import info, load

BEAT_INTERVAL_MS = Times().presence.beat_interval_ms
LOAD_INTERVAL_MS = Times().presence.load_interval_ms

LOAD = load(info("w", "decode"))


class Told:
    """Takes what is put into it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.publisher = LoadPublisher(cast("Outbox", self), Times().presence)

    def put(self, subject: object, ids: tuple[str, ...], message: Message) -> None:
        assert ids == ("w",)
        self.messages.append(message)

    def at(self, now_ms: int, said: WorkerLoad = LOAD) -> Message:
        """Return what is said then, which is one thing."""
        self.publisher.publish_due(said, now_ms)
        return self.messages.pop()


def test_an_unchanged_load_is_said_every_other_time_and_a_beat_in_between() -> None:
    told = Told()
    first_ms = 10**12
    said = [told.at(first_ms + number * BEAT_INTERVAL_MS) for number in range(6)]
    assert [type(message) for message in said] == [WorkerLoad, WorkerBeat] * 3
    assert said[1] == WorkerBeat(worker_id=LOAD.worker.worker_id, incarnation=LOAD.worker.incarnation)
    assert isinstance(told.at(first_ms + 10**6), WorkerLoad), "a long pause"


def test_a_timer_that_is_a_little_early_makes_no_load_late() -> None:
    told = Told()
    said = [told.at(10**12 + number * (BEAT_INTERVAL_MS - 30)) for number in range(4)]
    assert [type(message) for message in said] == [WorkerLoad, WorkerBeat, WorkerLoad, WorkerBeat]


def test_what_a_placement_weighs_is_said_at_once() -> None:
    told = Told()
    assert told.at(10**12) == LOAD
    changes = [
        {"num_running": 3}, {"num_queued": 2}, {"state": "draining"}, {"num_uncomputed_tokens": 7},
        {"blocks": msgspec.structs.replace(LOAD.blocks, free=1)},
        {"worker": msgspec.structs.replace(LOAD.worker, incarnation="b")},
    ]  # fmt: skip
    now = LOAD
    for number, change in enumerate(changes, start=1):
        now = msgspec.structs.replace(now, **change)
        assert told.at(10**12 + number, now) == now


def test_what_only_goes_on_counting_waits_for_the_next_load() -> None:
    told = Told()
    told.at(10**12)
    counted = msgspec.structs.replace(
        LOAD, num_tokens=100, rates=msgspec.structs.replace(LOAD.rates, decode_step_ms=9.0)
    )
    assert isinstance(told.at(10**12 + 200, counted), WorkerBeat)
    assert told.at(10**12 + LOAD_INTERVAL_MS, counted) == counted
