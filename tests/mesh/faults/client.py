"""A client of the mesh over real HTTP: what it was told, token for token, and how its answer ended."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import httpx

from tests.mesh.reference import Case

DATA = "data: "
DONE = "[DONE]"

Ending = Literal["", "finished", "failed", "broken", "hung up", "timeout"]


@dataclass(eq=False)
class Stream:
    """One request. `broken`: the connection ended without a word; `problem`: a promise that the stream itself broke."""

    number: int
    case: Case
    url: str
    tenant: str
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    """Of the tokens, where they are asked for."""
    ending: Ending = ""
    finish_reason: str = ""
    error: str = ""
    problem: str = ""
    request_id: str = ""
    workers: tuple[str, ...] = ()
    num_resumed_tokens: int = 0
    num_cached_tokens: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    event_times_s: list[float] = field(default_factory=list[float])
    num_tokens_changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def took_s(self) -> float:
        return self.ended_s - self.started_s

    def gaps_s(self, since_s: float = 0.0) -> list[float]:
        """Return the time before each event that came after `since_s`, but for the first of the answer."""
        return [later - earlier for earlier, later in pairwise(self.event_times_s) if later > since_s]

    def start(self, http: httpx.AsyncClient, model: str, limit_s: float) -> "asyncio.Task[None]":
        """Ask, and read until the answer ends. Whoever cancels the task hangs up.

        The ending is set from the task's result, not inside the task: a task that is cancelled before its first step
        runs none of its code, and its stream has an ending all the same."""
        self.started_s = time.monotonic()
        task = asyncio.create_task(self._run(http, model, limit_s), name=f"stream {self.number}")
        task.add_done_callback(self._end)
        return task

    async def until_tokens(self, num_tokens: int) -> None:
        """Return once so many tokens have come, or none will."""
        while len(self.tokens) < num_tokens and not self.ending:
            self.num_tokens_changed.clear()
            await self.num_tokens_changed.wait()

    async def _run(self, http: httpx.AsyncClient, model: str, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._read(http, model)
        except TimeoutError:
            self.ending = "timeout"

    def _end(self, task: "asyncio.Task[None]") -> None:
        self.ended_s = time.monotonic()
        if task.cancelled():
            self.ending = "hung up"
        elif error := task.exception():
            cause = repr(error.__context__ or error)
            self.ending, self.error = "broken", f"{type(error).__name__} after {self.took_s:.3f} s: {cause}"
        self.num_tokens_changed.set()

    async def _read(self, http: httpx.AsyncClient, model: str) -> None:
        body = self.case.fields | {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        headers = {"Authorization": f"Bearer {self.tenant}"}
        is_done = False
        async with http.stream("POST", f"{self.url}/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                self.ending, self.error = "failed", (await response.aread()).decode(errors="replace")
                return
            async for line in response.aiter_lines():
                if line == DATA + DONE:
                    is_done = True
                elif line.startswith(DATA):
                    if is_done:
                        self.problem = "something came after [DONE]"
                    self._take(json.loads(line.removeprefix(DATA)))
        self._settle(is_done)

    def _take(self, chunk: dict[str, Any]) -> None:
        self.event_times_s.append(time.monotonic())
        if "error" in chunk:
            self.error = json.dumps(chunk["error"])
            return
        for choice in chunk.get("choices", ()):
            self.tokens += choice.get("token_ids") or ()
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.request_id = str(chunk.get("id", self.request_id))
        if (usage := chunk.get("usage")) and (mesh := usage.get("kvmesh")):
            self.workers = (mesh["prefill_worker"], mesh["decode_worker"])
            self.num_resumed_tokens = mesh["resumed_tokens"]
            self.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        self.num_tokens_changed.set()

    def _settle(self, is_done: bool) -> None:
        if self.error:
            self.ending = "failed"
            if is_done or self.finish_reason:
                self.problem = "a failure that ends as if all were well"
        elif is_done and self.finish_reason:
            self.ending = "finished"
        else:
            self.ending = "broken"
            self.problem = "the stream ended without [DONE] and without an error"
