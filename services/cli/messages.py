"""`kvmesh sub` and `kvmesh req`: the bus by hand, with a person's credentials."""

import asyncio
import json
import re
import sys
import time
from itertools import zip_longest
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from schemas.message import Message, UndecodableMessageError, decode
from schemas.permissions import Direction, granted
from schemas.subjects import SUBJECTS, Role, Subject
from services.bus.base import BusError, Delivery, Subscription
from services.bus.nats import NatsBus
from services.cli.limits import MAX_SHOWN_CHARACTERS
from services.errors import UserError
from services.runtime import ended_before
from services.trust.keys import BusAccess

_SUBJECT = re.compile(r"[^\s.]+(\.[^\s.]+)*")


def subjects_of(pattern: str) -> list[Subject[Any, Any]]:
    """Return the subjects of the mesh of which a subscription may receive something."""
    return [subject for subject in SUBJECTS if _overlap(pattern, subject.of(*("*" for _ in subject.ids)))]


def not_received_by(role: Role, found: list[Subject[Any, Any]]) -> list[Subject[Any, Any]]:
    """Return those of them that a person of this role does not receive."""
    return [subject for subject in found if not granted(subject, role, Direction.SUBSCRIBE, "*")]


async def sub(access: BusAccess, pattern: str, stop: asyncio.Event) -> None:
    """Print what is published, as it comes, until `stop`. Raises UserError."""
    _check(pattern)
    found = subjects_of(pattern)
    not_received = not_received_by(access.identity.role, found) if access.identity else []
    if found and len(not_received) == len(found):
        raise UserError(f"an observer does not hear {pattern}, an operator does: pass --operator")
    console = Console(highlight=False, soft_wrap=True)
    bus = await NatsBus.connect(access, "kvmesh-sub")
    try:
        subscription = await bus.subscribe(pattern)
        await bus.flush()
        notes = "" if found else ": nothing of the mesh is published there"
        if not_received:
            named = ", ".join(subject.named for subject in not_received)
            which = named if len(not_received) < 4 else f"{len(not_received)} subjects"
            notes = f": all but {which}, which --operator receives"
        console.print(Text(f"receiving {pattern}{notes}. Ctrl-C ends it.", style="dim"))
        await ended_before(stop, _print(subscription, console))
    except BusError as error:
        raise UserError(f"cannot subscribe to {pattern}: {error}") from error
    finally:
        await bus.close()


async def req(access: BusAccess, subject: str, text: str, timeout_s: float) -> None:
    """Ask once, and print the reply. Raises UserError: nobody answers, or what is asked makes no sense."""
    _check(subject)
    if {"*", ">"} & set(subject.split(".")):
        raise UserError(f"{subject} is a pattern: a question goes to one subject, without * or >")
    payload = text.encode()
    if found := subjects_of(subject):
        payload = _question(found[0], text, access.identity.role if access.identity else None)
    bus = await NatsBus.connect(access, "kvmesh-req")
    try:
        reply = await bus.request(subject, payload, {}, timeout_s)
    except BusError as error:
        raise UserError(f"no answer: {error}") from error
    finally:
        await bus.close()
    try:
        shown = msgspec.json.format(reply.payload).decode()
    except (msgspec.DecodeError, UnicodeDecodeError):
        shown = reply.payload.decode(errors="replace")
    sys.stdout.write(_printable(shown, keep="\n") + "\n")  # whole: it may be a program that reads it


def text_of(subject: str, payload: bytes) -> tuple[str, str]:
    """Return what a message is called, and its content on one line, cut where it is long. Of bytes the number is
    shown."""
    found = next(iter(subjects_of(subject)), None)
    name, text = "", payload.decode(errors="replace")
    if found is not None:
        try:
            message = decode(payload or b"{}" if found.may_be_empty else payload, found.carries)
        except UndecodableMessageError as error:
            name = f"no {found.carries.__name__} ({error}):"
        else:
            name, text = found.carries.__name__, _fields(message)
    text = _printable(text)
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = f"{text[:MAX_SHOWN_CHARACTERS]}… ({len(text):,} characters in all)"
    return name, text


async def _print(subscription: Subscription, console: Console) -> None:
    async for delivery in subscription:
        for line in _lines(delivery, time.time()):
            console.print(line)


def _lines(delivery: Delivery, now_s: float) -> tuple[Text, Text]:
    name, text = text_of(delivery.subject, delivery.payload)
    clock = time.strftime("%H:%M:%S", time.localtime(now_s)) + f".{int(now_s % 1 * 1000):03}"
    head = Text.assemble((clock, "dim"), " ", (_printable(delivery.subject), "bold"), " ", (_printable(name), "cyan"))
    return head, Text(f"  {text}")


def _question(subject: Subject[Any, Any], text: str, role: Role | None) -> bytes:
    """Return the message that asks this, of the JSON of its fields. Raises UserError where it is invalid, or where a
    person may not ask it."""
    if not subject.reply:
        raise UserError(f"nobody answers {subject.named}: hear it with `kvmesh sub`")
    if role is not None and not granted(subject, role, Direction.PUBLISH, "*"):
        askers = {permit.role for permit in subject.published_by}
        hint = ": pass --operator" if Role.OPERATOR in askers else f", {' and '.join(sorted(askers))} may"
        raise UserError(f"an {role} may not ask {subject.named}{hint}")
    kind = subject.carries.__name__
    try:
        fields = json.loads(text or "{}")
        payload = json.dumps({"type": kind} | fields).encode()
        decode(payload, subject.carries)
    except (ValueError, TypeError, RecursionError) as error:  # it is no JSON, no object, or has other fields
        raise UserError(f"{subject.named} takes the JSON object of a {kind}, see docs/protocol.md: {error}") from error
    return payload


def _fields(message: Message) -> str:
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    del fields["type"]
    return json.dumps(fields, ensure_ascii=False, default=lambda value: f"{len(value)} bytes")


def _overlap(one: str, other: str) -> bool:
    """Return whether two patterns may match the same subject."""
    for left, right in zip_longest(one.split("."), other.split(".")):
        if ">" in (left, right):
            return left is not None and right is not None
        if left != right and (None in (left, right) or "*" not in (left, right)):
            return False
    return True


def _check(pattern: str) -> None:
    if not _SUBJECT.fullmatch(pattern) or ">" in pattern.split(".")[:-1]:
        raise UserError(
            f"{pattern!r} is no subject: words with dots between, * for any word, a last > for all that follow"
        )


def _printable(text: str, keep: str = "") -> str:
    """Return the text without what a terminal would obey: it may hold what a client sent."""
    return "".join(char if char.isprintable() or char in keep else " " for char in text)
