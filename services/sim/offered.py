"""What the clients of a measured mesh ask for: so many requests a second, of many lengths, some of which begin alike.
Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from services.sim.platform.coarse import ModelPace

SHARED = 0.6
"""The share of the requests that begin with a common prefix: a system prompt, a document."""
PREFIX_TOKENS = (512, 1_024, 2_048)
OWN_TOKENS = (64, 128, 256, 512, 1_024, 2_048)
ANSWER_TOKENS = (4, 8, 16, 32, 64)
VOCAB = 32_000
FIRST_TOKEN = 2
"""Lower ones are the engine's."""


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """One request, and when it is sent. `prefix` 0: its prompt shares nothing with another one."""

    number: int
    at_s: float
    prefix: int
    num_prefix_tokens: int
    num_own_tokens: int
    max_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_own_tokens

    def prompt(self) -> list[int]:
        """Return its tokens: equal prefixes are equal, and what follows is in no other prompt."""
        return [*_tokens(self.prefix, self.num_prefix_tokens), *_tokens(-1 - self.number, self.num_own_tokens)]


def offer(
    rng: random.Random, num_requests: int, num_workers: int, pace: ModelPace, load: float
) -> list[OfferedRequest]:
    """Return requests that come at random times, at `load` of what `num_workers` workers can compute with nothing
    reused. There are as many prefixes as workers, and the n-th is asked for 1/n as often as the first."""
    popularity = list(accumulate(1 / rank for rank in range(1, num_workers + 1)))
    prefixes = [rng.choice(PREFIX_TOKENS) for _ in popularity]
    requests: list[OfferedRequest] = []
    for number in range(num_requests):
        prefix = rng.choices(range(num_workers), cum_weights=popularity)[0] + 1 if rng.random() < SHARED else 0
        requests.append(
            OfferedRequest(
                number=number,
                at_s=0.0,
                prefix=prefix,
                num_prefix_tokens=prefixes[prefix - 1] if prefix else 0,
                num_own_tokens=rng.choice(OWN_TOKENS),
                max_tokens=rng.choice(ANSWER_TOKENS),
            )
        )
    per_s = load * capacity_per_s(requests, num_workers, pace)
    at_s = accumulate(rng.expovariate(per_s) for _ in requests)
    return [_at(request, when_s) for request, when_s in zip(requests, at_s, strict=True)]


def capacity_per_s(requests: Sequence[OfferedRequest], num_workers: int, pace: ModelPace) -> float:
    """Return how many such requests a second the workers can compute at most: half of them prompts, half answers."""
    prompt_s = sum(pace.span_s(0, request.num_prompt_tokens) for request in requests) / len(requests)
    answer_s = sum(pace.decode_token_s * request.max_tokens for request in requests) / len(requests)
    if num_workers == 1:
        return 1 / (prompt_s + answer_s)
    num_decode = num_workers // 2
    return min((num_workers - num_decode) / prompt_s, num_decode / answer_s)


def _at(request: OfferedRequest, at_s: float) -> OfferedRequest:
    return OfferedRequest(
        request.number, at_s, request.prefix, request.num_prefix_tokens, request.num_own_tokens, request.max_tokens
    )


def _tokens(text: int, num_tokens: int) -> list[int]:
    """Return the beginning of a text of this number: unequal from its first tokens on."""
    kinds = VOCAB - FIRST_TOKEN
    high, low = divmod(2 * abs(text) + (text < 0), kinds)
    return [FIRST_TOKEN + low, FIRST_TOKEN + high, *range(FIRST_TOKEN, FIRST_TOKEN + num_tokens)][:num_tokens]
