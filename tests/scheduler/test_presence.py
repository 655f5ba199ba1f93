"""The rules of alive, suspect, dead, partitioned, standing still and replaced: times in, verdicts out."""

import pytest

from schemas.ids import WorkerId
from schemas.worker import LeftReason, WorkerLeft
from services.presence import MAX_FENCES, BusConnected, FailureDetector, Fences, Heartbeat, Incarnations, Peer, Speaker
from services.times import PresenceTimes, Times

DEAF_AFTER_MS = Times().presence.partitioned_after_ms
LOAD_INTERVAL_MS = Times().presence.load_interval_ms
RECONNECT_WAIT_S = Times().bus.reconnect_wait_s
REPEAT_LEFT_MS = Times().presence.repeat_left_ms
SETTLE_MS = Times().presence.recover_ms
UNSERVED_GAP_MS = Times().presence.unserved_gap_ms

W = WorkerId("w")


def hearing_at(now_ms: int) -> FailureDetector:
    """Of one who has heard others all the time until now."""
    detector = FailureDetector(PresenceTimes())
    for at_ms in range(0, now_ms + 1, DEAF_AFTER_MS // 2):
        detector.received(at_ms)
    detector.received(now_ms)
    return detector


def test_the_times_fit_each_other() -> None:
    assert 2 * LOAD_INTERVAL_MS < DEAF_AFTER_MS, "one load that is lost is no partition"
    assert RECONNECT_WAIT_S * 1000 < UNSERVED_GAP_MS < SETTLE_MS, "who reconnects is back before the second question"


@pytest.mark.parametrize(
    ("unserved", "gone"),
    [
        ([(0, 0)], False),
        ([(0, 0), (UNSERVED_GAP_MS, UNSERVED_GAP_MS)], True),
        ([(0, 0), (UNSERVED_GAP_MS - 1, 9_000)], False),
        ([(0, 100), (UNSERVED_GAP_MS + 99, 9_000)], False),
        ([(0, 100), (UNSERVED_GAP_MS + 100, 9_000)], True),
        ([(0, 100), (50, 9_000), (UNSERVED_GAP_MS + 100, 9_100)], True),
    ],
)
def test_dead_is_whose_questions_nobody_serves_twice_apart_by_a_gap(
    unserved: list[tuple[int, int]], gone: bool
) -> None:
    """Each question: when it was asked, and when the broker said that nobody serves it."""
    peer, detector = Peer(0), FailureDetector(PresenceTimes())
    *first, last = [peer.is_gone(asked_ms, detector, now_ms) for asked_ms, now_ms in unserved]
    assert not any(first) and last == gone


def test_a_sign_between_two_unserved_questions_is_life() -> None:
    peer, detector = Peer(0), FailureDetector(PresenceTimes())
    assert not peer.is_gone(0, detector, 0)
    peer.seen(100)
    assert not peer.is_gone(1_000, detector, 1_000) and peer.is_gone(2_000, detector, 2_000)


def test_what_was_unserved_before_a_deafness_counts_no_more() -> None:
    peer, detector = Peer(0), hearing_at(1_000)
    assert not peer.is_gone(1_000, detector, 1_000)
    detector.received(60_000)
    for now_ms in (60_000, 60_000 + SETTLE_MS - 1, 60_000 + SETTLE_MS):
        assert not peer.is_gone(now_ms, detector, now_ms), "others may still be on their way back"
    now_ms += UNSERVED_GAP_MS
    assert peer.is_gone(now_ms, detector, now_ms)


def test_silence_does_not_grow_while_a_proof_is_on_its_way() -> None:
    detector = hearing_at(1_000)
    detector.ask_proof(1_000), detector.ask_proof(2_000)
    for now_ms in range(1_500, 9_001, 500):
        detector.received(now_ms)
        assert detector.quiet_ms(0, now_ms) == 1_000 and not detector.is_silent(0, 3_000, now_ms)
        assert detector.quiet_ms(now_ms, now_ms) == 0, "it was heard since"
    detector.proved(9_000)
    assert detector.quiet_ms(0, 9_000) == 9_000 and detector.is_silent(0, 3_000, 9_000)


def test_who_hears_something_for_the_first_time_has_nobody_to_wait_for() -> None:
    detector = FailureDetector(PresenceTimes())
    detector.received(10**12)
    assert not detector.is_recovering(10**12)


def test_after_a_reconnection_nobody_is_dead_for_a_while() -> None:
    peer, detector = Peer(0), FailureDetector(PresenceTimes())
    assert not detector.connects(BusConnected(1), 0) and not detector.connects(BusConnected(1), 500)
    assert not detector.is_recovering(500)
    assert not peer.is_gone(900, detector, 900)
    assert detector.connects(BusConnected(2), 1_000)
    ends_ms = 1_000 + SETTLE_MS
    for now_ms in (1_000, ends_ms - 1):
        assert detector.is_recovering(now_ms) and not peer.is_gone(now_ms, detector, now_ms)
    assert not detector.is_recovering(ends_ms) and not peer.is_gone(ends_ms, detector, ends_ms)
    assert peer.is_gone(ends_ms + 500, detector, ends_ms + 500)


def test_a_reconnection_starts_the_silences_anew() -> None:
    detector = hearing_at(5_000)
    detector.connects(BusConnected(1), 0), detector.connects(BusConnected(2), 5_000)
    assert detector.quiet_ms(0, 5_600) == 600 and detector.quiet_ms(5_500, 5_600) == 100


def test_silence_counts_while_others_are_heard() -> None:
    detector = hearing_at(3_000)
    assert not detector.is_silent(0, 3_000, 2_999) and detector.is_silent(0, 3_000, 3_000)
    assert not detector.is_silent(1, 3_000, 3_000)


def test_silence_of_everybody_is_our_own_deafness_and_starts_anew_afterwards() -> None:
    detector = hearing_at(1_000)
    assert not detector.is_partitioned(1_000 + DEAF_AFTER_MS - 1) and detector.is_partitioned(1_000 + DEAF_AFTER_MS)
    assert not detector.is_silent(0, 3_000, 60_000) and detector.quiet_ms(0, 60_000) == 60_000
    detector.received(60_000)
    assert detector.quiet_ms(0, 60_600) == 600
    detector.received(61_400), detector.received(62_800)
    assert not detector.is_silent(0, 3_000, 62_999) and detector.is_silent(0, 3_000, 63_000)


def test_who_has_never_heard_anything_is_partitioned() -> None:
    detector = FailureDetector(PresenceTimes())
    assert detector.is_partitioned(10**12)
    detector.received(10**12)
    assert not detector.is_partitioned(10**12) and detector.quiet_ms(0, 10**12) == 0


def test_standing_still_is_noticed_once() -> None:
    heartbeat = Heartbeat(interval_s=0.1, fence_after_s=2.5)
    assert not heartbeat.stood_still(100.0)  # it has not begun
    heartbeat.beat(100.0)
    assert not heartbeat.stood_still(102.4) and heartbeat.lag_ms(102.4) == 2_300
    assert heartbeat.stood_still(102.5) and not heartbeat.stood_still(102.6)
    heartbeat.beat(102.6)
    assert heartbeat.lag_ms(102.7) == 0


def test_who_joins_replaces_at_once() -> None:
    known = Incarnations(FailureDetector(PresenceTimes()), quiet_ms=3_000)
    assert known.joined(W, "a", 0) and not known.joined(W, "a", 1) and known.joined(W, "b", 2)
    assert not known.left(W, "a"), "news of a predecessor"
    assert known.left(W, "b") and known.left(W, "c"), "nobody is known any more"


def test_a_load_replaces_only_who_is_quiet_while_we_hear() -> None:
    detector = hearing_at(10_000)
    known = Incarnations(detector, quiet_ms=3_000)
    assert known.spoke(W, "a", 10_000) is Speaker.CURRENT
    assert known.spoke(W, "b", 10_100) is Speaker.PREDECESSOR
    assert known.spoke(W, "b", 13_001) is Speaker.PREDECESSOR, "we were partitioned"
    detector.received(13_001)
    assert known.spoke(W, "b", 13_002) is Speaker.SUCCESSOR
    assert known.spoke(W, "b", 13_003) is Speaker.CURRENT and known.spoke(W, "a", 13_004) is Speaker.PREDECESSOR


def test_a_fence_is_said_again_once_a_second_and_the_oldest_is_forgotten() -> None:
    fences = Fences(PresenceTimes(), max_fences=2)

    def left(incarnation: str, reason: LeftReason) -> WorkerLeft:
        return WorkerLeft(worker_id=W, incarnation=incarnation, reason=reason)

    for incarnation in "abc":
        fences.fence(left(incarnation, LeftReason.DIED), 0)
    assert [fences.holds(W, incarnation) for incarnation in "abc"] == [False, True, True]
    assert fences.repeat(W, "b", REPEAT_LEFT_MS - 1) is None
    assert fences.repeat(W, "b", REPEAT_LEFT_MS) == left("b", LeftReason.DIED)
    assert fences.repeat(W, "b", REPEAT_LEFT_MS + 1) is None
    fences.fence(left("b", LeftReason.STOPPED), 5_000)
    assert fences.repeat(W, "b", 5_999) is None
    assert fences.repeat(W, "b", 6_000) == left("b", LeftReason.DIED), "the first reason stays"
    assert MAX_FENCES >= 1_000
