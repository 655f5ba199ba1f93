"""Bad references to KV that vLLM has computed, by a reader that goes on with vLLM from what landed: each ends in a
typed error, and the rest is computed. `tests/plane/test_bad_references.py` has all of them, without an engine."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import ArenaShape, BlockTable, BlockTables, Segment, block_ids, segments_of, uniform_shape
from dataplane.carriers import shm, tcp
from dataplane.ends.reader import PlaneReader, ReadRequest
from dataplane.protocol.stream import TransferFailedError
from schemas.block import hash_blocks
from schemas.ids import BlockHash
from schemas.kv import LeaseGranted
from schemas.request import RefusalReason, Refused
from services.engine.checkpoint import layout_of, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.engine.vllm_engine.formats import format_here
from services.holder.kv.blocks import StreamLease
from tests.engine.vllm_engine.conftest import World
from tests.engine.vllm_engine.test_contract import HOT, Heard, prompt_of
from tests.plane.harness import DEADLINE_S, NUM_BLOCKS, SECRETS, fails, read_kv, write_kv
from tests.plane.test_bad_references import NUM_TOKENS, Lender, blocks_of

pytestmark = pytest.mark.vllm
TAIL = [5, 6, 7]
"""What a reader's prompt has behind a lender's."""
NUM_READ_BLOCKS = 10


class VllmLender(Lender):
    """Its prompts are computed by vLLM."""

    def __init__(self, carrier: str, world: World) -> None:
        assert world.memory is not None
        self.world = world
        super().__init__(carrier, world.memory.shape, world.memory)

    def hashes(self, prompt: int, num_tokens: int = NUM_TOKENS, tenant: str = "") -> list[BlockHash]:
        layout = self.shape.layout
        tokens = prompt_of(num_tokens, prompt)
        return hash_blocks(tokens, layout.block_size, model_fingerprint=layout.fingerprint, tenant=tenant)

    def compute(self, prompt: int, num_tokens: int, tables: BlockTables) -> None:
        self.world.forget()
        table = block_ids(tables[0].segments)
        self.world.add("fill", prompt_of(num_tokens, prompt), HOT, table, hands_over=True, listener=Heard())
        self.world.run()


class VllmReader:
    """Reads into other blocks of the same arena."""

    def __init__(self, lender: VllmLender, carrier: str, shape: ArenaShape | None = None) -> None:
        assert lender.world.memory is not None
        self.world = lender.world
        self._lender = lender
        self._carrier = carrier
        self._reader = PlaneReader(lender.world.memory.arena, shape or lender.shape, SECRETS)
        self.blocks = range(NUM_BLOCKS, NUM_BLOCKS + NUM_READ_BLOCKS)
        self.overwrite()

    def read(self, granted: LeaseGranted, *, num_tokens: int = 0, first_token: int = 0) -> None:
        """Raises TransferFailedError."""
        request = ReadRequest(
            endpoint=self._lender.endpoint, ticket=granted.ticket, carrier=self._carrier, tables=self._tables,
            first_token=first_token,
            num_tokens=num_tokens or granted.num_tokens, deadline_s=DEADLINE_S,
        )  # fmt: skip
        self._reader.read_blocking(request)

    def overwrite(self) -> None:
        """Let its blocks have another prompt's KV: to take it for one's own gives other tokens."""
        self._lender.compute(9, NUM_READ_BLOCKS * self.world.size, self._tables)

    @property
    def _tables(self) -> BlockTables:
        return (BlockTable(segments_of([*self.blocks])),)

    def goes_on(self, num_landed: int, prompt: int = 1) -> None:
        """Compute the rest of the prompt and an answer, and compare it with what vLLM says by itself."""
        tokens = [*prompt_of(NUM_TOKENS, prompt), *TAIL]
        expected = self.world.reference(tokens, HOT)
        self.world.forget()
        self.world.add("r", tokens, HOT, [*self.blocks], num_present=num_landed)
        assert self.world.run()["r"] == expected
        assert self.world.copies[0].start == num_landed, "what landed is not computed again, and no more than that"

    def close(self) -> None:
        self._reader.close()


@pytest.fixture(params=["shm", "tcp"])
def carrier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def lender(real_world: World, carrier: str) -> Iterator[VllmLender]:
    made = VllmLender(carrier, real_world)
    made.memory.fill(0)
    real_world.num_kept_blocks = 2 * NUM_BLOCKS  # a lender's, and as many that are read into
    made.fill(1)
    yield made
    real_world.num_kept_blocks = 0
    made.holder.stop_serving()
    made.holder.memory.check_integrity()


@pytest.fixture
def reader(lender: VllmLender, carrier: str) -> Iterator[VllmReader]:
    made = VllmReader(lender, carrier)
    yield made
    made.close()


@pytest.fixture
def small_frames(lender: VllmLender, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's layer each, so that a read can break in its middle."""
    layout = lender.shape.layout
    for holder in (shm.SharedHolder, tcp.TcpHolder):
        monkeypatch.setattr(holder, "frame_bytes", layout.block_size * 2 * layout.token_bytes)


def breaks(
    lender: VllmLender, reader: VllmReader, patch: pytest.MonkeyPatch, act: Callable[[LeaseGranted], None], share: float
) -> TransferFailedError:
    """Read, and do something as the holder looks whether its lease is good still: the first time, or, for a larger
    `share`, once it has looked so many of the times that it does in a good read. Return the read's error."""
    still_valid, looks, strike_at = StreamLease.still_valid, list[bool](), 0

    def look(stream: StreamLease[BlockCache]) -> bool:
        looks.append(True)
        if len(looks) == strike_at:
            act(granted)
        return still_valid(stream)

    patch.setattr(StreamLease, "still_valid", look)
    reader.read(granted := lender.lend())
    lender.until_served()
    lender.end(granted)
    reader.overwrite()
    strike_at = len(looks) + 1 + int(share * len(looks))
    granted = lender.lend()
    return fails(lambda: reader.read(granted))


def test_a_good_reference(lender: VllmLender, reader: VllmReader) -> None:
    """The others differ from this one in one thing."""
    reader.read(lender.lend())
    reader.goes_on(NUM_TOKENS)


def test_a_block_that_has_not_landed_gives_other_tokens(lender: VllmLender, reader: VllmReader) -> None:
    """So these tests can fail."""
    reader.read(lender.lend())
    own, other = (BlockTable((Segment(block, 1),)) for block in (reader.blocks[3], reader.blocks[4]))
    kv = read_kv(lender.memory.array, lender.shape, (other,), 0, lender.world.size)
    for layer in range(lender.shape.layout.num_layers):
        write_kv(lender.memory.array, lender.shape, (own,), kv, layer, 0, lender.world.size)
    with pytest.raises(AssertionError):
        reader.goes_on(NUM_TOKENS)


def test_reused_before_a_read(lender: VllmLender, reader: VllmReader) -> None:
    """vLLM has computed other prompts into the blocks."""
    old = lender.lend()
    old_blocks = blocks_of(lender.lease_of(old))
    lender.end(old)
    lender.fill(2, 40 * lender.world.size)
    lender.fill(3)
    assert isinstance(lender.ask(1), Refused), "what is gone is not lent"
    new = lender.lend(3)
    assert old_blocks & blocks_of(lender.lease_of(new)), "some of the same blocks"
    error = fails(lambda: reader.read(old))
    assert (error.code, error.detail, error.num_landed_tokens) == ("lease", "unknown", 0)
    reader.goes_on(0)
    reader.read(new)
    reader.goes_on(NUM_TOKENS, prompt=3)


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.usefixtures("small_frames")
def test_reused_during_a_read(
    lender: VllmLender, reader: VllmReader, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """vLLM computes into the blocks while they are on their way: what was confirmed before is used."""

    def reuse(granted: LeaseGranted) -> None:
        lender.end(granted)
        lender.fill(2, 44 * lender.world.size)

    error = breaks(lender, reader, monkeypatch, reuse, share)
    assert error.code == "holder" and error.num_landed_tokens % lender.world.size == 0
    assert (error.num_landed_tokens > 0) == (share > 0) and error.num_landed_tokens < NUM_TOKENS
    reader.goes_on(error.num_landed_tokens)


@pytest.mark.usefixtures("small_frames")
def test_refused_half_way_under_two_that_share_what_landed(
    lender: VllmLender, reader: VllmReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = lender.world
    landed = breaks(lender, reader, monkeypatch, lender.end, 0.5).num_landed_tokens
    assert 0 < landed < NUM_TOKENS
    shared = [*reader.blocks][: landed // world.size]
    prompts = {name: [*prompt_of(NUM_TOKENS, 1), *tail] for name, tail in (("one", TAIL), ("two", [8, 9]))}
    expected = {name: world.reference(prompt, HOT) for name, prompt in prompts.items()}
    held = lender.memory.array.copy()
    world.forget()
    for number, (name, prompt) in enumerate(prompts.items()):
        first = reader.blocks.stop + number * NUM_READ_BLOCKS
        own = range(first, first + NUM_READ_BLOCKS)[len(shared) :]
        world.add(name, prompt, HOT, [*shared, *own], num_present=landed)
    assert world.run() == expected
    assert all(copies.start >= landed for copies in world.copies)
    written = set(np.flatnonzero(_blocks(lender, held) != _blocks(lender, lender.memory.array)))
    assert written and not written & {*shared}, "nobody writes what both read"


@pytest.mark.parametrize(("first_block", "num_blocks"), [(0, 10), (0, 1), (1, 9)])
def test_out_of_range(lender: VllmLender, reader: VllmReader, first_block: int, num_blocks: int) -> None:
    """Beyond the lease's end, and before its beginning though the holder has those tokens too."""
    granted, size = lender.lend(first_block=2), lender.world.size
    error = fails(lambda: reader.read(granted, first_token=first_block * size, num_tokens=num_blocks * size))
    assert error.code == "range"
    reader.goes_on(0)


def test_another_format_or_model(lender: VllmLender, reader: VllmReader, carrier: str) -> None:
    """KV of another version of vLLM, of its other way to lay out a block, and of our own engine: none is lent."""
    checkpoint = read_checkpoint(str(DEMO_MODEL_DIR))
    own = format_here("float32", 32, checkpoint.head_dim, {})
    assert layout_of(checkpoint, block_size=32, kv_format=own).fingerprint == lender.shape.layout.fingerprint
    for kv_format in (own.replace("vllm", "vllm1"), own.replace("LBHNC", "LBNHC"), ""):
        layout = layout_of(checkpoint, block_size=32, kv_format=kv_format)
        answer = lender.ask(fingerprint=layout.fingerprint)
        assert isinstance(answer, Refused) and answer.reason == RefusalReason.FINGERPRINT
        other = VllmReader(lender, carrier, uniform_shape(layout, lender.shape.num_blocks[0]))
        error = fails(lambda other=other: other.read(lender.lend()))
        assert (error.code, error.num_landed_tokens) == ("fingerprint", 0)
        other.close()
    reader.goes_on(0)


def _blocks(lender: VllmLender, array: np.ndarray) -> np.ndarray:
    """Return a number for each block of the arena that tells of its bytes."""
    shape = lender.shape
    layout, num_blocks = shape.layout, shape.num_blocks[0]
    planes = [
        array[at : at + num_blocks * layout.block_size * layout.token_bytes].reshape(num_blocks, -1)
        for layer in range(layout.num_layers)
        for at in (shape.offset(layer, part, 0) for part in (0, 1))
    ]
    return np.array([hash(row.tobytes()) for row in np.concatenate(planes, axis=1)])
