"""Limits that belong together."""

from dataplane import limits
from dataplane.cards import limits as cards
from dataplane.times import PlaneTimes


def test_a_reader_takes_as_many_frames_as_a_holder_sends_ahead() -> None:
    assert limits.MAX_FRAMES_PER_ACK <= limits.MAX_UNACKED_FRAMES <= limits.MAX_OUTSTANDING_FRAMES


def test_no_frame_is_larger_than_the_protocol_allows() -> None:
    sizes = (limits.SHM_FRAME_BYTES, limits.TCP_FRAME_BYTES, cards.CUDA_FRAME_BYTES, cards.NCCL_FRAME_BYTES)
    assert max(sizes) <= limits.MAX_FRAME_BYTES


def test_a_full_holder_says_so_before_its_reader_has_given_up_connecting() -> None:
    assert PlaneTimes().busy_send_s < PlaneTimes().connect_s
