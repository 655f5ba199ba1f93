"""A client of a gateway that times a streamed answer's events and reads its usage."""

import itertools
import time
from collections.abc import Sequence

import httpx
import msgspec

from services.bench.limits import REQUEST_TIMEOUT_S
from services.errors import UserError

DATA = "data: "


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where one worker's KV of a prompt came from: cached + transferred + recomputed = the prompt."""

    cached_tokens: int = 0
    transferred_tokens: int = 0
    transferred_from: dict[str, int] = {}
    recomputed_tokens: int = 0


class ReportedMeshUsage(Source, frozen=True, kw_only=True):
    """`usage.kvmesh`: the decoding worker's view, and the prefill worker's where the request was split."""

    request_id: str = ""
    carrier: str = ""
    prefill_worker: str = ""
    decode_worker: str = ""
    prefill: Source | None = None


class ReportedUsage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    kvmesh: ReportedMeshUsage = ReportedMeshUsage()

    @property
    def computing(self) -> Source:
        """The account of the worker that computed the prompt. Where it is missing all tokens count as computed."""
        if self.kvmesh.prefill is not None:
            return self.kvmesh.prefill
        is_split = self.kvmesh.prefill_worker != self.kvmesh.decode_worker
        return Source(recomputed_tokens=self.prompt_tokens) if is_split else self.kvmesh


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One finished request. Times are in milliseconds from sending it; `total_ms`: at its last event."""

    ttft_ms: float
    gaps_ms: tuple[float, ...]
    """Between consecutive events with tokens."""
    total_ms: float
    token_ids: tuple[int, ...]
    """The answer; empty where token ids were not asked for."""
    usage: ReportedUsage


class RequestFailedError(UserError):
    """A request got an error, or no whole answer."""


class ListedModel(msgspec.Struct, frozen=True):
    """One model of the list at `/v1/models`."""

    id: str
    context_length: int = 0


class Client:
    """A client of one gateway. Make it with `open`, which raises UserError where no gateway answers."""

    def __init__(self, http: httpx.AsyncClient, url: str, model: ListedModel) -> None:
        self._http = http
        self._url = url
        self.model = model

    @classmethod
    async def open(cls, http: httpx.AsyncClient, url: str) -> "Client":
        return cls(http, url, await model_of(http, url))

    async def complete(
        self, prompt: Sequence[int], num_tokens: int, *, return_token_ids: bool = False, num_choices: int = 1
    ) -> Completion:
        """Ask for exactly `num_tokens` greedy tokens, in each choice. Raises RequestFailedError."""
        # Ask for a stream: its events' arrival times give TTFT and gaps. `ignore_eos` fixes the number of tokens.
        body: dict[str, object] = {
            "model": self.model.id,
            "prompt": list(prompt),
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "n": num_choices,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if return_token_ids:
            body["return_token_ids"] = True
        # Time each event with a JSON object; `[DONE]`, comments and empty lines carry no tokens.
        events = EventTimes()
        started = time.perf_counter()
        try:
            async with self._http.stream("POST", f"{self._url}/v1/completions", json=body) as response:
                if response.status_code != 200:
                    events.fail(await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith(DATA + "{"):
                        events.add_event(line[len(DATA) :].encode(), (time.perf_counter() - started) * 1e3)
        except httpx.HTTPError as error:
            raise RequestFailedError(f"a request to {self._url} failed: {error or type(error).__name__}") from error
        return events.completion((time.perf_counter() - started) * 1e3)


class EventTimes:
    """Collects the events of one stream; their times are given."""

    def __init__(self) -> None:
        self._arrivals_ms: list[float] = []
        self._token_ids: list[int] = []
        self._usage: ReportedUsage | None = None

    def add_event(self, data: bytes, at_ms: float) -> None:
        """Add one event. Raises RequestFailedError for an error, and for an event that does not decode."""
        try:
            chunk = _chunks.decode(data)
        except msgspec.DecodeError as error:
            raise RequestFailedError(f"the gateway sent an invalid event: {error}") from error
        if chunk.error is not None:
            self.fail(data)
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self._token_ids += choice.token_ids or ()
            # The last event ends the text, and brings no token of its own. Another server's may: where it is late, all.
            has_token = bool(choice.text or choice.token_ids)
            if choice.finish_reason is None or (has_token and not self._arrivals_ms):
                self._arrivals_ms.append(at_ms)

    def fail(self, body: bytes) -> None:
        """Raise RequestFailedError with the gateway's message."""
        try:
            error = _chunks.decode(body).error
        except msgspec.DecodeError:
            error = None
        message = error.message if error else body[:200].decode(errors="replace")
        raise RequestFailedError(f"the mesh failed a request: {message}")

    def completion(self, total_ms: float) -> Completion:
        """Return the finished request. Raises RequestFailedError where tokens or usage are missing."""
        if self._usage is None or not self._arrivals_ms:
            raise RequestFailedError("a stream ended without its tokens or its usage")
        times = self._arrivals_ms
        return Completion(
            ttft_ms=times[0],
            gaps_ms=tuple(after - before for before, after in itertools.pairwise(times)),
            total_ms=total_ms,
            token_ids=tuple(self._token_ids),
            usage=self._usage,
        )


async def model_of(http: httpx.AsyncClient, url: str) -> ListedModel:
    """Return the model that a gateway serves. Raises UserError when none answers."""
    try:
        reply = (await http.get(f"{url}/v1/models")).raise_for_status().content
        return msgspec.json.decode(reply, type=_Models).data[0]
    except (httpx.HTTPError, msgspec.DecodeError, IndexError) as error:
        raise UserError(f"no gateway answers at {url} ({type(error).__name__})") from error


def open_http() -> httpx.AsyncClient:
    """Return an HTTP client without a limit on connections."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False)


def base_url(url: str) -> str:
    """Return a gateway's address without the API's path, which people often add."""
    return url.rstrip("/").removesuffix("/v1")


class _Models(msgspec.Struct, frozen=True):
    data: list[ListedModel]


class _ChoiceEvent(msgspec.Struct, frozen=True):
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct, frozen=True):
    message: str


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_ChoiceEvent] = []
    usage: ReportedUsage | None = None
    error: _Error | None = None


_chunks = msgspec.json.Decoder(_Chunk)
