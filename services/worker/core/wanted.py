"""Which attempts nobody wants any more, because their gateway has ended them or is dead. Pure."""

from collections import defaultdict
from dataclasses import dataclass

from schemas.ids import GatewayId, RequestId
from schemas.request import AttemptId
from services.presence import Hearing, Peer
from services.worker.core.actions import AttemptKey
from services.worker.limits import ASK_AFTER_MS, MAX_ATTEMPTS_A_QUESTION


@dataclass(slots=True, frozen=True)
class Question:
    """Does this gateway still want these?"""

    gateway_id: GatewayId
    keys: tuple[AttemptKey, ...]
    asked_ms: int

    @property
    def attempts(self) -> tuple[AttemptId, ...]:
        return tuple(AttemptId(request_id=request_id, attempt=attempt) for request_id, attempt in self.keys)


class WantedCore:
    """What has been asked of the gateways and what they said."""

    def __init__(self) -> None:
        self._since_ms: dict[AttemptKey, int] = {}
        self._gateways: dict[GatewayId, Peer] = {}
        """Of those that are asked."""
        self._hearing = Hearing()

    @property
    def suspects(self) -> bool:
        """A gateway may be dead: ask again soon."""
        return any(gateway.unserved_ms is not None for gateway in self._gateways.values())

    def due(self, attempts: dict[AttemptKey, GatewayId], num_connects: int, now_ms: int) -> list[Question]:
        """Return what to ask now. `num_connects`: how often the bus has connected so far."""
        if self._hearing.connects(num_connects, now_ms):
            self._gateways.clear()
        self._since_ms = {key: self._since_ms.get(key, now_ms) for key in attempts}
        keys_of: defaultdict[GatewayId, list[AttemptKey]] = defaultdict(list)
        for key, gateway_id in attempts.items():
            if now_ms - self._since_ms[key] >= ASK_AFTER_MS:
                keys_of[gateway_id].append(key)
        self._gateways = {gateway_id: self._gateways.get(gateway_id) or Peer(now_ms) for gateway_id in keys_of}
        size = MAX_ATTEMPTS_A_QUESTION
        return [
            Question(gateway_id, tuple(keys[at : at + size]), now_ms)
            for gateway_id, keys in keys_of.items()
            for at in range(0, len(keys), size)
        ]

    def answered(self, question: Question, unwanted: tuple[AttemptId, ...], now_ms: int) -> list[AttemptKey]:
        """Return those of the asked attempts that the gateway does not want."""
        self._hear(question, now_ms)
        said = {(RequestId(attempt.request_id), attempt.attempt) for attempt in unwanted}
        return [key for key in question.keys if key in said]

    def unanswered(self, question: Question, now_ms: int) -> None:
        """No answer, or no bus. That says nothing of the gateway, but somebody may serve it again."""
        self._hear(question, now_ms)

    def unserved(self, question: Question, now_ms: int) -> list[AttemptKey]:
        """The broker says that the gateway is not there. Return what has lost it: all of it, the second time."""
        gateway = self._gateways.setdefault(question.gateway_id, Peer(now_ms))
        return list(question.keys) if gateway.is_gone(question.asked_ms, self._hearing, now_ms) else []

    def _hear(self, question: Question, now_ms: int) -> None:
        if gateway := self._gateways.get(question.gateway_id):
            gateway.hear(now_ms)
