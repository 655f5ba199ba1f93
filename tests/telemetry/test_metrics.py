"""One service's registry: exemplars, bounds, what is put and what is counted, and the server's thread."""

import socket
import threading
import urllib.request

import pytest
from prometheus_client import REGISTRY, Gauge

from dataplane.blocks.layout import BlockTable, Segment
from dataplane.protocol.progress import KVProgress
from dataplane.protocol.reasons import FailCode, RefusalCode
from schemas.ids import LeaseId, RequestId, WorkerId
from schemas.kv import LeaseEnd, ReadEnd
from services import metric_names as names
from services.config import MeshConfig, apply_environment
from services.errors import UserError
from services.holder.core.leases import Grant, LeaseTable
from services.holder.observe import metrics as worker_metrics
from services.holder.observe.metrics import HolderMetrics
from services.metrics import OTHER, MetricName, Metrics, exemplar_of, library_text
from services.telemetry.limits import MAX_SCRAPES, MAX_SERIES
from tests.pages.tables import metrics_table, shown_name
from tests.waiting import wait_until
from tests.wire.examples import LOAD

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


def text_of(metrics: Metrics, accept: str = "") -> str:
    return metrics.render(accept)[0].decode()


@pytest.mark.parametrize("traceparent", ["", "junk", UNSAMPLED, f"00-{TRACE}-{SPAN}-zz", f"00-{TRACE}-{SPAN}"])
def test_only_a_sampled_trace_is_an_exemplar(traceparent: str) -> None:
    assert exemplar_of(traceparent) is None
    assert exemplar_of(SAMPLED) == {"trace_id": TRACE, "span_id": SPAN}


def test_exemplars_are_told_to_whoever_takes_openmetrics() -> None:
    metrics = Metrics()
    metrics.observe(names.ITL, 0.003, trace=SAMPLED)
    metrics.observe(names.ITL, 0.3, trace=UNSAMPLED)
    text, content_type = metrics.render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    assert text.decode().count(f'trace_id="{TRACE}"') == 1
    plain, content_type = metrics.render("text/plain")
    assert content_type.startswith("text/plain") and TRACE not in plain.decode()


def test_what_is_put_replaces_what_was() -> None:
    metrics = Metrics("w")
    metrics.set_series(names.LEASES, {("<1s",): 2, (">120s",): 1})
    metrics.set_series(names.LEASES, {("<1s",): 3})
    lines = [line for line in text_of(metrics).splitlines() if line.startswith("kvmesh_leases{")]
    assert lines == ['kvmesh_leases{age="<1s",worker="w"} 3.0']


def test_what_a_library_counts_is_shown_by_its_prefix() -> None:
    registered = [Gauge(f"{name}:running", "Requests", registry=REGISTRY) for name in ("vllm", "other")]
    try:
        registered[0].set(3)
        metrics = Metrics("w")
        assert "vllm:running" not in text_of(metrics)
        metrics.show_library(lambda: library_text("vllm:"))
        assert "vllm:running 3.0" in text_of(metrics) and "other:running" not in text_of(metrics)
    finally:
        for gauge in registered:
            REGISTRY.unregister(gauge)


def test_known_series_begin_at_zero() -> None:
    metrics = Metrics("w")
    metrics.prepare(names.metrics_of("decode"))
    text = text_of(metrics)
    assert 'kvmesh_transfers_total{outcome="digest",worker="w"} 0.0' in text
    assert 'kvmesh_stranded_blocks_total{reason="reader_left",worker="w"} 0.0' in text
    assert "process_start_time_seconds" in text
    assert "gen_ai" not in text, "those are a gateway's"


def test_series_are_bounded() -> None:
    metrics = Metrics("w")
    for number in range(MAX_SERIES + 10):
        metrics.inc(names.TRANSFER_BYTES, f"source-{number}", "tcp")
    lines = [line for line in text_of(metrics).splitlines() if line.startswith("kvmesh_transfer_bytes_total{")]
    assert len(lines) == MAX_SERIES + 1
    assert f'kvmesh_transfer_bytes_total{{carrier="{OTHER}",source="{OTHER}",worker="w"}} 10.0' in lines
    metrics.set_series(names.TRANSFER_RATE, {(f"source-{number}", "tcp"): 1.0 for number in range(MAX_SERIES + 10)})
    assert text_of(metrics).count("kvmesh_transfer_rate_bytes_per_second{") == MAX_SERIES


def test_a_sampler_that_fails_keeps_the_others() -> None:
    metrics = Metrics()
    metrics.on_sample(lambda: 1 // 0)
    metrics.on_sample(lambda: metrics.set_series(names.DIRECTORY_HOLDERS, {(): 7}))
    metrics.sample()
    assert "kvmesh_directory_holders 7.0" in text_of(metrics)


def test_the_server_reads_while_everything_changes() -> None:
    """Collecting on another thread never meets a dict that grows."""
    metrics, stop = Metrics("w"), threading.Event()
    server = metrics.start_server("127.0.0.1", 0)
    assert server is not None
    failures: list[Exception] = []

    def scrape() -> None:
        try:
            while not stop.is_set():
                with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=30) as answer:
                    assert answer.status == 200
        except (OSError, AssertionError) as error:
            failures.append(error)

    scraping = threading.Thread(target=scrape)
    scraping.start()
    for number in range(3_000):
        metrics.inc(names.TRANSFERS, f"outcome-{number % 400}")
        metrics.observe(names.STEP_SECONDS, 0.001, "decode")
        metrics.set_series(
            MetricName("gauge", f"kvmesh_some_{number % 50}", "", ("x",), is_sampled=True), {(str(number),): 1}
        )
    stop.set()
    scraping.join(30)
    assert not failures
    taken = Metrics()
    assert taken.start_server("127.0.0.1", server.server_port) is None, "the port is somebody's: no metrics, no error"
    server.shutdown()
    server.server_close()


def test_who_says_nothing_takes_no_thread_for_ever() -> None:
    metrics, before = Metrics("w"), threading.active_count()
    server = metrics.start_server("127.0.0.1", 0)
    assert server is not None
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(280)]
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=60) as answer:
        assert answer.status == 200
    wait_until(lambda: threading.active_count() <= before + MAX_SCRAPES + 1)
    for connection in silent:
        connection.close()
    wait_until(lambda: threading.active_count() == before + 1)
    server.shutdown()
    server.server_close()


def test_leases_are_told_by_age_by_end_and_by_whether_anybody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    time_ms = 0
    monkeypatch.setattr(worker_metrics, "now_ms", lambda: time_ms)
    metrics, leases = Metrics("w"), LeaseTable()
    measured = HolderMetrics(metrics, lambda: LOAD, leases, 1)

    def shown() -> dict[str, float]:
        metrics.sample()
        lines = (line.rsplit(" ", 1) for line in text_of(metrics).splitlines() if not line.startswith("#"))
        told = ("kvmesh_leases", "kvmesh_unread", "kvmesh_stranded")
        return {name: float(value) for name, value in lines if name.startswith(told) and float(value)}

    def granted(lease_id: str, num_blocks: int, readable_ms: int = 0) -> Grant:
        grant = leases.grant(
            lease_id=LeaseId(lease_id), holder=WorkerId("w"), reader=WorkerId("d"),
            request_id=RequestId("r"), attempt=1, tables=(BlockTable((Segment(0, num_blocks),)),),
            num_tokens=num_blocks, expires_at_ms=100_000,
            progress=KVProgress(1, num_blocks),
        )  # fmt: skip
        grant.readable_ns = readable_ms * 1_000_000
        return grant

    def end(grant: Grant, why: LeaseEnd) -> None:
        leases.end(grant.lease_id, why)
        measured.lease_ended(grant)

    filling, read, alone = granted("filling", 5), granted("read", 3, 1), granted("alone", 2, 1)
    read.is_read = True
    assert shown() == {'kvmesh_leases{age="<1s",worker="w"}': 3}
    time_ms = 1_500
    assert shown() == {'kvmesh_leases{age="1-5s",worker="w"}': 3, 'kvmesh_unread_blocks{worker="w"}': 2}
    filling.readable_ns = 1_500 * 1_000_000
    time_ms = 40_000
    assert shown()['kvmesh_unread_blocks{worker="w"}'] == 7
    end(read, LeaseEnd.LANDED)
    end(alone, LeaseEnd.READER_LEFT)
    end(filling, LeaseEnd.CANCELLED)
    end(granted("unneeded", 1), LeaseEnd.UNNEEDED)
    assert shown() == {
        'kvmesh_leases_ended_total{outcome="landed",worker="w"}': 1,
        'kvmesh_leases_ended_total{outcome="reader_left",worker="w"}': 1,
        'kvmesh_leases_ended_total{outcome="cancelled",worker="w"}': 2,
        'kvmesh_stranded_blocks_total{reason="reader_left",worker="w"}': 2,
    }


def test_every_word_of_a_holder_is_one_of_the_known_ends() -> None:
    said = {ReadEnd(code) for code in (*RefusalCode, *FailCode)}

    assert not said & {ReadEnd.LANDED, ReadEnd.STOPPED, ReadEnd.REFUSED, ReadEnd.OTHER}
    assert tuple(ReadEnd) == names.TRANSFER_OUTCOMES


def test_the_environment_gives_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MeshConfig().telemetry.metrics_port == -1
    monkeypatch.setenv("KVMESH_METRICS_PORT", "9464")
    assert apply_environment(MeshConfig()).telemetry.metrics_port == 9464
    monkeypatch.setenv("KVMESH_METRICS_PORT", "none")
    with pytest.raises(UserError, match="KVMESH_METRICS_PORT"):
        apply_environment(MeshConfig())


def test_names_are_as_prometheus_wants_them() -> None:
    assert len({metric.name for metric in names.METRICS}) == len(names.METRICS)
    for metric in names.METRICS:
        assert metric.name.startswith(("kvmesh_", "gen_ai_")) and not metric.name.endswith(("_total", "_count", "_sum"))
        assert bool(metric.buckets) == (metric.kind == "histogram") and list(metric.buckets) == sorted(metric.buckets)
        assert len(metric.values) in (0, len(metric.labels)) and set(metric.roles) <= set(names.ALL)
        assert f"`{shown_name(metric)}`" in metrics_table()
