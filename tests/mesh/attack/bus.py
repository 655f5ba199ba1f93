"""Attacks on the bus: without a key, with another mesh's, and with an identity of one role that would be another."""

import asyncio
import base64
import contextlib
import itertools
import json
import random
import time
from collections import Counter
from typing import Any

import msgspec
import nats.errors
from nats.aio.client import Client, RawCredentials

from schemas import subjects
from schemas.directory import BlocksStored
from schemas.handoff import KVOffered
from schemas.kv import EvictionCandidates, LeaseGranted, ReplicateBlocks, RequestLease
from schemas.message import Message, UndecodableMessageError, decode, encode
from schemas.permissions import ALL, GUESTS, Direction, granted, replies_to
from schemas.request import PlaceRequest, RunAttempt
from schemas.subjects import SUBJECTS, Role, Subject
from services.trust.keys import MeshKeys, key_file, load_role_key
from tests.mesh.attack.mesh import EVIL, Found, Target
from tests.wire.cells import Member, every_cell, foreign_replies
from tests.wire.examples import EXAMPLES

SERVICES = (Role.GATEWAY, Role.SCHEDULER, Role.DIRECTORY, Role.HOLDER)
BATCH, MESSAGES_PER_S = 250, 6_000
"""Fuzzed messages come at a rate at which services keep up: to flood a bus on which one may speak is another matter."""
DEADLINE_S = 20.0
QUEUES = ("scheduler", "directory", "q")
SETTLES_S = 1.0
"""Whoever wants to read asks within this."""


async def strangers(target: Target, num_rounds: int) -> Found:
    """Connect with nothing, with a guess, with another mesh's key, one that is over, one that was altered."""
    found, keys = Found(), target.supervisor.keys_dir
    gateways = load_role_key(key_file(keys, Role.GATEWAY))
    for _ in range(num_rounds):
        foreign = MeshKeys.fresh().roles[Role.GATEWAY].identity(EVIL).credentials
        expired = gateways.identity(EVIL, life_s=-5).credentials
        ways: dict[str, dict[str, Any]] = {
            "nothing": {},
            "a password": {"user": "kvmesh", "password": "kvmesh"},
            "a token": {"token": "kvmesh"},
            "another mesh's key": {"user_credentials": RawCredentials(foreign)},
            "an expired key": {"user_credentials": RawCredentials(expired)},
            "an altered key": {"user_credentials": RawCredentials(_renamed(gateways.identity(EVIL).credentials))},
        }
        for name, way in ways.items():
            client = Client()
            found.num_tries += 1
            with contextlib.suppress(nats.errors.Error, OSError):
                await client.connect(target.url, allow_reconnect=False, error_cb=_silent, **way)
                found.got.append(f"let in with {name}")
            with contextlib.suppress(OSError):  # it was cut before
                await client._close(Client.CLOSED, False)
    return found


async def cells(target: Target) -> Found:
    """Try every cell of the table of permissions, as oneself and as another."""
    tried = await every_cell(target.url, target.identity)
    allowed = sum(cell.is_allowed for cell in tried)
    wrong = [str(cell) for cell, works in tried.items() if works != cell.is_allowed]
    return Found(len(tried), wrong, f"{len(tried) - allowed} denied, {allowed} work")


async def repeat_everything(target: Target, num_messages: int) -> Found:
    """Say again whatever is heard, word for word and under the name of who said it, as every role but the speaker's."""
    found, expected = Found(), Counter[Role]()
    async with contextlib.AsyncExitStack() as stack:
        members = {role: await stack.enter_async_context(target.joined(role)) for role in Role}
        async for subject, payload in target.hear(num_messages):
            known = _subject_of(subject)
            for role, member in members.items():
                if known is None or _may_say(role, known, subject):
                    continue
                found.num_tries += 1
                expected[role] += 1
                await member.client.publish(subject, payload)
        for role, member in members.items():
            await member.settle()
            if missing := expected[role] - len(member.denied):
                found.got.append(f"{missing} forged messages of {role} went through")
    return found


async def lie_under_own_name(target: Target, num_messages: int) -> Found:
    """Say what holders say of hand-overs, tokens, leases and blocks, changed so that it comes from a holder that nobody
    knows: the ids in the subject alone, and in the message too. Who listens must neither believe nor ask it."""
    found, asked = Found(), list[str]()
    own = {s: grant.own for s in SUBJECTS for grant in s.published_by if grant.role is Role.HOLDER and grant.own}
    async with target.joined(Role.HOLDER) as member:
        for subject in SUBJECTS:
            for pattern in granted(subject, Role.HOLDER, Direction.SUBSCRIBE, EVIL):
                if EVIL in pattern and subject is not subjects.INVENTORY:
                    await member.client.subscribe(pattern, cb=_collect(asked))
        async for concrete, payload in target.hear(num_messages):
            subject = _subject_of(concrete)
            name = own.get(subject) if subject else None
            if subject is None or name is None or "." in name:  # to join is a holder's right
                continue
            spoken = _with_id(subject, concrete, name, EVIL)
            message = decode(payload, subject.carries)
            for forged in (message, msgspec.structs.replace(message, **{name: EVIL})):
                await member.client.publish(spoken, encode(_worse(forged)))
                found.num_tries += 1
        await member.settle()
        found.got += [f"denied: {what}" for what in member.denied]
    found.got += [f"was asked on {subject}" for subject in asked]
    return found


async def blocks_of_nobody(target: Target, num_tries: int) -> Found:
    """Say of prompts under way, as a holder that nobody knows: I have their blocks, I am about to evict them, keep a
    copy of them. No store and no worker may come to read."""
    found, asked = Found(), list[str]()
    own = {"worker_id": EVIL, "incarnation": EVIL}
    async with target.joined(Role.HOLDER) as member, contextlib.aclosing(target.hear()) as heard:
        await member.client.subscribe(subjects.LEASE.of(EVIL, "*"), cb=_collect(asked))
        async for concrete, payload in heard:
            match _message_of(concrete, payload):
                case PlaceRequest(block_hashes=hashes, tenant=tenant) as place if hashes:
                    candidates = EvictionCandidates(**own, block_hashes=hashes, tenant=tenant)
                    stored = BlocksStored(**own, sequence=found.num_tries + 1, block_hashes=hashes)
                    copy = ReplicateBlocks(
                        request_id=place.request_id, attempt=1, deadline_ms=place.deadline_ms, source=EVIL,
                        fingerprint="x", first_block=0, block_hashes=hashes, tenant=tenant,
                    )  # fmt: skip
                    await member.client.publish(subjects.EVICTION_CANDIDATES.of(EVIL), encode(candidates))
                    await member.client.publish(subjects.STORED.of(EVIL), encode(stored))
                    for name in target.names():
                        await member.client.publish(subjects.REPLICATE.of(name, EVIL), encode(copy))
                    found.num_tries += 2 + len(target.names())
                case _:
                    pass
            if found.num_tries >= num_tries:
                break
        await member.settle()
        await asyncio.sleep(SETTLES_S)
        found.got += [f"denied: {what}" for what in member.denied]
    found.got += [f"a reader came: {subject}" for subject in asked]
    return found


async def foreign_leases(target: Target, num_tries: int) -> Found:
    """Ask every holder for blocks of other tenants' requests: without a proof, with a made-up one, with one for another
    tenant, and with the right one for another request."""
    found, refused = Found(), Counter[str]()
    places, proofs = dict[str, PlaceRequest](), dict[str, bytes]()
    signer = target.supervisor.signer
    async with target.joined(Role.HOLDER) as member, contextlib.aclosing(target.hear()) as heard:
        async for concrete, payload in heard:
            match _message_of(concrete, payload):
                case PlaceRequest() as place:
                    places[place.request_id] = place
                case RunAttempt() as run:
                    proofs[run.request_id] = run.signature
                case KVOffered() as offered if (place := places.get(offered.request_id)) and place.block_hashes:
                    others = [proof for request_id, proof in proofs.items() if request_id != place.request_id]
                    mallorys = signer.sign(place.request_id, "mallory", place.deadline_ms)
                    claims = [(b"", ""), (b"", place.tenant), (bytes(64), place.tenant)]
                    claims += [(mallorys, place.tenant), (mallorys, "mallory")]
                    claims += [(proof, place.tenant) for proof in others[-1:]]
                    for (proof, tenant), is_copy in itertools.product(claims, (False, True)):
                        asked = RequestLease(
                            request_id=place.request_id, attempt=1, deadline_ms=place.deadline_ms, reader=EVIL,
                            fingerprint=offered.fingerprint, first_block=0, block_hashes=place.block_hashes,
                            tenant=tenant, signature=proof, is_copy=is_copy,
                        )  # fmt: skip
                        answer = await _ask_lease(member, offered.source_worker, asked)
                        found.num_tries += 1
                        if isinstance(answer, LeaseGranted):
                            found.got.append(f"{offered.source_worker} lent {place.tenant}'s blocks as {tenant}'s")
                        else:
                            refused[answer] += 1
                case _:
                    pass
            if found.num_tries >= num_tries:
                break
    found.note = ", ".join(f"{count} {reason}" for reason, count in refused.most_common())
    return found


async def replies_of_others(target: Target) -> Found:
    """Hear and answer what other roles are told, with each service's key and under any name."""
    keys = {role: load_role_key(key_file(target.supervisor.keys_dir, role)) for role in SERVICES}
    return Found(*await foreign_replies(target.url, keys))


async def replies_led_elsewhere(target: Target) -> Found:
    """Ask what one may ask, and have the answer go where the requester may not speak: whoever answers may."""
    found, carried = Found(), {type(example): example for example in EXAMPLES}
    elsewhere = [subjects.LEFT.of(EVIL), subjects.TOKENS.of(EVIL, EVIL), "_REPLY.holder.decode-0.x", "_INBOX.evil"]
    heard = list[str]()

    async def hear(message: Any) -> None:
        heard.append(message.subject)

    async with target.joined(Role.OPERATOR) as operator, target.joined(Role.OBSERVER) as observer:
        for pattern in elsewhere[:2]:
            await operator.client.subscribe(pattern, cb=hear)
        await observer.client.subscribe(elsewhere[3], cb=hear)
        async with target.joined(Role.HOLDER, "decode-0") as holder:
            await holder.client.subscribe(elsewhere[2], cb=hear)
            await holder.settle()
            for role in Role:
                async with target.joined(role) as requester:
                    asked = [s for s in SUBJECTS if s.reply and granted(s, role, Direction.PUBLISH, EVIL)]
                    for subject, name, reply in itertools.product(asked, target.names(), elsewhere):
                        if reply.startswith(replies_to(subject)):
                            continue  # where its askers await replies
                        pattern = granted(subject, role, Direction.PUBLISH, EVIL)[0]
                        concrete = ".".join(name if token == "*" else token for token in pattern.split("."))
                        await requester.client.publish(concrete, encode(carried[subject.carries]), reply=reply)
                        found.num_tries += 1
                    await requester.settle()
            await asyncio.sleep(SETTLES_S)
            await holder.settle()
        await operator.settle()
        await observer.settle()
    found.got += [f"an answer came on {subject}" for subject in heard]
    return found


async def queues(target: Target) -> Found:
    """Listen in the queue groups of services, where one would take their questions away."""
    found = Found()
    for role in Role:
        async with target.joined(role) as member:
            for subject in SUBJECTS:
                patterns = {subject.of(*("*" for _ in subject.ids)), ALL} if subject.reply else set[str]()
                if role not in GUESTS:
                    patterns -= {*granted(subject, role, Direction.SUBSCRIBE, EVIL)}  # its own to serve
                for pattern, queue in itertools.product(patterns, QUEUES):
                    member.denied.clear()
                    await member.client.subscribe(pattern, queue=queue)
                    await member.settle()
                    found.num_tries += 1
                    if not member.denied:
                        found.got.append(f"{role} is in the queue {queue!r} of {pattern}")
    return found


async def fuzzed_messages(target: Target, num_messages: int) -> Found:
    """Send each role's messages, broken in every way, to whom the role may talk."""
    found, rng = Found(), random.Random(2)
    carried = {type(example): example for example in EXAMPLES}
    addresses = {Role.GATEWAY: target.names("gateway"), Role.HOLDER: target.names()}
    async with contextlib.AsyncExitStack() as stack:
        members = [(role, await stack.enter_async_context(target.joined(role))) for role in SERVICES]
        said = [
            (member, subject, pattern)
            for role, member in members
            for subject in SUBJECTS
            for pattern in granted(subject, role, Direction.PUBLISH, EVIL)
        ]
        while found.num_tries < num_messages:
            started_s = time.monotonic()
            for _ in range(BATCH):
                member, subject, pattern = rng.choice(said)
                names = rng.choice([addresses[Role.GATEWAY], addresses[Role.HOLDER], ["req-none"]])
                concrete = ".".join(rng.choice(names) if token == "*" else token for token in pattern.split("."))
                await member.client.publish(concrete, _broken(rng, carried[subject.carries]))
            found.num_tries += BATCH
            await asyncio.sleep(BATCH / MESSAGES_PER_S - (time.monotonic() - started_s))
        for role, member in members:
            await member.settle()
            found.got += [f"{role} was denied what it may say: {what}" for what in member.denied[:3]]
    return found


def _broken(rng: random.Random, example: Any) -> bytes:
    """Return a message that is none, or one whose fields are of the wrong size, kind or number."""
    whole = encode(example)
    match rng.randrange(6):
        case 0:
            return rng.randbytes(rng.randrange(200))
        case 1:
            return whole[: rng.randrange(len(whole))]
        case 2:
            at = rng.randrange(len(whole))
            return whole[:at] + rng.randbytes(1) + whole[at + 1 :]
        case 3:
            return b"[" * rng.choice((10, 10_000)) + whole
        case _:
            fields = json.loads(whole)
            name = rng.choice(list(fields))
            fields[name] = rng.choice((None, -1, 2**63, 1e308, "", "x" * 5_000, "*", "a.b", [], {}, [[[]]] * 50))
            return json.dumps(fields).encode()


def _message_of(concrete: str, payload: bytes) -> Message | None:
    subject = _subject_of(concrete)
    return None if subject is None or not payload else decode(payload, subject.carries)


def _subject_of(concrete: str) -> Subject[Any, Any] | None:
    return next((s for s in SUBJECTS if _matches(s.of(*("*" for _ in s.ids)), concrete)), None)


def _may_say(role: Role, subject: Subject[Any, Any], concrete: str) -> bool:
    return any(_matches(pattern, concrete) for pattern in granted(subject, role, Direction.PUBLISH, EVIL))


def _matches(pattern: str, concrete: str) -> bool:
    wanted, tokens = pattern.split("."), concrete.split(".")
    return len(wanted) == len(tokens) and all(w in ("*", t) for w, t in zip(wanted, tokens, strict=True))


def _with_id(subject: Subject[Any, Any], concrete: str, name: str, value: str) -> str:
    shapes = subject.pattern.split(".")
    ids = [token for token, shape in zip(concrete.split("."), shapes, strict=True) if shape == "{}"]
    return subject.of(*(value if own == name else token for own, token in zip(subject.ids, ids, strict=True)))


def _worse(message: Any) -> Any:
    """Return a message that would do harm if it were believed: other tokens, and an end."""
    if not isinstance(message, subjects.TOKENS.carries):
        return message
    forged = [
        msgspec.structs.replace(share, tokens=type(share.tokens)(bytes(len(share.tokens))), finish_reason="stop")
        for share in message.requests
    ]
    return msgspec.structs.replace(message, requests=tuple(forged))


async def _ask_lease(member: Member, holder: str, asked: RequestLease) -> LeaseGranted | str:
    try:
        answer = await member.client.request(subjects.LEASE.of(holder, EVIL), encode(asked), timeout=DEADLINE_S)
        said = decode(answer.data, *subjects.LEASE.reply)
    except (nats.errors.Error, UndecodableMessageError) as error:
        return type(error).__name__
    return said if isinstance(said, LeaseGranted) else said.reason


def _collect(into: list[str]) -> Any:
    async def take(message: Any) -> None:
        if message.reply:  # a question: it hears events of its own, too
            into.append(message.subject)

    return take


def _renamed(credentials: str) -> str:
    """Return credentials in whose token another name stands, under the old signature."""
    head, body, signature = next(line for line in credentials.splitlines() if line.count(".") == 2).split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    forged = base64.urlsafe_b64encode(json.dumps(claims | {"name": "gateway-0"}).encode()).rstrip(b"=").decode()
    return credentials.replace(f"{head}.{body}.{signature}", f"{head}.{forged}.{signature}")


async def _silent(_error: Exception) -> None:
    pass
