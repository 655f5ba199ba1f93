"""`kvmesh trace`: what is read from span files, which request is found, and what is drawn of it."""

import io
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from services.cli import trace
from services.cli.trace import SpanRecord, find_trace, load_spans, render_waterfall, show_chosen, show_trace
from services.errors import UserError
from services.telemetry import FileExporter, Key, SpanName, Telemetry, trace_id_of

MS = 1_000_000


def span(name: str, start_ms: int, end_ms: int, *, id: str = "", parent: str = "", **fields: Any) -> SpanRecord:
    values = {"trace_id": "t1", "service": "gateway", "error": "", "attributes": {}} | fields
    return SpanRecord(
        span_id=id or name, parent_id=parent, name=name, start_ns=start_ms * MS, end_ns=end_ms * MS, **values
    )


def one_request(trace_id: str = "t1", request_id: str = "req-aa", at: int = 1000, parent: str = "") -> list[SpanRecord]:
    root = f"root-{request_id}"
    attributes = {
        Key.REQUEST_ID: request_id,
        Key.TTFT_MS: 12.25,
        Key.PREFILL_WORKER: "prefill-0",
        Key.DECODE_WORKER: "decode-0",
        Key.OUTCOME: "stop",
    }
    moved = {
        Key.CARRIER: "shm",
        Key.CARRIER_REASON: "one host",
        Key.NUM_BYTES: 3 * 1024 * 1024,
        Key.GB_PER_S: 1.5,
        Key.OUTCOME: "landed",
    }
    decoded = {Key.REQUEST_ID: request_id, Key.NUM_TOKENS: 7, Key.OUTCOME: "stop"}
    release = {Key.NUM_BLOCKS: 4, Key.EXPOSED_MS: 2.0}
    decode = f"decode-{request_id}"

    def part(name: str, start: int, end: int, above: str = root, **fields: Any) -> SpanRecord:
        fields |= {"id": f"{name}-{request_id}", "parent": above, "trace_id": trace_id}
        return span(name, at + start, at + end, **fields)

    top = span("POST /v1/completions", at, at + 40, id=root, parent=parent, trace_id=trace_id, attributes=attributes)
    return [
        part("kv.release", 14, 16, service="prefill-0", attributes=release),
        part("decode", 12, 40, service="decode-0", attributes=decoded),
        part("decode.stream", 20, 40, decode, service="decode-0"),
        part("decode.queue", 12, 13, decode, service="decode-0"),
        part("kv.transfer", 8, 14, service="decode-0", attributes=moved),
        top,
    ]


def draw(spans: list[SpanRecord], width: int = 140) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), highlight=False)
    render_waterfall(spans, console)
    return console.export_text()


def write(folder: Path, spans: list[SpanRecord], tail: bytes = b"") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "gateway-1.jsonl").write_bytes(b"".join(msgspec.json.encode(s) + b"\n" for s in spans) + tail)


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    whole = one_request()
    torn = msgspec.json.encode(whole[0])[:-20]
    write(tmp_path, whole, b'\n{"an": "other object"}\n"\xff\xfe"\n' + torn)
    assert load_spans(tmp_path) == whole


def test_a_missing_folder_holds_no_spans(tmp_path: Path) -> None:
    assert load_spans(tmp_path / "nowhere") == []


def test_reads_what_the_exporter_writes(tmp_path: Path) -> None:
    telemetry = Telemetry("decode-0", [FileExporter(tmp_path, "decode-0")])
    root = telemetry.begin_span("POST /v1/completions", attributes={Key.REQUEST_ID: "req-1"}, server=True)
    telemetry.record(SpanName.DECODE, root.traceparent, (5, 9), {Key.NUM_TOKENS: 3, Key.GB_PER_S: 0.5}, error="lost")
    root.end()
    telemetry.close()
    decode, top = sorted(load_spans(tmp_path), key=lambda s: s.start_ns)
    assert (decode.parent_id, decode.error, decode.service) == (top.span_id, "lost", "decode-0")
    assert decode.attributes == {Key.NUM_TOKENS: 3, Key.GB_PER_S: 0.5}
    assert (top.trace_id, top.parent_id, top.error) == (trace_id_of(root.traceparent), "", "")


@pytest.mark.parametrize("request_id", ["req-aa", "cmpl-aa", "chatcmpl-aa", "aa"])
def test_a_request_is_found_by_any_of_its_names(request_id: str) -> None:
    spans = one_request("t1", "req-aa", at=0) + one_request("t2", "req-bb", at=5000)
    assert {s.trace_id for s in find_trace(spans, request_id)} == {"t1"}


def test_without_an_id_it_is_the_request_that_started_last() -> None:
    newest = one_request("t2", "req-bb", at=5000)
    stray = span("kv.transfer", 9000, 9001, id="stray", trace_id="t9")
    assert find_trace([stray, *newest, *one_request("t1", "req-aa", at=0)], None) == newest


def test_the_last_request_may_have_lost_its_root() -> None:
    half = [s for s in one_request("t2", "req-bb", at=5000) if not s.name.startswith("POST")]
    assert find_trace(one_request() + half, None) == half


@pytest.mark.parametrize("request_id", ["req-zz", "req-", ""])
def test_an_unknown_request_is_one_line_that_says_what_to_do(request_id: str) -> None:
    with pytest.raises(UserError, match="x-request-id") as caught:
        find_trace([*one_request(), span("tokenize", 1, 2)], request_id)
    assert "\n" not in str(caught.value)


def test_no_spans_at_all_says_what_to_do() -> None:
    with pytest.raises(UserError, match="send a request"):
        find_trace([], None)


def test_requests_that_share_a_client_s_trace_are_kept_apart() -> None:
    first = one_request("t1", "req-aa", at=0, parent="client")
    second = one_request("t1", "req-bb", at=5000, parent="client")
    assert find_trace(first + second, "req-aa") == first
    assert find_trace(first + second, None) == second


def test_the_waterfall_is_a_tree_in_time_order() -> None:
    lines = draw(one_request()).splitlines()
    header, _axis, *rows = lines
    assert " ".join(header.split()) == "req-aa trace t1 TTFT 12.2 ms prefill-0 → decode-0 stop"
    assert [row[: len("POST /v1/completions")].rstrip() for row in rows] == [
        "POST /v1/completions", "  kv.transfer", "  decode", "    decode.queue", "    decode.stream", "  kv.release",
    ]  # fmt: skip
    assert rows[1].split()[:4] == ["kv.transfer", "decode-0", "8.0", "6.0"]
    assert "shm (one host) 3.0 MiB 1.50 GB/s landed" in rows[1]
    assert "7 tokens stop" in rows[2]
    assert "4 blocks exposed 2.0 ms" in rows[5]


@pytest.mark.parametrize("width", [80, 140, 300])
def test_bars_share_one_axis_and_fit_the_terminal(width: int) -> None:
    lines = draw(one_request(), width).splitlines()[1:]
    assert max(map(len, lines)) <= width
    bars = {line.split()[0]: (line.find("█"), line.rfind("█")) for line in lines if "█" in line}
    root, transfer, stream, release = (bars[n] for n in ("POST", "kv.transfer", "decode.stream", "kv.release"))
    assert root[0] < transfer[0] < stream[0] and transfer[1] <= stream[1] == root[1]
    assert root[0] < release[0] <= release[1] < root[1]


@pytest.mark.parametrize("width", [50, 60, 70, 80, 100])
def test_a_narrow_terminal_hides_no_word(width: int) -> None:
    lines = draw([*one_request(), span("prefill", 1001, 1009, parent="gone", error="boom")], width).splitlines()[1:]
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    for word in [
        "kv.transfer",
        "decode.stream",
        "28.0",
        "shm",
        "(one",
        "host)",
        "3.0",
        "MiB",
        "1.50",
        "GB/s",
        "landed",
        "7",
        "tokens",
        "exposed",
        "2.0",
        "boom",
        "orphan:",
    ]:
        assert word in words


def test_orphans_are_shown_and_flagged() -> None:
    lost = span("prefill", 1001, 1009, parent="gone", service="prefill-0")
    child = span("prefill.compute", 1002, 1009, parent="prefill", service="prefill-0")
    lines = draw([lost, child, *one_request()]).splitlines()
    flagged = [line for line in lines if "orphan" in line]
    assert len(flagged) == 1 and flagged[0].startswith("? prefill ")
    assert lines[lines.index(flagged[0]) + 1].startswith("  prefill.compute")


def test_a_trace_without_its_root_says_so() -> None:
    text = draw([s for s in one_request() if not s.name.startswith("POST")])
    assert "no root span" in text and "req-aa" in text
    assert text.count("orphan") == 3  # transfer, decode, release: what lies under decode has its parent


def test_a_circle_of_parents_is_drawn_once() -> None:
    text = draw([*one_request(), span("one", 1, 2, parent="two"), span("two", 1, 2, parent="one")])
    assert text.count("? one") + text.count("? two") == 1
    assert text.count("  one") + text.count("  two") == 1


def test_errors_are_red_and_text_is_never_markup() -> None:
    console = Console(record=True, width=140, file=io.StringIO(), force_terminal=True, color_system="standard")
    attributes = {Key.OUTCOME: "worker_lost"}
    render_waterfall([span("decode", 1, 9, error="lost [bold]\n\x1b[2Jx", attributes=attributes)], console)
    text = console.export_text(styles=True)
    assert "\x1b[31mdecode\x1b[0m" in text
    assert "lost [bold]  [2Jx" in text
    assert "\x1b[2J" not in text


def test_a_span_of_no_length_has_a_bar() -> None:
    assert "█" in draw([span("tokenize", 5, 5)])


def test_show_prints_the_last_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old spans are complete: there is nothing to wait for."""
    write(tmp_path, one_request())
    monkeypatch.setattr(trace.time, "sleep", pytest.fail)
    show_trace(tmp_path, None)
    assert "kv.release" in capsys.readouterr().out


def test_show_waits_for_spans_on_their_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = one_request(at=time.time_ns() // MS)
    write(tmp_path, whole[-1:])
    monkeypatch.setattr(trace.time, "sleep", lambda _: write(tmp_path, whole))
    drawn: list[list[SpanRecord]] = []
    monkeypatch.setattr(trace, "render_waterfall", lambda spans, *_: drawn.append(spans))
    show_trace(tmp_path, "req-aa")
    assert drawn == [whole]


def test_show_waits_no_longer_than_exporting_takes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="x-request-id"):
        show_trace(tmp_path, "req-aa", settle_s=0.3)
    with pytest.raises(UserError):
        show_trace(tmp_path / "nowhere", "req-aa")


def step(number: int) -> SpanRecord:
    return span(
        "engine.step", 1015 + number, 1016 + number, id=f"step-{number}", trace_id=f"s{number}", service="decode-0"
    )


def test_engine_steps_are_no_requests_and_no_part_of_one() -> None:
    newest = one_request(at=1000)
    steps = [step(number) for number in range(3)]
    assert find_trace([*newest, *steps], None) == newest
    joined = [*newest, span("engine.step", 1016, 1017, id="mine", parent="root-req-aa")]
    assert find_trace(joined, "req-aa") == newest


def test_links_are_told_in_short() -> None:
    linked = tuple(f"00-s-step{number}-01" for number in range(3))
    steps = [span("engine.step", 1, 2, id=f"step{number}", trace_id="s") for number in range(3)]
    reader = span("kv.transfer", 3, 4, id="reader", service="decode-0", links=("00-t1-holder-01", "gibberish"))
    holder = span("kv.transfer", 3, 4, id="holder", service="prefill-0", links=("00-t1-reader-01",))
    stream = span("decode.stream", 5, 6, links=linked)
    console = Console(record=True, width=140, file=io.StringIO(), highlight=False)
    render_waterfall([reader, holder, stream], console, {s.span_id: s for s in steps})
    lines = console.export_text().splitlines()
    assert any("decode-0" in line and "↔ prefill-0 ↔ unrecorded" in line for line in lines)
    assert any("prefill-0" in line and "↔ decode-0" in line for line in lines)
    assert any(line.lstrip("? ").startswith("decode.stream") and "↔ 3 engine.step" in line for line in lines)


def test_a_transfer_tells_its_phases_once() -> None:
    phases = {Key.LEASE_WAIT_MS: 1.25, Key.FIRST_BYTE_MS: 2.5, Key.VERIFY_MS: 0.5}
    transfer = span("kv.transfer", 3, 9, attributes=phases)
    assert "lease wait 1.2 first byte 2.5 verify 0.5 ms" in draw([transfer])
    text = draw([transfer, span("kv.lease_wait", 3, 5, parent="kv.transfer")])
    assert "  kv.lease_wait" in text and "lease wait 1.2" not in text


def test_the_parts_of_a_ttft_stand_under_the_header() -> None:
    attributes = {
        Key.TTFT_MS: 12.0,
        "kvmesh.ttft.tokenize_ms": 2.0,
        "kvmesh.ttft.place_ms": 9.9,
        "kvmesh.ttft.retry_ms": 0.0,
        Key.REQUEST_ID: "req-aa",
    }
    lines = draw([span("POST /v1/completions", 1, 30, attributes=attributes)]).splitlines()
    assert lines[1].strip() == "TTFT = tokenize 2.0 + place 9.9 ms"


def several() -> list[SpanRecord]:
    """Three requests: a quick one, the slowest, one that failed before it had a token."""
    quick, slow = one_request("t1", "req-aa", at=0), one_request("t2", "req-bb", at=1_000)
    slow[-1].attributes[Key.TTFT_MS] = 900.0
    attributes = {Key.REQUEST_ID: "req-cc", Key.OUTCOME: "overloaded"}
    failed = span("POST /v1/completions", 2_000, 2_005, trace_id="t3", id="r3", error="full", attributes=attributes)
    return [failed, *quick, *slow, step(1)]


def test_the_slowest_and_the_last_failed_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, several())
    show_chosen(tmp_path, slowest=True, failed=False, rejected=False, limit=0)
    assert capsys.readouterr().out.startswith("req-bb")
    show_chosen(tmp_path, slowest=False, failed=True, rejected=False, limit=0)
    assert capsys.readouterr().out.startswith("req-cc")


def test_recorded_requests_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, several())

    def listed(**options: bool) -> list[str]:
        show_chosen(tmp_path, **{"slowest": False, "failed": False, "rejected": False, "limit": 2} | options)
        return [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]

    assert listed() == ["req-bb", "req-cc"]
    assert listed(slowest=True) == ["req-bb", "req-aa"]
    assert listed(failed=True) == ["req-cc"]


def test_what_a_client_did_wrong_is_no_failure_of_the_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def failed(number: int, status: int) -> SpanRecord:
        attributes = {Key.REQUEST_ID: f"req-{number}", Key.OUTCOME: "invalid", Key.HTTP_STATUS: status}
        name, at = "POST /v1/completions", number * 1_000
        return span(name, at, at + 5, trace_id=f"t{number}", id=f"r{number}", error="no", attributes=attributes)

    write(tmp_path, [failed(1, 400)])
    with pytest.raises(UserError, match=r"no request has failed yet; 1 were refused .* --rejected"):
        show_chosen(tmp_path, slowest=False, failed=True, rejected=False, limit=0)
    write(tmp_path, [failed(1, 400), failed(2, 429), failed(3, 401), failed(4, 502), failed(5, 404)])
    for rejected, expected in ((False, "24"), (True, "12345")):
        show_chosen(tmp_path, slowest=False, failed=True, rejected=rejected, limit=9)
        listed = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]
        assert listed == [f"req-{number}" for number in expected]


def test_nothing_to_choose_from_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, one_request())
    with pytest.raises(UserError, match="no request has failed"):
        show_chosen(tmp_path, slowest=False, failed=True, rejected=False, limit=0)
    with pytest.raises(UserError, match="no request has ended"):
        show_chosen(tmp_path / "nowhere", slowest=True, failed=False, rejected=False, limit=5)
