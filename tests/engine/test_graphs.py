"""Which graph a decode takes, when it is recorded, and what becomes of it all when recording fails."""

import pytest
import torch
from torch import Tensor

from services.engine.cuda.graphs import GraphRunner, graph_sizes
from services.engine.limits import MAX_GRAPH_ROWS


class Recording:
    def __init__(self, output: Tensor) -> None:
        self.output = output
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class Rig:
    """A recorder and what it records: `computed` are the sizes in the order of computation."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.computed: list[int] = []
        self.recordings: dict[int, Recording] = {}
        self.fails_at = fails_at

    def compute(self, size: int) -> Tensor:
        self.computed.append(size)
        if size == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.full((size, 3), float(size))

    def start_afresh(self) -> None:
        """Nothing is shared."""

    def record(self, compute: object) -> Recording:
        output = compute()  # type: ignore[operator]
        self.recordings[len(output)] = Recording(output)
        return self.recordings[len(output)]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8)), (1000, (1, 2, 4, 8, 16, 32, 64, 128, 256))],
)
def test_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes
    assert sizes[-1] <= MAX_GRAPH_ROWS


def test_a_decode_takes_the_next_larger_graph() -> None:
    runner = GraphRunner(rig := Rig(), rig.compute, 12)
    assert [runner.size_for(n) for n in (1, 2, 3, 4, 5, 8, 9, 12)] == [1, 2, 4, 4, 8, 8, 12, 12]
    assert runner.size_for(13) is None


def test_a_graph_is_recorded_once_behind_a_first_computation_and_replayed() -> None:
    runner = GraphRunner(rig := Rig(), rig.compute, 8)
    first, second = runner.run(4), runner.run(4)
    assert first is second is rig.recordings[4].output
    assert rig.computed == [4, 4], "once to set up, once recorded"
    assert rig.recordings[4].num_replays == 2
    runner.clear()
    assert runner.run(4) is not first
    assert rig.computed == [4] * 4


def test_failing_to_record_ends_all_graphs_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    runner = GraphRunner(rig := Rig(fails_at=2), rig.compute, 8)
    assert runner.run(8) is not None
    assert runner.run(2) is None
    assert [runner.size_for(n) for n in (1, 2, 8)] == [None] * 3
    assert len([r for r in caplog.records if "without CUDA graphs" in r.message]) == 1
    runner.clear()
    assert runner.size_for(1) is None
