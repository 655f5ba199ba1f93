"""Which blocks attached servers may load and save, and which servers share at all. Pure.

A server shares once its canary has proven it (`canary.py`), and until a comparison finds it wrong. What it asks for is
pinned until it says that it has loaded it; what it saves goes into empty slots that it was given before, its *purse*,
as it may be writing into them at any time: they are its own until both of its halves are gone.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import BlockTable, segments_of
from schemas.attach import (
    PROTOCOL,
    Ask,
    BlockRefused,
    Compared,
    Counted,
    FromScheduler,
    FromWorker,
    Half,
    Hello,
    HelloRefused,
    KVIdentity,
    Loaded,
    NotSaved,
    Off,
    Proven,
    Release,
    Saved,
    SlotsGiven,
    Use,
    WantSlots,
    WeightsChanged,
)
from schemas.block import split_hashes
from schemas.ids import BlockHash
from services.attach.limits import CANARY_BLOCKS, MAX_PINS, MAX_SERVERS, MAX_WAITING, PURSES_SHARE, RATED_BLOCKS
from services.holder.core.actions import Action, OwnersAction
from services.holder.core.events import OwnersEvent, ReadEnded, TimePassed
from services.holder.core.rules import RuleTable
from services.store.blocks import StoreMemory
from services.times import AttachTimes


class Sharing(enum.StrEnum):
    """Whether a server shares. `PROVING`: its canary is still to say so."""

    PROVING = "proving"
    ON = "on"
    OFF = "off"


class Proof(enum.StrEnum):
    """How a canary ended. `UNREACHABLE`: the server's API has not answered; that is tried again."""

    RIGHT = "right"
    WRONG = "wrong"
    UNREACHABLE = "unreachable"


# What happens.


@dataclass(frozen=True, slots=True)
class HalfJoined(OwnersEvent):
    hello: Hello

    @property
    def about(self) -> str:
        return f"{self.hello.server} {self.hello.half}"


@dataclass(frozen=True, slots=True)
class HalfLeft(OwnersEvent):
    """Its connection has ended: its process has, or it is going to connect anew."""

    server: str
    half: Half

    @property
    def about(self) -> str:
        return f"{self.server} {self.half}"


@dataclass(frozen=True, slots=True)
class HalfSent(OwnersEvent):
    """`tags`: of the blocks that are `Saved`."""

    server: str
    half: Half
    message: FromScheduler | FromWorker
    tags: tuple[bytes, ...] = ()

    @property
    def about(self) -> str:
        return f"{self.server} {type(self.message).__name__}"


@dataclass(frozen=True, slots=True)
class BringEnded(OwnersEvent):
    """What could be brought for a question is here: so many blocks."""

    server: str
    number: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CanaryEnded(OwnersEvent):
    """`detail`: for people."""

    server: str
    proof: Proof
    detail: str

    @property
    def about(self) -> str:
        return f"{self.server} {self.proof}"


# What is to be done.


@dataclass(frozen=True, slots=True)
class Welcomed(OwnersAction):
    """The half may map the arena."""

    server: str
    half: Half


@dataclass(frozen=True, slots=True)
class Refuse(OwnersAction):
    """The half that has just said who it is may not join. Its connection ends with this."""

    answer: HelloRefused


@dataclass(frozen=True, slots=True)
class SendHalf(OwnersAction):
    server: str
    half: Half
    message: SlotsGiven | Proven | Off


@dataclass(frozen=True, slots=True)
class GiveBlocks(OwnersAction):
    """Answer a question: these blocks are pinned for its number. Their digests go with them."""

    server: str
    number: int
    blocks: tuple[int, ...]
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Bring(OwnersAction):
    """Have these blocks brought here, from behind memory or from another holder, as far as that is quicker than
    computing them; `BringEnded` reports when that is over. `hint`: who is said to have them, or to have them within
    `wait_ms`."""

    server: str
    number: int
    hashes: tuple[BlockHash, ...]
    hint: str
    wait_ms: int


@dataclass(frozen=True, slots=True)
class BlocksCame(OwnersAction):
    """A read has ended: whoever brings blocks is to look again."""


@dataclass(frozen=True, slots=True)
class EndHalf(OwnersAction):
    """End its connection. `reason`: why what it sent makes no sense; "": its other half has gone."""

    server: str
    half: Half
    reason: str


@dataclass(frozen=True, slots=True)
class RunCanary(OwnersAction):
    """Let the server prove itself; `CanaryEnded` reports how that went."""

    server: str


@dataclass(frozen=True, slots=True)
class TurnedOff(OwnersAction):
    """A server shares no more. `num_dropped`: blocks of its that were given up."""

    server: str
    reason: str
    num_dropped: int


class GivenUp(NamedTuple):
    """Slots of a server that has gone, empty from a time on."""

    slots: list[int]
    until_ms: int


class Pin(NamedTuple):
    blocks: list[int]
    until_ms: int


@dataclass(slots=True)
class Waiting:
    """A question that is answered once more. `is_bringing`: somebody brings blocks for it. `until_ms`: until when other
    servers may save some."""

    hashes: list[BlockHash]
    until_ms: int
    is_bringing: bool


@dataclass(slots=True)
class Server:
    """One life of an attached server."""

    hello: Hello
    sharing: Sharing = Sharing.PROVING
    why: str = "its canary has not run yet"
    """Why it does not share, for people."""
    halves: set[Half] = field(default_factory=set[Half])
    is_leaving: bool = False
    """One half has gone, and the other one is to follow."""
    purse: set[int] = field(default_factory=set[int])
    num_saves: int = 0
    """How many `Saved` have come."""
    pins: dict[int, Pin] = field(default_factory=dict[int, Pin])
    waiting: dict[int, Waiting] = field(default_factory=dict[int, Waiting])
    token_s: float = 0.0
    """How long it computes at a token of a prompt; 0: that is not known yet."""
    canary_ms: int | None = 0
    """When its canary is to run (again); None: it runs."""
    canary: str = ""
    """How its last canary went."""
    num_asked_tokens: int = 0
    num_loaded_tokens: int = 0
    num_brought_blocks: int = 0
    num_saved_blocks: int = 0
    num_compared: int = 0
    num_refused: int = 0
    not_saved: dict[NotSaved, int] = field(default_factory=dict[NotSaved, int])

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned for it, each as often as it is."""
        return sum(len(pin.blocks) for pin in self.pins.values())


class AttachCore:
    """The servers that are attached to one holder, whose blocks are of this `identity`.

    `canary_ms`: a server that shares proves itself again after so long. `brings`: there may be blocks elsewhere.
    """

    def __init__(
        self, memory: StoreMemory, identity: KVIdentity, canary_ms: int, times: AttachTimes, *, brings: bool = False
    ) -> None:
        self._memory = memory
        self._identity = identity
        self._canary_every_ms = canary_ms
        self._times = times
        self._brings = brings
        self.servers: dict[str, Server] = {}
        self._given_up: list[GivenUp] = []
        self._saved_by: dict[Content, str] = {}
        """Of blocks that are kept, or were: which life of a server has computed them."""

    def rules(self) -> RuleTable:
        """Return what is done with which event."""
        return {
            HalfJoined: self._joined,
            HalfLeft: self._left,
            HalfSent: self._sent,
            BringEnded: self._bring_ended,
            ReadEnded: self._read_ended,
            CanaryEnded: self._canary_ended,
            TimePassed: self._time_passed,
        }

    # Who is here.

    def _joined(self, event: HalfJoined, now_ms: int) -> list[Action]:
        hello = event.hello
        if refusal := self._refusal(hello):
            return [Refuse(refusal)]
        server = self.servers.setdefault(hello.server, Server(hello))
        server.halves.add(hello.half)
        actions: list[Action] = [Welcomed(hello.server, hello.half)]
        if hello.off:
            server.sharing, server.why, server.canary_ms = Sharing.OFF, hello.off, None
        return actions + self._start_canary(hello.server, now_ms)

    def _refusal(self, hello: Hello) -> HelloRefused | None:
        if hello.protocol != PROTOCOL:
            return HelloRefused(
                f"the connector speaks version {hello.protocol} and the holder version {PROTOCOL}: "
                "install kvmesh and kvmesh_vllm of one version",
                is_final=True,
            )
        for name, ours in msgspec.structs.asdict(self._identity).items():
            if (theirs := getattr(hello.identity, name)) != ours:
                return HelloRefused(f"its {name} is {theirs}, and this holder's is {ours}", is_final=True)
        known = self.servers.get(hello.server)
        if known is not None and known.is_leaving:
            return HelloRefused("its other half is still attached to what was before", is_final=False)
        if known is not None and hello.half in known.halves:
            return HelloRefused(f"a server {hello.server} is attached already", is_final=False)
        if known is None and len(self.servers) >= MAX_SERVERS:
            return HelloRefused(f"{MAX_SERVERS} servers are attached already", is_final=False)
        return None

    def _left(self, event: HalfLeft, now_ms: int) -> list[Action]:
        server = self.servers.get(event.server)
        if server is None or event.half not in server.halves:
            return []
        server.halves.discard(event.half)
        # Pins are the scheduler's. A worker that still copies from them reads memory that stays mapped, and notices by
        # its digest where that was filled anew.
        if event.half is Half.SCHEDULER:
            for number in [*server.pins, *server.waiting]:
                self._unpin(server, number)
        # One half knows nothing of what the other one had: both attach anew.
        if server.halves:
            server.is_leaving = True
            return [EndHalf(event.server, half, "") for half in server.halves]
        # A process that has not ended may be in the middle of a copy into one of its slots; it begins no other.
        self._given_up.append(GivenUp(sorted(server.purse), now_ms + round(1000 * self._times.purse_s)))
        del self.servers[event.server]
        return []

    # What the halves send.

    def _sent(self, event: HalfSent, now_ms: int) -> list[Action]:
        server = self.servers.get(event.server)
        if server is None or event.half not in server.halves:
            return []
        match event.message:
            case Ask():
                return self._asked(event.server, server, event.message, now_ms)
            case Release(number=number):
                self._unpin(server, number)
                return []
            case WantSlots(num_slots=num_slots):
                return [SendHalf(event.server, Half.SCHEDULER, SlotsGiven(self._fill_purse(server, num_slots)))]
            case Saved():
                return self._saved(event, server, event.message, now_ms)
            case BlockRefused(slot=slot, block_hash=block_hash):
                server.num_refused += 1
                if self._memory.kept.block_of.get(Content(server.hello.tenant, block_hash)) == slot:
                    self._memory.kept.forget_block(slot)
                return []
            case Compared():
                return self._compared(server, event.message)
            case WeightsChanged():
                return self._turn_off([event.server], "its weights may have been changed: start it again")
            case Counted():
                self._count(server, event.message)
                return []
            case Loaded():
                return []

    def _asked(self, name: str, server: Server, ask: Ask, now_ms: int) -> list[Action]:
        """Pin the leading run that is here. One that shares no more finds nothing."""
        self._unpin(server, ask.number)
        hashes = split_hashes(ask.hashes)
        if server.sharing is Sharing.OFF or len(server.pins) >= MAX_PINS:
            return [GiveBlocks(name, ask.number, ())]
        blocks = self._pin(server, ask.number, hashes, now_ms)
        rest = hashes[len(blocks) :]
        wait_ms = min(ask.wait_ms, round(1000 * self._times.handoff_wait_max_s))
        may_come = bool(rest) and (self._brings or wait_ms > 0) and len(server.waiting) < MAX_WAITING
        # What is to be compared may come from elsewhere at any time: that is how servers of two holders are compared
        # before they share.
        if may_come and (ask.use is Use.COMPARE or (ask.use is Use.LOAD and server.sharing is Sharing.ON)):
            server.waiting[ask.number] = Waiting(hashes, now_ms + wait_ms, self._brings)
            more = [Bring(name, ask.number, tuple(rest), ask.hint, wait_ms)] if self._brings else []
            return [GiveBlocks(name, ask.number, tuple(blocks), has_more=True), *more]
        if ask.use is Use.CONFUSED and len(blocks) >= CANARY_BLOCKS:
            blocks[CANARY_BLOCKS - 1] = blocks[0]
        return [GiveBlocks(name, ask.number, tuple(blocks))]

    def _bring_ended(self, event: BringEnded, now_ms: int) -> list[Action]:
        server = self.servers.get(event.server)
        waiting = server.waiting.get(event.number) if server is not None else None
        if server is not None:
            server.num_brought_blocks += event.num_blocks
        if server is None or waiting is None:
            return []
        waiting.is_bringing = False
        return self._answer_again(event.server, server, now_ms)

    def _read_ended(self, _: ReadEnded, __: int) -> list[Action]:
        """Blocks may have come, or come no more."""
        return [BlocksCame()] if any(server.waiting for server in self.servers.values()) else []

    def _answer_again(self, name: str, server: Server, now_ms: int) -> list[Action]:
        """Answer what this server waits for, where all of it is here now, or no more of it comes."""
        actions: list[Action] = []
        for number, waiting in list(server.waiting.items()):
            is_over = not waiting.is_bringing and waiting.until_ms <= now_ms
            if is_over or Content(server.hello.tenant, waiting.hashes[-1]) in self._memory.kept.block_of:
                del server.waiting[number]
                self._unpin(server, number)
                blocks = self._pin(server, number, waiting.hashes, now_ms)
                actions.append(GiveBlocks(name, number, tuple(blocks)))
        return actions

    def _pin(self, server: Server, number: int, hashes: Sequence[BlockHash], now_ms: int) -> list[int]:
        """Return the blocks of the leading run that is here, pinned for this number."""
        blocks = self._memory.take(hashes, server.hello.tenant)
        if blocks:
            server.pins[number] = Pin(list(blocks), now_ms + round(1000 * self._times.pin_s))
        return blocks

    def _fill_purse(self, server: Server, num_slots: int) -> tuple[int, ...]:
        """Give a server empty slots, as far as its share of all purses goes."""
        if server.sharing is Sharing.OFF:
            return ()
        most = max(1, self._memory.num_blocks // PURSES_SHARE)
        left = most - sum(len(each.purse) for each in self.servers.values())
        own = max(1, most // len(self.servers)) - len(server.purse)
        slots = self._memory.allocate_up_to(max(0, min(num_slots, left, own)), server.hello.tenant)
        server.purse.update(slots)
        return tuple(slots)

    def _saved(self, event: HalfSent, server: Server, saved: Saved, now_ms: int) -> list[Action]:
        slots, hashes = saved.slots, split_hashes(saved.hashes)
        if saved.number != server.num_saves + 1:
            return [EndHalf(event.server, event.half, "what it has saved comes twice, or not in order")]
        server.num_saves += 1
        is_right = len(set(slots)) == len(slots) == len(hashes) == len(event.tags) and server.purse.issuperset(slots)
        if not is_right:
            return [EndHalf(event.server, event.half, "it has saved blocks into slots that are not its own")]
        server.purse.difference_update(slots)
        if server.sharing is Sharing.OFF:
            self._memory.give_back(slots)
            return []
        self._memory.kept.tags |= dict(zip(slots, event.tags, strict=True))
        self._memory.keep((BlockTable(segments_of(slots)),), hashes)
        server.num_saved_blocks += len(slots)
        self._forget_gone()
        for slot in slots:
            if (content := self._memory.kept.content_of(slot)) is not None:
                self._saved_by[content] = event.server
        if saved.seconds > 0 and len(slots) >= RATED_BLOCKS:
            token_s = saved.seconds / (len(slots) * self._memory.layout.block_size)
            server.token_s = (server.token_s + token_s) / 2 if server.token_s else token_s
        # Somebody may wait for just these: the prompt of a request that goes on at another server.
        return [
            action
            for name, each in self.servers.items()
            if each.waiting
            for action in self._answer_again(name, each, now_ms)
        ]

    def _compared(self, server: Server, compared: Compared) -> list[Action]:
        """Two servers do not agree on a block, and nothing shows which of them is wrong: both are off, and so is what
        they have saved. Of a block from elsewhere nobody here knows the server: so all such blocks go, and no more are
        brought."""
        server.num_compared += 1
        if compared.is_same:
            return []
        content = Content(server.hello.tenant, compared.block_hash)
        reason = f"a block that it computed anew differs by {compared.difference:.2g} of the values' spread"
        saver = self._saved_by.get(content)
        if saver is None:
            self._brings = False
            reason += ", and came from elsewhere: until it is started again this holder brings nothing more from there"
            held = [Content(content.tenant, each) for _, hashes in self._memory.contents() for each in hashes]
            strange = [each.block_hash for each in held if each not in self._saved_by]
            self._memory.forget_blocks(strange, content.tenant)
        self._memory.forget_blocks([content.block_hash], content.tenant)
        return self._turn_off(sorted({server.hello.server, saver or server.hello.server}), reason)

    def _turn_off(self, names: Iterable[str], reason: str) -> list[Action]:
        """Share nothing with these any more, and give up what they have saved."""
        actions: list[Action] = []
        for name in names:
            own = [content for content, saver in self._saved_by.items() if saver == name]
            num_dropped = 0
            for content in own:
                del self._saved_by[content]
                num_dropped += self._memory.forget_blocks([content.block_hash], content.tenant)
            if (server := self.servers.get(name)) is not None:
                server.sharing, server.why, server.canary_ms = Sharing.OFF, reason, None
                actions += [SendHalf(name, half, Off(reason)) for half in sorted(server.halves)]
            actions.append(TurnedOff(name, reason, num_dropped))
        return actions

    # The canary.

    def _start_canary(self, name: str, now_ms: int) -> list[Action]:
        server = self.servers[name]
        is_due = server.canary_ms is not None and server.canary_ms <= now_ms
        if not is_due or server.halves != {*Half}:
            return []
        server.canary_ms = None
        return [RunCanary(name)]

    def _canary_ended(self, event: CanaryEnded, now_ms: int) -> list[Action]:
        server = self.servers.get(event.server)
        if server is None or server.sharing is Sharing.OFF:
            return []
        server.canary = event.detail
        match event.proof:
            case Proof.WRONG:
                return self._turn_off([event.server], event.detail)
            case Proof.UNREACHABLE:
                server.canary_ms = now_ms + round(1000 * self._times.canary_retry_s)
                if server.sharing is Sharing.PROVING:
                    server.why = event.detail
                return []
            case Proof.RIGHT:
                server.canary_ms = now_ms + self._canary_every_ms
                if server.sharing is Sharing.ON:
                    return []
                server.sharing, server.why = Sharing.ON, ""
                return [SendHalf(event.server, half, Proven()) for half in sorted(server.halves)]

    def _time_passed(self, _: TimePassed, now_ms: int) -> list[Action]:
        for each in [each for each in self._given_up if each.until_ms <= now_ms]:
            self._memory.give_back(each.slots)
            self._given_up.remove(each)
        actions: list[Action] = []
        for name, server in self.servers.items():
            for number in [number for number, pin in server.pins.items() if pin.until_ms <= now_ms]:
                self._unpin(server, number)
            actions += self._answer_again(name, server, now_ms)
            actions += self._start_canary(name, now_ms)
        return actions

    def num_leading(self, hashes: Sequence[BlockHash], tenant: str) -> int:
        """Return how many blocks of this run, from its first on, are in memory or behind it."""
        holds = self._memory.holds
        return next((at for at, each in enumerate(hashes) if not holds(each, tenant)), len(hashes))

    def is_waiting(self, server: str, number: int) -> bool:
        """Return whether a question is still to be answered once more."""
        return server in self.servers and number in self.servers[server].waiting

    def tag(self, block: int) -> bytes | None:
        """Return a block's tag, if it has one."""
        return self._memory.kept.tags.get(block)

    # Helpers.

    def _unpin(self, server: Server, number: int) -> None:
        server.waiting.pop(number, None)
        if (pin := server.pins.pop(number, None)) is not None:
            self._memory.give_back(pin.blocks)

    def _forget_gone(self) -> None:
        """Bound what is remembered of blocks that are not kept any more."""
        if len(self._saved_by) > 2 * (self._memory.num_blocks + len(self._memory.back)):
            self._saved_by = {
                content: name
                for content, name in self._saved_by.items()
                if self._memory.holds(content.block_hash, content.tenant)
            }

    def _count(self, server: Server, counted: Counted) -> None:
        server.num_asked_tokens += counted.asked_tokens
        server.num_loaded_tokens += counted.loaded_tokens
        for reason, number in counted.not_saved.items():
            server.not_saved[reason] = server.not_saved.get(reason, 0) + number

    @property
    def num_given_up(self) -> int:
        """Slots of servers that have gone, which are not empty yet."""
        return sum(len(each.slots) for each in self._given_up)

    def check_integrity(self) -> None:
        """Assert that pins and purses have each a reference, and none that nobody has."""
        pool = self._memory.kept.pool
        purses = [slot for server in self.servers.values() for slot in server.purse]
        assert len(set(purses)) == len(purses), "a slot is in one purse"
        assert all(pool.num_references(slot) == 1 for slot in purses), "a slot of a purse is nobody else's"
        pinned = [b for server in self.servers.values() for pin in server.pins.values() for b in pin.blocks]
        assert all(pool.num_references(block) for block in pinned), "what is pinned is in use"
