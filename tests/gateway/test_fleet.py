"""Which incarnations of workers a gateway knows, and whose requests are lost by what it hears."""

import msgspec

from schemas.ids import WorkerId
from schemas.worker import LeftReason, WorkerJoined, WorkerLeft
from services.config import MeshConfig
from services.gateway.fleet import Fleet
from services.gateway.request.events import WorkerLost, WorkerReady
from tests.gateway.test_gateway_watch import NOW, hearing_others
from tests.gateway.test_survival import load

D1 = WorkerId("d1")
CONFIG = MeshConfig()
SILENT_MS = CONFIG.gateway.worker_silent_ms
LOAD_KEPT_MS = CONFIG.times.gateway.load_kept_ms
READY = WorkerReady()
RESTARTED = WorkerLost(D1, "it was restarted", is_back=True)


def left(incarnation: str) -> WorkerLeft:
    return WorkerLeft(worker_id=D1, incarnation=incarnation, reason=LeftReason.SILENT)


def test_a_worker_that_leaves_is_lost_but_not_its_successor() -> None:
    fleet = Fleet(hearing_others(), CONFIG)
    assert fleet.apply(load("d1", incarnation="2"), NOW) == [READY]
    assert fleet.apply(left("1"), NOW) == [] and fleet.block_counts(NOW) and fleet.role_of(D1) == "decode"
    assert fleet.apply(left("2"), NOW) == [WorkerLost(D1, "silent")]
    assert fleet.block_counts(NOW) == {} and not fleet.role_of(D1)


def test_a_new_incarnation_has_lost_what_the_old_one_had_taken() -> None:
    fleet = Fleet(hearing_others(), CONFIG)
    fleet.apply(load("d1", incarnation="1"), NOW)
    joined = WorkerJoined(worker=load("d1", incarnation="2").worker)
    assert fleet.apply(joined, NOW) == [RESTARTED]
    assert fleet.apply(joined, NOW) == [], "it has joined once"
    assert fleet.apply(load("d1", incarnation="2"), NOW) == [READY]


def test_a_load_of_another_incarnation_counts_only_once_the_known_one_is_quiet() -> None:
    fleet, later_ms = Fleet(hearing_others(NOW + 2 * SILENT_MS), CONFIG), NOW + SILENT_MS
    fleet.apply(load("d1", incarnation="1", free=2), NOW)
    assert fleet.apply(load("d1", incarnation="2", free=7), later_ms) == []
    assert fleet.block_counts(later_ms)[D1].free == 2
    assert fleet.apply(load("d1", incarnation="2", free=7), later_ms + 1) == [RESTARTED, READY]
    assert fleet.block_counts(later_ms + 1)[D1].free == 7


def test_nobody_is_replaced_while_the_gateway_itself_hears_nothing() -> None:
    fleet = Fleet(hearing_others(), CONFIG)
    fleet.apply(load("d1", incarnation="1"), NOW)
    assert fleet.apply(load("d1", incarnation="2"), NOW + 2 * SILENT_MS) == []


def test_a_worker_is_ready_once_and_again_where_it_was_not_meanwhile() -> None:
    fleet, ready = Fleet(hearing_others(), CONFIG), load("d1")
    starting = msgspec.structs.replace(ready, state="starting")
    told = [fleet.apply(each, NOW) for each in (ready, ready, starting, starting, ready, ready)]
    assert told == [[READY], [], [], [], [READY], []]


def test_a_load_is_forgotten_after_a_while() -> None:
    fleet = Fleet(hearing_others(), CONFIG)
    fleet.apply(load("d1"), NOW)
    assert fleet.block_counts(NOW + LOAD_KEPT_MS) and not fleet.block_counts(NOW + LOAD_KEPT_MS + 1)
