"""What the guard of the data plane's ratios decides, from figures that were not measured."""

import pytest

from tests.bench import bench_guard
from tests.bench.bench_guard import MORE_ROUNDS, ROOM, ROUNDS, STATED, Figures, judge, ratios_of, table, verdicts_of


def figures(share: float) -> Figures:
    """Return a run in which each ratio is this share of what is stated."""
    stated = {name: share * ratio for name, ratio in STATED.items()}
    return {
        "shm_to_memory_copy": stated["shm / memory copy"],
        "shm_proved_to_unproved": stated["shm, digests on / off"],
        "tcp_to_raw_socket": stated["tcp / raw socket"],
        "tcp_encrypted_to_expected": stated["tcp encrypted / expected"],
        "scattered": {"shm_of_copy": stated["shm scattered / copy"]},
        "one_block_us": {
            "socket": 80.0,
            "shm": 80.0 / stated["one block: socket / shm"],
            "tcp": 80.0 / stated["one block: socket / tcp"],
        },
    }


def test_each_stated_ratio_is_found_and_has_half_of_it_as_its_bound() -> None:
    assert ratios_of(figures(1.0)).keys() == STATED.keys()
    assert [verdict.bound for verdict in verdicts_of(figures(1.0))] == [stated / ROOM for stated in STATED.values()]


@pytest.mark.parametrize(("share", "holds"), [(2.0, True), (1.0, True), (0.51, True), (0.49, False), (0.0001, False)])
def test_a_ratio_fails_below_half_of_what_is_stated(share: float, holds: bool) -> None:
    assert {verdict.holds for verdict in verdicts_of(figures(share))} == {holds}


def judged(*runs: Figures) -> tuple[list[bool], list[int]]:
    """Return whether each ratio holds where these are the runs, and how many rounds each had."""
    rounds: list[int] = []

    def measure(num_rounds: int) -> Figures:
        rounds.append(num_rounds)
        return runs[len(rounds) - 1]

    return [verdict.holds for verdict in judge(measure)], rounds


def test_what_fails_is_measured_once_more_with_more_rounds() -> None:
    assert judged(figures(1.0)) == ([True] * len(STATED), [ROUNDS])
    assert judged(figures(0.1), figures(1.0)) == ([True] * len(STATED), [ROUNDS, MORE_ROUNDS])
    assert judged(figures(0.1), figures(0.1)) == ([False] * len(STATED), [ROUNDS, MORE_ROUNDS])


def test_what_held_at_first_need_not_hold_again() -> None:
    first, second = figures(1.0), figures(0.1)
    first["tcp_to_raw_socket"] = 0.1
    holds, _ = judged(first, second)
    assert holds == [name != "tcp / raw socket" for name in STATED]


def test_the_command_fails_and_shows_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["bench_guard"])
    monkeypatch.setattr(bench_guard, "run", lambda mib, rounds: figures(0.4))
    with pytest.raises(SystemExit, match="less than half as quick"):
        bench_guard.main()
    assert "fails" in capsys.readouterr().out
    assert table(verdicts_of(figures(1.0))).row_count == len(STATED)
