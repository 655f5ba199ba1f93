"""The bench of restoring from a store: it restores what it times, from files and whole, on prompts of a few blocks."""

from pathlib import Path

import pytest

from tests.bench.bench_restore import Bench, Restored, figures, from_disk, hashes_of, layout_of, table


def test_a_layout_has_the_kv_that_was_asked_for() -> None:
    for kv_kib in (4, 128):
        layout = layout_of(kv_kib)
        assert layout.block_bytes == kv_kib * 1024 * layout.block_size


def test_prompts_share_no_block() -> None:
    assert len({*hashes_of("a", 5), *hashes_of("b", 5)}) == 10


@pytest.fixture
def bench():
    made = Bench(layout_of(4), 6, "auto")
    yield made
    made.close()


def test_rates_are_of_kv_and_ratios_of_each_round(bench: Bench) -> None:
    ours = [Restored(seconds=seconds, waited_s=1.0, read_s=0.5, num_leases=1) for seconds in (2.0, 4.0, 8.0)]
    found = figures(bench, "disk", [1.0, 1.0, 2.0], ours)
    assert found.restored_gib_per_s == bench.num_bytes / 2**30 / 4.0 and found.ratio == 0.25
    assert table([found], "restored").row_count == 1


async def test_a_real_store_restores_from_disk(bench: Bench, tmp_path: Path) -> None:
    found = await from_disk(bench, tmp_path, 2)
    assert [each.what for each in found] == ["disk, cold", "disk, warm"]
    assert all(each.ratio > 0 and each.num_leases >= 1 for each in found)
