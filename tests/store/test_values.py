"""A value that is not the very block, whole and of this format, is not believed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.blocks.layout import KVLayout
from dataplane.blocks.ticket import TicketSecrets
from dataplane.memory.content_macs import TAG_BYTES
from services.store.values import HEADER_BYTES, BadValueError
from tests.store.rig import LAYOUT, Memory, key_at

TAG = bytes(range(TAG_BYTES))
VALUE_BYTES = HEADER_BYTES + LAYOUT.block_bytes


def test_a_block_comes_back_as_it_was_in_another_place() -> None:
    source, target = Memory(seed=1), Memory(seed=2)
    before = {block: target.kv(block) for block in range(16) if block != 9}
    assert target.values.unpack(key_at(1), bytes(source.values.pack(key_at(1), 3, TAG)), 9) == TAG
    assert target.kv(9) == source.kv(3)
    assert {block: target.kv(block) for block in before} == before


@given(st.integers(0, VALUE_BYTES - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(at: int, flip: int) -> None:
    memory, target = Memory(), Memory(seed=2)
    value = memory.values.pack(key_at(1), 3, TAG)
    value[at] ^= flip
    before = target.kv(0)
    with pytest.raises(BadValueError):
        target.values.unpack(key_at(1), bytes(value), 0)
    assert target.kv(0) == before, "nothing is written before all is checked"


@given(st.integers(0, VALUE_BYTES - 1))
def test_any_truncation_is_found(size: int) -> None:
    memory = Memory()
    with pytest.raises(BadValueError):
        memory.values.unpack(key_at(1), bytes(memory.values.pack(key_at(1), 3, TAG)[:size]), 0)


def test_another_blocks_value_is_refused() -> None:
    memory = Memory()
    with pytest.raises(BadValueError, match="another"):
        memory.values.unpack(key_at(2), bytes(memory.values.pack(key_at(1), 3, TAG)), 0)


def test_another_models_value_is_refused() -> None:
    layout = KVLayout(weights="v", dtype="float32", num_layers=3, num_kv_heads=2, head_dim=8, block_size=8)
    with pytest.raises(BadValueError, match="another"):
        Memory().values.unpack(key_at(1), bytes(Memory(layout).values.pack(key_at(1), 3, TAG)), 0)


def test_another_version_is_refused() -> None:
    memory = Memory()
    value = memory.values.pack(key_at(1), 3, TAG)
    value[8] += 1
    with pytest.raises(BadValueError, match="version 4"):
        memory.values.unpack(key_at(1), bytes(value), 0)


def test_what_others_have_written_is_refused() -> None:
    """Who can write to the folder or the server has no content secret, whatever else of a value it can compute."""
    stranger = Memory(secrets=TicketSecrets([b"a stranger's secret"]))
    with pytest.raises(BadValueError, match="nobody who has a content secret"):
        Memory().values.unpack(key_at(1), bytes(stranger.values.pack(key_at(1), 3, TAG)), 0)


def test_a_value_of_an_earlier_secret_is_believed_while_that_stays() -> None:
    old, new = b"the secret of old", b"the new secret"
    value = bytes(Memory(secrets=TicketSecrets([old])).values.pack(key_at(1), 3, TAG))
    assert Memory(secrets=TicketSecrets([new, old])).values.unpack(key_at(1), value, 0) == TAG
    with pytest.raises(BadValueError):
        Memory(secrets=TicketSecrets([new])).values.unpack(key_at(1), value, 0)


def test_of_an_arena_that_is_closed_no_value_is_made() -> None:
    """A thread may still be at it when the store ends: zeros would be believed by the next one."""
    memory = Memory()
    memory.array = np.empty(0, np.uint8)
    with pytest.raises(AssertionError, match="open"):
        memory.values.pack(key_at(1), 3, TAG)
