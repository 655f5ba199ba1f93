"""One name, one living service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import subjects
from schemas.message import encode
from schemas.worker import ClaimName
from services.bus.base import Bus
from services.bus.typed import headers_of
from services.errors import UserError
from services.launch.names import holding, yields_to
from tests.bus.conftest import Connect
from tests.waiting import PATIENCE_S, until

NAME = "decode-0"


class Living:
    """A service that lives by a name until it is told to stop."""

    def __init__(self, bus: Bus, name: str = NAME, within_s: float = PATIENCE_S) -> None:
        self.began = asyncio.Event()
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(self._live(bus, name, within_s))

    async def _live(self, bus: Bus, name: str, within_s: float) -> None:
        async with holding(bus, name, self.stop, within_s):
            self.began.set()
            await self.stop.wait()

    async def end(self) -> None:
        self.stop.set()
        await self.task


@pytest.fixture
async def buses(connect: Connect) -> AsyncIterator[tuple[Bus, Bus]]:
    yield await connect(), await connect()


async def test_the_second_is_refused_and_told_where_the_first_lives(buses: tuple[Bus, Bus]) -> None:
    first = Living(buses[0])
    await first.began.wait()
    # The first is not settled yet, and may leave it the name: one of them goes on.
    second = Living(buses[1])
    await asyncio.wait([first.task, second.task], return_when=asyncio.FIRST_COMPLETED)
    lost, kept = (second, first) if second.task.done() else (first, second)
    with pytest.raises(UserError, match=rf"{NAME} is the name of a service that lives already \(.*, process \d+\)"):
        await lost.task
    assert not kept.stop.is_set()
    await kept.end()


async def test_a_name_is_free_at_once_when_its_service_has_ended(buses: tuple[Bus, Bus]) -> None:
    for bus in (*buses, *buses):
        living = Living(bus)
        await living.began.wait()
        await living.end()


async def test_other_names_live_beside(buses: tuple[Bus, Bus]) -> None:
    livings = [Living(bus, name) for bus, name in zip(buses, ("decode-0", "decode-1"), strict=True)]
    for living in livings:
        await living.began.wait()
    for living in livings:
        await living.end()


async def test_of_many_that_begin_together_one_lives(buses: tuple[Bus, Bus]) -> None:
    livings = [Living(buses[number % 2]) for number in range(6)]
    await until(lambda: sum(living.task.done() for living in livings) == len(livings) - 1)
    (kept,) = (living for living in livings if not living.task.done())
    assert kept.began.is_set() and not kept.stop.is_set()
    await kept.end()
    ends = await asyncio.gather(*(living.task for living in livings if living is not kept), return_exceptions=True)
    assert all(isinstance(end, UserError) for end in ends)


async def test_who_answers_nothing_holds_no_name(buses: tuple[Bus, Bus]) -> None:
    """As a process that stands still does: its subscription is there, and it says nothing."""
    async with AsyncExitStack() as stack:
        subscription = await buses[0].subscribe(subjects.CLAIM.of(NAME))
        stack.push_async_callback(subscription.close)
        living = Living(buses[1], within_s=0.05)
        await living.began.wait()
        await living.end()


tokens = st.text("ab", max_size=3)
claims = st.builds(ClaimName, name=st.just(NAME), token=tokens, where=st.just(""), settled=st.booleans())


@given(st.lists(claims, min_size=1, max_size=6, unique_by=lambda claim: claim.token))
def test_of_any_claims_one_yields_to_none(asked: list[ClaimName]) -> None:
    """No circle, and the settled before the others, whatever was heard in which order."""
    (kept,) = (claim for claim in asked if not any(yields_to(claim, other) for other in asked))
    assert all(yields_to(other, kept) for other in asked if other is not kept)
    assert kept.settled == any(claim.settled for claim in asked)


async def test_the_settled_stays_whatever_the_tokens(buses: tuple[Bus, Bus]) -> None:
    async with AsyncExitStack() as stack:
        subscription = await buses[0].subscribe(subjects.CLAIM.of(NAME))
        stack.push_async_callback(subscription.close)
        settled = ClaimName(name=NAME, token="g", where="elsewhere", settled=True)  # above every token that is drawn
        living = Living(buses[1])
        question = await anext(aiter(subscription))
        await question.respond(encode(settled), headers_of(settled, ""))
        with pytest.raises(UserError, match="elsewhere"):
            await living.task


async def test_who_leaves_us_the_name_is_not_the_last_who_is_asked(buses: tuple[Bus, Bus]) -> None:
    """The first answer is of one that yields; another one, which does not, is heard at the second question."""
    async with AsyncExitStack() as stack:
        subscription = await buses[0].subscribe(subjects.CLAIM.of(NAME))
        stack.push_async_callback(subscription.close)
        living = Living(buses[1])
        questions = aiter(subscription)
        for settled, where in ((False, "yields"), (True, "stays")):
            question = await anext(questions)
            said = ClaimName(name=NAME, token="g", where=where, settled=settled)
            await question.respond(encode(said), headers_of(said, ""))
        with pytest.raises(UserError, match="stays"):
            await living.task
