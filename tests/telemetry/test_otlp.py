"""With an endpoint configured, spans leave as OTLP over HTTP: read back with the protocol's own messages."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from services.config import MeshConfig, TelemetryConfig
from services.telemetry import Key, SpanName, open_telemetry


@pytest.fixture
def received() -> Iterator[tuple[str, "SimpleQueue[ExportTraceServiceRequest]"]]:
    requests: SimpleQueue[ExportTraceServiceRequest] = SimpleQueue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
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
    telemetry = open_telemetry("prefill-0", MeshConfig(telemetry=TelemetryConfig(otlp_endpoint=endpoint)))
    root = telemetry.start("POST /v1/completions", server=True)
    telemetry.record(SpanName.KV_TRANSFER, root.context, (1_000, 5_000), {Key.NUM_BYTES: 42}, error="digest")
    root.end()
    telemetry.close()
    request = requests.get(timeout=30)
    (resource,) = request.resource_spans
    names = {a.key: a.value.string_value for a in resource.resource.attributes}
    assert names["service.name"] == "kvmesh-prefill-0"
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    transfer, top = spans[SpanName.KV_TRANSFER], spans["POST /v1/completions"]
    assert transfer.parent_span_id == top.span_id and transfer.trace_id == top.trace_id
    assert (transfer.start_time_unix_nano, transfer.end_time_unix_nano) == (1_000, 5_000)
    assert transfer.attributes[0].value.int_value == 42 and transfer.status.message == "digest"


def test_who_asks_another_service_is_its_client(received: tuple[str, "SimpleQueue[ExportTraceServiceRequest]"]) -> None:
    endpoint, requests = received
    telemetry = open_telemetry("decode-0", MeshConfig(telemetry=TelemetryConfig(otlp_endpoint=endpoint)))
    root = telemetry.start("POST /v1/completions", server=True)
    telemetry.record(SpanName.PLACE, root.context, (1, 2), {})
    telemetry.record(SpanName.DISPATCH, root.context, (1, 2), {Key.WORKER: "prefill-1"})
    ends = {"target": "prefill-0", "source": ""}
    for end, source in ends.items():
        telemetry.record(SpanName.KV_TRANSFER, root.context, (1, 2), {Key.END: end, Key.SOURCE: source})
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
        (SpanName.DISPATCH, Span.SPAN_KIND_CLIENT, "kvmesh-prefill-1"),
        (SpanName.KV_TRANSFER, Span.SPAN_KIND_CLIENT, "kvmesh-prefill-0"),
        (SpanName.KV_TRANSFER, Span.SPAN_KIND_INTERNAL, ""),
    }
