"""What a bus does, and the errors it raises. Knows bytes and subjects; `typed.py` knows messages.

A dead queue group answers at once (NoRespondersError); a request already on its way to a process that dies gets no
answer at all, so every request has its own timeout.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

NOTHING: Mapping[str, str] = {}
LOST = "the connection was lost"
"""Why a BusError ends what was asked over a connection that has ended: nobody knows whether it has arrived."""

_FRAME_BYTES = len("NATS/1.0\r\n\r\n")
_HEADER_BYTES = len(": \r\n")


class BusError(Exception):
    """The bus could not do what was asked. Carries the subject."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(f"{reason} on {subject}")
        self.subject = subject
        self.reason = reason


class NoRespondersError(BusError):
    """Nobody serves this subject."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject, "nobody serves requests")


class RequestTimedOutError(BusError):
    """No reply came in time."""

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(subject, f"no reply within {timeout_s:g} s")


class MessageTooLargeError(BusError):
    """The payload is over what the broker takes."""

    def __init__(self, subject: str, num_bytes: int, max_bytes: int) -> None:
        super().__init__(subject, f"a message of {num_bytes} bytes is over the broker's max_payload, {max_bytes}")


def check_size(subject: str, payload: bytes, headers: Mapping[str, str], max_bytes: int) -> None:
    """Raise MessageTooLargeError for what the broker would refuse: it counts headers as well as payload, and closes the
    connection of a client that sends more."""
    num_bytes = len(payload) + _FRAME_BYTES
    for key, value in headers.items():
        num_bytes += len(key) + len(value.encode()) + _HEADER_BYTES
    if num_bytes > max_bytes:
        raise MessageTooLargeError(subject, num_bytes, max_bytes)


class BusClosedError(BusError):
    """The connection is closed for good."""

    def __init__(self, subject: str = "the bus") -> None:
        super().__init__(subject, "the connection is closed")


class Delivery(Protocol):
    """A message as it came in."""

    @property
    def subject(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def expects_reply(self) -> bool: ...

    @property
    def reply_to(self) -> str:
        """The subject on which the reply is awaited, where it matters to whom that belongs: on a broker that knows its
        clients. Else empty."""
        ...

    async def respond(self, payload: bytes, headers: Mapping[str, str]) -> None:
        """Answer a request. Does nothing for a message that expects no reply. Raises BusError."""
        ...

    def count_failure(self, reason: str) -> None:
        """Count a request that is not answered in the statistics that the service shows; `reason` is for people."""
        ...


class Subscription(Protocol):
    """What has come on a subject, to be iterated by one task of its owner. Ends when it or the bus is closed."""

    def __aiter__(self) -> AsyncIterator[Delivery]: ...

    async def close(self) -> None:
        """Take no more. What has come is still iterated."""
        ...


class Bus(Protocol):
    """At most once, in order per publisher and subject. While the broker is away, what is published waits in a bounded
    buffer and goes out once it is back; subscriptions and endpoints come back by themselves."""

    @property
    def is_connected(self) -> bool:
        """Whether the broker is there."""
        ...

    @property
    def max_bytes(self) -> int:
        """The largest message that may be sent, its headers included: `MAX_PAYLOAD_BYTES`, or what the broker takes
        where that is less."""
        ...

    @property
    def num_connects(self) -> int:
        """How often the bus has connected. What others published between two connections may be lost."""
        ...

    @property
    def num_reroutes(self) -> int:
        """How often the broker has said that it has lost some of its servers: who was connected there is on the way to
        another one."""
        ...

    @property
    def num_returns(self) -> int:
        """How often it has said that one of them is back: what is behind others may come back after it."""
        ...

    @property
    def num_dropped(self) -> int:
        """Messages that came and were dropped, as `MAX_WAITING` others waited for their reader already."""
        ...

    async def publish(self, subject: str, payload: bytes, headers: Mapping[str, str]) -> None:
        """Send to whoever listens. Raises MessageTooLargeError, BusClosedError, BusError when the buffer is full."""
        ...

    async def request(self, subject: str, payload: bytes, headers: Mapping[str, str], timeout_s: float) -> Delivery:
        """Send and await one reply. Raises NoRespondersError, RequestTimedOutError, MessageTooLargeError,
        BusClosedError (at once, also when the bus is closed while the request waits), BusError (`LOST`: at once, when
        the connection ends while the request waits: it may have arrived)."""
        ...

    async def subscribe(self, pattern: str, queue: str = "") -> Subscription:
        """Listen to a subject or pattern (`*` one token, `>` the rest). In a queue group each message reaches one
        member."""
        ...

    async def serve(
        self, service: str, endpoint: str, subject: str, queue: str = "", metadata: Mapping[str, str] = NOTHING
    ) -> Subscription:
        """Listen to requests as a named endpoint of a named service, so that tools can list it.

        Of a queue group's members (`queue`, or the endpoint's name) one receives each request. `metadata` is listed.
        """
        ...

    async def announce(self, service: str, description: str, metadata: dict[str, str]) -> None:
        """Be listed as this service, before any of its endpoints is. `metadata` is kept, and looked at whenever
        somebody asks; its `id` is the connection's name unless it is given."""
        ...

    async def flush(self, timeout_s: float | None = None) -> None:
        """Send a message through the broker to ourselves, and return once it has come back. So all that was sent before
        has reached the broker, subscriptions are live, and the connection works in both directions. Other servers of
        the broker hear of it a moment later. `timeout_s` None: the bus' own.

        Raises RequestTimedOutError, BusError while the broker is away or when the connection is lost, BusClosedError.
        """
        ...

    async def close(self) -> None:
        """End all subscriptions, endpoints and requests, and the connection. Raises nothing."""
        ...
