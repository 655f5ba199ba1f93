"""A prefill and a decode worker's cores over a bus that loses, repeats and reorders: their shells in miniature, without
time, threads or bytes. After every event the conservation law is checked on both."""

from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.block import split_hashes, unpack_tokens
from schemas.handoff import BlocksReserved, FirstToken, HandoffAborted, KVLanded
from schemas.ids import LeaseId, WorkerId
from schemas.kv import ReadEnd, RequestLease
from schemas.message import Message
from schemas.request import CancelRequest, RequestTokens, RunAttempt
from schemas.worker import LeftReason, WorkerLeft
from services.engine.batch import Batch
from services.engine.interface import ChosenToken, Sequence
from services.engine.loop import sequence_of
from services.holder.core.actions import (
    Action,
    AttemptEnded,
    CloseLease,
    Emit,
    FinishLease,
    Offer,
    Publish,
    StartRead,
    StopRead,
    Submit,
    Withdraw,
)
from services.holder.core.attempt import KVRead
from services.holder.core.content import AttemptKey, ReadOutcome
from services.holder.core.events import (
    AttemptUnwanted,
    DrainBegun,
    DrainOver,
    Event,
    Fenced,
    ReadEnded,
    ReadStarted,
    SequenceFailed,
    SequenceRemoved,
    StreamEnded,
)
from services.holder.core.leases import Grant, LeaseTable
from services.holder.core.lending import LendCore
from services.worker.core import AttemptCore
from tests.worker import worker_cases as case

BLOCK = 4


def token_at(index: int) -> int:
    """The answer's token of this index, whoever samples it."""
    return 100 + index


@dataclass
class WorkerWorld:
    """One worker: its cores, its engine, its reads. `send` puts a message on the bus."""

    worker_id: WorkerId
    num_blocks: int
    send: Callable[[Message], None]
    whole_blocks: bool = False
    emitted: list[RequestTokens] = field(default_factory=list[RequestTokens])
    running: dict[AttemptKey, Sequence] = field(default_factory=dict[AttemptKey, Sequence])
    withdrawn: list[AttemptKey] = field(default_factory=list[AttemptKey])
    reads: list[KVRead] = field(default_factory=list[KVRead])
    offered: dict[LeaseId, Grant] = field(default_factory=dict[LeaseId, Grant])
    finished: dict[LeaseId, FirstToken] = field(default_factory=dict[LeaseId, FirstToken])

    def __post_init__(self) -> None:
        self.cache = case.block_cache(self.num_blocks, whole_blocks=self.whole_blocks)
        self.leases = LeaseTable()
        limits = case.limits(self.worker_id, num_blocks=self.num_blocks)
        self.core = AttemptCore(limits, self.cache, self.leases)
        self.lending = LendCore(limits, self.cache, self.leases)
        self.batch = Batch(8, context_length=100)

    def check(self) -> None:
        case.check_blocks(self.cache, self.leases, self.core)
        owned = case.tables_of(self.core)
        for writer in (*self.running.values(), *self.reads):
            assert writer.tables in owned, "what may still be written is nobody else's"
        assert len(self.core.wanted_by()) <= len(self.core.records)
        assert self.core.num_queued <= 8

    @property
    def is_at_rest(self) -> bool:
        free = self.cache.num_free + self.cache.num_cached
        return (len(self.core.records), len(self.leases), free) == (0, 0, self.num_blocks)

    @property
    def fetches(self) -> list[KVRead]:
        return [read for read in self.reads if not read.is_hand_over]

    @property
    def hand_overs(self) -> list[KVRead]:
        return [read for read in self.reads if read.is_hand_over]

    def handle(self, event: Event, now_ms: int) -> None:
        self.execute(case.decide(self.core, event, now_ms))

    def tick(self, now_ms: int) -> None:
        self.execute(case.tick(self.core, now_ms))

    def execute(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Emit(tokens=tokens):
                    self.emitted.append(tokens)
                    for index, token in enumerate(unpack_tokens(tokens.tokens), tokens.index):
                        assert token == token_at(index)
                case Publish(message=message):
                    self.send(message)
                case Offer(lease=lease, attempt=attempt):
                    self.offered[lease.lease_id] = lease
                    number = int(attempt.request.request_id[1:])
                    self.send(case.offered(number, num_tokens=lease.num_tokens))
                case Submit():
                    self._submit(action)
                case Withdraw(key=key):
                    self.withdrawn.append(key)
                case StartRead(read=read):
                    assert read.key not in [other.key for other in self.reads], "one read at a time"
                    self.reads.append(read)
                case StopRead(read=read):
                    assert read in self.reads
                case AttemptEnded(attempt=ended):
                    assert ended.key not in self.running and ended.read is None and not ended.tables
                case FinishLease(lease=lease, first_token=first):
                    self.finished[lease.lease_id] = first
                case CloseLease(lease=lease):
                    assert lease.end is not None, "it is said to have ended"
                    self.finished.pop(lease.lease_id, None)
                case _:
                    pass

    # The engine, and what its shell takes in of its work.

    def _submit(self, action: Submit) -> None:
        sequence = sequence_of(action.sequence)
        num_present = sequence.num_computed_tokens
        has_landed = num_present == action.attempt.num_prompt_tokens
        assert has_landed or self.cache.layout.usable(num_present) == num_present
        self._computed(sequence, sequence.num_computed_tokens)
        self.running[action.attempt.key] = sequence
        self.batch.add(sequence)

    def _computed(self, sequence: Sequence, num_tokens: int, *, ended: bool = False) -> None:
        attempt = self.core.of_engine[sequence.number]
        assert attempt.kv is not None
        hashes = attempt.hasher.extend(sequence.token_ids, num_tokens)
        stored, landed = attempt.num_stored_blocks, attempt.kv.num_present_tokens
        self.cache.store(sequence.tables, hashes, stored, num_tokens, landed, ended=ended)
        attempt.num_stored_blocks = num_tokens // BLOCK

    def step(self, now_ms: int, *, fails: bool = False) -> None:
        """One engine step: what was withdrawn goes first."""
        keys, self.withdrawn = self.withdrawn, []
        for key in keys:
            if (sequence := self.batch.remove(self.core.records[key].number)) is not None:
                del self.running[key]
                self._computed(sequence, sequence.num_computed_tokens, ended=True)
                self.handle(SequenceRemoved(key), now_ms)
        items = self.batch.plan()
        if fails:
            for item in items:
                key = self.core.of_engine[item.sequence.number].key
                self.batch.remove(item.sequence.number)
                del self.running[key]
                self.handle(SequenceFailed(key, "boom"), now_ms)
            return
        if not items:
            return
        tokens = [ChosenToken(token_at(item.sequence.index)) for item in items if item.samples]
        result = self.batch.commit(items, tokens, 0, 1)
        of_step = {item.sequence.number: item.sequence for item in items}
        for number, num_tokens in result.computed:
            self._computed(of_step[number], num_tokens)
        for sampled in result.sampled:
            if sampled.local_end:
                sequence = of_step[sampled.number]
                del self.running[self.core.of_engine[sampled.number].key]
                self._computed(sequence, sequence.num_computed_tokens, ended=True)
        self.handle(result, now_ms)

    def stream_ended(self, lease_id: LeaseId, now_ms: int) -> None:
        """The stream of a hand-over is over; its lease may have ended before."""
        self.handle(StreamEnded(self.offered[lease_id]), now_ms)

    def end_fetch(self, index: int, share: int, now_ms: int) -> None:
        """One fetch ends with a part of what it asked for."""
        if fetches := self.fetches:
            read = fetches[index % len(fetches)]
            self.reads.remove(read)
            assert isinstance(read.lease, RequestLease)
            asked = len(split_hashes(read.lease.block_hashes))
            num_blocks = min(share, asked)
            landed = (read.lease.first_block + num_blocks) * BLOCK if num_blocks else 0
            outcome = ReadOutcome(landed, landed, "tcp", is_whole=num_blocks == asked)
            self.handle(ReadEnded(read, outcome), now_ms)


class World:
    """Two workers and what is between them. Every public method is an event."""

    def __init__(self, num_blocks: int, *, whole_blocks: bool = False) -> None:
        self.now_ms = 0
        self.num_requests = 0
        self.bus: list[Message] = []
        self.sent: list[type[Message]] = []
        self.p = WorkerWorld(case.PREFILL, num_blocks, self._send, whole_blocks)
        self.d = WorkerWorld(case.DECODE, num_blocks, self._send, whole_blocks)
        self.lent: list[Grant] = []

    def _send(self, message: Message) -> None:
        self.bus.append(message)
        self.sent.append(type(message))

    def check(self) -> None:
        self.p.check()
        self.d.check()

    def worker(self, number: int) -> WorkerWorld:
        return self.d if number % 2 else self.p

    def deliver(self, index: int, *, keep: bool = False) -> None:
        """One of the messages under way arrives; with `keep` it will arrive again."""
        if not self.bus:
            return
        at = index % len(self.bus)
        message = self.bus[at] if keep else self.bus.pop(at)
        match message:
            case RunAttempt():
                worker = self.p if message.downstream is not None else self.d
                worker.execute(case.decide(worker.core, case.asked(message), self.now_ms))
            case BlocksReserved() | KVLanded():
                self.p.handle(message, self.now_ms)
            case case.KVOffered():
                self.d.handle(message, self.now_ms)
            case HandoffAborted():
                self.p.handle(message, self.now_ms)
                self.d.handle(message, self.now_ms)
            case CancelRequest():
                for worker in (self.p, self.d):
                    worker.handle(message, self.now_ms)
            case _:
                pass

    def lose(self, index: int) -> None:
        if self.bus:
            self.bus.pop(index % len(self.bus))

    def advance(self, ms: int) -> None:
        self.now_ms += ms
        for worker in (self.p, self.d):
            worker.tick(self.now_ms)
            worker.execute(case.tick(worker.lending, self.now_ms))

    def start_read(self, index: int) -> None:
        if reads := self.d.hand_overs:
            self.d.handle(ReadStarted(reads[index % len(reads)], "tcp"), self.now_ms)

    def end_read(self, index: int, *, whole: bool) -> None:
        """A hand-over's stream ends: with all where all is computed and leased, else with a part. The holder hears of
        it too."""
        if not (reads := self.d.hand_overs):
            return
        read = reads[index % len(reads)]
        self.d.reads.remove(read)
        offer = read.lease
        assert isinstance(offer, case.KVOffered)
        first = self.p.finished.get(offer.lease_id)
        if whole and first is not None:
            outcome = ReadOutcome(offer.num_tokens, 1, "tcp", is_whole=True)
            self.p.stream_ended(offer.lease_id, self.now_ms)
            self.d.handle(ReadEnded(read, outcome, first_token=first), self.now_ms)
        else:
            part = self.d.cache.layout.usable(index % (offer.num_tokens - read.first_token + 1))
            outcome = ReadOutcome(read.first_token + part)
            self.p.stream_ended(offer.lease_id, self.now_ms)
            self.d.handle(ReadEnded(read, outcome, ReadEnd.CLOSED, "cut"), self.now_ms)

    def lend(self, number: int, request: RequestLease) -> None:
        worker = self.worker(number)
        lease = worker.lending.answer(request, self.now_ms)
        if isinstance(lease, Grant):
            self.lent.append(lease)

    def end_lent(self, index: int) -> None:
        if self.lent:
            lease = self.lent.pop(index % len(self.lent))
            worker = self.p if lease.holder == case.PREFILL else self.d
            worker.execute(case.decide(worker.lending, StreamEnded(lease), self.now_ms))

    def fence(self, number: int) -> None:
        """One is declared dead: it ends all and tells no gateway, and the other hears of it or not."""
        worker = self.worker(number)
        num_emitted = len(worker.emitted)
        worker.handle(Fenced("declared dead"), self.now_ms)
        worker.execute(case.decide(worker.lending, Fenced("declared dead"), self.now_ms))
        assert len(worker.emitted) == num_emitted and len(worker.leases) == 0
        assert not worker.core.wanted_by() and not worker.core.wanted_by()

    def left(self, number: int) -> None:
        """One hears that the other has left."""
        other = self.d if number % 2 else self.p
        event = WorkerLeft(worker_id=self.worker(number).worker_id, incarnation="a", reason=LeftReason.SILENT)
        other.handle(event, self.now_ms)
        other.execute(case.decide(other.lending, event, self.now_ms))

    def drain(self, number: int) -> None:
        worker = self.worker(number)
        worker.handle(DrainBegun(finishes=number % 2 == 0), self.now_ms)
        assert worker.core.num_queued == worker.core.num_queued == 0

    def hand_back(self, number: int) -> None:
        worker = self.worker(number)
        worker.handle(DrainOver(), self.now_ms)

    def unwanted(self, number: int, request: int) -> None:
        key = (case.run_prefill(request).request_id, 1)
        worker = self.worker(number)
        worker.handle(AttemptUnwanted(key), self.now_ms)
        assert key not in worker.core.wanted_by() and key not in worker.core.wanted_by()

    def settle(self) -> None:
        """Every message is lost from now on, whatever still runs comes to its end, and every deadline passes."""
        for _ in range(200):
            self.bus.clear()
            for worker in (self.p, self.d):
                worker.step(self.now_ms)
                worker.end_fetch(0, 0, self.now_ms)
            self.end_read(0, whole=False)
            self.advance(1_000)
            self.check()
            if self.p.is_at_rest and self.d.is_at_rest:
                return
        raise AssertionError("something never ends")
