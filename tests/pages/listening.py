"""Writes the section "Listening" from what a real mesh publishes: `make pages`.

Ids and times differ each time, so the page is written on demand; a test checks that the named messages are published.
"""

import asyncio
import json
import sys
import textwrap
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from schemas.observe import RequestDescribed
from schemas.subjects import Role
from services.bus.base import Delivery
from services.bus.nats import NatsBus
from services.cli.messages import not_received_by, subjects_of
from services.errors import UserError
from services.trust.keys import BusAccess
from tests.pages.limits import TIMEOUT_S
from tests.pages.scene import Scene, running_mesh

START, END = "<!-- received: listening -->\n", "<!-- end of what was received -->"
WIDTH = 140
MAX_TEXT = 48
"""Characters of one string that are shown; hashes are longer."""
MAX_ANSWER_LINES = 5
LEFT_OUT = frozenset(
    {"type", "request_id", "worker_id", "handoff_id", "source_worker", "target_worker", "gateway_id", "left_ms"}
    | {
        "attempt",
        "lease_id",
        "epoch",
        "lease_ms",
        "ticket",
        "pair",
        "proof",
        "fingerprint",
        "incarnation",
        "worker",
        "rates",
    }
    | {"tenant", "answer_within_ms", "sequence", "num_unreceived_tokens", "num_dropped_messages", "num_refused_reads"}
)
"""Fields that are not shown: they are in the subject already, or only programs use them."""


class Listening(NamedTuple):
    """One subscription. `shows`: what it is good for; `num_shown`: how many of its messages are shown."""

    subscription: str
    shows: str
    num_shown: int = 2


LISTENING = (
    Listening("mesh.v1.request.>", "the events of every request, from `accepted` to its one end", 7),
    Listening("mesh.v1.request.*.failed", "requests that failed, and why: empty on a good day", 1),
    Listening("mesh.v1.request.*.resumed", "answers that were continued on other workers, and why", 1),
    Listening("mesh.v1.handoff.>", "every hand-over of KV, in five events", 5),
    Listening("mesh.v1.handoff.*.*.*.landed", "what has crossed, from whom to whom, how large"),
    Listening("mesh.v1.worker.*.left", "workers that stopped, died or were silent for too long", 1),
    Listening("mesh.v1.worker.*.load", "what every worker has to do: when it changes, and at least every 0.6 s", 1),
    Listening("mesh.v1.kv.*.*.lease", "who asks whom for KV that is cached there"),
    Listening("mesh.v1.kv.*.stored", "which blocks a worker has from now on", 1),
    Listening("mesh.v1.tokens.>", "the answers' tokens, a message for each engine step: many", 1),
)

QUERIES = (
    "mesh.v1.scheduler.status", "mesh.v1.directory.status", "mesh.v1.worker.{worker}.status",
    "mesh.v1.request.{request}.status",
)  # fmt: skip
"""Questions: the workers; whose blocks the directory knows; one worker, its requests and leases; where a request is."""


@dataclass
class Heard:
    """The messages of each subscription, in order, and the replies to the questions."""

    request_id: str = ""
    messages: dict[str, list[tuple[str, bytes]]] = field(default_factory=dict[str, list[tuple[str, bytes]]])
    answers: list[tuple[str, bytes]] = field(default_factory=list[tuple[str, bytes]])


async def hear() -> Heard:
    """Run a mesh and the scene, and return what was published."""
    heard = Heard()
    async with (
        running_mesh() as supervisor,
        _connected(supervisor.access(Role.OPERATOR)) as bus,
        asyncio.TaskGroup() as tasks,
    ):
        listeners = [tasks.create_task(_listen(bus, listening.subscription, heard)) for listening in LISTENING]
        await asyncio.sleep(0)
        await bus.flush()

        async def ask(described: RequestDescribed) -> None:
            for pattern in QUERIES:
                subject = pattern.format(worker=described.decode_worker, request=described.request_id)
                heard.answers.append((subject, (await bus.request(subject, b"", {}, TIMEOUT_S)).payload))

        async with Scene(supervisor, bus) as scene:
            heard.request_id = await scene.play(ask)
        for listener in listeners:
            listener.cancel()
    return heard


@asynccontextmanager
async def _connected(access: BusAccess) -> AsyncGenerator[NatsBus]:
    bus = await NatsBus.connect(access, "kvmesh-listening")
    yield bus
    await bus.close()


async def _listen(bus: NatsBus, pattern: str, heard: Heard) -> None:
    messages = heard.messages[pattern] = []
    async for delivery in await bus.subscribe(pattern):
        if not _is_question(delivery):
            messages.append((delivery.subject, delivery.payload))


def _is_question(delivery: Delivery) -> bool:
    """Say whether this is a question of our own about a request."""
    return delivery.subject.endswith((".status", ".sought"))


def section(heard: Heard) -> str:
    """Return the text between the markers."""
    rows = [
        f"| `{listening.subscription}` | {received_by(listening.subscription)} | {listening.shows} |"
        for listening in LISTENING
    ]
    lines = ["| `kvmesh sub` | who receives it | what it shows |", "|---|---|---|", *rows, "", "```"]
    for listening in LISTENING:
        flag = " --operator" if received_by(listening.subscription) == Role.OPERATOR else ""
        lines.append(f"$ kvmesh sub '{listening.subscription}'{flag}")
        for subject, payload in _shown(listening, heard):
            lines += [_cut(subject), _cut(f"  {_brief(payload)}")]
        lines.append("")
    for subject, payload in heard.answers:
        answer = textwrap.wrap(_brief(payload), WIDTH - 2, max_lines=MAX_ANSWER_LINES, placeholder=" …")
        lines += [f"$ kvmesh req {subject}", *(f"  {line}" for line in answer)]
    return "\n".join([*lines, "```"])


def received_by(subscription: str) -> str:
    """Return who receives a subscription's messages, by the permissions on the broker. Operators: all."""
    found = subjects_of(subscription)
    unheard = not_received_by(Role.OBSERVER, found)
    if len(unheard) == len(found):
        return Role.OPERATOR
    ends = ", ".join(f"`{subject.pattern.rsplit('.', 1)[-1]}`" for subject in unheard)
    return f"{Role.OBSERVER}; {ends}: {Role.OPERATOR}" if ends else Role.OBSERVER


def _shown(listening: Listening, heard: Heard) -> list[tuple[str, bytes]]:
    """Return the messages to show. Where many are shown, those of the one request with the most events."""
    messages = heard.messages[listening.subscription]
    if listening.num_shown > 2:
        messages = [(subject, payload) for subject, payload in messages if heard.request_id in subject]
    return messages[: listening.num_shown]


def _brief(payload: bytes) -> str:
    return json.dumps(_without(json.loads(payload)), ensure_ascii=False).replace('"', "")


def _without(value: object) -> object:
    """Return the value without the fields that are not shown, at any depth."""
    if isinstance(value, list):
        return [_without(item) for item in cast("list[object]", value)]
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}…"
    if isinstance(value, dict):
        members = cast("dict[str, object]", value)
        return {key: _without(member) for key, member in members.items() if key not in LEFT_OUT}
    return value


def _cut(text: str) -> str:
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def rewrite(document: str, text: str) -> str:
    """Return the document with `text` between its markers. Raises UserError where it has none."""
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise UserError(f"the document has no {START.strip()} … {END}")
    return f"{before}{start}{text}\n{end}{after}"


def main() -> None:
    """Rewrite the document named on the command line."""
    path = Path(sys.argv[1])
    path.write_text(rewrite(path.read_text("utf-8"), section(asyncio.run(hear()))), "utf-8")


if __name__ == "__main__":
    main()
