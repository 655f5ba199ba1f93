"""Workers on cards and beside cards, in one process: services, plane and staging as they are, the cards fake ones.

Their streams run late. The engine reads its KV, so that what was read too early, or copied to a wrong place, is a wrong
token.
"""

import asyncio
import random
import threading
from collections.abc import Iterator

import pytest

from schemas.request import SamplingParams
from services.telemetry import Key, ListExporter, SpanName, SpanRecord
from services.worker.parts import WorkerParts
from tests.mesh.late_engine import make_card_parts
from tests.mesh.one_process import VOCAB, make_parts, one_process_mesh
from tests.mesh.test_one_process import expected, sampling
from tests.plane.fake_card import Fabric, FakeCard
from tests.promises import same_tokens

NUM_REQUESTS = 24


@pytest.fixture
def cards() -> Iterator[dict[str, FakeCard]]:
    """Two cards that do not see each other, and one that sees the first."""
    fabric = Fabric()
    made = {
        "one": FakeCard("GPU-1", seed=1, fabric=fabric),
        "other": FakeCard("GPU-2", seed=2, fabric=fabric),
        "peer": FakeCard("GPU-3", seed=3, peers=("GPU-1",), fabric=fabric),
    }
    yield made
    for card in made.values():
        assert not any(card.opened.values()), card.opened
        card.close()


def worker(worker_id: str, role: str, card: FakeCard | None) -> WorkerParts:
    if card is None:
        return make_parts(worker_id, role)  # type: ignore[arg-type]
    return make_card_parts(worker_id, role, card)  # type: ignore[arg-type]


CASES = {
    "one card": ("one", "one", "auto", "cuda", "one process, one card"),
    "one card, tcp": ("one", "one", "tcp", "tcp", "a network, the holder's and the reader's card staged"),
    "a peer": ("one", "peer", "auto", "cuda", "one process, cards that see each other's memory"),
    "two cards": ("one", "other", "auto", "nccl", "two cards"),
    "two cards without NCCL": ("one", "other", "auto", "tcp", "a network, the holder's and the reader's card staged"),
    "card to memory": ("one", None, "auto", "tcp", "a network, the holder's card staged"),
    "memory to card": (None, "one", "auto", "tcp", "a network, the reader's card staged"),
}
"""Where the prefill and the decode worker are, the carrier asked for, and what is taken and why."""


@pytest.mark.parametrize("case", CASES)
async def test_answers_are_right_wherever_kv_lies(case: str, cards: dict[str, FakeCard]) -> None:
    source, target, asked, carrier, reason = CASES[case]
    rng, spans = random.Random(7), list[SpanRecord]()
    before = set(threading.enumerate())  # tests of workers that are aborted may leave some
    if "without" in case:
        for card in cards.values():
            card.refusal = "the library is not installed"
    parts = [
        worker("p-0", "prefill", cards[source] if source else None),
        worker("d-0", "decode", cards[target] if target else None),
    ]
    async with one_process_mesh(*parts, carrier=asked, exporter=ListExporter(spans)) as client:
        jobs: list[tuple[str, list[int], SamplingParams]] = []
        for number in range(NUM_REQUESTS):
            prompt = [rng.randrange(1, VOCAB) for _ in range(rng.choice([9, 40, 130, 200]))]
            jobs.append((f"r{number}", prompt, sampling(rng, rng.randrange(2, 12))))
        answers = await asyncio.gather(*(client.complete(*job) for job in jobs))
        for (_, prompt, params), answer in zip(jobs, answers, strict=True):
            same_tokens(answer.token_ids, expected(prompt, params))
        await client.until_free()
        # On a slow machine a hand-over may run out of time: its prompt is then computed again.
        count = client.events.count
        await client.until(lambda _: count("released") == count("landed") > NUM_REQUESTS // 2)
        fleet = {load.worker.worker_id: load.worker for load in await client.fleet()}
        assert fleet["p-0"].device.startswith("cuda:0" if source else "cpu")
    reads = [span.attributes for span in spans if is_read(span) and Key.CARRIER in span.attributes]
    taken = {read[Key.CARRIER] for read in reads}
    assert carrier in taken and taken <= {carrier, "tcp"}, "where a pair is in use, the next read goes by tcp"
    assert taken == {carrier} or carrier == "nccl"
    of_carrier = [read for read in reads if read[Key.CARRIER] == carrier]
    assert all(str(read[Key.CARRIER_REASON]).startswith(reason) for read in of_carrier), of_carrier[0]
    left = set(threading.enumerate()) - before
    assert not [t.name for t in left if t.name.startswith(("kv-", "engine"))]


def is_read(span: SpanRecord) -> bool:
    return span.name == SpanName.KV_TRANSFER and span.attributes[Key.END] == "target"
