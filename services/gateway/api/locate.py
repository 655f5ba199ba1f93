"""Where the KV of a prompt is held: what a router in front of several meshes, or a person, asks before a request.

Block hashes begin with the tenant's name, so that a question can only be about what this tenant has had computed: for
what others have, the directory knows as little of these hashes as of any that nobody holds.
"""

import asyncio
from weakref import WeakValueDictionary

import msgspec

from schemas import subjects
from schemas.directory import LocateBlocks, Tier
from schemas.ids import RequestId, WorkerId
from services.bus.base import BusError
from services.bus.typed import TypedBus
from services.gateway.api.guard import NotNowError
from services.gateway.api.invalid import InvalidRequestError
from services.gateway.api.openai import check_vocabulary, decode_strictly
from services.gateway.api.prepare import GatewayModel, check_model
from services.gateway.api.tokenizing import PromptBody, tokens_of_prompt
from services.gateway.request.job import PackedPrompt, pack_prompt
from services.runtime import now_ms


class LocateBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt as `/tokenize` takes it, or its tokens."""

    tokens: list[int] | None = None


class HeldReply(msgspec.Struct, frozen=True, kw_only=True):
    """One holder's: `num_tokens` from `first_token` on, whole blocks, all in this tier or a faster one."""

    worker_id: WorkerId
    tier: Tier
    first_token: int
    num_tokens: int


class LocateReply(msgspec.Struct, frozen=True, kw_only=True):
    """A hint, as of now: who holds a beginning of the prompt, the longest first, then who holds what follows one.
    `num_held_tokens`: of the longest beginning."""

    object: str = "kv.location"
    model: str
    num_tokens: int
    block_size: int
    num_held_tokens: int
    holders: tuple[HeldReply, ...]


def prompt_asked_for(model: GatewayModel, payload: bytes, tenant: str) -> PackedPrompt:
    """Return the prompt of a body. Raises InvalidRequestError."""
    body = decode_strictly(payload, LocateBody)
    check_model(model, body.model or model.name)
    if (body.prompt, body.messages, body.tokens).count(None) != 2:
        raise InvalidRequestError("give one of `prompt`, `messages` and `tokens`", "prompt")
    if body.tokens is None:
        tokens = tokens_of_prompt(model, body)
    else:
        tokens = body.tokens
        check_vocabulary(tokens, model.vocab_size, "tokens")
    if len(tokens) > model.context_length:
        message = f"the prompt has {len(tokens)} tokens, and the model takes {model.context_length}"
        raise InvalidRequestError(message, "prompt", "context_length_exceeded")
    return pack_prompt(tokens, model.key_of(tenant))


class Located:
    """Asks the directory, one question of an owner at a time: it answers the mesh's scheduler beside."""

    def __init__(self, model: GatewayModel, bus: TypedBus, timeout_s: float) -> None:
        self._model = model
        self._bus = bus
        self._timeout_s = timeout_s
        self._asking = WeakValueDictionary[str, asyncio.Lock]()

    async def holders_of(self, prompt: PackedPrompt, owner: str, request_id: RequestId) -> LocateReply:
        """Raises NotNowError where no directory answers."""
        deadline_ms = now_ms() + round(1000 * self._timeout_s)
        question = LocateBlocks(
            request_id=request_id, attempt=1, deadline_ms=deadline_ms, block_hashes=prompt.block_hashes
        )
        try:
            # The dictionary is weak: a lock is gone once nobody has it or waits for it.
            async with self._asking.setdefault(owner, asyncio.Lock()):
                found = await self._bus.ask(subjects.LOCATE, (), question, self._timeout_s)
        except BusError as error:
            raise NotNowError("no_directory", f"no directory answers ({error.reason})") from error
        # The directory answers in blocks, and the reply is in tokens. Only ranges from token 0 on are a held beginning.
        size = self._model.layout.block_size
        held = tuple(
            HeldReply(
                worker_id=each.worker_id,
                tier=each.tier,
                first_token=size * each.first_block,
                num_tokens=size * each.num_blocks,
            )
            for each in found.holders
        )
        return LocateReply(
            model=self._model.name,
            num_tokens=prompt.num_tokens,
            block_size=size,
            num_held_tokens=max((each.num_tokens for each in held if each.first_token == 0), default=0),
            holders=held,
        )
