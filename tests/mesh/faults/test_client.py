"""The client that judges a mesh says how each of its requests ended, whenever it hung up."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from schemas.request import SamplingParams
from tests.mesh.faults.client import Ending, Stream
from tests.mesh.reference import Case

LIMIT_S = 30.0
FIRST = b'data: {"id": "cmpl-1", "choices": [{"token_ids": [7], "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"token_ids": [8], "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'


class Gateway(httpx.AsyncBaseTransport):
    """Answers with a first token, and goes on once `goes_on` is set."""

    def __init__(self, last: bytes = LAST) -> None:
        self.goes_on = asyncio.Event()
        self.last = last

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        async def answer() -> AsyncIterator[bytes]:
            yield FIRST
            await self.goes_on.wait()
            yield self.last

        return httpx.Response(200, content=answer())


@asynccontextmanager
async def asked(gateway: Gateway) -> AsyncIterator[tuple[Stream, "asyncio.Task[None]"]]:
    """A request that has just been sent, and the task that reads its answer."""
    stream = Stream(0, Case([1, 2], SamplingParams(max_tokens=2)), "http://gateway", "tenant-0")
    async with httpx.AsyncClient(transport=gateway) as http:
        yield stream, stream.start(http, "m", LIMIT_S)


async def test_who_is_hung_up_before_the_first_step_has_hung_up() -> None:
    async with asked(Gateway()) as (stream, task):
        task.cancel()
        await asyncio.wait([task])
        assert (stream.ending, stream.tokens) == ("hung up", [])
        assert 0 < stream.started_s <= stream.ended_s
        await stream.until_tokens(1)  # which do not come any more


async def test_who_is_hung_up_in_mid_stream_has_hung_up() -> None:
    async with asked(Gateway()) as (stream, task):
        await stream.until_tokens(1)
        task.cancel()
        await asyncio.wait([task])
        assert (stream.ending, stream.tokens) == ("hung up", [7])


@pytest.mark.parametrize(
    ("last", "ending"), [(LAST, "finished"), (b"", "broken"), (b"data: {\n\n", "broken")], ids=["whole", "cut", "junk"]
)
async def test_other_endings(last: bytes, ending: Ending) -> None:
    gateway = Gateway(last)
    async with asked(gateway) as (stream, task):
        gateway.goes_on.set()
        await asyncio.wait([task])
        assert stream.ending == ending


def test_the_gaps_of_a_stream() -> None:
    stream = Stream(0, Case([1], SamplingParams(max_tokens=2)), "http://gateway", "t", event_times_s=[1.0, 2.0, 5.0])
    assert stream.gaps_s() == [1.0, 3.0]
    assert stream.gaps_s(since_s=2.5) == [3.0], "the gap around that moment is whole"
