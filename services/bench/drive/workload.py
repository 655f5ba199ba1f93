"""Traces of requests to replay: read, scaled to a machine, or made up. Pure.

A trace has one JSON object on each line: `timestamp` in ms, `input_length` and `output_length` in tokens, and
`hash_ids`, one for each block of 512 prompt tokens (the last may be partial). Equal ids mean equal prefixes.
"""

import random
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from services.bench.drive.random_model import FIRST_TOKEN
from services.errors import UserError

TRACE_BLOCK = 512
SYSTEM_BLOCKS = 4
"""Blocks of a generated conversation's shared system prompt."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trace."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request, scaled. Block i of the prompt is `block_tokens` tokens made from `hash_ids[i]`. `is_cut`: the
    prompt was shortened to fit the model's context."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    block_tokens: int
    is_cut: bool


def parse_trace(lines: Iterable[str | bytes], name: str) -> list[TraceRequest]:
    """Return a trace's requests by time of arrival. Raises UserError, naming the line, for an invalid one."""
    requests: list[TraceRequest] = []
    parents: dict[int, int | None] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UserError(f"{name}, line {number}: no trace request: {error}") from error
        if problem := _problem(request) or _broken_chain(request, parents):
            raise UserError(f"{name}, line {number}: {problem}")
        requests.append(request)
    if not requests:
        raise UserError(f"{name} holds no request")
    return sorted(requests, key=lambda request: request.timestamp)


def _problem(request: TraceRequest) -> str:
    """Return what is wrong with a decoded line; empty where nothing is."""
    if request.timestamp < 0 or request.input_length < 1 or request.output_length < 0:
        return "`timestamp` and `output_length` must be 0 or more, and `input_length` 1 or more"
    num_blocks = -(-request.input_length // TRACE_BLOCK)
    if len(request.hash_ids) != num_blocks:
        return f"{request.input_length} tokens are {num_blocks} blocks of {TRACE_BLOCK}, not {len(request.hash_ids)}"
    return ""


def _broken_chain(request: TraceRequest, parents: dict[int, int | None]) -> str:
    """Return a message where an id follows another block than before, else an empty string."""
    parent: int | None = None
    for hash_id in request.hash_ids:
        if parents.setdefault(hash_id, parent) != parent:
            return f"hash id {hash_id} stood behind another block before: equal ids must be equal prefixes"
        parent = hash_id
    return ""


def first_groups(trace: Sequence[TraceRequest], num_groups: int) -> list[TraceRequest]:
    """Return the requests of the first groups of two or more, by time of arrival. Raises UserError if there is none.

    A group is the prompts that have the same block after what all prompts of the trace share: a conversation, mostly.
    """
    in_all = set(trace[0].hash_ids).intersection(*(request.hash_ids for request in trace))
    groups: dict[int | None, list[TraceRequest]] = {}
    for request in trace:
        first = next((hash_id for hash_id in request.hash_ids if hash_id not in in_all), None)
        groups.setdefault(first, []).append(request)
    shared = [group for group in groups.values() if len(group) > 1][:num_groups]
    if not shared:
        raise UserError("--groups: no two prompts of this trace share more than all of them do")
    return sorted((request for group in shared for request in group), key=lambda request: request.timestamp)


def scale_trace(
    trace: Sequence[TraceRequest], *, scale: float, speed: float, context_length: int
) -> list[ReplayRequest]:
    """Return the trace with its lengths divided by `scale` and its arrival times, counted from the first, by `speed`.

    A prompt that does not fit `context_length` beside its answer is cut at its end; an answer is cut only where it
    alone does not fit. Raises UserError for values out of range.
    """
    if not 0 < scale <= TRACE_BLOCK or speed <= 0:
        raise UserError(f"--scale must lie over 0 and be at most {TRACE_BLOCK}, --speed over 0")
    # Round the block, not each length: all blocks have one size, so equal hash ids still give equal tokens.
    block_tokens = max(1, round(TRACE_BLOCK / scale))
    first_ms = min((request.timestamp for request in trace), default=0.0)
    scaled: list[ReplayRequest] = []
    for request in trace:
        # The last block may be partial: scale its tokens separately, and keep at least one.
        tail = request.input_length - TRACE_BLOCK * (len(request.hash_ids) - 1)
        tail_tokens = min(block_tokens, max(1, round(tail * block_tokens / TRACE_BLOCK)))
        wanted = block_tokens * (len(request.hash_ids) - 1) + tail_tokens
        # The answer takes its part of the context first, but leaves at least one token for the prompt.
        num_output = min(max(1, round(request.output_length * block_tokens / TRACE_BLOCK)), context_length - 1)
        num_prompt = min(wanted, context_length - num_output)
        scaled.append(
            ReplayRequest(
                at_s=(request.timestamp - first_ms) / 1e3 / speed,
                num_prompt_tokens=num_prompt,
                num_output_tokens=num_output,
                hash_ids=request.hash_ids[: -(-num_prompt // block_tokens)],
                block_tokens=block_tokens,
                is_cut=num_prompt < wanted,
            )
        )
    return scaled


def build_prompt(request: ReplayRequest, vocab_size: int) -> list[int]:
    """Return the prompt's tokens. Equal ids give equal tokens, in every process."""
    tokens: list[int] = []
    for hash_id in request.hash_ids:
        tokens += block_of(hash_id, request.block_tokens, vocab_size)
    return tokens[: request.num_prompt_tokens]


@lru_cache(maxsize=16_384)
def block_of(hash_id: int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Return the tokens that stand for a hash id."""
    return tuple(random_tokens(random.Random(f"block {hash_id}"), num_tokens, vocab_size))


def random_tokens(rng: random.Random, num_tokens: int, vocab_size: int) -> list[int]:
    """Return random tokens, none of them special."""
    first = min(FIRST_TOKEN, vocab_size // 2)
    return [rng.randrange(first, vocab_size) for _ in range(num_tokens)]


def reusable_tokens(requests: Sequence[ReplayRequest], block_size: int) -> int:
    """Return how many prompt tokens a cache of unlimited size would have had: the most that can be reused.

    It keeps each prompt from its arrival on, in full blocks of `block_size` tokens, and never all of a prompt's tokens.
    """
    seen: dict[int, int] = {}
    total = 0
    for request in requests:
        found = 0
        for number, hash_id in enumerate(request.hash_ids, start=1):
            end = min(number * request.block_tokens, request.num_prompt_tokens)
            found = max(found, min(seen.get(hash_id, 0), end))
            seen[hash_id] = max(seen.get(hash_id, 0), end)
        total += min(found, request.num_prompt_tokens - 1) // block_size * block_size
    return total


def make_trace(
    num_conversations: int, *, seed: int, turns: int = 4, num_systems: int = 3, duration_s: float = 60.0
) -> list[TraceRequest]:
    """Return a made-up trace of conversations. Each begins with one of a few system prompts, and each turn's prompt
    is the previous one and more."""
    rng = random.Random(seed)
    # Ids below this one are the blocks of the system prompts, which conversations share.
    next_id = SYSTEM_BLOCKS * num_systems
    requests: list[TraceRequest] = []
    for _ in range(num_conversations):
        # Begin a conversation: choose its system prompt and the time of its first turn.
        system = rng.randrange(num_systems)
        ids = list(range(system * SYSTEM_BLOCKS, (system + 1) * SYSTEM_BLOCKS))
        at_ms = rng.uniform(0, duration_s * 1e3)
        # Grow the conversation turn by turn: its full blocks are also in all later prompts.
        for _ in range(rng.randint(1, turns)):
            grown = rng.randint(1, 6)
            ids = [*ids, *range(next_id, next_id + grown)]
            next_id += grown
            tail = rng.randint(1, TRACE_BLOCK)
            requests.append(
                TraceRequest(
                    timestamp=round(at_ms),
                    input_length=TRACE_BLOCK * len(ids) + tail,
                    output_length=rng.randint(32, 640),
                    hash_ids=(*ids, next_id),  # this last, partial block is in no other prompt
                )
            )
            next_id += 1
            at_ms += rng.uniform(2_000, 15_000)
    return sorted(requests, key=lambda request: request.timestamp)


_decoder = msgspec.json.Decoder(TraceRequest)
