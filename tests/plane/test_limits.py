"""Limits that belong together."""

from dataplane import limits
from dataplane.cards import limits as cards
from dataplane.cards.nccl.pair import BUFFER_BYTES
from dataplane.cards.nccl.pair_core import NUM_BUFFERS
from dataplane.times import PlaneTimes


def test_a_reader_takes_as_many_frames_as_a_holder_sends_ahead() -> None:
    assert limits.MAX_FRAMES_PER_ACK <= limits.MAX_UNACKED_FRAMES <= limits.MAX_OUTSTANDING_FRAMES


def test_no_frame_is_larger_than_the_protocol_allows() -> None:
    sizes = (limits.SHM_FRAME_BYTES, limits.TCP_FRAME_BYTES, cards.STAGED_FRAME_BYTES, cards.CUDA_FRAME_BYTES)
    assert max(*sizes, BUFFER_BYTES) <= limits.MAX_FRAME_BYTES


def test_a_full_holder_says_so_before_its_reader_has_given_up_connecting() -> None:
    assert PlaneTimes().busy_send_s < PlaneTimes().connect_s


def test_a_holder_of_pairs_tells_of_no_more_slots_than_a_reader_remembers() -> None:
    assert NUM_BUFFERS <= cards.MAX_ORDERED


def test_a_pair_that_is_stuck_is_seen_before_a_connection_is_idle() -> None:
    assert PlaneTimes().holder_idle_s > cards.SLOT_TIMEOUT_S + cards.WATCH_S
