"""With an endpoint configured, spans leave as OTLP over HTTP: read back with the protocol's own messages."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from services.cli.recorded import load_spans
from services.config import MeshConfig, TelemetryConfig, apply_environment, otlp_target
from services.errors import UserError
from services.telemetry import Key, SpanName, Telemetry, open_telemetry
from services.telemetry.otlp import OtlpExporter

HEADERS: list[dict[str, str]] = []
Received = tuple[str, "SimpleQueue[ExportTraceServiceRequest]"]


@pytest.fixture
def received() -> Iterator[tuple[str, "SimpleQueue[ExportTraceServiceRequest]"]]:
    requests: SimpleQueue[ExportTraceServiceRequest] = SimpleQueue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            HEADERS.append(dict(self.headers.items()))
            if self.path != "/v1/traces" or self.headers["content-type"] != "application/x-protobuf":
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers["content-length"]))
            requests.put(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", requests
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_arrive_with_parent_times_and_attributes(
    received: tuple[str, "SimpleQueue[ExportTraceServiceRequest]"],
) -> None:
    endpoint, requests = received
    telemetry = open_telemetry("prefill", "prefill-0", MeshConfig(telemetry=TelemetryConfig(otlp_endpoint=endpoint)))
    root = telemetry.begin_span("POST /v1/completions", server=True)
    telemetry.record(SpanName.KV_TRANSFER, root.traceparent, (1_000, 5_000), {Key.NUM_BYTES: 42}, error="digest")
    root.end()
    telemetry.close()
    request = requests.get(timeout=30)
    (resource,) = request.resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert (names["service.name"], names["service.instance.id"]) == ("kvmesh-prefill", "prefill-0")
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    transfer, top = spans[SpanName.KV_TRANSFER], spans["POST /v1/completions"]
    assert transfer.parent_span_id == top.span_id and transfer.trace_id == top.trace_id
    assert (transfer.start_time_unix_nano, transfer.end_time_unix_nano) == (
        telemetry.clock.date_ns(1_000),
        telemetry.clock.date_ns(5_000),
    )
    assert transfer.attributes[0].value.int_value == 42 and transfer.status.message == "digest"


def test_who_asks_another_service_is_its_client(received: tuple[str, "SimpleQueue[ExportTraceServiceRequest]"]) -> None:
    endpoint, requests = received
    telemetry = open_telemetry("decode", "decode-0", MeshConfig(telemetry=TelemetryConfig(otlp_endpoint=endpoint)))
    root = telemetry.begin_span("POST /v1/completions", server=True)
    telemetry.record(SpanName.PLACE, root.traceparent, (1, 2), {}, peer="scheduler")
    telemetry.record(SpanName.DISPATCH, root.traceparent, (1, 2), {Key.WORKER: "somebody new"})
    root.end()
    telemetry.close()
    (resource,) = requests.get(timeout=30).resource_spans
    seen = set[tuple[str, int, str]]()
    for scope in resource.scope_spans:
        for span in scope.spans:
            peers = [a.value.string_value for a in span.attributes if a.key == "peer.service"]
            seen.add((span.name, span.kind, "".join(peers)))
    assert seen == {
        ("POST /v1/completions", Span.SPAN_KIND_SERVER, ""),
        (SpanName.PLACE, Span.SPAN_KIND_CLIENT, "kvmesh-scheduler"),
        (SpanName.DISPATCH, Span.SPAN_KIND_INTERNAL, ""),
    }


def test_spans_go_to_a_file_as_well(received: Received, tmp_path: Path) -> None:
    """`kvmesh trace` reads it, whatever the back end does."""
    endpoint, requests = received
    for target in (endpoint, f"{endpoint}/nobody"):
        config = TelemetryConfig(otlp_endpoint=target, trace_dir=str(tmp_path))
        telemetry = open_telemetry("gateway", "gateway-0", MeshConfig(telemetry=config))
        telemetry.begin_span("POST /v1/completions", server=True).end()
        telemetry.close()
    (resource,) = requests.get(timeout=30).resource_spans
    sent = {span.span_id.hex() for scope in resource.scope_spans for span in scope.spans}
    written = {span.span_id for span in load_spans(tmp_path)}
    assert len(written) == 2 and sent < written


def told(monkeypatch: pytest.MonkeyPatch, endpoint: str = "", **variables: str) -> MeshConfig:
    """Return a configuration with variables of the environment laid over it."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return apply_environment(MeshConfig(telemetry=TelemetryConfig(otlp_endpoint=endpoint)))


def send(config: MeshConfig) -> None:
    telemetry = open_telemetry("prefill", "prefill-0", config)
    telemetry.begin_span("POST /v1/completions", server=True).end()
    telemetry.close()


@pytest.mark.parametrize("path", ["", "/", "/v1/traces"])
@pytest.mark.parametrize("name", ["--otlp", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"])
def test_every_way_to_say_where_through_no_proxy(
    received: Received, monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    if name == "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" and not path.endswith("traces"):
        pytest.skip("it is taken as it is")
    endpoint, requests = received
    for proxy in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(proxy, "http://127.0.0.1:9")
    url = endpoint + path
    send(told(monkeypatch, url) if name == "--otlp" else told(monkeypatch, **{name: url}))
    assert requests.get(timeout=30).resource_spans


def test_what_stands_above_what(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, all_signals = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"

    def url(endpoint: str = "", **variables: str) -> str:
        target = otlp_target(told(monkeypatch, endpoint, **variables).telemetry)
        return target.url if target is not None else ""

    both = {traces: "http://a:1/custom", all_signals: "http://b:2/otlp/"}
    assert url("http://c:3", **both) == "http://c:3/v1/traces"
    assert url(**both) == "http://a:1/custom"
    assert url(**{all_signals: both[all_signals]}) == "http://b:2/otlp/v1/traces"
    assert url() == url(**both, OTEL_TRACES_EXPORTER="none") == url(**both, OTEL_SDK_DISABLED="true") == ""
    with pytest.raises(UserError, match="is 'http/json': spans are sent by http/protobuf or grpc"):
        url(**both, OTEL_EXPORTER_OTLP_PROTOCOL="http/json")
    with pytest.raises(UserError, match="no address"):
        url(**{traces: "localhost"})


def test_headers_are_opentelemetry_s_own_variables(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint, requests = received
    headers = {"OTEL_EXPORTER_OTLP_HEADERS": "x-scope=a", "OTEL_EXPORTER_OTLP_COMPRESSION": "none"}
    send(told(monkeypatch, endpoint, **headers))
    assert requests.get(timeout=30).resource_spans
    assert HEADERS[-1]["x-scope"] == "a"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"service.name": "kvmesh-prefill"}),
        ({"OTEL_SERVICE_NAME": "chat"}, {"service.name": "chat"}),
        (
            {"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=x,deployment.environment=lab"},
            {"service.name": "kvmesh-prefill", "deployment.environment": "lab"},
        ),
    ],
)
def test_a_process_is_described_by_opentelemetry_s_own_variables(
    received: Received, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: dict[str, str]
) -> None:
    endpoint, requests = received
    send(told(monkeypatch, endpoint, **variables))
    (resource,) = requests.get(timeout=30).resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert expected.items() <= names.items() and names["service.instance.id"] == "prefill-0"


def test_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: SimpleQueue[ExportTraceServiceRequest] = SimpleQueue()

    class Collector(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: object) -> ExportTraceServiceResponse:
            requests.put(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(max_workers=1))
    add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    send(told(monkeypatch, f"http://127.0.0.1:{port}", OTEL_EXPORTER_OTLP_PROTOCOL="grpc"))
    assert requests.get(timeout=30).resource_spans
    server.stop(None).wait()


def test_what_cannot_be_delivered_is_one_line_with_the_address(
    received: Received, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"{received[0]}/elsewhere"
    target = otlp_target(told(monkeypatch, url).telemetry)
    assert target is not None
    telemetry = Telemetry("prefill-0", [OtlpExporter(target)], at_once=True)
    for _ in range(3):
        telemetry.begin_span("POST /v1/completions", server=True).end()
    telemetry.close()
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [f"{num} spans are lost: {url}/v1/traces does not take them as OTLP" for num in (1, 2)]
