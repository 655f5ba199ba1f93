"""Which attempts nobody wants any more, because their gateway has ended them or is dead. Pure."""

from collections import defaultdict
from dataclasses import dataclass

from schemas.ids import GatewayId, RequestId
from schemas.request import AttemptId
from services.worker.core.actions import AttemptKey

ASK_AFTER_MS = 1_000
"""How long an attempt goes on before its gateway is asked: most end earlier."""
MAX_ATTEMPTS_A_QUESTION = 256
UNSERVED_GAP_MS = 500
"""The least time between the two answers of the broker that make a gateway dead."""
RECONNECT_GRACE_MS = 2_000
"""Everybody comes back to a broker in a time of its own."""


@dataclass(slots=True, frozen=True)
class Question:
    """Does this gateway still want these?"""

    gateway_id: GatewayId
    keys: tuple[AttemptKey, ...]

    @property
    def attempts(self) -> tuple[AttemptId, ...]:
        return tuple(AttemptId(request_id=request_id, attempt=attempt) for request_id, attempt in self.keys)


class WantedCore:
    """What has been asked of the gateways and what they said."""

    def __init__(self) -> None:
        self._since_ms: dict[AttemptKey, int] = {}
        self._unserved_ms: dict[GatewayId, int] = {}
        """When the broker first said, as far as nothing else was heard since, that nobody is there."""
        self._num_connects: int | None = None
        self._trusts_broker_ms = 0

    @property
    def suspects(self) -> bool:
        """A gateway may be dead: ask again soon."""
        return bool(self._unserved_ms)

    def due(self, attempts: dict[AttemptKey, GatewayId], num_connects: int, now_ms: int) -> list[Question]:
        """Return what to ask now. `num_connects`: how often the bus has connected so far."""
        if self._num_connects not in (None, num_connects):
            self._trusts_broker_ms = now_ms + RECONNECT_GRACE_MS
            self._unserved_ms.clear()
        self._num_connects = num_connects
        self._since_ms = {key: self._since_ms.get(key, now_ms) for key in attempts}
        keys_of: defaultdict[GatewayId, list[AttemptKey]] = defaultdict(list)
        for key, gateway_id in attempts.items():
            if now_ms - self._since_ms[key] >= ASK_AFTER_MS:
                keys_of[gateway_id].append(key)
        self._unserved_ms = {gateway: since for gateway, since in self._unserved_ms.items() if gateway in keys_of}
        size = MAX_ATTEMPTS_A_QUESTION
        return [
            Question(gateway_id, tuple(keys[at : at + size]))
            for gateway_id, keys in keys_of.items()
            for at in range(0, len(keys), size)
        ]

    def answered(self, question: Question, unwanted: tuple[AttemptId, ...]) -> list[AttemptKey]:
        """Return those of the asked attempts that the gateway does not want."""
        self._unserved_ms.pop(question.gateway_id, None)
        said = {(RequestId(attempt.request_id), attempt.attempt) for attempt in unwanted}
        return [key for key in question.keys if key in said]

    def unanswered(self, question: Question) -> None:
        """No answer, or no bus: that says nothing of the gateway."""
        self._unserved_ms.pop(question.gateway_id, None)

    def unserved(self, question: Question, now_ms: int) -> list[AttemptKey]:
        """The broker says that the gateway is not there. Return what has lost it: all of it, the second time."""
        if now_ms < self._trusts_broker_ms:
            return []
        first_ms = self._unserved_ms.setdefault(question.gateway_id, now_ms)
        return list(question.keys) if now_ms - first_ms >= UNSERVED_GAP_MS else []
