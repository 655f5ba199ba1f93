"""The base of every message, and the one place where bytes become messages.

JSON, so that a stock NATS client shows what is sent; tagged, so that one subject may carry several types; unknown
fields are ignored and new fields carry defaults, and an unknown word of an enum is `OTHER`, so that old and new
services understand each other.
"""

import enum
from typing import Self, TypeVar

import msgspec

from schemas.ids import RequestId
from schemas.numbers import Ms, Number

MessageT = TypeVar("MessageT", bound="Message")


class OpenEnum(enum.StrEnum):
    """The words that a field may have on the bus. Each has a member `OTHER`, for those of a later release: whoever
    decides by a word does with it what is safe, and never takes it for a success."""

    @classmethod
    def _missing_(cls, value: object) -> Self | None:
        return cls["OTHER"] if isinstance(value, str) else None


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=True):
    """Base of everything that travels on the bus."""


class RequestMessage(Message, frozen=True, kw_only=True):
    """A message about one attempt at one request. `left_ms`: until the request's deadline.

    Clocks of two machines differ, durations do not: in a process `deadline_ms` is by its own monotonic clock, and on
    the bus `left_ms` is what was left as the message was sent (`departing`, `arriving`).
    """

    request_id: RequestId
    attempt: Number
    deadline_ms: Ms = msgspec.field(name="left_ms")


class UndecodableMessageError(ValueError):
    """The bytes are not a message of the expected type. Carries no payload: it may be anybody's."""


def departing(message: MessageT, now_ms: int) -> MessageT:
    """Return the message as it crosses the bus: with what is left of its deadline."""
    if not isinstance(message, RequestMessage):
        return message
    return msgspec.structs.replace(message, deadline_ms=max(0, message.deadline_ms - now_ms))


def arriving(message: MessageT, now_ms: int) -> MessageT:
    """Return the message as its receiver reads it: with its deadline by the receiver's clock."""
    if not isinstance(message, RequestMessage):
        return message
    return msgspec.structs.replace(message, deadline_ms=message.deadline_ms + now_ms)


_encoder = msgspec.json.Encoder()


def encode(message: Message) -> bytes:
    """Return the message as JSON."""
    return _encoder.encode(message)


def decode(payload: bytes, *expected: type[MessageT]) -> MessageT:
    """Return the message in `payload`, which must be one of the `expected` types.

    Raises UndecodableMessageError for anything else, whatever the bytes are.
    """
    try:
        return _decoder(expected).decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableMessageError(str(error)) from error


_decoders: dict[tuple[type[Message], ...], msgspec.json.Decoder[Message]] = {}


def _decoder(expected: tuple[type[MessageT], ...]) -> msgspec.json.Decoder[MessageT]:
    """Return the decoder for this union, built once (building costs a hundred times what decoding does)."""
    decoder = _decoders.get(expected)
    if decoder is None:
        union = expected[0]
        for other in expected[1:]:
            union = union | other  # pyright: ignore[reportOperatorIssue, reportUnknownVariableType]
        decoder = _decoders[expected] = msgspec.json.Decoder(union)  # pyright: ignore[reportUnknownArgumentType, reportArgumentType]
    return decoder  # pyright: ignore[reportReturnType]
