"""What a bench says here is compared with what it said at an earlier commit, number by number."""

from tests.bench.against import compared, leaves


def test_numbers_are_found_by_their_paths() -> None:
    said = {"rows": [{"workers": 8, "p50_ms": 1.5, "met": True}, {"p50_ms": 2}], "name": "x", "some": [3]}
    assert dict(leaves(said)) == {
        "rows[workers=8].workers": 8, "rows[workers=8].p50_ms": 1.5, "rows[1].p50_ms": 2, "some[0]": 3,
    }  # fmt: skip


def test_only_what_both_say_every_time_is_compared() -> None:
    here = [{"a": 2.0, "b": 1.0, "zero": 1.0}, {"a": 4.0, "zero": 1.0}, {"a": 3.0, "zero": 1.0}]
    there = [{"a": 1.0, "b": 1.0, "zero": 0.0}, {"a": 4.0, "b": 1.0, "zero": 0.0}, {"a": 2.0, "b": 1.0, "zero": 0.0}]
    lines = [line.split() for line in compared(here, there)]
    assert lines == [["a", "3.000", "2.000", "1.50", "(1.00", "to", "2.00)"], ["zero", "1.000", "0.000", "-"]]
