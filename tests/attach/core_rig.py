"""One holder's core of attached servers, over a memory of a few blocks, without sockets."""

from collections.abc import Sequence
from typing import TypeVar

from dataplane.blocks.kept import Content
from schemas.attach import (
    PROTOCOL,
    Ask,
    FromScheduler,
    FromWorker,
    Half,
    Hello,
    KVIdentity,
    Saved,
    SlotsGiven,
    Use,
    WantSlots,
)
from schemas.block import join_hashes
from services.attach.core import AttachCore, CanaryEnded, GiveBlocks, HalfJoined, HalfLeft, HalfSent, Proof, SendHalf
from services.holder.core.actions import Action
from services.holder.core.events import Event
from services.holder.core.rules import Rules
from services.times import AttachTimes
from tests.store.rig import LAYOUT, hashes_of
from tests.store.test_blocks import make_memory

IDENTITY = KVIdentity(
    weights=LAYOUT.weights,
    kv_format="vllm0/test",
    dtype=LAYOUT.dtype,
    num_layers=LAYOUT.num_layers,
    num_kv_heads=LAYOUT.num_kv_heads,
    head_dim=LAYOUT.head_dim,
    block_size=LAYOUT.block_size,
)
CANARY_MS = 600_000
ActionT = TypeVar("ActionT")


def hello(server: str, half: Half, **changes: object) -> Hello:
    fields = {
        "protocol": PROTOCOL,
        "half": half,
        "server": server,
        "identity": IDENTITY,
        "tenant": "",
        "url": "http://127.0.0.1:1",
        "model": "m",
        "api_key": "",
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


class CoreRig:
    def __init__(
        self,
        num_blocks: int = 16,
        *,
        brings: bool = False,
        identity: KVIdentity = IDENTITY,
        times: AttachTimes | None = None,
    ) -> None:
        self.memory = make_memory(num_blocks, behind=False)
        self.memory.writes = False
        self.core = AttachCore(self.memory, identity, CANARY_MS, times or AttachTimes(), brings=brings)
        self._rules = Rules([self.core.rules()])
        self.now_ms = 1_000_000

    def step(self, event: Event) -> list[Action]:
        actions = self._rules.decide(event, self.now_ms)
        self.check()
        return actions

    def join(self, server: str, *halves: Half, **changes: object) -> list[Action]:
        return [action for half in halves or Half for action in self.step(HalfJoined(hello(server, half, **changes)))]

    def prove(self, server: str, proof: Proof = Proof.RIGHT) -> list[Action]:
        return self.step(CanaryEnded(server, proof, "as the test has it"))

    def leave(self, server: str, *halves: Half) -> list[Action]:
        return [action for half in halves or Half for action in self.step(HalfLeft(server, half))]

    def send(self, server: str, message: FromScheduler | FromWorker, tags: tuple[bytes, ...] = ()) -> list[Action]:
        is_workers = isinstance(message, FromWorker)
        return self.step(HalfSent(server, Half.WORKER if is_workers else Half.SCHEDULER, message, tags))

    def want(self, server: str, num_slots: int) -> tuple[int, ...]:
        (given,) = of_type(self.send(server, WantSlots(num_slots)), SendHalf)
        assert isinstance(given.message, SlotsGiven)
        return given.message.slots

    def save(self, server: str, slots: Sequence[int], numbers: Sequence[int]) -> list[Action]:
        tags = tuple(b"tag%d" % number for number in numbers)
        return self.send(server, self.saved(server, slots, numbers), tags)

    def saved(self, server: str, slots: Sequence[int], numbers: Sequence[int]) -> Saved:
        """Return the next message of what a server has saved."""
        number = self.core.servers[server].num_saves + 1 if server in self.core.servers else 1
        return Saved(number, tuple(slots), join_hashes(hashes_of(*numbers)))

    def ask(self, server: str, number: int, *blocks: int, use: Use = Use.LOAD) -> tuple[int, ...]:
        """Return the blocks of the first answer."""
        given, *_ = of_type(self.send(server, Ask(number, join_hashes(hashes_of(*blocks)), use)), GiveBlocks)
        assert (given.server, given.number) == (server, number)
        return given.blocks

    def fill(self, server: str, *numbers: int) -> dict[int, int]:
        """Save these blocks; return where each lies."""
        slots = self.want(server, len(numbers))
        assert len(slots) == len(numbers), "the purse has room for them"
        self.save(server, slots, numbers)
        return dict(zip(numbers, slots, strict=True))

    def take_in(self, number: int) -> None:
        """Have a block here that no server here has saved."""
        tables = self.memory.admit_spare(1, "", evicts=True)
        assert tables is not None
        self.memory.keep(tables, hashes_of(number))

    def is_kept(self, number: int) -> bool:
        return Content("", hashes_of(number)[0]) in self.memory.kept.block_of

    @property
    def num_held(self) -> int:
        """Blocks that are pinned or in a purse, each counted once."""
        held = {slot for server in self.core.servers.values() for slot in server.purse}
        return len(held.union(*(pin.blocks for server in self.core.servers.values() for pin in server.pins.values())))

    def check(self) -> None:
        self.memory.check_integrity()
        self.core.check_integrity()
        held = self.num_held + self.core.num_given_up
        assert self.memory.num_free + self.memory.num_cached + held == self.memory.num_blocks


def of_type(actions: Sequence[object], kind: type[ActionT]) -> list[ActionT]:
    return [action for action in actions if isinstance(action, kind)]
