"""The canary of an attached server: three requests to its own API, before it shares anything and now and then after.

What is loaded must give the same next token's logprobs as what was computed, and other ones where a block has another
one's bytes: so a server that reads pages otherwise than it wrote them, or other pages than those it was given, is found
before it answers anybody from them. The prompt is the same for all servers of one identity: what a server computes is
compared with what the others have saved of it, so a server with other weights is found as well.
"""

import http.client
import json
import secrets
import time
from typing import Annotated, Any, NamedTuple, cast
from urllib.parse import urlsplit

import msgspec

from schemas.attach import Hello, Use
from services.attach.core import Proof
from services.attach.limits import (
    CANARY_BLOCKS,
    MIN_IN_COMMON,
    NUM_LOGPROBS,
)
from services.engine.vllm_engine.formats import TOLERANCE
from services.times import AttachTimes

MAX_TOKEN = 250
"""Of the prompt: every model has so many."""
PROMPT_STEP = 7_919
WEAK_TOKENS = 16
"""Where an API gives no logprobs, so many tokens are compared."""
MAX_ANSWER_BYTES = 1 << 20


class _Logprobs(msgspec.Struct):
    top_logprobs: Annotated[list[dict[str, float]], msgspec.Meta(min_length=1)]


class _Choice(msgspec.Struct):
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None


class _Own(msgspec.Struct):
    loaded: int = 0


class _Params(msgspec.Struct):
    kvmesh: _Own | None = None


class _Completion(msgspec.Struct):
    """What is read of an answer of `/v1/completions`."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]
    kv_transfer_params: _Params | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)


class Verdict(NamedTuple):
    """`detail`: for people."""

    proof: Proof
    detail: str


class Answer(NamedTuple):
    """What a server has answered to one request: the likeliest next tokens with their logprobs, or, of an API that
    hides these, the tokens. `num_loaded`: blocks."""

    logprobs: dict[str, float]
    token_ids: tuple[int, ...]
    num_loaded: int


class CanaryError(Exception):
    """The API does not answer as it is to: a line for the user."""


class ApiRefusedError(CanaryError):
    """It has answered with this status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"its API answers with {status}: {text:.200}")
        self.status = status


def run_canary(hello: Hello, word: str, times: AttachTimes) -> Verdict:
    """Let a server prove itself; takes seconds, minutes while it starts. `word`: by which it knows whose the requests
    are."""
    try:
        client = ApiClient(hello, word, times)
        client.await_health()
        computed = client.complete(Use.COMPARE)
        loaded = client.complete_loaded(Use.LOAD)
        confused = client.complete_loaded(Use.CONFUSED)
    except CanaryError as error:
        return Verdict(Proof.UNREACHABLE, f"{error}")
    # One that has loaded nothing proves nothing: there was no room, a load has failed, or another connector loaded.
    if min(loaded.num_loaded, confused.num_loaded) < CANARY_BLOCKS:
        return Verdict(
            Proof.UNREACHABLE,
            f"its canary has loaded {loaded.num_loaded} and {confused.num_loaded} of {CANARY_BLOCKS} blocks",
        )
    tolerance = TOLERANCE[hello.identity.dtype]
    right, wrong = Likeness.of_answers(computed, loaded), Likeness.of_answers(computed, confused)
    if not right.is_same(tolerance):
        return Verdict(Proof.WRONG, f"what it loads gives other tokens than what it computes ({right})")
    if wrong.is_same(tolerance):
        return Verdict(Proof.WRONG, f"another block's bytes change nothing: it does not read what it loads ({wrong})")
    return Verdict(Proof.RIGHT, f"loaded: {right}; with another block: {wrong}")


class Likeness(NamedTuple):
    """Of two answers. `in_common`: of the likeliest tokens, or of those of an answer. `difference`: the largest of
    their logprobs, as a share of the logprobs' spread; 0 where there are none."""

    in_common: int
    difference: float
    of: int

    @classmethod
    def of_answers(cls, one: Answer, other: Answer) -> "Likeness":
        if not one.logprobs:
            same = sum(a == b for a, b in zip(one.token_ids, other.token_ids, strict=False))
            return cls(same, 0.0, len(one.token_ids))
        common = one.logprobs.keys() & other.logprobs.keys()
        values = [*one.logprobs.values(), *other.logprobs.values()]
        spread = max(values) - min(values) or 1.0
        difference = max((abs(one.logprobs[each] - other.logprobs[each]) for each in common), default=0.0)
        return cls(len(common), difference / spread, len(one.logprobs))

    def is_same(self, tolerance: float) -> bool:
        """Return whether rounding explains what differs: it may change the order of the unlikeliest."""
        return self.in_common >= self.of * MIN_IN_COMMON // NUM_LOGPROBS and self.difference <= tolerance

    def __str__(self) -> str:
        return f"{self.in_common} of {self.of} tokens the same, logprobs within {self.difference:.2g} of their spread"


class ApiClient:
    """Sends a canary's requests to a server's OpenAI API. Raises CanaryError."""

    def __init__(self, hello: Hello, word: str, times: AttachTimes) -> None:
        try:
            self._url = urlsplit(hello.url)
            self._port = self._url.port
        except ValueError as error:
            raise CanaryError(f"its url {hello.url!r:.100} is none: {error}") from error
        if self._url.scheme not in ("http", "https") or not self._url.hostname:
            raise CanaryError(f'no url leads to its API ({hello.url!r:.100}): set "url" in the connector\'s settings')
        self._hello = hello
        self._word = word
        self._times = times
        size = hello.identity.block_size
        self._prompt = [1 + PROMPT_STEP * at % MAX_TOKEN for at in range(CANARY_BLOCKS * size + size // 2)]

    def await_health(self) -> None:
        """Wait until the server takes requests: its connector is there before that."""
        until_s = time.monotonic() + self._times.canary_timeout_s
        while True:
            try:
                self._request("GET", "/health")
            except CanaryError:
                if time.monotonic() > until_s:
                    raise
                time.sleep(self._times.health_retry_s)
            else:
                return

    def complete(self, use: Use) -> Answer:
        """Have one token computed behind the prompt, from blocks that are used like this."""
        body: dict[str, Any] = {
            "model": self._hello.model,
            "prompt": self._prompt,
            "temperature": 0,
            "max_tokens": 1,
            "logprobs": NUM_LOGPROBS,
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "ignore_eos": True,
            # The server's own cache has nothing of it.
            "cache_salt": secrets.token_hex(16),
            "kv_transfer_params": {"kvmesh": {"canary": self._word, "use": use.value}},
        }
        try:
            return self._answer(self._request("POST", "/v1/completions", body))
        except ApiRefusedError as error:
            if error.status != http.HTTPStatus.BAD_REQUEST:
                raise
        # An API that allows no logprobs: tokens are compared, which shows less.
        del body["logprobs"]
        return self._answer(self._request("POST", "/v1/completions", body | {"max_tokens": WEAK_TOKENS}))

    def complete_loaded(self, use: Use) -> Answer:
        """Do the same once the blocks are there: what was computed is the holder's a moment after its answer."""
        until_s = time.monotonic() + self._times.saved_s
        while (answer := self.complete(use)).num_loaded < CANARY_BLOCKS and time.monotonic() < until_s:
            time.sleep(self._times.saved_look_s)
        return answer

    def _answer(self, text: bytes) -> Answer:
        try:
            found = _COMPLETION.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CanaryError(f"its API answers something else than completions: {text[:100]!r}") from error
        choice, params = found.choices[0], found.kv_transfer_params
        top = choice.logprobs.top_logprobs[0] if choice.logprobs is not None else {}
        loaded = params.kvmesh.loaded if params is not None and params.kvmesh is not None else 0
        return Answer(top, tuple(choice.token_ids or ()), loaded)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        make = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = make(cast("str", self._url.hostname), self._port, timeout=self._times.canary_timeout_s)
        headers = {"Content-Type": "application/json"}
        if self._hello.api_key:
            headers["Authorization"] = f"Bearer {self._hello.api_key}"
        try:
            connection.request(method, self._url.path.rstrip("/") + path, json.dumps(body) if body else None, headers)
            answer = connection.getresponse()
            text = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise CanaryError(f"its API at {self._hello.url} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
            raise CanaryError('its API wants a key: name a file that has it as "api_key_file"')
        if answer.status != http.HTTPStatus.OK:
            raise ApiRefusedError(answer.status, text.decode(errors="replace"))
        return text
