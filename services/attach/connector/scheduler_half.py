"""The half of the connector in vLLM's scheduler: what is asked for, what is loaded, what is saved.

vLLM calls it on its only thread, while every running request waits: nothing here waits for more than a millisecond.
`request`: `vllm.v1.request.Request`.
"""

import contextlib
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec

from schemas.attach import MAX_RUN, Ask, Counted, Have, KVIdentity, NotSaved, Release, Use, WantSlots, WeightsChanged
from schemas.block import BlockHasher, join_hashes
from schemas.ids import MAX_SUBJECT_TOKEN
from services.attach.connector.client import HolderClient
from services.attach.connector.identity import layout_of, not_shared
from services.attach.connector.plan import Compare, Load, Save, StepPlan
from services.attach.connector.settings import HANDOFF_WAIT_S

DIGEST_BYTES = 16
WAIT_S = 0.001
"""So long the first question of a step waits for an answer that is under way."""
GIVE_UP_S = 0.05
"""A holder that has not answered within so long has nothing."""
GRACE_S = 1.0
"""Beyond the time in which a holder brings blocks: after that it is taken to have none."""
COUNT_EVERY_S = 1.0
PURSE_STEPS = 2
"""The purse has room for what so many full steps compute."""
OWN_KEY = "kvmesh"
"""In a request's `kv_transfer_params`. All others are somebody else's, but for these two, by which vLLM's proxies say
that a prompt is computed for another server, and that another one has computed it."""
REMOTE_DECODE, REMOTE_PREFILL = "do_remote_decode", "do_remote_prefill"
MAX_TRACEPARENT = 64
SALT, CANARY_SALT = "s:", "c:"
"""Before what distinguishes hashes of equal tokens: no client's salt is the canary's."""


class CanaryParams(msgspec.Struct, frozen=True):
    """In the `kv_transfer_params` of a canary's request. `canary`: the word that the holder has given this server."""

    canary: str
    use: Use


class HintParams(msgspec.Struct, frozen=True):
    """In those of a request whose prompt another server has just computed: the holder that server is attached to, and
    how many of its tokens that is getting. Any client may write this: it costs itself a wait."""

    holder: Annotated[str, msgspec.Meta(max_length=MAX_SUBJECT_TOKEN)]
    tokens: Annotated[int, msgspec.Meta(ge=0)]


ParamsT = TypeVar("ParamsT")


@dataclass(slots=True)
class Shared:
    """A request that is shared. `use`: of what is found of it. `num_found`: blocks, from the first on, that the holder
    has pinned for it; None: it has not answered. `num_saved`: blocks that are the holder's already, or on their way."""

    request: Any
    number: int
    hasher: BlockHasher
    use: Use
    asked_s: float
    attachment: str
    fetch_s: float
    """So long the holder may be bringing blocks of it."""
    found: Have | None = None
    partial: Have | None = None
    """What is there for certain, while more comes."""
    num_saved: int = 0
    num_loaded: int = 0
    is_loading: bool = False
    is_canary: bool = False
    wait_s: float = 0.0
    """So long its blocks may be on their way to the holder."""

    @property
    def num_found(self) -> int:
        return len(self.found.slots) if self.found is not None else 0

    @property
    def num_loadable(self) -> int:
        return self.num_found if self.use is not Use.COMPARE else 0


@dataclass(slots=True)
class Counts:
    """Since they were sent last."""

    asked_tokens: int = 0
    loaded_tokens: int = 0
    not_saved: dict[NotSaved, int] = field(default_factory=dict[NotSaved, int])

    def miss(self, reason: NotSaved, number: int = 1) -> None:
        self.not_saved[reason] = self.not_saved.get(reason, 0) + number


class SchedulerHalf:
    """`step_tokens`: the most that a step computes. `check_every`: of so many requests one is compared.
    `handoff_wait_s`: so long a request waits whose prompt another server has just computed."""

    def __init__(
        self,
        client: HolderClient,
        identity: KVIdentity,
        *,
        check_every: int,
        step_tokens: int,
        handoff_wait_s: float = HANDOFF_WAIT_S,
    ) -> None:
        self._client = client
        self._fingerprint = layout_of(identity).fingerprint
        self._size = identity.block_size
        self._check_every = check_every
        self._handoff_wait_s = handoff_wait_s
        self._purse = PURSE_STEPS * max(1, step_tokens // self._size)
        self._shared: dict[str, Shared] = {}
        self._last_number = 0
        self._plan = StepPlan()
        """Of the step that is being scheduled: the loads."""
        self._counts = Counts()
        self._counted_s = 0.0

    def new_request(self, request: Any) -> None:
        """Ask what there is of a request, so that the answer is there when it is wanted."""
        if (reason := not_shared(request)) is not None:
            return self._counts.miss(reason)
        client = self._client
        own, hint = _own_params(request, CanaryParams), _own_params(request, HintParams)
        with client.changed:
            welcome, is_proven = client.welcome, client.is_proven
        if welcome is None:
            return self._counts.miss(NotSaved.NO_HOLDER)
        is_canary = own is not None and own.canary == welcome.attachment
        if not (is_proven or is_canary):
            return self._counts.miss(NotSaved.OFF)
        salt = CANARY_SALT if is_canary else hash_salt(request.cache_salt)
        hasher = BlockHasher(self._size, model_fingerprint=self._fingerprint, tenant=salt)
        self._last_number += 1
        one = Shared(
            request=request,
            number=self._last_number,
            hasher=hasher,
            use=own.use if own is not None and is_canary else self._sampled(request.request_id),
            asked_s=time.monotonic(),
            attachment=welcome.attachment,
            fetch_s=welcome.fetch_s,
            is_canary=is_canary,
            wait_s=self._handoff_wait_s if hint is not None and hint.tokens >= self._size else 0.0,
        )
        # The last token is computed even where all is there.
        hashes = hasher.extend(request.all_token_ids, request.num_tokens)
        most = request.num_tokens if one.use is Use.COMPARE else request.num_tokens - 1
        asked = hashes[: min(MAX_RUN, most // self._size)]
        self._shared[request.request_id] = one
        self._counts.asked_tokens += 0 if is_canary else request.num_tokens
        if asked:
            holder = hint.holder if hint is not None else ""
            wait_ms = round(1000 * one.wait_s)
            client.send_holder(Ask(one.number, join_hashes(asked), one.use, holder, wait_ms, _traceparent(request)))
        else:
            one.found = Have(one.number, (), b"")
        return None

    def num_matched(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """Return how many tokens can be loaded behind the `num_local` that vLLM has itself, and that this happens
        beside its steps; None: it is to ask again. Called for a request in each step until there is room for it."""
        if (one := self._shared.get(request.request_id)) is None:
            return 0, False
        if one.found is None and not self._is_answered(one):
            return None, False
        num_tokens = one.num_loadable * self._size - num_local
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def allocated(self, request: Any, pages: list[int], num_external: int) -> None:
        """vLLM has pages for a request, and waits for `num_external` tokens of it. Called twice for a request that is
        loaded; the second time with none."""
        one = self._shared.get(request.request_id)
        if one is None or one.found is None:
            return
        if not num_external:
            if one.use is not Use.COMPARE and not one.is_loading:
                self._release(one)
            return
        # What vLLM has itself comes first; what is loaded ends where the run ends.
        end = one.num_found
        first = end - num_external // self._size
        digests = _split(one.found.digests)
        self._plan.loads.append(
            Load(
                request=request.request_id,
                number=one.number,
                slots=one.found.slots[first:end],
                pages=tuple(pages[first:end]),
                digests=tuple(digests[first:end]),
                hashes=tuple(one.hasher.hashes[first:end]),
            )
        )
        one.is_loading, one.num_loaded, one.num_saved = True, end - first, end
        self._counts.loaded_tokens += 0 if one.is_canary else num_external

    def plan_step(self, scheduler_output: Any) -> StepPlan:
        """Return what the worker half does in this step: the loads that were promised, and what is computed saved."""
        plan, self._plan = self._plan, StepPlan()
        with self._client.changed:
            welcome, is_proven = self._client.welcome, self._client.is_proven
        plan.attachment = welcome.attachment if welcome is not None else ""
        starts = _starts(scheduler_output)
        state = scheduler_output.kv_connector_block_state
        for name, num_tokens in scheduler_output.num_scheduled_tokens.items():
            one = self._shared.get(name)
            if one is not None and one.attachment == plan.attachment and (is_proven or one.is_canary):
                self._plan_saves(plan, one, starts[name] + num_tokens, state.get_block_ids(name)[0])
        self._refill()
        self._send_counts()
        return plan

    def loads_ended(self, names: set[str], failed: set[str]) -> None:
        """These requests have what they waited for, or, of the failed ones, compute it."""
        for name in names | failed:
            if (one := self._shared.get(name)) is None:
                continue
            self._release(one)
            one.is_loading = False
            if name in failed:
                # vLLM asks again for it: there is nothing for it any more.
                one.num_loaded, one.num_saved = 0, 0

    def finished(self, request: Any) -> dict[str, Any] | None:
        """A request has ended. Return what its answer says of it: to a canary how many blocks were loaded, to a proxy
        that has its prompt computed here, for another server, where its KV is."""
        if (one := self._shared.pop(request.request_id, None)) is None:
            return None
        self._release(one)
        self._send_counts(is_last=not self._shared)
        if one.is_canary:
            return {OWN_KEY: {"loaded": one.num_loaded}}
        params: dict[str, Any] = request.kv_transfer_params or {}
        with self._client.changed:
            welcome = self._client.welcome
        if not params.get(REMOTE_DECODE) or welcome is None:
            return None
        own = {"holder": welcome.holder, "tokens": one.num_saved * self._size}
        return {REMOTE_PREFILL: True, REMOTE_DECODE: False, OWN_KEY: own}

    def weights_changed(self) -> None:
        self._client.send_holder(WeightsChanged())

    def _is_answered(self, one: Shared) -> bool:
        """Return whether the holder has answered, or will not in time."""
        client = self._client
        with client.changed:
            have = client.take_answer(one.number)
            if have is None and client.welcome is not None:
                client.changed.wait(WAIT_S)
                have = client.take_answer(one.number)
            is_there = client.welcome is not None and client.welcome.attachment == one.attachment
        if have is not None and have.has_more:
            one.partial, have = have, None
        within_s = one.wait_s + (GIVE_UP_S if one.partial is None else one.fetch_s + GRACE_S)
        if have is None and is_there:
            if time.monotonic() - one.asked_s < within_s:
                return False
            self._counts.miss(NotSaved.LATE)
        # A later answer takes the place of this one at the holder: what it pins ends with the request.
        one.found = (have or one.partial or _nothing(one)) if is_there else _nothing(one)
        return True

    def _release(self, one: Shared) -> None:
        """Let the holder have back what is pinned for a request. A later answer is of no use either."""
        self._client.send_holder(Release(one.number))
        one.found = Have(one.number, (), b"")

    def _plan_saves(self, plan: StepPlan, one: Shared, end: int, pages: list[int]) -> None:
        """Plan to save what is full at the end of this step and not the holder's, or to compare it."""
        tokens = one.request.all_token_ids
        hashes = one.hasher.extend(tokens, min(end, len(tokens)))
        last = min(len(hashes), end // self._size)
        digests = _split(one.found.digests) if one.found is not None else []
        while one.num_saved < last:
            at = one.num_saved
            if one.use is Use.COMPARE and one.found is not None and at < one.num_found:
                plan.compares.append(Compare(pages[at], one.found.slots[at], hashes[at], digests[at]))
            else:
                with self._client.changed:
                    slots = self._client.take_slots(1)
                if slots:
                    plan.saves.append(Save(pages[at], slots[0], hashes[at]))
                else:
                    self._counts.miss(NotSaved.NO_ROOM)
            one.num_saved += 1

    def _refill(self) -> None:
        client = self._client
        with client.changed:
            missing = self._purse - client.num_slots()
            if client.welcome is None or 2 * missing < self._purse or not client.may_refill():
                return
        client.send_holder(WantSlots(missing))

    def _send_counts(self, *, is_last: bool = False) -> None:
        """Send what has been counted, now and then. `is_last`: there may be no other step for long."""
        now_s = time.monotonic()
        if self._counts == Counts() or not (is_last or now_s - self._counted_s >= COUNT_EVERY_S):
            return
        self._counted_s = now_s
        counts, self._counts = self._counts, Counts()
        self._client.send_holder(Counted(counts.asked_tokens, counts.loaded_tokens, counts.not_saved))

    def _sampled(self, name: str) -> Use:
        """Return the use of what is found of a request: the same whenever it is asked."""
        return Use.COMPARE if zlib.crc32(name.encode()) % self._check_every == 0 else Use.LOAD


def hash_salt(cache_salt: str | None) -> str:
    """Return what the hashes of a request's blocks are salted with."""
    return SALT + cache_salt if cache_salt else ""


def _nothing(one: Shared) -> Have:
    return Have(one.number, (), b"")


def _own_params(request: Any, kind: type[ParamsT]) -> ParamsT | None:
    """Return what a request says to us, if it is of this kind. Any client may send anything there."""
    with contextlib.suppress(msgspec.ValidationError, LookupError, TypeError):
        return msgspec.convert(request.kv_transfer_params[OWN_KEY], kind)
    return None


def _traceparent(request: Any) -> str:
    headers: Mapping[str, str] = getattr(request, "trace_headers", None) or {}
    return headers.get("traceparent", "")[:MAX_TRACEPARENT]


def _split(digests: bytes) -> list[bytes]:
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]


def _starts(scheduler_output: Any) -> dict[str, int]:
    """Return where each request's tokens of this step begin."""
    cached = scheduler_output.scheduled_cached_reqs
    starts: dict[str, int] = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return starts | {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
