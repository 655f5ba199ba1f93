"""Every absurd body ends in a 4xx of OpenAI's shape that names the field."""

import json
import re
import socket

import httpx
import pytest

from schemas.ids import GatewayId, HandoffId, RequestId, WorkerId
from schemas.message import encode
from schemas.request import OtherEnd, RefusalReason, SamplingParams
from services.bus.limits import MAX_PAYLOAD_BYTES, MIN_PAYLOAD_BYTES
from services.config import MeshConfig
from services.errors import UserError
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.openai import decode_body, options_of
from services.gateway.api.prepare import GatewayModel, make_jobs, prepare
from services.gateway.limits import MAX_BODY_BYTES
from services.gateway.request.events import SendAttempt
from services.gateway.request.job import attempt_message
from services.gateway.service import load_model
from services.ports import bind
from tests.credentials import SEED
from tests.gateway.conftest import OpenRig, Rig
from tests.gateway.fake_mesh import Conduct

C, H = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
MESSAGES = [{"role": "user", "content": "Hi"}]


def table(model: str, vocab: int, context: int) -> list[tuple[str, dict, int, str | None]]:
    cases: list[tuple[str, dict, int, str | None]] = []

    def completion(param: str | None, status: int = 400, **fields: object) -> None:
        cases.append((C, {"model": model, "prompt": "Hi", **fields}, status, param))

    def chat(param: str | None, status: int = 400, **fields: object) -> None:
        cases.append((H, {"model": model, "messages": MESSAGES, **fields}, status, param))

    for value in (0, -1):
        completion("max_tokens", max_tokens=value)
        completion("n", n=value)
    completion("n", n=17)
    for value in (-0.1, 2.1):
        completion("temperature", temperature=value)
    for value in (0, -1, 1.1):
        completion("top_p", top_p=value)
    completion("top_k", top_k=-2)
    for name in ("max_tokens", "n", "temperature", "top_p", "seed", "stop_token_ids", "stream_options"):
        completion(name, **{name: "many"})
    completion("max_tokens", max_tokens=True)
    completion("max_tokens", max_tokens=1.5)
    completion("seed", seed=2**64)
    completion("stream", stream="yes")
    completion("stop", stop=["a", "b", "c", "d", "e"])
    completion("stop", stop="")
    completion("stop", stop=["x", ""])
    completion("stop", stop="x" * 1000)
    completion("stop[1]", stop=["x", 1])
    completion("stop_token_ids", stop_token_ids=[vocab])
    completion("stop_token_ids", stop_token_ids=[1] * 1000)
    completion("prompt", prompt="")
    completion("prompt", prompt=[])
    completion("prompt", prompt=[[]])
    completion("prompt", prompt=[""])
    completion("prompt", prompt=["Hi", 3])
    completion("prompt", prompt=[[1, "x"]])
    completion("prompt", prompt=[vocab])
    completion("prompt", prompt=[-1])
    completion("prompt", prompt=[[1, vocab + 5]])
    completion("prompt", prompt=None)
    completion("prompt", prompt={"text": "Hi"})
    completion("prompt", prompt=["Hi"] * 200)
    completion("prompt", prompt=[1] * context)
    completion("max_tokens", prompt=[1] * (context - 1), max_tokens=2)
    completion("max_tokens", max_tokens=10**9)
    completion("model", 404, model="no-such-model")
    completion("model", model=None)
    for name, value in [("logprobs", 21), ("logprobs", True), ("echo", "yes"), ("suffix", "x"), ("best_of", 2),
                        ("logit_bias", {"one": 5}), ("logit_bias", {"1": 101}), ("logit_bias", {str(vocab): 1}),
                        ("logit_bias", {str(n): 1 for n in range(1025)}), ("presence_penalty", 2.1),
                        ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("min_p", 1.1), ("min_tokens", -1),
                        ("allowed_token_ids", []), ("allowed_token_ids", [vocab]), ("bad_words", [""]),
                        ("bad_words", "word"), ("bad_words", [f"w {n}" for n in range(500)]), ("prompt_logprobs", 21),
                        ("kv_transfer_params", {"a": 1}), ("messages", MESSAGES), ("no_such_field", None)]:  # fmt: skip
        completion(name, **{name: value})
    completion("min_tokens", min_tokens=5, max_tokens=4)
    completion("prompt_logprobs", prompt_logprobs=1, stream=True)
    for name, value in [("tools", [{"type": "function"}]), ("tool_choice", "required"),
                        ("functions", [{}]),
                        ("logprobs", 1), ("audio", {}), ("modalities", ["audio"]),
                        ("top_logprobs", 2), ("store", True), ("prompt", "Hi"), ("echo", True)]:  # fmt: skip
        chat(name, **{name: value})
    chat("response_format.type", response_format={"type": "xml"})
    chat("messages", messages=[])
    chat("messages", messages="Hi")
    chat("messages[0].role", messages=[{"role": 1, "content": "Hi"}])
    chat("messages[0].content", messages=[{"role": "user"}])
    chat("messages[0].content", messages=[{"role": "user", "content": 5}])
    chat("messages[0].content[0]", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    chat("max_completion_tokens", max_completion_tokens=0)
    chat("max_completion_tokens", max_completion_tokens=10**9)
    chat("model", 404, model="other")
    cases.append((C, {"prompt": "Hi"}, 400, "model"))
    cases.append((C, {"model": model}, 400, "prompt"))
    cases.append((H, {"model": model}, 400, "messages"))
    return cases


async def test_every_bad_body_names_its_field(rig: Rig) -> None:
    wrong: list[str] = []
    for path, body, status, param in table(rig.model.name, rig.model.vocab_size, rig.model.context_length):
        answer = await rig.http.post(path, json=body)
        error = answer.json().get("error", {})
        asked = {key: value for key, value in body.items() if key not in ("model", "messages")}
        got = (answer.status_code, (error.get("param") or "").split("[")[0])
        expected = (status, (param or "").split("[")[0])
        if got != expected or error["type"] != "invalid_request_error" or set(error) != ERROR_FIELDS:
            wrong.append(f"{path} {str(asked)[:80]}: {got} instead of {expected}: {error}")
        assert "x-request-id" in answer.headers
    assert not wrong, "\n".join(wrong)
    assert rig.mesh.places == []
    assert 'outcome="invalid"' in rig.metrics_text()


ERROR_FIELDS = {"message", "type", "param", "code"}


async def test_the_context_error_gives_both_numbers(rig: Rig) -> None:
    body = {"model": rig.model.name, "prompt": [1, 2, 3], "max_tokens": rig.model.context_length}
    error = (await rig.http.post(C, json=body)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert str(rig.model.context_length) in error["message"]
    assert str(rig.model.context_length + 3) in error["message"]
    assert error["message"].startswith("This model's maximum context length is"), "litellm looks for these words"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_worker_without_room_says_so_in_the_same_words(open_rig: OpenRig, stream: bool) -> None:
    async with open_rig(conduct={"p1": Conduct(refuses=RefusalReason.TOO_LONG)}) as rig:
        answer = await rig.http.post(C, json={"model": rig.model.name, "prompt": "Hi", "stream": stream})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith("This model's maximum context length is")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"nonsense", b'{"model": "x"} trailing', b"\xff\xfe", b'{"model": "\xff", "prompt": "x"}',
     b'{"model": "x", "prompt": "\\ud800 x"}', b'{"model": "x", "prompt": "y", "temperature": NaN}', b"[]",
     b"[" * 100_000],
)  # fmt: skip
async def test_what_is_no_json_object(rig: Rig, content: bytes) -> None:
    for path in (C, H):
        answer = await rig.http.post(path, content=content, headers=JSON)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


DOUBLED = [
    (C, b'{"model": "M", "prompt": "y", "prompt": "z"}', "prompt"),
    (C, b'{"model": "M", "prompt": "y", "max_tokens": 1, "m\\u0061x_tokens": 9}', "max_tokens"),
    (C, b'{"model":"M","prompt":"y","temperature":1,"temperature":1}', "temperature"),
    (C, b'{"model": "M", "prompt": "y", "logit_bias": {"7": 1, "7": -1}}', "7"),
    (C, b'{"model": "M", "prompt": "y", "guided_json": "{\\"type\\": \\"object\\", \\"type\\": 1}"}', "guided_json"),
    (H, b'{"model": "M", "messages": [{"role": "user", "content": "a", "role": "system"}]}', "role"),
    (H, b'{"model": "M", "messages": [{"role": "user", "content": [{"text": "a", "text": "b"}]}]}', "text"),
    (H, b'{"model": "M", "messages": [], "tools": {"a": [[{"b": {"\xc3\xa4": 1, "\\u00e4": 2}}]]}}', "\u00e4"),
    ("/v1/responses", b'{"model": "M", "input": "y", "metadata": {"a": "b", "a": "c"}}', "a"),
    ("/tokenize", b'{"prompt": "y", "prompt": "z"}', "prompt"),
    ("/detokenize", b'{"tokens": [1], "tokens": [2]}', "tokens"),
]  # fmt: skip


@pytest.mark.parametrize("padding", [b"", b" " * 70_000])
@pytest.mark.parametrize(("path", "content", "param"), DOUBLED)
async def test_a_name_that_stands_twice_is_named(
    rig: Rig, path: str, content: bytes, param: str, padding: bytes
) -> None:
    content = content.replace(b'"M"', f'"{rig.model.name}"'.encode()).replace(b"{", b"{" + padding, 1)
    answer = await rig.http.post(path, content=content, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert "twice" in answer.json()["error"]["message"] and not rig.mesh.places


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "{\"{'", '\u2028"a":1,"a":2\\'])
async def test_names_in_texts_and_in_several_objects_are_no_doubles(rig: Rig, text: str) -> None:
    asked = {"model": rig.model.name, "max_tokens": 2, "logit_bias": {"1": 1, "10": 2, "0": 1}}
    for separators in ((",", ":"), (" , ", " : ")):
        content = json.dumps({"messages": [*MESSAGES, *MESSAGES, {"role": "user", "content": text}], **asked})
        answer = await rig.http.post(H, content=json.dumps(json.loads(content), separators=separators), headers=JSON)
        assert answer.status_code == 200, answer.text
    content = json.dumps({"prompt": text, **asked}).replace("max_tokens", "m\\u0061x_tokens")
    assert (await rig.http.post(C, content=content, headers=JSON)).status_code == 200


@pytest.mark.parametrize(
    "key", ["1_0", " 7 ", "\u0663", "+7", "-1", "007", "7.0", "1e1", "", "\uff17", "7\n", "9" * 5_000]
)
async def test_a_token_s_id_is_a_plain_number(rig: Rig, key: str) -> None:
    body = {"model": rig.model.name, "prompt": "Hi", "logit_bias": {key: 1}}
    answer = await rig.http.post(C, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias"), answer.text


async def test_infinity_names_the_field(rig: Rig) -> None:
    body = f'{{"model": "{rig.model.name}", "prompt": "y", "temperature": 1e999}}'
    answer = await rig.http.post(C, content=body.encode(), headers=JSON)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "temperature")


async def test_what_asks_for_nothing_is_taken(rig: Rig) -> None:
    body = {"model": rig.model.name, "prompt": "Hi", "echo": False, "suffix": None, "best_of": 1, "logit_bias": {},
            "presence_penalty": 0.0, "frequency_penalty": 0, "user": "me", "stop": None,
            "stream": None, "n": None, "temperature": 0, "top_k": -1}  # fmt: skip
    assert (await rig.http.post(C, json=body)).status_code == 200
    body = {"model": rig.model.name, "messages": MESSAGES, "logprobs": False,
            "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "parallel_tool_calls": True,
            "modalities": ["text"], "store": False, "metadata": {"a": "b"}, "functions": None}  # fmt: skip
    assert (await rig.http.post(H, json=body)).status_code == 200
    assert rig.mesh.runs[0].sampling.temperature == 0.0
    assert rig.mesh.runs[0].sampling.max_tokens == 16


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", C, 405), ("PUT", H, 405), ("GET", "/nothing", 404), ("POST", "/v1/embeddings", 404)],
)
async def test_wrong_paths_and_methods(rig: Rig, method: str, path: str, status: int) -> None:
    answer = await rig.http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == ERROR_FIELDS


async def test_a_body_over_the_limit(rig: Rig) -> None:
    content = b'{"model": "x", "prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'
    answer = await rig.http.post(C, content=content, headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


def huge(model: GatewayModel, num_tokens: int, max_tokens: int = 1) -> bytes:
    return f'{{"model": "{model.name}", "max_tokens": {max_tokens}, "prompt": [{"1," * (num_tokens - 1)}1]}}'.encode()


async def test_a_prompt_over_the_bus_limit(rig: Rig) -> None:
    answer = await rig.http.post(C, content=huge(rig.model, 1_600_000), headers=JSON)
    assert answer.status_code == 413
    assert str(MAX_PAYLOAD_BYTES) in answer.json()["error"]["message"]


async def test_a_broker_of_small_messages_bounds_prompt_and_answer(open_rig: OpenRig) -> None:
    """Before anything is placed; what fits is answered, and an answer without a bound ends where it still fits."""
    async with open_rig(max_bytes=MIN_PAYLOAD_BYTES, timeout_s=30) as rig:
        for body, param in ((huge(rig.model, 7_900), "prompt"), (huge(rig.model, 100, 6_000), "max_tokens")):
            refused = await rig.http.post(C, content=body, headers=JSON)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (413, "request_too_large", param)
            assert str(MIN_PAYLOAD_BYTES) in error["message"] and re.search(r"of (7900|100) tokens", error["message"])
        asked = {"model": rig.model.name, "prompt": [1] * 3_000, "prompt_logprobs": 1, "max_tokens": 1}
        refused = await rig.http.post(C, json=asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "prompt_logprobs")
        assert not rig.mesh.places
        answered = await rig.http.post(C, content=huge(rig.model, 4_000), headers=JSON)
        assert answered.status_code == 200 and len(rig.mesh.places) == 1


async def test_a_client_or_the_mesh_may_insist_on_two_workers(open_rig: OpenRig) -> None:
    async with open_rig(timeout_s=30) as rig:

        async def ask(split: str, max_tokens: int = 2) -> httpx.Response:
            body = {"model": rig.model.name, "prompt": "Hi", "max_tokens": max_tokens}
            return await rig.http.post(C, json=body, headers={"X-Kvmesh-Split": split} if split else {})

        for split, must_split in (("always", True), ("Always", True), ("auto", False), ("", False)):
            assert (await ask(split)).status_code == 200
            assert rig.mesh.places[-1].must_split is must_split
        for refused, code in ((await ask("never"), None), (await ask("always", 1), "not_split")):
            assert refused.status_code == 400 and refused.json()["error"]["code"] == code
        assert len(rig.mesh.places) == 4
    async with open_rig(timeout_s=30, gateway={"split": "always"}) as rig:
        assert (await ask("auto")).status_code == 200 and rig.mesh.places[-1].must_split


def test_what_passes_the_limit_fits(model: GatewayModel) -> None:
    import msgspec

    large = GatewayModel(**{f: getattr(model, f) for f in model.__slots__} | {"context_length": 10**7})
    w = WorkerId("w" * 100)
    fits = MAX_PAYLOAD_BYTES // 16 * 3 - 1_000
    prepared = prepare(large, decode_body(huge(model, fits), is_chat=False))
    job = make_jobs(large.key_of("t" * 128), prepared, RequestId("req-1234567890123456"), 2**41, "")[0]
    sampling = msgspec.structs.replace(job.sampling, stop_token_ids=tuple([2**31] * 64))
    other = OtherEnd(worker_id=w, handoff_id=HandoffId("h" * 30))
    run = msgspec.structs.replace(
        attempt_message(job, bytes(64), GatewayId("g" * 30), SendAttempt(1, w, other, replica=w), job.prompt),
        sampling=sampling,
    )
    assert len(encode(run)) <= MAX_PAYLOAD_BYTES
    with pytest.raises(InvalidRequestError):
        prepare(large, decode_body(huge(model, fits + 2_000), is_chat=False))


def test_options_default() -> None:
    options = options_of(decode_body(b'{"model": "m", "prompt": "p"}', is_chat=False), 10)
    assert (options.n, options.sampling) == (1, SamplingParams(max_tokens=0))
    assert (options.max_tokens, options.stops, options.stream, options.seed) == (None, (), False, None)


def test_a_port_in_use_is_one_line() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is in use on 127.0.0.1; pass --port"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", port).close()
    assert isinstance(taken, socket.socket)


def test_a_bad_checkpoint_is_a_user_error(tmp_path) -> None:
    import msgspec

    config = MeshConfig(tenant_seed=SEED)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(tmp_path)))
    with pytest.raises(UserError):
        load_model(config)
