import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.blocks.layout import segments_of
from dataplane.blocks.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The pool against a count of references per block."""

    @initialize(num_blocks=st.integers(1, 40))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references = [0] * num_blocks
        self.held: list[list[int]] = []

    @rule(num_blocks=st.integers(0, 42))
    def allocate(self, num_blocks: int) -> None:
        num_free = self.references.count(0)
        longest = self._longest_free_run()
        blocks = self.pool.allocate(num_blocks)
        if num_blocks > num_free:
            assert blocks is None
            return
        assert blocks is not None
        assert len(blocks) == len(set(blocks)) == num_blocks
        assert not any(self.references[block] for block in blocks), "a block in use was given out"
        if num_blocks <= longest:
            assert len(segments_of(blocks)) <= 1, "a contiguous run was there"
        for block in blocks:
            self.references[block] = 1
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        self.pool.share(blocks)
        for block in blocks:
            self.references[block] += 1
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), is_last_first=st.booleans())
    def free(self, data: st.DataObject, is_last_first: bool) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        if is_last_first:
            blocks = blocks[::-1]
        for block in blocks:
            self.references[block] -= 1
        assert self.pool.free(blocks) == [block for block in blocks if not self.references[block]]

    @invariant()
    def conserves(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == self.references.count(0)

    def teardown(self) -> None:
        if hasattr(self, "held"):
            for blocks in self.held:
                self.pool.free(blocks)
            assert self.pool.allocate(self.pool.num_blocks) == list(range(self.pool.num_blocks))

    def _longest_free_run(self) -> int:
        text = "".join("x" if n else "." for n in self.references)
        return max(map(len, text.split("x")))


TestPool = PoolMachine.TestCase


def test_takes_the_smallest_run_that_fits() -> None:
    pool = BlockPool(20)
    first, _, third, _ = (pool.allocate(num_blocks) for num_blocks in (4, 1, 2, 1))
    assert first is not None and third is not None
    pool.free(first)
    pool.free(third)
    assert pool.allocate(2) == third
    assert pool.allocate(3) == [0, 1, 2]


def test_takes_few_runs_where_none_fits() -> None:
    pool = BlockPool(10)
    pool.allocate(10)
    pool.free([0, 2, 3, 4, 6, 7])
    assert pool.allocate(5) == [2, 3, 4, 6, 7]
    assert pool.allocate(2) is None
    assert pool.allocate(0) == []


def test_shared_blocks_are_free_with_the_last_reference() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.share(blocks)
    assert pool.free(blocks) == []
    assert pool.num_free == 1
    assert pool.free(blocks) == [0, 1, 2]
    assert pool.num_free == 4


@pytest.mark.parametrize("wrong", [[2], [0, 1, 2], [9], [-3]])
@pytest.mark.parametrize("method", ["free", "share"])
def test_caller_s_errors_assert_and_change_nothing(wrong: list[int], method: str) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError):
        getattr(pool, method)([0, *wrong])
    pool.check_integrity()
    assert pool.num_free == 2
    assert [pool.num_references(block) for block in range(4)] == [1, 1, 0, 0]


def test_double_free_and_twice_named_blocks_assert() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    assert blocks is not None
    with pytest.raises(AssertionError):
        pool.free(blocks * 2)
    pool.free(blocks)
    with pytest.raises(AssertionError):
        pool.free(blocks)
    pool.check_integrity()
