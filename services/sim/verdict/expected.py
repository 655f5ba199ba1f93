"""The requests of a simulation's clients, and the only right answers to them. Pure."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataplane.blocks.layout import KVLayout
from schemas.request import SamplingParams
from services.engine.fake import fake_answer
from services.sim.brackets import Brackets

PARAGRAPH_TOKENS = 4
CONSTRAINED = 4
"""One of so many requests has a grammar."""
MAX_DEPTH = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One HTTP request, and when it is sent."""

    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    num_choices: int
    stream: bool
    max_depth: int = 0
    """The answer is to be brackets that match, open within each other at most so often; 0: anything."""

    @property
    def grammar(self) -> str:
        return f"brackets {self.max_depth}" if self.max_depth else ""

    @property
    def body(self) -> dict[str, Any]:
        return {
            "model": "fake",
            "prompt": list(self.prompt),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "n": self.num_choices,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            "return_token_ids": True,
            "structured_outputs": {"grammar": self.grammar} if self.grammar else None,
        }

    def reference(self, layout: KVLayout, choice: int, vocab_size: int, eos: int) -> tuple[list[int], str]:
        """Return the only right answer and its finish reason."""
        sampling = SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, seed=(self.seed + choice) & (2**63 - 1)
        )
        grammar = Brackets(self.max_depth, vocab_size, eos) if self.max_depth else None
        tokens = fake_answer(layout, self.prompt, sampling, vocab_size=vocab_size, eos=(eos,), grammar=grammar)
        return tokens, "stop" if tokens[-1] == eos else "length"


def make_requests(rng: random.Random, num_requests: int, span_s: float, vocab_size: int) -> list[ClientRequest]:
    """Return requests over `span_s` seconds. Many share a prefix, as conversations and documents do; some are repeated;
    some consist of the same few paragraphs in another order."""
    # Make shared beginnings, and paragraphs as long as one KV block of the simulated mesh (4 tokens):
    # equal blocks then follow different prefixes.
    stems = [_tokens(rng, rng.randint(4, 40), vocab_size) for _ in range(max(2, num_requests // 6))]
    paragraphs = [_tokens(rng, PARAGRAPH_TOKENS, vocab_size) for _ in range(6)]
    prompts: list[tuple[int, ...]] = []
    for _ in range(num_requests):
        # Repeat an earlier prompt, join random paragraphs, or put new tokens behind a part of a stem or behind nothing.
        kind = rng.random()
        if kind < 0.15 and prompts:
            prompt = rng.choice(prompts)
        elif kind < 0.35:
            prompt = tuple(token for _ in range(rng.randint(1, 8)) for token in rng.choice(paragraphs))
        else:
            stem = rng.choice(stems) if rng.random() < 0.7 else []
            own = _tokens(rng, rng.choice((1, 3, 9, 25, 60)), vocab_size)
            prompt = (*stem[: rng.randint(0, len(stem))], *own)
        prompts.append(prompt)
    requests = [
        ClientRequest(
            at_s=rng.uniform(0.0, span_s),
            prompt=prompt,
            max_tokens=rng.choice((1, 2, 4, 9, 17, 30)),
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.randrange(2**31),
            num_choices=rng.choice((1, 1, 1, 1, 1, 2, 3)),
            stream=rng.random() < 0.8,
        )
        for prompt in prompts
    ]
    # A request's own seed decides on its grammar: this draws nothing from `rng`.
    constrained = [
        replace(request, max_depth=1 + request.seed % MAX_DEPTH) if request.seed % CONSTRAINED == 0 else request
        for request in requests
    ]
    return sorted(constrained, key=lambda request: request.at_s)


def _tokens(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Return random tokens. EOS (0) may be among them."""
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


def is_prefix(tokens: Sequence[int], reference: Sequence[int]) -> bool:
    return len(tokens) <= len(reference) and list(tokens) == list(reference[: len(tokens)])
