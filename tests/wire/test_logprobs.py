"""Logprobs, packed and unpacked."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.ids import TokenIds, WorkerId
from schemas.logprobs import Logprobs, TokenLogprob, num_message_bytes, pack_logprobs, unpack_logprobs
from schemas.message import encode
from schemas.request import RequestTokens, TokensEmitted

VALUES = st.floats(max_value=0, width=32, allow_nan=False)


@st.composite
def of_tokens(draw: st.DrawFn) -> list[TokenLogprob]:
    num_tokens, num_top = draw(st.integers(0, 6)), draw(st.integers(0, 4))
    top = st.lists(st.tuples(st.integers(0, 2**32 - 1), VALUES), min_size=num_top, max_size=num_top)
    return [TokenLogprob(draw(VALUES), tuple(draw(top))) for _ in range(num_tokens)]


@given(of_tokens())
def test_what_was_packed_comes_back(found: list[TokenLogprob]) -> None:
    assert unpack_logprobs(pack_logprobs(found)) == found


@pytest.mark.parametrize(
    "packed",
    [
        Logprobs(own=b"\0" * 7),
        Logprobs(own=b"\0" * 4, num_top=1),
        Logprobs(own=b"\0" * 4, num_top=1, top_ids=TokenIds(b"\0" * 4)),
        Logprobs(own=b"\0" * 4, num_top=1, top_ids=TokenIds(b"\0" * 8), top=b"\0" * 8),
        Logprobs(own=b"", num_top=0, top=b"\0" * 4),
    ],
)
def test_fields_that_do_not_agree_are_refused(packed: Logprobs) -> None:
    with pytest.raises(ValueError):
        unpack_logprobs(packed)


@pytest.mark.parametrize("num_tokens, num_top", [(1, 0), (1000, 0), (333, 20)])
def test_their_length_in_a_message_is_known_before(num_tokens: int, num_top: int) -> None:
    found = [TokenLogprob(-1.0, tuple((n, -1.0) for n in range(num_top)))] * num_tokens

    def length(logprobs: Logprobs | None) -> int:
        share = RequestTokens(request_id="r", attempt=1, index=0, prompt_logprobs=logprobs)
        return len(encode(TokensEmitted(worker_id=WorkerId("w"), requests=(share,))))

    packed = length(pack_logprobs(found)) - length(None)
    assert packed - 100 <= num_message_bytes(num_tokens, num_top) <= packed
