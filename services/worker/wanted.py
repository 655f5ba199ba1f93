"""Which attempts nobody wants any more, because their gateway has ended them or is dead. Pure."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from schemas.ids import GatewayId, RequestId
from schemas.request import AttemptId
from services.holder.core.content import AttemptKey
from services.holder.core.events import AttemptUnwanted
from services.holder.limits import MAX_ATTEMPTS_A_QUESTION
from services.presence import BusConnected, FailureDetector, Peer
from services.times import Times


@dataclass(slots=True, frozen=True)
class AskGateway:
    """Ask this gateway whether it still wants these. What comes of it must be reported: `GatewayAnswered`,
    `GatewayUnanswered` or `GatewayUnserved`."""

    gateway_id: GatewayId
    keys: tuple[AttemptKey, ...]
    asked_ms: int

    @property
    def attempts(self) -> tuple[AttemptId, ...]:
        return tuple(AttemptId(request_id=request_id, attempt=attempt) for request_id, attempt in self.keys)


@dataclass(slots=True, frozen=True)
class GatewayAnswered:
    question: AskGateway
    unwanted: tuple[AttemptId, ...]


@dataclass(slots=True, frozen=True)
class GatewayUnanswered:
    """No answer, or no bus. That says nothing of the gateway, but somebody may serve it again."""

    question: AskGateway


@dataclass(slots=True, frozen=True)
class GatewayUnserved:
    """The broker answers that the gateway is not there."""

    question: AskGateway


WantedEvent = GatewayAnswered | GatewayUnanswered | GatewayUnserved | BusConnected


class WantedCore:
    """What has been asked of the gateways and what they answered. `wanted_by` returns the attempts that go on here, and
    whose they are."""

    def __init__(self, wanted_by: Callable[[], dict[AttemptKey, GatewayId]], times: Times) -> None:
        self._wanted_by = wanted_by
        self._ask_after_ms = times.worker.ask_after_ms
        self._since_ms: dict[AttemptKey, int] = {}
        self._gateways: dict[GatewayId, Peer] = {}
        """Of those that are asked."""
        self._detector = FailureDetector(times.presence)

    @property
    def suspects(self) -> bool:
        """A gateway may be dead: ask again soon."""
        return any(gateway.unserved_ms is not None for gateway in self._gateways.values())

    def handle(self, event: WantedEvent, now_ms: int) -> list[AttemptUnwanted]:
        """React to an answer or its absence: return the end of what nobody wants any more. A gateway that is not there
        the second time wants nothing of what it was asked about."""
        match event:
            case GatewayAnswered(question=question, unwanted=unwanted):
                self._seen(question.gateway_id, now_ms)
                unwanted_keys = {(RequestId(attempt.request_id), attempt.attempt) for attempt in unwanted}
                return [AttemptUnwanted(key) for key in question.keys if key in unwanted_keys]
            case GatewayUnanswered(question=question):
                self._seen(question.gateway_id, now_ms)
                self._detector.begin_recovery(now_ms)
            case GatewayUnserved(question=question):
                gateway = self._gateways.setdefault(question.gateway_id, Peer(now_ms))
                if gateway.is_gone(question.asked_ms, self._detector, now_ms):
                    return [AttemptUnwanted(key, is_orphaned=True) for key in question.keys]
            case BusConnected():
                if self._detector.connects(event, now_ms):
                    self._gateways.clear()
        return []

    def tick(self, now_ms: int) -> list[AskGateway]:
        """Return what to ask now."""
        attempts = self._wanted_by()
        self._since_ms = {key: self._since_ms.get(key, now_ms) for key in attempts}
        keys_of: defaultdict[GatewayId, list[AttemptKey]] = defaultdict(list)
        for key, gateway_id in attempts.items():
            if now_ms - self._since_ms[key] >= self._ask_after_ms:
                keys_of[gateway_id].append(key)
        self._gateways = {gateway_id: self._gateways.get(gateway_id) or Peer(now_ms) for gateway_id in keys_of}
        size = MAX_ATTEMPTS_A_QUESTION
        return [
            AskGateway(gateway_id, tuple(keys[at : at + size]), now_ms)
            for gateway_id, keys in keys_of.items()
            for at in range(0, len(keys), size)
        ]

    def _seen(self, gateway_id: GatewayId, now_ms: int) -> None:
        if gateway := self._gateways.get(gateway_id):
            gateway.seen(now_ms)
