"""Servers that attach to a holder, die and lose their connections, with messages that come late, doubled and in another
order: simulated by seeds, around the holder's real core.

`python -m tests.attach.simulated` runs many seeds and hunts the planted bugs.
"""

import heapq
import itertools
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import pytest
from rich.console import Console
from rich.progress import track
from rich.table import Table

from schemas.attach import (
    Ask,
    BlockRefused,
    Compared,
    FromScheduler,
    FromWorker,
    Half,
    Have,
    Hello,
    Loaded,
    Off,
    Proven,
    Release,
    Saved,
    SlotsGiven,
    Use,
    WantSlots,
)
from schemas.block import join_hashes
from schemas.ids import BlockHash
from services.attach.core import (
    AttachCore,
    CanaryEnded,
    EndHalf,
    GiveBlocks,
    HalfJoined,
    HalfLeft,
    HalfSent,
    Proof,
    Refuse,
    RunCanary,
    SendHalf,
    TurnedOff,
    Welcomed,
)
from services.holder.core.actions import Action
from services.holder.core.events import Event, TimePassed
from services.times import AttachTimes
from tests.attach.core_rig import IDENTITY, CoreRig, hello
from tests.store.rig import hashes_of

NUM_BLOCKS = 40
NUM_PROMPTS, LONGEST = 6, 8
END_MS = 20_000
LATENCY_MS = (0, 100)
COPY_MS = (0, 500)
SHARDS = tuple(msgspec.structs.replace(IDENTITY, kv_format=f"vllm0/test rank {rank}") for rank in (0, 1))
"""Two ranks of one model: equal but for what their bytes mean."""
Message = FromScheduler | FromWorker | SlotsGiven | Proven | Off | Have


class Bytes(NamedTuple):
    """What lies in a slot: KV of this block, as a server of this format computes it."""

    kv_format: str
    block_hash: BlockHash

    @property
    def digest(self) -> bytes:
        return repr(self).encode()


class ProblemError(Exception):
    """A promise is broken."""


@dataclass(eq=False)
class Life:
    """One life of a server. `attachment`: the one that its halves know of; 0: none. `joined`: halves that the holder
    has a connection of, with the connection's number."""

    name: str
    rank: int
    is_alive: bool = True
    attachment: int = 0
    joined: dict[Half, int] = field(default_factory=dict[Half, int])
    cut: set[Half] = field(default_factory=set[Half])
    """Whose connection has ended, which they have not noticed yet."""
    num_saves: int = 0
    slots: list[int] = field(default_factory=list[int])
    asked: dict[int, Ask] = field(default_factory=dict[int, Ask])


class World:
    """`is_hostile`: what halves send comes doubled and in another order; else in theirs, as over a socket."""

    def __init__(self, seed: int, *, is_hostile: bool) -> None:
        self._rng = random.Random(seed)
        self._is_hostile = is_hostile
        self._rig = CoreRig(NUM_BLOCKS, identity=SHARDS[0], times=TIMES)
        self._core = self._rig.core
        self._arena: dict[int, Bytes] = {}
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count(1)
        self._now_ms = 0
        self._lives: dict[str, Life] = {}
        self._attachments: dict[str, int] = {}
        self._last_ms: dict[tuple[int, Half, bool], int] = {}
        """By connection and direction, when the last message comes."""

    def run(self) -> None:
        """Raises ProblemError, AssertionError."""
        for _ in range(3):
            self._begin_life(0)
        self._begin_life(1)
        for at_ms in range(0, END_MS, 500):
            self._at(at_ms, lambda: self._step(TimePassed()))
        while self._queue and self._now_ms < END_MS:
            self._now_ms, _, happen = heapq.heappop(self._queue)
            happen()
        # All of them die: nothing is held then, once the last may have copied.
        for life in list(self._lives.values()):
            self._end(life)
        self._now_ms += round(1000 * max(TIMES.purse_s, TIMES.pin_s)) + LATENCY_MS[1]
        self._step(TimePassed())
        if self._core.servers or self._rig.num_held or self._core.num_given_up:
            raise ProblemError("servers have died, and blocks of theirs are held")

    # The servers.

    def _begin_life(self, rank: int) -> None:
        life = Life(f"s{next(self._numbers)}", rank)
        self._lives[life.name] = life
        for half in Half:
            self._attach(life, half)
        self._later(50, 500, lambda: self._act(life))

    def _attach(self, life: Life, half: Half) -> None:
        """Connect, now and again, until the holder takes this half."""
        if life.is_alive and half not in life.joined and half not in life.cut:
            greeting = hello(life.name, half, identity=SHARDS[life.rank])
            self._later(*LATENCY_MS, lambda: self._joins(life, greeting))
            self._later(1_000, 1_100, lambda: self._attach(life, half))

    def _act(self, life: Life) -> None:
        """Do what a server does, or what happens to one."""
        if not life.is_alive:
            return
        match self._rng.random():
            case chance if chance < 0.02:
                self._end(life)
                self._later(100, 2_000, lambda: self._begin_life(life.rank))
                return
            case chance if chance < 0.05 and life.joined:
                self._cut(life, self._rng.choice(list(life.joined)))
            case chance if chance < 0.4:
                self._send(life, WantSlots(self._rng.randrange(1, 6)))
            case chance if chance < 0.7:
                self._ask(life)
            case _:
                self._save(life)
        self._later(5, 200, lambda: self._act(life))

    def _end(self, life: Life) -> None:
        """Kill its processes: whatever they were doing ends."""
        life.is_alive = False
        self._lives.pop(life.name, None)
        for half in list(life.joined):
            self._cut(life, half)

    def _cut(self, life: Life, half: Half) -> None:
        """End a connection; its server learns it a moment later, and goes on meanwhile."""
        if life.joined.pop(half, None) is None:
            return
        self._step(HalfLeft(life.name, half))
        if life.name not in self._core.servers:
            self._attachments.pop(life.name, None)
        life.cut.add(half)
        self._later(*LATENCY_MS, lambda: self._lost(life, half))
        self._later(1_000, 1_100, lambda: self._attach(life, half))

    def _lost(self, life: Life, half: Half) -> None:
        life.cut.discard(half)
        life.attachment, life.num_saves = 0, 0
        life.slots.clear()
        life.asked.clear()

    def _ask(self, life: Life) -> None:
        if not life.attachment:
            return
        use = self._rng.choice((Use.LOAD, Use.LOAD, Use.COMPARE))
        ask = Ask(next(self._numbers), join_hashes(self._run_of_blocks()), use, wait_ms=self._rng.choice((0, 500)))
        life.asked[ask.number] = ask
        self._send(life, ask)

    def _save(self, life: Life) -> None:
        """Copy what a step has computed into slots, if the attachment that gave them is still there, and report it."""
        run, attachment = self._run_of_blocks(), life.attachment
        slots, life.slots[: len(run)] = life.slots[: len(run)], []
        if not slots:
            return

        def copied() -> None:
            if not life.is_alive:
                return
            for slot, block_hash in zip(slots, run, strict=False):
                self._write(life, slot, block_hash)
            if life.attachment == attachment:
                life.num_saves += 1
                self._send(life, Saved(life.num_saves, tuple(slots), join_hashes(run[: len(slots)])))

        def begun() -> None:
            if life.attachment == attachment:
                self._later(*COPY_MS, copied)

        self._later(0, 300, begun)

    def _write(self, life: Life, slot: int, block_hash: BlockHash) -> None:
        kept = self._rig.memory.kept
        purses = {each for name, server in self._core.servers.items() for each in server.purse if name != life.name}
        if slot in purses or kept.content_of(slot) is not None:
            raise ProblemError(f"{life.name} writes into a slot that is another's")
        self._arena[slot] = Bytes(SHARDS[life.rank].kv_format, block_hash)

    def _answered(self, life: Life, have: Have) -> None:
        """Load what was found, or compare it."""
        ask, attachment = life.asked.get(have.number), life.attachment
        if ask is None or have.has_more:
            return
        digests = have.digests.split(b"|") if have.digests else []
        hashes = [BlockHash(ask.hashes[at : at + 16]) for at in range(0, len(ask.hashes), 16)]

        def copied() -> None:
            if not life.is_alive:
                return
            num_right = 0
            for slot, digest, block_hash in zip(have.slots, digests, hashes, strict=False):
                found, right = self._arena[slot], Bytes(SHARDS[life.rank].kv_format, block_hash)
                if found.digest != digest:
                    self._send(life, BlockRefused(slot, block_hash))
                elif ask.use is Use.COMPARE:
                    self._send(life, Compared(block_hash, 0.0, found == right))
                elif found != right:
                    raise ProblemError(f"{life.name} loads {found} in place of {right}")
                else:
                    num_right += 1
            if life.attachment == attachment:
                life.asked.pop(have.number, None)
                self._send(life, Loaded(have.number, num_right, 0.001))
                self._send(life, Release(have.number))

        self._later(*COPY_MS, copied)

    def _run_of_blocks(self) -> list[BlockHash]:
        """Return the beginning of one of a few prompts."""
        prompt = self._rng.randrange(NUM_PROMPTS)
        return hashes_of(*(100 * prompt + at for at in range(self._rng.randrange(1, LONGEST))))

    # The holder.

    def _joins(self, life: Life, greeting: Hello) -> None:
        if not life.is_alive or greeting.half in life.joined:
            return
        life.joined[greeting.half] = next(self._numbers)
        self._step(HalfJoined(greeting))

    def _send(self, life: Life, message: FromScheduler | FromWorker) -> None:
        """A half sends."""
        half = Half.WORKER if isinstance(message, FromWorker) else Half.SCHEDULER
        connection = life.joined.get(half)

        def comes() -> None:
            if connection is None or life.joined.get(half) != connection:
                return
            saved = message if isinstance(message, Saved) else None
            tags = tuple(self._arena[slot].digest for slot in saved.slots) if saved is not None else ()
            self._step(HalfSent(life.name, half, message, tags))

        for _ in range(2 if self._is_hostile and self._rng.random() < 0.1 else 1):
            self._in_order((connection or 0, half, True), comes, may_overtake=self._is_hostile)

    def _tell(self, life: Life, half: Half, message: Message) -> None:
        """The holder sends."""
        connection = life.joined.get(half)

        def comes() -> None:
            if not life.is_alive or connection is None or life.joined.get(half) != connection:
                return
            match message:
                case SlotsGiven(slots=slots):
                    if set(slots) & set(life.slots):
                        raise ProblemError(f"{life.name} is given slots that it has")
                    life.slots += slots
                case Have():
                    self._answered(life, message)
                case _:
                    pass

        self._in_order((connection or 0, half, False), comes, may_overtake=False)

    def _step(self, event: Event) -> None:
        self._rig.now_ms = 1_000_000 + self._now_ms
        actions = self._rig.step(event)
        for block in self._rig.memory.kept.block_of.values():
            if self._core.tag(block) != self._arena[block].digest:
                raise ProblemError("a block can be found that has no digest, or another one")
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case Welcomed(server=name, half=half):
                word, life = self._attachments.setdefault(name, next(self._numbers)), self._lives[name]
                self._in_order((life.joined[half], half, False), lambda: self._welcomed(life, word), may_overtake=False)
            case Refuse():
                for life in self._lives.values():
                    for half in [each for each in life.joined if not self._is_joined(life, each)]:
                        del life.joined[half]
            case SendHalf(server=name, half=half, message=message):
                if name in self._lives:
                    self._tell(self._lives[name], half, message)
            case GiveBlocks(server=name, number=number, blocks=blocks, has_more=has_more):
                digests = b"|".join(self._arena[block].digest for block in blocks)
                if name in self._lives:
                    self._tell(self._lives[name], Half.SCHEDULER, Have(number, blocks, digests, has_more=has_more))
            case EndHalf(server=name, half=half):
                if name in self._lives:
                    self._later(0, 0, lambda: self._cut(self._lives[name], half) if name in self._lives else None)
            case RunCanary(server=name):
                proof = self._rng.choice((Proof.RIGHT, Proof.RIGHT, Proof.UNREACHABLE))
                self._later(50, 1_000, lambda: self._step(CanaryEnded(name, proof, "")))
            case TurnedOff(server=name, reason=reason):
                raise ProblemError(f"{name} is found wrong, and nobody is: {reason}")
            case _:
                pass

    def _is_joined(self, life: Life, half: Half) -> bool:
        return life.name in self._core.servers and half in self._core.servers[life.name].halves

    def _welcomed(self, life: Life, word: int) -> None:
        if self._attachments.get(life.name) == word:
            life.attachment = word

    # Time.

    def _at(self, at_ms: int, happen: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (at_ms, next(self._numbers), happen))

    def _later(self, least_ms: int, most_ms: int, happen: Callable[[], None]) -> None:
        self._at(self._now_ms + self._rng.randint(least_ms, most_ms), happen)

    def _in_order(self, line: tuple[int, Half, bool], happen: Callable[[], None], *, may_overtake: bool) -> None:
        at_ms = self._now_ms + self._rng.randint(*LATENCY_MS)
        if not may_overtake:
            at_ms = self._last_ms[line] = max(at_ms, self._last_ms.get(line, 0))
        self._at(at_ms, happen)


TIMES = AttachTimes()


def problem_of(seed: int) -> str:
    """Return what goes wrong in this seed's world; "": nothing does."""
    try:
        World(seed, is_hostile=seed % 2 == 1).run()
    except (ProblemError, AssertionError) as error:
        return str(error) or "a check of the holder's"
    return ""


# Planted bugs.


class Bug(NamedTuple):
    """`within`: seeds, of which one must find it."""

    name: str
    patch: Callable[[pytest.MonkeyPatch], None]
    within: int = 20


def _pins_not_given_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AttachCore, "_unpin", lambda self, server, number: server.pins.pop(number, None))


def _purse_given_twice(patch: pytest.MonkeyPatch) -> None:
    fill = AttachCore._fill_purse

    def fill_again(self, server, num_slots):
        fill(self, server, num_slots)
        return tuple(sorted(server.purse))

    patch.setattr(AttachCore, "_fill_purse", fill_again)


def _announced_before_its_digest(patch: pytest.MonkeyPatch) -> None:
    saved = AttachCore._saved

    def without(self, event, server, message, now_ms):
        early = HalfSent(event.server, event.half, event.message, tuple(b"" for _ in event.tags))
        return saved(self, early, server, message, now_ms)

    patch.setattr(AttachCore, "_saved", without)


def _identity_without_the_rank(patch: pytest.MonkeyPatch) -> None:
    refusal = AttachCore._refusal

    def without(self, greeting):
        of_rank_0 = msgspec.structs.replace(greeting, identity=SHARDS[0])
        return refusal(self, of_rank_0)

    patch.setattr(AttachCore, "_refusal", without)


def _slots_given_on_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{__name__}.TIMES", AttachTimes(purse_s=0.0))


BUGS = (
    Bug("pins_not_given_back", _pins_not_given_back),
    Bug("purse_given_twice", _purse_given_twice),
    Bug("announced_before_its_digest", _announced_before_its_digest),
    Bug("identity_without_the_rank", _identity_without_the_rank),
    Bug("slots_given_on_at_once", _slots_given_on_at_once, within=200),
)


def hunt(bug: Bug) -> tuple[int, str]:
    """Return after how many seeds a planted bug was caught, and as what; "": it was not."""
    with pytest.MonkeyPatch.context() as patch:
        bug.patch(patch)
        for seed in range(bug.within):
            if problem := problem_of(seed):
                return seed + 1, problem
    return bug.within, ""


def main() -> None:
    """Exit code 1 where a promise is broken without a bug, or a bug is not caught."""
    console, num_seeds = Console(), 2_000
    problems = {seed: problem_of(seed) for seed in track(range(num_seeds), "simulating", console=Console(stderr=True))}
    for seed, problem in problems.items():
        if problem:
            console.print(f"seed {seed}: {problem}")
    table = Table("bug", "caught after", "as", title=f"{num_seeds} seeds of attached servers")
    caught = {bug.name: hunt(bug) for bug in BUGS}
    for name, (number, problem) in caught.items():
        table.add_row(name, f"{number} seeds" if problem else "never", problem[:80])
    console.print(table)
    sys.exit(any(problems.values()) or not all(problem for _, problem in caught.values()))


if __name__ == "__main__":
    main()
