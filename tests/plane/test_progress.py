import threading

import pytest

from dataplane.progress import KVProgress, Ready
from tests.plane.harness import DEADLINE_S, running


def test_shows_what_is_ready() -> None:
    progress = KVProgress(3, 10)
    assert progress.ready() == Ready((0, 0, 0), None, None)
    progress.advance(1, 4)
    progress.advance(1, 3)
    assert progress.ready().num_tokens == (0, 4, 0), "it never goes back"
    for layer in range(3):
        progress.advance(layer, 10)
    progress.finish(b"t")
    assert progress.ready() == Ready((10, 10, 10), b"t", None) == KVProgress.completed(3, 10, b"t").ready()


def test_failure_hides_the_trailer_and_the_first_reason_stays() -> None:
    progress = KVProgress.completed(1, 1)
    progress.fail("first")
    progress.fail("second")
    assert progress.ready() == Ready((1,), None, "first")


def test_wait_returns_at_once_when_there_is_more() -> None:
    progress = KVProgress(2, 10)
    assert progress.wait_ready([0, 0], 0).num_tokens == (0, 0)
    progress.advance(0, 1)
    assert progress.wait_ready([0, 0], DEADLINE_S).num_tokens == (1, 0)
    assert progress.wait_ready([1, 0], 0.001).num_tokens == (1, 0)


def test_waiting_thread_wakes_for_each_event() -> None:
    progress = KVProgress(1, 2)
    seen: list[Ready] = []
    first = threading.Event()

    def wait() -> None:
        seen.append(progress.wait_ready([0], DEADLINE_S))
        first.set()
        seen.append(progress.wait_ready([2], DEADLINE_S))

    with running(wait):
        progress.advance(0, 2)
        assert first.wait(DEADLINE_S)
        progress.finish(b"")
    assert [ready.num_tokens for ready in seen] == [(2,), (2,)]
    assert seen[1].trailer == b""


def test_failure_wakes() -> None:
    progress = KVProgress(1, 2)
    seen: list[Ready] = []
    with running(lambda: seen.append(progress.wait_ready([0], DEADLINE_S))):
        progress.fail("over")
    assert seen[0].failure == "over"


def test_wakers_are_called_until_they_leave() -> None:
    progress = KVProgress(1, 3)
    calls: list[str] = []
    one, two = (lambda: calls.append("one")), (lambda: calls.append("two"))
    progress.subscribe(one)
    progress.subscribe(two)
    progress.advance(0, 1)
    progress.advance(0, 1)
    progress.unsubscribe(one)
    progress.advance(0, 3)
    progress.finish()
    assert calls == ["one", "two", "two", "two"]


def test_engine_s_errors_assert() -> None:
    progress = KVProgress(1, 3)
    with pytest.raises(AssertionError):
        progress.advance(0, 4)
    with pytest.raises(AssertionError):
        progress.finish()
