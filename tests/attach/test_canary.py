"""What a holder asks of a server's API, and what it makes of the answers."""

import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from schemas.attach import Half, Use
from services.attach.canary import Verdict, run_canary
from services.attach.core import Proof
from services.attach.limits import CANARY_BLOCKS, NUM_LOGPROBS
from services.times import AttachTimes
from tests.attach.core_rig import IDENTITY, hello

WORD = "the canary's word"
SAME = {f"token_id:{number}": -0.1 * number for number in range(NUM_LOGPROBS)}
OTHER = {f"token_id:{number + 100}": -0.1 * number for number in range(NUM_LOGPROBS)}
Body = dict[str, Any]
SOON = AttachTimes(canary_timeout_s=10.0, health_retry_s=0.01, saved_s=0.0)
NEVER = AttachTimes(canary_timeout_s=0.01, health_retry_s=0.01)


def answer(logprobs: dict[str, float], loaded: int = CANARY_BLOCKS, token_ids: list[int] | None = None) -> Body:
    choice = {"logprobs": {"top_logprobs": [logprobs]} if logprobs else None, "token_ids": token_ids or [0]}
    return {"choices": [choice], "kv_transfer_params": {"kvmesh": {"loaded": loaded}}}


@contextmanager
def api(reply: Callable[[Body, str], tuple[int, object]]) -> Generator[str]:
    """Serve an API that answers with what `reply` returns for a body and its key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, b"")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = reply(body, self.headers.get("Authorization", ""))
            self._send(status, content if isinstance(content, bytes) else json.dumps(content).encode())

        def _send(self, status: int, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def by_use(computed: Body, loaded: Body, confused: Body) -> Callable[[Body, str], tuple[int, object]]:
    answers = {Use.COMPARE: computed, Use.LOAD: loaded, Use.CONFUSED: confused}
    return lambda body, _: (200, answers[Use(body["kv_transfer_params"]["kvmesh"]["use"])])


def ran(url: str, **changes: object) -> Verdict:
    return run_canary(hello("a", Half.SCHEDULER, url=url, **changes), WORD, SOON)


NEARLY = {name: value + 1e-5 for name, value in SAME.items()}
LITTLE_ELSE = dict(list(SAME.items())[:-2]) | {"token_id:200": -1.95, "token_id:201": -1.96}
MUCH_ELSE = dict(list(SAME.items())[:-3]) | {f"token_id:{200 + at}": -1.95 for at in range(3)}
SHIFTED = {name: value - 0.1 * (name == "token_id:3") for name, value in SAME.items()}


@pytest.mark.parametrize(
    ("loaded", "confused", "proof"),
    [
        (SAME, OTHER, Proof.RIGHT),
        (NEARLY, OTHER, Proof.RIGHT),
        (LITTLE_ELSE, SHIFTED, Proof.RIGHT),
        (MUCH_ELSE, OTHER, Proof.WRONG),
        (SHIFTED, OTHER, Proof.WRONG),
        (OTHER, OTHER, Proof.WRONG),
        (SAME, SAME, Proof.WRONG),
        (SAME, NEARLY, Proof.WRONG),
    ],
)
def test_loaded_blocks_must_give_the_same_and_another_block_must_not(
    loaded: dict[str, float], confused: dict[str, float], proof: Proof
) -> None:
    with api(by_use(answer(SAME, 0), answer(loaded), answer(confused))) as url:
        verdict = ran(url)
    assert verdict.proof is proof, verdict.detail


def test_each_request_is_the_canary_s_and_has_a_salt_of_its_own() -> None:
    bodies: list[Body] = []

    def reply(body: Body, _: str) -> tuple[int, object]:
        bodies.append(body)
        return 200, answer(SAME if len(bodies) < 3 else OTHER)

    with api(reply) as url:
        assert ran(url).proof is Proof.RIGHT
    assert [body["kv_transfer_params"]["kvmesh"] for body in bodies] == [
        {"canary": WORD, "use": use} for use in ("compare", "load", "confused")
    ]
    assert len({body["cache_salt"] for body in bodies}) == 3
    (prompt,) = {tuple(body["prompt"]) for body in bodies}
    assert len(prompt) == CANARY_BLOCKS * IDENTITY.block_size + IDENTITY.block_size // 2


def test_an_api_without_logprobs_is_compared_by_its_tokens() -> None:
    def reply(body: Body, _: str) -> tuple[int, object]:
        if "logprobs" in body:
            return 400, {"error": "no logprobs here"}
        is_confused = body["kv_transfer_params"]["kvmesh"]["use"] == "confused"
        return 200, answer({}, token_ids=[body["max_tokens"] + is_confused] * 16)

    with api(reply) as url:
        assert ran(url).proof is Proof.RIGHT


def test_the_key_of_its_file_goes_with_each_request() -> None:
    def reply(body: Body, key: str) -> tuple[int, object]:
        is_confused = body["kv_transfer_params"]["kvmesh"]["use"] == "confused"
        return (200, answer(OTHER if is_confused else SAME)) if key == "Bearer k" else (401, {})

    with api(reply) as url:
        assert ran(url, api_key="k").proof is Proof.RIGHT
        verdict = ran(url)
    assert verdict.proof is Proof.UNREACHABLE and "api_key_file" in verdict.detail


@pytest.mark.parametrize(
    ("status", "content", "text"),
    [
        (404, {"error": "no such model"}, "404"),
        (500, b"", "500"),
        (200, b"<html>", "something else"),
        (200, {"choices": []}, "something else"),
        (200, {"choices": [{"logprobs": {"top_logprobs": [3]}}]}, "something else"),
        (200, {"choices": [{}], "kv_transfer_params": {"kvmesh": {"loaded": "x"}}}, "something else"),
        (200, answer(SAME, loaded=2), "2 of 3 blocks"),
        (200, {"choices": [{"token_ids": [1]}]}, "0 and 0 of 3 blocks"),
    ],
)
def test_an_api_that_answers_otherwise_proves_nothing(status: int, content: object, text: str) -> None:
    with api(lambda *_: (status, content)) as url:
        verdict = ran(url)
    assert verdict.proof is Proof.UNREACHABLE and text in verdict.detail


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://[", "http://x:port", "http://127.0.0.1:1"]
)
def test_a_url_that_leads_nowhere_is_named(url: str) -> None:
    verdict = run_canary(hello("a", Half.SCHEDULER, url=url), WORD, NEVER)
    assert verdict.proof is Proof.UNREACHABLE and ("url" in verdict.detail or "does not answer" in verdict.detail)
