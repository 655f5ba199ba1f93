"""Where a prompt's KV comes from, and rates learnt from what happens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.blocks.layout import KVLayout
from dataplane.protocol.stream import TransferStats
from schemas.block import BlockHasher, hash_blocks
from schemas.ids import WorkerId
from schemas.request import KVSource
from services.engine.messages import StepResult
from services.holder.core.content import PromptKV, ReadOutcome
from services.holder.limits import STALE_RATE_MS
from services.worker.observe.measured_rates import MeasuredRates
from services.worker.wire_dtype import WireChoice, compresses

ME, A = WorkerId("me"), WorkerId("a")


def test_the_answers_blocks_get_the_hashes_that_the_next_turns_prompt_has() -> None:
    tokens = list(range(30))
    hasher = BlockHasher(4, model_fingerprint="f")
    assert hasher.extend(tokens[:10], 10) == hash_blocks(tokens[:10], 4, model_fingerprint="f")
    assert hasher.extend(tokens, 23) == hash_blocks(tokens[:23], 4, model_fingerprint="f")


@given(
    num_prompt=st.integers(1, 60),
    cached_blocks=st.integers(0, 14),
    keeps_parts=st.booleans(),
    sources=st.lists(
        st.tuples(st.sampled_from("abcm"), st.integers(-2, 12), st.integers(-2, 12), st.floats(0, 1)), max_size=6
    ),
)
def test_pieces_join_without_gaps_and_the_report_adds_up(
    num_prompt: int, cached_blocks: int, keeps_parts: bool, sources: list[tuple[str, int, int, float]]
) -> None:
    cached = min(cached_blocks, (num_prompt - 1) // 4) * 4
    kv = PromptKV(num_prompt_tokens=num_prompt, block_size=4, num_cached_tokens=cached, keeps_parts=keeps_parts)
    kv.sources.extend(
        KVSource(worker_id=WorkerId(name), first_block=first, num_blocks=count) for name, first, count, _ in sources
    )
    shares = {(name, first, count): share for name, first, count, share in sources}
    num_pieces = 0
    while (piece := kv.next_piece(WorkerId("m"))) is not None:
        num_pieces += 1
        assert piece.source != "m" and piece.num_blocks >= 1
        assert piece.first_block * 4 <= kv.num_present_tokens < (piece.first_block + piece.num_blocks) * 4
        assert (piece.first_block + piece.num_blocks) * 4 < num_prompt, "the last token is always computed"
        share = next(s for (name, _, _), s in shares.items() if name == piece.source)
        landed = piece.first_block * 4 + int(piece.num_blocks * 4 * share)
        kv.landed(piece.source, ReadOutcome(landed, 1, "tcp", is_whole=share == 1))
        if not keeps_parts and share < 1:
            assert kv.num_present_tokens == cached
        report = kv.report()
        assert report.cached_tokens == cached
        assert sum(source.num_tokens for source in report.transferred_from) == report.transferred_tokens
        assert report.cached_tokens + report.transferred_tokens + report.recomputed_tokens == num_prompt
    assert num_pieces <= len(sources)


@pytest.mark.parametrize(("kept", "expected"), [(12, {"a": 8}), (9, {"a": 5}), (4, {}), (2, {})])
def test_what_is_computed_again_counts_as_computed(kept: int, expected: dict[str, int]) -> None:
    kv = PromptKV(num_prompt_tokens=12, block_size=4, num_cached_tokens=4)
    kv.landed(A, ReadOutcome(12, 1, "tcp", is_whole=True))
    kv.keep_at_most(kept)
    report = kv.report()
    assert {source.worker_id: source.num_tokens for source in report.transferred_from} == expected
    assert (report.cached_tokens, report.recomputed_tokens) == (min(4, kept), 12 - kept)


def step(num_prefill: int, num_decode: int, context: int, ms: float) -> StepResult:
    return StepResult(0, int(ms * 1e6), num_prefill, num_decode, ((1, context),), ())


@pytest.mark.parametrize(("reused", "expected"), [(0, (16, 24)), (20, (36, 4)), (100, (40, 0))])
def test_what_the_engine_had_itself_counts_as_cached(reused: int, expected: tuple[int, int]) -> None:
    report = PromptKV(num_prompt_tokens=40, block_size=16, num_cached_tokens=16).report(num_reused_tokens=reused)
    assert (report.cached_tokens, report.recomputed_tokens) == expected


def test_prefill_rates_by_context_and_the_price_of_a_decode_step() -> None:
    book = MeasuredRates(token_bytes=64)
    assert book.rates(0).prefill == () and book.rates(0).decode_step_ms == 0
    book.stepped(step(0, 4, 50, 10))
    book.stepped(step(100, 0, 100, 50))
    book.stepped(step(100, 0, 3000, 100))
    book.stepped(step(100, 4, 5000, 210))  # its decodes cost the 10 ms known
    book.stepped(step(1, 0, 9000, 5))  # says nothing of a token
    rates = book.rates(0)
    assert rates.decode_step_ms == 10
    assert [(r.context_tokens, r.tokens_per_s) for r in rates.prefill] == [(0, 2000), (2048, 1000), (4096, 500)]


def test_transfer_rates_are_per_pair_and_carrier_and_forgotten_in_time() -> None:
    book = MeasuredRates(token_bytes=64)
    stats = TransferStats(carrier="tcp", num_bytes=10_000_000, first_byte_ns=7_000_000, landed_ns=17_000_000)
    book.transferred(A, 2_000_000, stats, 1_000)
    small = TransferStats(carrier="shm", num_bytes=100, first_byte_ns=3_000_000, landed_ns=4_000_000)
    book.transferred(A, 2_000_000, small, 2_000)
    (tcp, shm) = book.rates(3_000).transfers
    assert (tcp.source, tcp.carrier, tcp.bytes_per_s, tcp.latency_ms) == (A, "tcp", 1e9, 5)
    assert (shm.carrier, shm.bytes_per_s, shm.latency_ms) == ("shm", 0, 1)
    assert [rate.carrier for rate in book.rates(1_000 + STALE_RATE_MS).transfers] == ["shm"]


@pytest.mark.parametrize(
    ("link", "codec", "item_bytes", "expected"),
    [
        (0, 1e9, 4, False),  # not measured yet
        (125e6, 1e9, 4, True),  # a gigabit: four times fewer bytes
        (125e6, 1e9, 2, True),
        (1.25e9, 1e9, 4, False),  # ten gigabits are quicker than the codec
        (700e6, 1e9, 2, False),
        (125e6, 0, 4, False),
    ],
)
def test_a_wire_is_compressed_where_it_is_slow(link: float, codec: float, item_bytes: int, expected: bool) -> None:
    assert compresses(link, codec, item_bytes) == expected


def test_auto_measures_a_pair_as_it_is_before_it_compresses() -> None:
    layout = KVLayout(weights="w", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=64, block_size=16)
    book = MeasuredRates(token_bytes=64)
    auto = WireChoice("auto", layout, book)
    auto.measure()
    assert auto.dtype(A, 0) == "same"
    slow = TransferStats(carrier="tcp", num_bytes=10_000_000, copy_ns=1_000_000_000)
    book.carried(A, slow, 0)
    assert auto.dtype(A, 1) == "int8" and auto.dtype(ME, 1) == "same"
    book.carried(A, TransferStats(carrier="tcp", num_bytes=10_000_000, copy_ns=1, wire_dtype="int8"), 2)
    assert auto.dtype(A, 3) == "int8", "what crossed compressed says nothing of the wire"
    assert auto.dtype(A, STALE_RATE_MS) == "same", "measured anew from time to time"
    assert (
        WireChoice("fp8", layout, book).dtype(A, 0) == "fp8" and WireChoice("same", layout, book).dtype(A, 1) == "same"
    )


def test_what_a_read_may_have_written_over_does_not_count() -> None:
    """A hand-over broke inside a block; the next read begins at that block's border, and brings nothing."""
    kv = PromptKV(num_prompt_tokens=30, block_size=4, num_cached_tokens=0)
    kv.landed(A, ReadOutcome(10))
    kv.sources.append(KVSource(worker_id=WorkerId("b"), first_block=0, num_blocks=7))
    piece = kv.next_piece(ME)
    assert piece is not None and piece.first_block == 2
    kv.landed(piece.source, ReadOutcome(8))
    report = kv.report()
    assert (kv.num_present_tokens, report.transferred_tokens, report.recomputed_tokens) == (8, 8, 22)
