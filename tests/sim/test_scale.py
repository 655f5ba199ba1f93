"""Meshes that are measured at a size: paced workers in virtual time; scheduler, directory and gateways are real."""

import itertools
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import BlockTables
from services.bench.drive.plot import plot_sizes
from services.scheduler.core import SchedulerCore
from services.sim.offered import SHARED, VOCAB, capacity_per_s, offer
from services.sim.scale import CONTROL, PACE, SIZES, ScaleOptions, ScaleRow, ScaleWorld, Seen, measure, shape_of
from services.sim.world import undisturbed
from tests.cli.commands import run_here
from tests.sim.bugs import BUGS


def row_of(num_workers: int, num_requests: int = 24, *, seed: int = 1, charge: bool = False) -> ScaleRow:
    return measure(seed, ScaleOptions(num_workers=num_workers, num_requests=num_requests, charge=charge))


def virtual(row: ScaleRow) -> dict[str, Any]:
    """Return what must be the same for a seed."""
    real = ("cpu_us", "cpu_busy", "cpu_s", "control_share")
    return {name: value for name, value in msgspec.structs.asdict(row).items() if name not in real}


@pytest.mark.parametrize("num_workers", [1, 2, 3, 16])
def test_every_request_is_answered_and_everything_given_back(num_workers: int) -> None:
    row = row_of(num_workers)
    assert not row.problems
    assert row.finished == row.requests == 24 and not row.failed
    assert row.ttft_p50_ms and row.ttft_p99_ms and row.place_p50_ms
    assert 0 < row.place_p50_ms < row.ttft_p50_ms <= row.ttft_p99_ms
    assert 0 < row.reused < 1 and 0 < row.requests_per_s <= row.offered_per_s
    assert set(row.cpu_us) == {*CONTROL, "workers"} and all(spent > 0 for spent in row.cpu_us.values())
    assert 0 < row.control_share < 1


def test_a_first_token_takes_the_prompts_computation_and_little_more() -> None:
    seen = first_seen()
    num_tokens = seen.request.num_prompt_tokens
    computed_s = PACE.span_s(0, num_tokens) + PACE.step_base_s * -(-num_tokens // 512)
    assert seen.first_s is not None
    rest_s = seen.first_s - seen.asked_s - seen.place_s - computed_s
    assert 0 < rest_s < 0.02


def first_seen() -> Seen:
    with undisturbed():
        world = ScaleWorld(1, ScaleOptions(num_workers=1, num_requests=1, charge=False), lambda: None)
        world.run()
        return world.seen[0]


def test_a_seed_has_the_same_virtual_figures() -> None:
    assert virtual(row_of(3, 12)) == virtual(row_of(3, 12)) != virtual(row_of(3, 12, seed=2))


def slow_placement(patch: pytest.MonkeyPatch, cpu_s: float) -> None:
    """Make every placement take so much more CPU time."""
    place = SchedulerCore.place

    def slowly(self: SchedulerCore, *arguments: Any) -> Any:
        until_s = time.thread_time() + cpu_s
        while time.thread_time() < until_s:
            pass
        return place(self, *arguments)

    patch.setattr(SchedulerCore, "place", slowly)


def test_what_the_control_plane_takes_passes_in_virtual_time_where_it_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = row_of(2, 12)
    slow_placement(monkeypatch, 0.05)
    uncharged, charged = row_of(2, 12), row_of(2, 12, charge=True)
    assert virtual(uncharged) == virtual(before)
    for row in (uncharged, charged):
        assert row.cpu_us["scheduler"] >= 50e3
    assert uncharged.place_p50_ms and charged.place_p50_ms and charged.ttft_p50_ms
    assert charged.ttft_p50_ms > charged.place_p50_ms >= uncharged.place_p50_ms + 50
    assert charged.place_share and charged.place_share > 0.1
    assert charged.finished == charged.requests and not charged.problems


def test_what_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    free, num_calls = BlockCache.free, itertools.count(1)

    def forgetful(self: BlockCache, tables: BlockTables) -> None:
        if next(num_calls) % 10:
            free(self, tables)

    monkeypatch.setattr(BlockCache, "free", forgetful)
    assert any("neither free nor cached" in problem for problem in row_of(2).problems)


def test_a_request_that_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    [bug] = [bug for bug in BUGS if bug.name == "first_token_twice"]
    bug.patch(monkeypatch)
    row = row_of(2)
    assert row.failed and any("was not answered although nothing went wrong" in problem for problem in row.problems)


def test_what_is_offered_follows_the_number_of_workers() -> None:
    for num_workers in (1, 8, 100):
        requests = offer(random.Random(1), 4_000, num_workers, PACE, 0.5)
        per_s = len(requests) / requests[-1].at_s
        assert per_s == pytest.approx(0.5 * capacity_per_s(requests, num_workers, PACE), rel=0.1)
        assert [request.at_s for request in requests] == sorted(request.at_s for request in requests)
        assert sum(request.prefix > 0 for request in requests) / 4_000 == pytest.approx(SHARED, abs=0.05)
        assert len({request.num_prompt_tokens for request in requests}) > 6


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    requests = offer(random.Random(1), 400, 4, PACE, 0.5)
    firsts: dict[int, tuple[int, ...]] = {}
    for request in requests:
        prompt = tuple(request.prompt())
        assert len(prompt) == request.num_prompt_tokens and max(prompt) < VOCAB
        at = request.num_prefix_tokens
        if request.prefix:
            assert firsts.setdefault(request.prefix, prompt[:at]) == prompt[:at]
    assert len(set(firsts.values())) == len(firsts) == 4
    own = {tuple(request.prompt()[request.num_prefix_tokens :][:16]) for request in requests}
    assert len(own) == len(requests)


def test_half_of_the_workers_prefill() -> None:
    for num_workers in SIZES:
        shape = shape_of(num_workers)
        if num_workers == 1:
            assert (shape.num_prefill, shape.num_decode, shape.num_aggregated) == (0, 0, 1)
        else:
            assert shape.num_prefill == shape.num_decode == num_workers // 2 and not shape.num_aggregated
    assert (*(2**power for power in range(10)), 1_000) == SIZES


def simulate(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return run_here(tmp_path, "simulate", *arguments)


def test_the_command_measures_each_size(tmp_path: Any) -> None:
    plot = tmp_path / "sizes.svg"
    done = simulate(tmp_path, "--workers", "1,2", "--requests", "8", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    rows = msgspec.json.decode(done.stdout)["rows"]
    assert [(row["workers"], row["finished"]) for row in rows] == [(1, 8), (2, 8)]
    assert "2 workers, 8 requests" in done.stderr
    assert plot.stat().st_size > 10_000


def test_the_command_prints_a_row_for_a_size(tmp_path: Path) -> None:
    done = simulate(tmp_path, "--workers", "2", "--requests", "8")
    assert done.returncode == 0, done.stderr
    for word in ("requests/s", "TTFT p50", "scheduler", "directory", "gateway"):
        assert word in done.stdout


def test_the_command_says_what_was_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from services.cli.scale import run_scale

    broken = msgspec.structs.replace(row_of(1, 2), problems=("a lease is open",))
    monkeypatch.setattr("services.cli.scale.measure", lambda *_: broken)
    with pytest.raises(SystemExit) as ended:
        run_scale([1], 0, 2, charge=False, plot=None, as_json=True)
    assert ended.value.code == 1
    assert "1 workers: a lease is open" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--workers", "0"], "between 1 and 1000"),
        (["--workers=-1"], "between 1 and 1000"),
        (["--workers", "1001"], "between 1 and 1000"),
        (["--workers", "1,2000"], "between 1 and 1000"),
        (["--workers", "many"], "give numbers"),
        (["--workers", "4", "--jobs", "2"], "leave out --jobs"),
        (["--workers", "4", "--plot", "a.txt"], "name a .png"),
        (["--workers", "4", "--plot", "no/such/folder/a.png"], "there is no folder"),
        (["--sweep", "--workers", "4"], "leave out --workers"),
        (["--sweep", "--faults", "all"], "leave out --faults"),
        (["--sweep", "--scenario", "kill.toml"], "leave out --scenario"),
        (["--workers", "1,2", "--faults", "all"], "give a number"),
        (["--workers", "65", "--faults", "kill"], "at most 64"),
        (["--faults", "kill", "--plot", "a.png"], "leave out --plot"),
        (["--charge"], "leave out --charge"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.main import get_command

    from services.cli.app import app
    from services.errors import UserError

    monkeypatch.setattr("services.cli.scale.measure", None)
    with pytest.raises(UserError, match=says) as raised:
        get_command(app).main(["simulate", *arguments], standalone_mode=False)
    assert "\n" not in str(raised.value)


def test_a_user_error_ends_the_command_with_two(tmp_path: Path) -> None:
    done = simulate(tmp_path, "--workers", "0")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


def test_a_plot_needs_no_more_than_its_rows(tmp_path: Any) -> None:
    plot_sizes([row_of(1, 2)], tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1_000
