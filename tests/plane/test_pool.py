import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.blocks.layout import Segment, block_ids
from dataplane.blocks.pool import BlockPool


class PoolMachine(RuleBasedStateMachine):
    """The pool against a count of references per block."""

    @initialize(num_blocks=st.integers(1, 40))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.references = [0] * num_blocks
        self.held: list[tuple[Segment, ...]] = []

    @rule(num_blocks=st.integers(0, 42))
    def allocate(self, num_blocks: int) -> None:
        num_free = self.references.count(0)
        longest = self._longest_free_run()
        segments = self.pool.allocate(num_blocks)
        if num_blocks > num_free:
            assert segments is None
            return
        assert segments is not None
        blocks = block_ids(segments)
        assert len(blocks) == len(set(blocks)) == num_blocks
        assert not any(self.references[block] for block in blocks), "a block in use was given out"
        if num_blocks <= longest:
            assert len(segments) <= 1, "a contiguous run was there"
        for block in blocks:
            self.references[block] = 1
        self.held.append(segments)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        segments = data.draw(st.sampled_from(self.held))
        self.pool.share(segments)
        for block in block_ids(segments):
            self.references[block] += 1
        self.held.append(segments)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        segments = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for block in block_ids(segments):
            self.references[block] -= 1
        assert self.pool.free(segments) == [b for b in block_ids(segments) if not self.references[b]]

    @invariant()
    def conserves(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == self.references.count(0)

    def teardown(self) -> None:
        if hasattr(self, "held"):
            for segments in self.held:
                self.pool.free(segments)
            assert self.pool.allocate(self.pool.num_blocks) in ((Segment(0, self.pool.num_blocks),),)

    def _longest_free_run(self) -> int:
        text = "".join("x" if n else "." for n in self.references)
        return max(map(len, text.split("x")))


TestPool = PoolMachine.TestCase


def test_takes_the_smallest_run_that_fits() -> None:
    pool = BlockPool(20)
    (a,), _, (c,), _ = pool.allocate(4), pool.allocate(1), pool.allocate(2), pool.allocate(1)  # pyright: ignore
    pool.free([a])
    pool.free([c])
    assert pool.allocate(2) == (c,)
    assert pool.allocate(3) == (Segment(0, 3),)


def test_takes_few_runs_where_none_fits() -> None:
    pool = BlockPool(10)
    pool.allocate(10)
    pool.free([Segment(0, 1), Segment(2, 3), Segment(6, 2)])
    assert pool.allocate(5) == (Segment(2, 3), Segment(6, 2))
    assert pool.allocate(2) is None
    assert pool.allocate(0) == ()


def test_shared_blocks_are_free_with_the_last_reference() -> None:
    pool = BlockPool(4)
    segments = pool.allocate(3)
    assert segments is not None
    pool.share(segments)
    assert pool.free(segments) == []
    assert pool.num_free == 1
    assert pool.free(segments) == [0, 1, 2]
    assert pool.num_free == 4


@pytest.mark.parametrize("wrong", [Segment(2, 1), Segment(0, 3), Segment(9, 9), Segment(-1, 1)])
@pytest.mark.parametrize("method", ["free", "share"])
def test_caller_s_errors_assert_and_change_nothing(wrong: Segment, method: str) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(AssertionError):
        getattr(pool, method)((Segment(0, 1), wrong))
    pool.check_integrity()
    assert pool.num_free == 2


def test_double_free_and_twice_named_blocks_assert() -> None:
    pool = BlockPool(4)
    segments = pool.allocate(2)
    assert segments is not None
    with pytest.raises(AssertionError):
        pool.free(segments * 2)
    pool.free(segments)
    with pytest.raises(AssertionError):
        pool.free(segments)
    pool.check_integrity()
