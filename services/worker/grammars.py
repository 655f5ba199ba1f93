"""Long grammars: their digests come with the attempts, and their texts from the gateway, once."""

import asyncio
from collections import OrderedDict

import msgspec

from schemas import subjects
from schemas.ids import GatewayId, WorkerId
from schemas.request import AskGrammar, RefusalReason, Refused, RunAttempt, digest_of_grammar, refuse
from services.bus.base import BusError
from services.bus.typed import TypedBus
from services.holder.limits import MAX_RECEIVED_GRAMMAR_CHARACTERS


class ReceivedGrammars:
    """Those that one worker was sent. They are known by their content: whoever's a text is, its digest is its own."""

    def __init__(self, bus: TypedBus, worker_id: WorkerId, timeout_s: float) -> None:
        self._bus = bus
        self._worker_id = worker_id
        self._timeout_s = timeout_s
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        """By digest; those asked for last are at the end."""
        self._asking: dict[tuple[GatewayId, bytes], asyncio.Event] = {}

    async def with_text(self, request: RunAttempt) -> RunAttempt | Refused:
        """Return an attempt with its grammar, or why it cannot be begun."""
        digest = request.sampling.grammar_digest
        if not digest:
            return request
        if (text := self._kept.get(digest)) is None:
            text = await self._text_of(request)
            if isinstance(text, Refused):
                return text
        self._keep(digest, text)
        sampling = msgspec.structs.replace(request.sampling, grammar=text, grammar_digest=b"")
        return msgspec.structs.replace(request, sampling=sampling)

    async def _text_of(self, request: RunAttempt) -> str | Refused:
        """Ask a gateway for the text, but not twice at a time: who comes meanwhile waits for that answer, and asks
        again only where there was none."""
        digest = request.sampling.grammar_digest
        key = (request.gateway_id, digest)
        while (asking := self._asking.get(key)) is not None:
            await asking.wait()
        if (text := self._kept.get(digest)) is not None:
            return text
        self._asking[key] = asyncio.Event()
        try:
            text = await self._ask(request)
            if not isinstance(text, Refused):
                self._keep(digest, text)
            return text
        finally:
            self._asking.pop(key).set()

    async def _ask(self, request: RunAttempt) -> str | Refused:
        question = AskGrammar(request_id=request.request_id, attempt=request.attempt, deadline_ms=request.deadline_ms)
        try:
            sent = await self._bus.ask(subjects.GRAMMAR, (request.gateway_id,), question, self._timeout_s)
        except BusError as error:
            detail = f"{self._worker_id} did not get the answer's grammar: {error.reason}"
            return refuse(request, RefusalReason.OVERLOADED, detail)
        if not sent.grammar:
            return refuse(request, RefusalReason.DEADLINE, f"{request.gateway_id} does not know the request any more")
        if digest_of_grammar(sent.grammar) != request.sampling.grammar_digest:
            return refuse(request, RefusalReason.INVALID, f"{request.gateway_id} has sent another grammar")
        return sent.grammar

    def _keep(self, digest: bytes, text: str) -> None:
        self._kept[digest] = text
        self._kept.move_to_end(digest)
        num_characters = sum(map(len, self._kept.values()))
        while num_characters > MAX_RECEIVED_GRAMMAR_CHARACTERS:
            num_characters -= len(self._kept.popitem(last=False)[1])
