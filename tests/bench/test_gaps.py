"""What the bench of gaps makes of what a socket gives."""

import json

from tests.bench.bench_gaps import Answer, Arrival, arrivals_of, figures_of


def event(*token_ids: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": token_ids}]}).encode() + b"\n\n"


def test_an_event_came_with_the_read_that_brought_its_end() -> None:
    cut = event(3)
    parts = [(1.0, b"HTTP/1.1 200 OK\r\n\r\n" + event(1)), (2.0, event(2) + cut[:9]), (3.0, cut[9:] + event(4, 5))]
    parts.append((4.0, event() + b": keep-alive\n\n" + b"data: [DONE]\n\n"))
    assert arrivals_of(parts) == [Arrival(1.0, 0, 1), Arrival(2.0, 1, 1), Arrival(3.0, 2, 1), Arrival(3.0, 2, 2)]


def test_what_came_together_is_counted() -> None:
    answer = [Arrival(1.0, 0, 1), Arrival(1.01, 1, 1), Arrival(1.01, 1, 2), Arrival(1.03, 2, 1)]
    found = figures_of(7, [Answer(0.9, answer), Answer(0.7, [Arrival(1.0, 0, 1)])], 99.0)
    assert found.first_token_p50_ms == 200.0
    assert (found.streams, found.tokens_per_s) == (7, 99.0)
    assert (found.gap_p50_ms, found.gap_max_ms) == (10.0, 20.0)
    assert (found.several_tokens, found.together) == (0.2, 0.3333)
