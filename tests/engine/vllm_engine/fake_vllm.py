"""Stands in for vLLM where it is not installed: schedules as it does, calls the hooks in its order, and makes tokens of
what it *reads* in its own blocks, as `FakeEngine` does of the arena's: a block that is wrong or missing gives another
token. `test_contract.py` holds it and the real one to the same promises.

As vLLM does it: chunks under a token budget, running requests first; blocks are known for reuse as soon as they are
allocated, so that a request shares what another one of the same step computes; where blocks run out the request that
came last begins again; `start_load_kv` runs before the forward only if there is something to load; nothing is reused or
loaded for a request that wants its prompt's logprobs. Layers with windows have groups with block lists of their own,
from one pool, two where there are layers enough; blocks that no window sees are given back before the next step, and
nothing is cached (`loading.py` says so to vLLM).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from dataplane.blocks.layout import KVLayout, num_blocks_for
from services.engine.fake import _rows, fake_logprob, fake_outcome
from services.engine.interface import ChosenToken, Sequence
from services.engine.rules import stop_token_ids
from services.engine.vllm_engine.link import EngineLayer, EngineLink
from services.engine.vllm_engine.plan import NO_BLOCK


@dataclass(frozen=True)
class Group:
    """Layers with one block list."""

    layers: tuple[int, ...]
    window: int


@dataclass(eq=False)
class Request:
    name: str
    given_name: str
    tokens: list[int]
    sequence: Sequence
    num_tokens: int
    """So many may be sampled."""
    stops: frozenset[int]
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list[list[int]])
    """By group."""
    num_sampled: int = 0
    prompt_logprobs: list[dict[int, SimpleNamespace] | None] = field(default_factory=list[Any])

    @property
    def num_left(self) -> int:
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True)
class Item:
    request: Request
    start: int
    num_tokens: int


class FakeVllm:
    """As `LocalEngine`. `num_preempted`: how often a request had to begin again."""

    def __init__(
        self, link: EngineLink, *, num_blocks: int = 64, token_budget: int = 64, vocab_size: int = 256
    ) -> None:
        self.layout: KVLayout = link.layout
        self.vocab_size = vocab_size
        self.num_preempted = 0
        self.num_steps = 0
        self._link = link
        self._token_budget = token_budget
        self._half = self.layout.block_size * self.layout.token_bytes
        self._pages = [np.zeros((num_blocks, 2 * self._half), np.uint8) for _ in range(self.layout.num_layers)]
        self._groups = groups_of(self.layout)
        self._free = list(range(NO_BLOCK + 1, num_blocks))
        self._users: dict[int, int] = {}
        """Block to the number of requests that have it."""
        self._cached: dict[tuple[str, tuple[int, ...]], int] = {}
        """A tenant's prefix of whole blocks to its last block."""
        self._running: list[Request] = []
        self._waiting: list[Request] = []
        layers = ((layer, number, group) for number, group in enumerate(self._groups) for layer in group.layers)
        link.attach({layer: EngineLayer(self._pages[layer], number, group.window) for layer, number, group in layers})

    # As LocalEngine.

    def add_request(self, name: str, sequence: Sequence, num_tokens: int) -> str:
        theirs = f"{name}-{len(name):08x}"
        request = Request(
            theirs, name, list(sequence.token_ids), sequence, num_tokens, stop_token_ids(sequence),
            blocks=[[] for _ in self._groups],
        )  # fmt: skip
        self._waiting.append(request)
        return theirs

    def abort(self, name: str) -> None:
        for line in (self._running, self._waiting):
            for request in [request for request in line if request.name == name]:
                self._give_back(request)
                line.remove(request)

    def engine_step(self) -> list[SimpleNamespace]:
        self.num_steps += 1
        before = self.num_preempted
        items = self._schedule()
        self._plan(items, self.num_preempted - before)
        if any(any(copies.loads) for copies in self._link.step):
            self._link.copy_in()
        for layer in range(self.layout.num_layers):
            for item in items:
                self._write(item, layer)
            self.layer_is_written(layer)
        self._link.check_saved()
        return [output for item in items if (output := self._output(item)) is not None]

    def forget_blocks(self) -> None:
        assert not self._running and not self._waiting
        self._cached.clear()

    def close(self) -> None:
        self._pages.clear()

    # What a planted bug may change.

    def layer_is_written(self, layer: int) -> None:
        self._link.save(layer)

    @property
    def num_free(self) -> int:
        return len(self._free)

    # Scheduling.

    def _schedule(self) -> list[Item]:
        budget, items = self._token_budget, list[Item]()
        for request in list(self._running):
            if request not in self._running or not budget:
                continue
            num_tokens = min(budget, request.num_left)
            self._give_back_unseen(request)
            while not self._grow(request, request.num_computed + num_tokens):
                last = self._running[-1]
                self._preempt(last)
                items = [item for item in items if item.request is not last]
                if last is request:
                    break
            if request in self._running:
                items.append(Item(request, request.num_computed, num_tokens))
                budget -= num_tokens
        while self._waiting and budget:
            request = self._waiting[0]
            tracked = self._link.tracked.get(request.name)
            local = self._shared(request)
            num_local = len(local) * self.layout.block_size
            matched = tracked.num_matched(len(request.tokens), num_local) if tracked else 0
            matched = 0 if request.sequence.wants_prompt_logprobs else matched
            start = num_local + matched
            num_tokens = min(budget, len(request.tokens) - start)
            self._take(request, 0, local)
            self._skip(request, start)
            if not self._grow(request, start + num_tokens):
                self._give_back(request)
                break
            if tracked is not None:
                tracked.promised(len(request.tokens), matched)
            self._waiting.pop(0)
            self._running.append(request)
            request.num_computed = start
            items.append(Item(request, start, num_tokens))
            budget -= num_tokens
        return items

    def _plan(self, items: Seq[Item], num_preempted: int) -> None:
        tracked = ((self._link.tracked.get(item.request.name), item) for item in items)
        step = [one.plan(item.start, item.num_tokens, item.request.blocks) for one, item in tracked if one]
        self._link.begin_step(step, num_preempted)

    def _shared(self, request: Request) -> list[int]:
        """Return the blocks of its prefix that are cached: all but one token at most."""
        size, found = self.layout.block_size, list[int]()
        if self.layout.is_windowed or request.sequence.wants_prompt_logprobs:
            return found
        for end in range(size, len(request.tokens), size):
            block = self._cached.get((request.sequence.tenant, tuple(request.tokens[:end])))
            if block is None:
                break
            found.append(block)
        return found

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Give a request blocks for so many tokens; the full ones can be shared from now on."""
        size = self.layout.block_size
        missing = [num_blocks_for(num_tokens, size) - len(blocks) for blocks in request.blocks]
        if sum(missing) > len(self._free):
            return False
        for group, count in enumerate(missing):
            for _ in range(count):
                block = self._free.pop(0)
                self._cached = {prefix: each for prefix, each in self._cached.items() if each != block}
                self._take(request, group, [block])
        for number in range(num_tokens // size):
            prefix = (request.sequence.tenant, tuple(request.tokens[: (number + 1) * size]))
            self._cached.setdefault(prefix, request.blocks[0][number])
        return True

    def _num_unseen(self, group: Group, num_computed: int) -> int:
        """Return how many blocks no later query of this group sees."""
        return max(0, num_computed - group.window + 1) // self.layout.block_size if group.window else 0

    def _skip(self, request: Request, num_computed: int) -> None:
        """Put "no block" where a window sees nothing of a prefix that is computed."""
        for group, blocks in zip(self._groups, request.blocks, strict=True):
            blocks += [NO_BLOCK] * max(0, self._num_unseen(group, num_computed) - len(blocks))

    def _give_back_unseen(self, request: Request) -> None:
        for group, blocks in zip(self._groups, request.blocks, strict=True):
            for number in range(self._num_unseen(group, request.num_computed)):
                self._drop(blocks[number])
                blocks[number] = NO_BLOCK

    def _take(self, request: Request, group: int, blocks: Seq[int]) -> None:
        for block in blocks:
            request.blocks[group].append(block)
            self._users[block] = self._users.get(block, 0) + 1
            if block in self._free:
                self._free.remove(block)

    def _drop(self, block: int) -> None:
        if block != NO_BLOCK:
            self._users[block] -= 1
            if not self._users[block]:
                self._free.append(block)

    def _give_back(self, request: Request) -> None:
        for blocks in request.blocks:
            for block in reversed(blocks):
                self._drop(block)
            blocks.clear()

    def _preempt(self, request: Request) -> None:
        self.num_preempted += 1
        self._give_back(request)
        request.num_computed = 0
        self._running.remove(request)
        self._waiting.insert(0, request)

    def says(self, name: str, token: int, *, finished: bool) -> list[SimpleNamespace]:
        """Return what a step gives that chose this token for this request."""
        self._link.outcomes[name] = ChosenToken(token)
        outputs = [SimpleNamespace(token_ids=[token])]
        return [SimpleNamespace(request_id=name, finished=finished, outputs=outputs, prompt_logprobs=None)]

    # Computing.

    def _write(self, item: Item, layer: int) -> None:
        request, size = item.request, self.layout.block_size
        tokens = request.tokens[item.start : item.start + item.num_tokens]
        rows = _rows(self.layout, tokens, item.start)
        width = self.layout.token_bytes
        blocks = request.blocks[self._group_of(layer)]
        for part in range(2):
            values = np.frombuffer(rows[layer * 2 + part], np.uint8)
            for number in range(len(tokens)):
                block, at = divmod(item.start + number, size)
                first = part * self._half + at * width
                page = self._pages[layer][blocks[block]]
                page[first : first + width] = values[number * width : (number + 1) * width]

    def _output(self, item: Item) -> SimpleNamespace | None:
        request = item.request
        request.num_computed = end = item.start + item.num_tokens
        self._score_prompt(item)
        if end < len(request.tokens):
            return None
        digest = self._digest(request, end)
        if self._link.on_logits is not None:
            seen = digest.to_bytes(8, "big") * 4
            self._link.on_logits(np.frombuffer(seen, np.uint8)[None].astype(np.float32))
        outcome = fake_outcome(digest, request.sequence, self.vocab_size)
        self._link.outcomes[request.given_name] = outcome
        token = outcome.token_id if isinstance(outcome, ChosenToken) else 0
        request.tokens.append(token)
        request.num_sampled += 1
        finished = token in request.stops or request.num_sampled >= request.num_tokens
        if finished:
            self._running.remove(request)
            self._give_back(request)
        outputs = [SimpleNamespace(token_ids=[token])]
        return SimpleNamespace(
            request_id=request.given_name,
            finished=finished,
            outputs=outputs,
            prompt_logprobs=request.prompt_logprobs if request.num_sampled == 1 else None,
        )

    def _score_prompt(self, item: Item) -> None:
        """Note what is said of the prompt's tokens that follow an item's, where that is wanted."""
        request, sequence, found = item.request, item.request.sequence, item.request.prompt_logprobs
        if not sequence.wants_prompt_logprobs or request.num_sampled:
            return
        found += [None] * (len(request.tokens) - len(found))
        for end in range(item.start + 1, min(request.num_computed + 1, len(request.tokens))):
            token_id, digest = request.tokens[end], self._digest(request, end)
            one = fake_logprob(digest, token_id, sequence.sampling.prompt_logprobs or 0, self.vocab_size)
            by_id = {token_id: one.logprob} | dict(one.top)
            found[end] = {other: SimpleNamespace(logprob=logprob) for other, logprob in by_id.items()}

    def _digest(self, request: Request, end: int) -> int:
        """Return a number made of all that the last of `end` tokens sees."""
        digest = xxhash.xxh3_64()
        for layer in range(self.layout.num_layers):
            for part in range(2):
                digest.update(self._read(layer, request, part, end))
        return digest.intdigest()

    def _read(self, layer: int, request: Request, part: int, end: int) -> bytes:
        """Return what the last of `end` tokens sees in a layer."""
        group = self._group_of(layer)
        halves = self._pages[layer][request.blocks[group], part * self._half : (part + 1) * self._half]
        window = self._groups[group].window
        first = max(0, end - window) if window else 0
        return halves.tobytes()[first * self.layout.token_bytes : end * self.layout.token_bytes]

    def _group_of(self, layer: int) -> int:
        return next(number for number, group in enumerate(self._groups) if layer in group.layers)


def groups_of(layout: KVLayout) -> list[Group]:
    """Return the groups as vLLM forms them: each with as many layers as the smallest of ours."""
    size = min(len(group.layers) for group in layout.groups)
    return [
        Group(group.layers[first : first + size], group.window)
        for group in layout.groups
        for first in range(0, len(group.layers), size)
    ]
