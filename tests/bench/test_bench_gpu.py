"""`make gpu-bench` without a card: its arithmetic, its report, and that it runs at all on what is not one."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.telemetry import Key, SpanName, SpanRecord
from tests.bench import bench_gpu, gpu_carriers, gpu_split
from tests.bench.gpu_report import Row, against, cells, markdown, plain, share, with_and_without


def test_a_rate_beside_its_limit() -> None:
    row = against("copy", "GB/s", 45.0, 50.0, "the link", 0.9)
    assert (row.ratio, row.is_met) == (0.9, True)
    assert cells(row) == ("copy", "45.0 GB/s; the link: 50.0", "0.90× ✓", "≥ 0.9×")
    assert against("copy", "GB/s", 44.0, 50.0, "the link", 0.9).is_met is False
    assert against("copy", "GB/s", 44.0, 50.0, "the link").is_met is None
    assert against("copy", "GB/s", 44.0, 0.0, "the link", 0.9).is_met is None


def test_less_is_better_of_times_and_shares() -> None:
    assert with_and_without("ttft", 104.0, 100.0, 1.05).is_met is True
    assert with_and_without("ttft", 106.0, 100.0, 1.05).is_met is False
    assert with_and_without("ttft", None, 100.0, 1.05).error
    assert share("exposed", 2.0, 50.0, 0.05).is_met is True
    assert share("exposed", 3.0, 50.0, 0.05).is_met is False
    assert share("exposed", 0.0, 50.0, 0.05).is_met is True, "nothing at all is exposed"
    assert share("exposed", None, 50.0, 0.05).error and share("exposed", 1.0, None, 0.05).error


def test_the_report_is_one_table_whatever_an_error_says() -> None:
    rows = [against("a", "x", 1, 2, "b"), Row(what="c", aim=0.9, error="a | b")]
    lines = markdown("a card", rows).splitlines()
    assert lines[0] == "a card"
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == 4 and {line.count("|") for line in table} == {5}
    assert "**not measured**: a / b" in table[-1] and table[-1].endswith("| ≥ 0.9× |")
    assert "not measured: a | b" in plain(rows[1]) and "**" not in plain(rows[1])


def transfer(trace_id: str, length: int, exposed_ms: float | None, end: str = "target") -> Iterator[SpanRecord]:
    def span(name: str, **attributes: object) -> SpanRecord:
        return SpanRecord(
            trace_id=trace_id, span_id=f"{trace_id}-{name}-{end}", parent_id="", name=name, service="s", start_ns=0,
            end_ns=1, attributes=attributes, error="",
        )  # fmt: skip

    yield span("POST /v1/completions", **{Key.INPUT_TOKENS: length})
    moved = {Key.END: end, Key.CARRIER: "cuda", Key.CARRIER_REASON: "one host, one card"}
    yield span(SpanName.KV_TRANSFER, **moved, **({} if exposed_ms is None else {Key.EXPOSED_MS: exposed_ms}))


def test_hand_overs_are_told_by_prompt_and_by_their_readers_end() -> None:
    spans = [
        *transfer("t1", 1000, 1.5),
        *transfer("t2", 4000, 2.5),
        *transfer("t3", 1000, None),
        *transfer("t4", 1000, 9.0, end="source"),
    ]
    assert gpu_split.handovers(spans, 1000) == [(1.5, "`cuda`, one host, one card")]
    assert gpu_split.handovers(spans, 4000) == [(2.5, "`cuda`, one host, one card")]


def test_without_a_card_there_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_gpu, "has_driver", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_gpu", "--quick"])
    with pytest.raises(SystemExit) as ended:
        bench_gpu.main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert "no driver for a graphics card" in err


def test_the_sections_share_what_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    def take(section: str, _: argparse.Namespace, limit_s: float) -> Iterator[Row]:
        limits[section] = limit_s
        yield Row(what=section)

    monkeypatch.setattr(bench_gpu, "section_rows", take)
    rows = list(bench_gpu.all_rows(bench_gpu.parse(["--quick"])))
    assert [row.what for row in rows] == list(limits) == ["carriers", "split"]
    assert limits["split"] == pytest.approx(bench_gpu.QUICK_BUDGET_S, abs=5), "what the others leave is the last one's"
    assert limits["carriers"] < limits["split"] < 540
    assert bench_gpu.models_of(bench_gpu.parse(["--quick"])) == ("qwen3-0.6b",)
    assert bench_gpu.models_of(bench_gpu.parse([])) == bench_gpu.MODELS
    both = ["--quick", "--model", "qwen3-8b"]
    assert bench_gpu.models_of(bench_gpu.parse(both)) == ("qwen3-8b",)
    assert bench_gpu.command(bench_gpu.parse(both)) == "python -m tests.bench.bench_gpu --quick --model qwen3-8b"


def section(name: str, *, limit_s: float, device: str = "cpu") -> list[Row]:
    arguments = bench_gpu.parse(["--quick", "--model", "tiny", "--device", device])
    return list(bench_gpu.section_rows(name, arguments, limit_s))


def test_a_section_that_fails_or_takes_too_long_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVMESH_STATE_DIR", str(tmp_path))
    [late] = section("split", limit_s=0.0)
    assert "ended early, over its 0 s" in late.error
    [failed] = section("split", limit_s=200.0, device="cuda:77")[-1:]
    assert "ended early, code 1" in failed.error and len(failed.error) < 2000


@pytest.mark.slow  # eight processes
def test_the_split_section_runs_on_what_is_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVMESH_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu_split, "REQUESTS", (2, 2))
    rows = list(gpu_split.rows("cpu", ("tiny",), quick=True))
    assert [row.what.partition(": ")[2].partition(" (")[0] for row in rows] == [
        "first token, with / without the split", "second token, with / without", "exposed of a hand-over",
    ]  # fmt: skip
    assert all(row.ratio is not None and not row.error for row in rows), rows
    assert "`shm`, one host" in rows[2].what


def test_the_carriers_section_runs_on_a_fake_card() -> None:
    rows = {row.what.partition(",")[0]: row for row in gpu_carriers.rows("fake", (), quick=True)}
    assert [name for name in rows if name.startswith("`")] == ["`cuda`", "`tcp`"]
    for name in ("`cuda`", "`tcp`"):
        assert not rows[name].error, rows[name]
        assert rows[name].ratio and rows[name].aim == gpu_carriers.AIM
