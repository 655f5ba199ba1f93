"""Logprobs, as workers send them and gateways read them.

They are natural logarithms of the model's own probabilities: log-softmax of its logits, before temperature, penalties,
bias and any mask. So they do not depend on how a token was chosen.
"""

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from schemas.block import TOKEN_BYTES, pack_tokens, unpack_tokens
from schemas.ids import TokenIds
from schemas.numbers import Count

MAX_LOGPROBS = 20
"""Likeliest tokens at each place: as many as OpenAI's API gives."""
NumTop = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
FLOAT_BYTES = 4
"""Of one logprob as it is packed."""


class TokenLogprob(NamedTuple):
    """One token's own logprob, and the likeliest tokens at its place with theirs, likeliest first; of equal ones the
    smaller id."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Those of tokens that follow each other. `own`: float32, little-endian, one a token. `top_ids` and `top`: of
    `num_top` tokens at each place, one place after another."""

    own: bytes
    num_top: Count = 0
    top_ids: TokenIds = TokenIds(b"")
    top: bytes = b""


def pack_logprobs(found: Sequence[TokenLogprob]) -> Logprobs:
    """Return the logprobs as they travel. All must have equally many likeliest tokens."""
    num_top = len(found[0].top) if found else 0
    assert all(len(one.top) == num_top for one in found), "equally many at each place"
    return Logprobs(
        own=_pack([one.logprob for one in found]),
        num_top=num_top,
        top_ids=pack_tokens([token_id for one in found for token_id, _ in one.top]),
        top=_pack([logprob for one in found for _, logprob in one.top]),
    )


def unpack_logprobs(packed: Logprobs) -> list[TokenLogprob]:
    """Return the logprobs. Raises ValueError where the fields do not agree."""
    own, top, num_top = _unpack(packed.own), _unpack(packed.top), packed.num_top
    top_ids = unpack_tokens(packed.top_ids)
    if not len(top_ids) == len(top) == len(own) * num_top:
        raise ValueError(f"{len(own)} tokens, {num_top} likeliest ones each, and {len(top_ids)}, {len(top)} of these")
    pairs = list(zip(top_ids, top, strict=True))
    return [TokenLogprob(value, tuple(pairs[at * num_top : (at + 1) * num_top])) for at, value in enumerate(own)]


def logprob_bytes(packed: Logprobs) -> int:
    """Return how much memory they take."""
    return len(packed.own) + len(packed.top_ids) + len(packed.top)


def num_message_bytes(num_tokens: int, num_top: int) -> int:
    """Return how long the logprobs of so many tokens are in a message, which has them in base64."""
    return -(-num_tokens * (FLOAT_BYTES + num_top * (FLOAT_BYTES + TOKEN_BYTES)) // 3) * 4


def _pack(values: Sequence[float]) -> bytes:
    return _little_endian(array("f", values)).tobytes()


def _unpack(packed: bytes) -> "array[float]":
    values = array("f")
    values.frombytes(packed)
    return _little_endian(values)


def _little_endian(values: "array[float]") -> "array[float]":
    if sys.byteorder == "big":
        values.byteswap()
    return values
