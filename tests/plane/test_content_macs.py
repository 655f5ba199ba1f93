"""A block's tag says what these bytes are, to whoever is handed them: anything else is not believed."""

import dataclasses
from collections.abc import Iterator
from unittest import mock

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import KVLayout, block_ids, uniform_shape
from dataplane.blocks.ticket import TicketSecrets
from dataplane.ends.read import Read
from dataplane.memory.content_macs import TAG_BYTES, BlockContents, ExpectedContent
from dataplane.protocol.wire import WireClosedError
from schemas.ids import BlockHash
from schemas.kv import LeaseGranted
from services.holder.core.events import StreamStarted
from tests.plane.harness import LAYOUT, SECRET, Target, fails, random_kv
from tests.plane.test_bad_references import BLOCK, NUM_TOKENS, Lender, hashes_of, read
from tests.worker import worker_cases as case

SECRETS = TicketSecrets([SECRET])
NUM_BLOCKS = NUM_TOKENS // BLOCK
ANOTHER_MODEL = msgspec.structs.replace(LAYOUT, weights="another")
CONTENT = Content("acme", BlockHash(b"h" * 16))


@dataclasses.dataclass
class Bytes:
    """An arena that is only bytes."""

    host_array: np.ndarray


def contents(seed: int = 1, layout: KVLayout = LAYOUT, secrets: TicketSecrets = SECRETS) -> BlockContents:
    shape = uniform_shape(layout, 4)
    array = np.random.default_rng(seed).integers(0, 256, shape.arena_bytes, np.uint8)
    return BlockContents(Bytes(array), shape, secrets)


def test_a_block_is_right_wherever_it_lies() -> None:
    there, here = contents(1), contents(2)
    for source, target in zip(there.views(3), here.views(0), strict=True):
        target[:] = source
    assert here.is_right(CONTENT, 0, there.tag(CONTENT, 3))


@given(st.data())
def test_any_changed_byte_of_a_block_or_its_tag_is_found(data: st.DataObject) -> None:
    made = contents()
    tag = bytearray(made.tag(CONTENT, 2))
    view = data.draw(st.sampled_from([*made.views(2), np.frombuffer(tag, np.uint8)]))
    view[data.draw(st.integers(0, len(view) - 1))] ^= data.draw(st.integers(1, 255))
    assert not made.is_right(CONTENT, 2, bytes(tag))


@pytest.mark.parametrize(
    ("content", "layout", "secrets"),
    [
        (CONTENT._replace(tenant="other"), LAYOUT, SECRETS),
        (CONTENT._replace(tenant=""), LAYOUT, SECRETS),
        (CONTENT._replace(block_hash=BlockHash(b"i" * 16)), LAYOUT, SECRETS),
        (CONTENT, ANOTHER_MODEL, SECRETS),
        (CONTENT, LAYOUT, TicketSecrets([b"another secret"])),
    ],
    ids=["tenant", "no tenant", "hash", "format", "secret"],
)
def test_the_same_bytes_are_no_other_content(content: Content, layout: KVLayout, secrets: TicketSecrets) -> None:
    assert not contents(layout=layout, secrets=secrets).is_right(content, 2, contents().tag(CONTENT, 2))


def test_an_earlier_secret_is_believed_while_it_stays() -> None:
    tag = contents().tag(CONTENT, 2)
    assert contents(secrets=TicketSecrets([b"the next secret", SECRET])).is_right(CONTENT, 2, tag)


@pytest.mark.parametrize(("wrong", "num_right"), [(None, 3), (0, 0), (2, 2)])
def test_what_is_right_ends_with_the_first_that_is_not(wrong: int | None, num_right: int) -> None:
    made = contents()
    content = [Content("", BlockHash(bytes([number]) * 16)) for number in range(3)]
    tags = [made.tag(each, block) for block, each in enumerate(content)]
    if wrong is not None:
        made.views(wrong)[0][0] ^= 1
    expected = ExpectedContent(made, content, [0, 1, 2])
    assert expected.num_right(b"".join(tags), 3) == num_right and expected.tags == tags[:num_right]
    assert expected.num_right(b"".join(tags), 1) == min(num_right, 1), "what has not landed is not looked at"
    assert expected.num_right(b"".join(tags)[: 2 * TAG_BYTES - 1], 3) == min(num_right, 1), "no tag, not believed"


# Between a worker's holder and a reader, over every carrier.


@pytest.fixture(params=["loopback", "shm", "tcp"])
def carrier(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def lender(carrier: str) -> Iterator[Lender]:
    made = Lender(carrier)
    made.fill(1)
    yield made
    made.holder.close()
    made.memory.close()


def expected_of(target: Target, first_block: int = 0) -> ExpectedContent:
    content = [Content("", block_hash) for block_hash in hashes_of(1)[first_block:]]
    made = BlockContents(target.arena, target.shape, SECRETS)
    return ExpectedContent(made, content, block_ids(target.tables[0].segments)[first_block:])


def damage(lender: Lender, granted: LeaseGranted, number: int) -> None:
    """Change a byte of a lease's `number`-th block, as bad memory does: everything that the holder digests and seals
    from now on agrees with it."""
    block = block_ids(lender.lease_of(granted).tables[0].segments)[number]
    assert lender.holder.contents is not None
    lender.holder.contents.views(block)[0][5] ^= 1


def known_tags(lender: Lender, target: Target, carrier: str) -> list[bytes]:
    """Read once: the holder makes its tags, and keeps them."""
    granted, content = lender.lend(), expected_of(target)
    assert read(lender, target, carrier, granted, content=content).num_tokens == NUM_TOKENS
    assert lender.until_served() == ""
    case.decide(lender.lending, StreamStarted(lender.lease_of(granted)), 0)
    lender.end(granted)
    return content.tags


def test_a_reader_gets_the_tags_of_who_has_computed_it(carrier: str, lender: Lender, target: Target) -> None:
    tags = known_tags(lender, target, carrier)
    assert len(tags) == NUM_BLOCKS and set(tags) == set(lender.holder.memory.kept.tags.values())
    assert np.array_equal(target.landed(NUM_TOKENS), random_kv(NUM_TOKENS, seed=1))


@pytest.mark.parametrize("number", [0, 7, NUM_BLOCKS - 1])
def test_what_was_damaged_since_is_not_believed(carrier: str, lender: Lender, target: Target, number: int) -> None:
    tags = known_tags(lender, target, carrier)
    granted, content = lender.lend(), expected_of(target)
    damage(lender, granted, number)
    error = fails(lambda: read(lender, target, carrier, granted, content=content))
    assert (error.code, error.num_landed_tokens) == ("content", number * BLOCK)
    assert content.tags == tags[:number], "what comes before is right"


def test_of_a_read_that_breaks_only_what_is_right_is_believed(
    carrier: str, lender: Lender, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder cannot hide what is damaged by breaking the read before its end."""
    known_tags(lender, target, carrier)
    granted = lender.lend()
    damage(lender, granted, 3)
    monkeypatch.setattr(Read, "_finish", mock.Mock(side_effect=WireClosedError("the holder has gone")))
    error = fails(lambda: read(lender, target, carrier, granted, content=expected_of(target)))
    assert (error.code, error.num_landed_tokens) == ("closed", 3 * BLOCK)


def test_a_block_that_is_filled_anew_has_a_tag_of_its_own(carrier: str, lender: Lender, target: Target) -> None:
    known_tags(lender, target, carrier)
    kept = lender.holder.memory.kept
    with lender.holder.lock:
        blocks = kept.allocate(kept.room())
        assert blocks is not None and not kept.tags
        kept.release(blocks)


def test_a_block_that_is_computed_anew_where_it_lies_has_none(carrier: str, lender: Lender, target: Target) -> None:
    """As after a read that was stopped: its blocks are the sequence's still, and filled with other bytes."""
    known_tags(lender, target, carrier)
    cache = lender.holder.memory
    with lender.holder.lock:
        found = cache.lend(hashes_of(1), 0)
        assert found is not None
        cache.is_computed_from(found.tables, 5)
        assert set(cache.kept.tags) == set(block_ids(found.tables[0].segments)[:5])
        cache.free(found.tables)
