import pytest

from dataplane.protocol.progress import KVProgress, Ready


def test_shows_what_is_ready() -> None:
    progress = KVProgress(3, 10)
    assert progress.ready() == Ready((0, 0, 0), None, None, (0, 0, 0))
    progress.advance(1, 4)
    progress.advance(1, 3)
    assert progress.ready().num_tokens == (0, 4, 0), "it never goes back"
    for layer in range(3):
        progress.advance(layer, 10)
    progress.complete(b"t")
    assert progress.ready() == Ready((10, 10, 10), b"t", None, (0, 0, 0)) == KVProgress.completed(3, 10, b"t").ready()


def test_a_layer_s_latest_mark_counts_until_all_is_computed() -> None:
    progress = KVProgress(2, 10)
    progress.advance(0, 4, mark=5)
    progress.advance(1, 4, mark=6)
    progress.advance(0, 10, mark=7)
    progress.advance(0, 10, mark=9)
    assert progress.ready().marks == (7, 6), "nothing came with mark 9"
    progress.advance(1, 10, mark=8)
    progress.complete()
    assert progress.ready().marks == (0, 0)


def test_failure_hides_the_trailer_and_the_first_reason_stays() -> None:
    progress = KVProgress.completed(1, 1)
    progress.fail("first")
    progress.fail("second")
    assert progress.ready() == Ready((1,), None, "first", (0,))


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
    progress.complete()
    progress.fail("over")
    assert calls == ["one", "two", "two", "two", "two"]


def test_engine_s_errors_assert() -> None:
    progress = KVProgress(1, 3)
    with pytest.raises(AssertionError):
        progress.advance(0, 4)
    with pytest.raises(AssertionError):
        progress.complete()
