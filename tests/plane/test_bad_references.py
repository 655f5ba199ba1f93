"""Every bad reference to KV, by name: each ends in a typed error, and not a wrong byte is believed.

The holder is a worker's own, with its cache and its leases; readers are threads and sockets as they are.
"""

import base64
import functools
import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import ArenaShape, BlockTables, KVLayout, block_ids, uniform_shape
from dataplane.blocks.ticket import TicketSecrets
from dataplane.carriers.carrier import CarrierBrokenError, ReaderEnd
from dataplane.ends.choice import CarrierChoice
from dataplane.ends.reader import Landed
from dataplane.ends.server import PlaneServer
from dataplane.protocol.stream import Accepted, TransferFailedError, TransferStats
from dataplane.times import PlaneTimes
from schemas.block import hash_blocks, join_hashes
from schemas.handoff import Endpoint
from schemas.ids import BlockHash, LeaseId, RequestId, WorkerId
from schemas.kv import LeaseGranted, RequestLease
from schemas.request import RefusalReason, Refused
from services.config import WorkerConfig
from services.holder.core.checks import WorkerLimits
from services.holder.core.leases import Grant
from services.holder.core.lending import LendCore, StreamEnded
from services.holder.kv.blocks import LentBlocks, StreamLease
from services.times import Times
from tests.credentials import SIGNER, credentials_for
from tests.plane.corruption import BitFlip, measure, tapped
from tests.plane.harness import (
    CARRIERS,
    DEADLINE_S,
    FROM_OR_TO_CARDS,
    HOLDER,
    LAYOUT,
    NUM_BLOCKS,
    READER,
    SECRET,
    Holder,
    Memory,
    Target,
    fails,
    holder_memory,
    name_of,
    now_ms,
    random_kv,
    write_kv,
)
from tests.plane.test_unauthenticated import proxy
from tests.worker import worker_cases as case

OPEN_LEASE_WITHIN_MS = Times().worker.open_lease_within_ms

BLOCK = LAYOUT.block_size
NUM_TOKENS = 18 * BLOCK


@pytest.fixture(params=[*CARRIERS, *FROM_OR_TO_CARDS])
def carrier(request: pytest.FixtureRequest) -> str:
    return name_of(request.param)


class Lender:
    """A worker's holder, as its shell keeps it, without an engine. It keeps the arena's first blocks."""

    def __init__(self, carrier: str, shape: ArenaShape | None = None, memory: Memory | None = None) -> None:
        self.shape = shape or uniform_shape(LAYOUT, NUM_BLOCKS)
        self.memory = memory or holder_memory(self.shape)
        layout = self.shape.layout
        self.served: queue.Queue[tuple[LeaseId, str]] = queue.Queue()
        self.holder = LentBlocks[BlockCache](
            worker_id=HOLDER,
            incarnation="one",
            arena=self.memory.arena,
            shape=self.shape,
            memory=BlockCache(uniform_shape(layout, NUM_BLOCKS), chunk_tokens=64),
            credentials=credentials_for([SECRET], SIGNER),
            make_server=PlaneServer,
            on_started=lambda _: None,
            on_served=self._on_served,
        )
        limits = WorkerLimits(
            worker_id=HOLDER, fingerprint=layout.fingerprint, num_blocks=NUM_BLOCKS, block_size=layout.block_size,
            context_length=4096, vocab_size=1000, eos_token_ids=frozenset(), max_queued=4, lease_ms=60_000,
            times=Times(),
        )  # fmt: skip
        self.lending = LendCore(limits, self.holder.memory, self.holder.leases)
        self.holder.serve_reads(WorkerConfig(carrier=carrier), PlaneTimes())  # type: ignore[arg-type]

    @property
    def endpoint(self):
        assert self.holder.plane is not None
        return self.holder.plane.endpoint

    def fill(self, prompt: int, num_tokens: int = NUM_TOKENS, tenant: str = "") -> None:
        """Compute a prompt, and keep it."""
        cache = self.holder.memory
        with self.holder.lock:
            allocation = cache.admit([], num_tokens, 0, tenant=tenant)
            assert allocation is not None, "no room"
            self.compute(prompt, num_tokens, allocation.tables)
            cache.store(allocation.tables, self.hashes(prompt, num_tokens, tenant), 0, num_tokens, 0, ended=True)
            cache.free(allocation.tables)

    def hashes(self, prompt: int, num_tokens: int = NUM_TOKENS, tenant: str = "") -> list[BlockHash]:
        return hashes_of(prompt, num_tokens, tenant)

    def compute(self, prompt: int, num_tokens: int, tables: BlockTables) -> None:
        kv = random_kv(num_tokens, seed=prompt)
        for layer in range(LAYOUT.num_layers):
            write = functools.partial(write_kv, self.memory.array, self.shape, tables, kv)
            self.memory.compute(functools.partial(write, layer, 0, num_tokens))
        self.memory.wait()

    def ask(self, prompt: int = 1, *, first_block: int = 0, tenant: str = "", ago_ms: int = 0, **changes):
        """Ask for a lease on a prompt's blocks, `ago_ms` before now."""
        request = RequestLease(
            request_id=RequestId("r1"), attempt=1, deadline_ms=now_ms() + 600_000, reader=READER,
            fingerprint=self.shape.layout.fingerprint, first_block=first_block, tenant=tenant,
            block_hashes=join_hashes(self.hashes(prompt, NUM_TOKENS, tenant)[first_block:]),
        )  # fmt: skip
        request = msgspec.structs.replace(request, **changes)
        with self.holder.lock:
            lease = self.lending.answer(request, now_ms() - ago_ms)
        return lease if isinstance(lease, Refused) else self.holder.sign_lease(lease, request, "")

    def lend(self, prompt: int = 1, *, first_block: int = 0, ago_ms: int = 0) -> LeaseGranted:
        granted = self.ask(prompt, first_block=first_block, ago_ms=ago_ms)
        assert isinstance(granted, LeaseGranted), granted
        return granted

    def lease_of(self, granted: LeaseGranted) -> Grant:
        return next(lease for lease in self.holder.leases if lease.lease_id == granted.lease_id)

    def ticket(self, granted: LeaseGranted, *, secret: bytes = SECRET, **changes) -> str:
        """Return a ticket for a lease, signed as the holder signs them."""
        ticket = self.lease_of(granted).ticket(self.holder.incarnation)
        return TicketSecrets([secret]).sign(msgspec.structs.replace(ticket, **changes))

    def end(self, granted: LeaseGranted) -> None:
        """Take in, as the event loop does, that a lease's read is over."""
        with self.holder.lock:
            lease = self.lease_of(granted)
            case.decide(self.lending, StreamEnded(lease), now_ms())
        self.holder.close_lease(lease)

    def until_served(self) -> str:
        return self.served.get(timeout=DEADLINE_S)[1]

    def _on_served(self, lease: Grant, stats: TransferStats, error: str) -> None:
        self.served.put((lease.lease_id, error))


def hashes_of(prompt: int, num_tokens: int = NUM_TOKENS, tenant: str = "") -> list[BlockHash]:
    tokens = [prompt] * num_tokens
    return hash_blocks(tokens, BLOCK, model_fingerprint=LAYOUT.fingerprint, tenant=tenant)


def blocks_of(lease: Grant) -> set[int]:
    return set(block_ids(lease.tables[0].segments))


@pytest.fixture
def lender(carrier: str) -> Iterator[Lender]:
    made = Lender(carrier)
    made.fill(1)
    yield made
    made.holder.close()
    made.memory.close()
    made.holder.memory.check_integrity()


def read(lender: Lender, target: Target, carrier: str, granted: LeaseGranted, **changes) -> Landed:
    fields = {
        "ticket": granted.ticket, "first_token": granted.first_token, "num_tokens": granted.num_tokens,
    } | changes  # fmt: skip
    return target.reader.read_blocking(target.request(lender.endpoint, carrier=carrier, **fields))


def refused(lender: Lender, target: Target, carrier: str, granted: LeaseGranted, **changes) -> tuple[str, str]:
    """Return why a read is refused before its first byte."""
    target.array[:] = 0
    error = fails(lambda: read(lender, target, carrier, granted, **changes))
    assert error.num_landed_tokens == changes.get("first_token", 0) and not target.array.any(), "not a byte was written"
    return error.code, error.detail


def test_a_good_reference(carrier: str, lender: Lender, target: Target) -> None:
    """The others differ from this one in one thing."""
    landed = read(lender, target, carrier, lender.lend())
    assert landed.num_tokens == NUM_TOKENS and np.array_equal(target.landed(NUM_TOKENS), random_kv(NUM_TOKENS, seed=1))
    assert lender.until_served() == ""


def test_unknown_lease(carrier: str, lender: Lender, target: Target) -> None:
    granted = lender.lend()
    ticket = lender.ticket(granted, lease_id=LeaseId("read-prefill-0-99"))
    assert refused(lender, target, carrier, granted, ticket=ticket) == ("lease", "unknown")


@pytest.mark.parametrize(("first_token", "num_tokens"), [(0, NUM_TOKENS + 1), (0, BLOCK), (BLOCK, NUM_TOKENS)])
def test_out_of_range_tokens(carrier: str, lender: Lender, target: Target, first_token: int, num_tokens: int) -> None:
    """Beyond the lease's end, and before its beginning though the holder has those tokens too."""
    granted = lender.lend(first_block=2)
    code, _ = refused(lender, target, carrier, granted, first_token=first_token, num_tokens=num_tokens)
    assert code == "range"


def test_consumed_twice(carrier: str, lender: Lender, target: Target) -> None:
    granted = lender.lend()
    read(lender, target, carrier, granted)
    assert lender.until_served() == ""
    lender.end(granted)
    assert refused(lender, target, carrier, granted) == ("lease", "unknown")
    assert lender.holder.memory.num_cached == NUM_TOKENS // BLOCK


def test_one_ticket_opens_one_stream(carrier: str, lender: Lender) -> None:
    """Six at once: one is served, the others are told so, and so is who comes later, its connection broken or not."""
    granted, ended = lender.lend(), queue.Queue[tuple[str, str]]()
    together = threading.Barrier(6)

    def read_once() -> None:
        target = Target()
        together.wait(DEADLINE_S)
        try:
            read(lender, target, carrier, granted)
            assert np.array_equal(target.landed(NUM_TOKENS), random_kv(NUM_TOKENS, seed=1))
            ended.put(("", ""))
        except TransferFailedError as error:
            ended.put((error.code, error.detail))
        finally:
            target.close()

    threads = [threading.Thread(target=read_once) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(ended.get(timeout=DEADLINE_S) for _ in threads) == [("", "")] + [("lease", "opened")] * 5
    late = Target()
    assert refused(lender, late, carrier, granted) == ("lease", "opened")
    late.close()


@pytest.mark.parametrize("carrier", ["shm"])
def test_a_stream_of_which_nothing_was_taken_leaves_its_ticket(
    lender: Lender, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a carrier turns out to be broken the reader tries another one."""
    granted, reader_end, tried = lender.lend(), target.reader._end, list[str]()

    def broken_once(endpoint: Endpoint, accepted: Accepted, *rest: Any) -> ReaderEnd:
        tried.append(accepted.carrier)
        if len(tried) == 1:
            raise CarrierBrokenError(accepted.carrier, "it broke")
        return reader_end(endpoint, accepted, *rest)

    monkeypatch.setattr(target.reader, "_end", broken_once)
    monkeypatch.setattr(
        target.reader, "_choices", lambda *_: [CarrierChoice("shm", "first"), CarrierChoice("shm", "second")]
    )
    assert read(lender, target, "shm", granted).num_tokens == NUM_TOKENS and tried == ["shm", "shm"]
    assert refused(lender, target, "shm", granted) == ("lease", "opened")
    again = lender.lend()
    assert refused(lender, target, "shm", again, num_tokens=NUM_TOKENS + 1)[0] == "range"
    assert read(lender, target, "shm", again).num_tokens == NUM_TOKENS, "one that is refused does not take it"


def test_stale_after_reuse(carrier: str, lender: Lender, target: Target) -> None:
    """The lease has ended and its blocks are another prompt's: the old ticket opens nothing, a new one the new KV."""
    old = lender.lend()
    old_blocks = blocks_of(lender.lease_of(old))
    lender.end(old)
    for prompt in (2, 3):
        lender.fill(prompt, 40 * BLOCK if prompt == 2 else NUM_TOKENS)
    assert isinstance(lender.ask(1), Refused), "what is gone is not lent"
    new = lender.lend(3)
    assert old_blocks & blocks_of(lender.lease_of(new)), "some of the same blocks"
    assert refused(lender, target, carrier, old) == ("lease", "unknown")
    forged = lender.ticket(new, epoch=old.epoch)
    assert refused(lender, target, carrier, new, ticket=forged) == ("lease", "epoch")
    read(lender, target, carrier, new)
    assert np.array_equal(target.landed(NUM_TOKENS), random_kv(NUM_TOKENS, seed=3))


@pytest.mark.parametrize("at_look", [1, 2])
def test_reused_during_a_read(
    carrier: str, lender: Lender, target: Target, monkeypatch: pytest.MonkeyPatch, at_look: int
) -> None:
    """The blocks are given away and written while the stream is open: what was not confirmed before is void."""
    granted = lender.lend()
    still_valid, num_looks = StreamLease.still_valid, 0

    def reuse_first(stream: StreamLease[BlockCache]) -> bool:
        nonlocal num_looks
        num_looks += 1
        if num_looks == at_look:
            lender.end(granted)
            for prompt in (2, 3, 4):
                lender.fill(prompt)
        return still_valid(stream)

    monkeypatch.setattr(StreamLease, "still_valid", reuse_first)
    error = fails(lambda: read(lender, target, carrier, granted))
    assert error.code == "holder"
    landed = error.num_landed_tokens
    assert landed in ((0,) if at_look == 1 else (0, NUM_TOKENS))
    assert np.array_equal(target.landed(landed), random_kv(NUM_TOKENS, seed=1)[:, :, :landed])
    assert lender.until_served(), "the holder knows that it was not read to its end"


def test_expired_lease(carrier: str, lender: Lender, target: Target) -> None:
    granted = lender.lend(ago_ms=OPEN_LEASE_WITHIN_MS)
    assert refused(lender, target, carrier, granted) == ("lease", "expired")


def test_expired_ticket(carrier: str, lender: Lender, target: Target) -> None:
    granted = lender.lend()
    ticket = lender.ticket(granted, expires_at_ms=now_ms() - 1)
    assert refused(lender, target, carrier, granted, ticket=ticket) == ("ticket", "expired")


def test_forged_with_another_secret(carrier: str, lender: Lender, target: Target) -> None:
    granted = lender.lend()
    ticket = lender.ticket(granted, secret=b"another mesh's secret")
    assert refused(lender, target, carrier, granted, ticket=ticket) == ("ticket", "signature")


def test_forged_by_a_flipped_bit(carrier: str, lender: Lender, target: Target) -> None:
    """A bit of any character of a good ticket: of what it says, and of its signature."""
    granted, rng = lender.lend(), random.Random(1)
    good = granted.ticket
    for _ in range(40):
        at = rng.randrange(len(good))
        flipped = good[:at] + chr(ord(good[at]) ^ 1 << rng.randrange(6)) + good[at + 1 :]
        code, detail = refused(lender, target, carrier, granted, ticket=flipped)
        assert (code, detail) in (("ticket", "signature"), ("ticket", "malformed"))


def test_forged_by_another_body(carrier: str, lender: Lender, target: Target) -> None:
    """The signature is a good one, of another ticket."""
    granted, other = lender.lend(), lender.lend()
    body, _, mac = other.ticket.partition(".")
    said = msgspec.json.decode(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    said["lease_id"] = granted.lease_id
    forged = base64.urlsafe_b64encode(msgspec.json.encode(said)).rstrip(b"=").decode() + "." + mac
    assert refused(lender, target, carrier, granted, ticket=forged) == ("ticket", "signature")


def test_other_tenant_s_lease(carrier: str, lender: Lender, target: Target) -> None:
    granted = lender.lend()
    ticket = lender.ticket(granted, tenant="other")
    assert refused(lender, target, carrier, granted, ticket=ticket) == ("lease", "tenant")


def test_truncated_stream(carrier: str, lender: Lender, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends once bytes have been sent, and before they are confirmed."""
    granted, plane = lender.lend(), lender.holder.plane
    assert plane is not None

    def cut_all(_: StreamLease[BlockCache]) -> bool:
        for stream in list(plane._streams):
            stream.wire.cut()
        return True

    monkeypatch.setattr(StreamLease, "still_valid", cut_all)
    error = fails(lambda: read(lender, target, carrier, granted))
    assert (error.code, error.num_landed_tokens) == ("closed", 0)
    assert lender.until_served(), "the holder knows that it was not read to its end"


@pytest.mark.parametrize("at", [20, 50, 400, 30_000, 100_000])
def test_truncated_bytes(make_holder: Callable[..., Holder], target: Target, at: int) -> None:
    """The network ends it, wherever it stands."""
    holder = make_holder(("tcp",))
    holder.compute_all()
    with proxy(holder, at, "cut") as endpoint:
        error = fails(lambda: target.reader.read_blocking(target.request(endpoint, holder.ticket(), "tcp", 300)))
    assert (error.code, error.num_landed_tokens) == ("closed", 0)


def test_bit_flipped_payload(carrier: str, lender: Lender, target: Target) -> None:
    granted, rng = lender.lend(), random.Random(2)
    for _ in range(10):
        flip = BitFlip(rng.randrange(NUM_TOKENS * LAYOUT.num_layers * 2 * LAYOUT.token_bytes * 8))
        lender.lease_of(granted).is_opened = False
        with tapped(flip):
            error = fails(lambda: read(lender, target, carrier, granted))
        assert flip.done and error.code == "digest"
        landed = error.num_landed_tokens
        assert np.array_equal(target.landed(landed), random_kv(NUM_TOKENS, seed=1)[:, :, :landed])


def test_wrong_model(carrier: str, lender: Lender) -> None:
    """Neither a lease nor, with another's ticket, a read."""
    answer = lender.ask(fingerprint="another model's")
    assert isinstance(answer, Refused) and answer.reason == RefusalReason.FINGERPRINT
    other = Target(KVLayout(**(msgspec.structs.asdict(LAYOUT) | {"weights": "other"})))
    code, _ = refused(lender, other, carrier, lender.lend())
    assert code == "fingerprint"
    other.close()


@pytest.mark.parametrize("step", [-1, 1])
def test_wrong_epoch(carrier: str, lender: Lender, target: Target, step: int) -> None:
    granted = lender.lend()
    ticket = lender.ticket(granted, epoch=granted.epoch + step)
    assert refused(lender, target, carrier, granted, ticket=ticket) == ("lease", "epoch")


def test_other_reader_s(carrier: str, lender: Lender, target: Target) -> None:
    granted = lender.lend()
    ticket = lender.ticket(granted, reader=WorkerId("decode-1"))
    code, detail = refused(lender, target, carrier, granted, ticket=ticket)
    assert (code, detail) == ("lease", "reader") or (carrier, code) == ("nccl", "carrier"), "nor is the pair his"


def test_one_flipped_bit_in_each_of_many_transfers_is_caught(carrier: str) -> None:
    result = measure(carrier, num_flips=200, num_clean_blocks=10_000)
    assert (result.num_caught, result.num_wrong, result.num_untouched) == (200, 0, 0)
    assert result.num_clean_blocks >= 10_000 and result.num_false_alarms == 0


def test_without_digests_the_same_bits_are_delivered(carrier: str) -> None:
    """So the measure can fail."""
    result = measure(carrier, num_flips=20, digests=False)
    assert (result.num_caught, result.num_wrong) == (0, 20)
