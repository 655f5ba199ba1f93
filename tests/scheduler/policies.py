"""Policies as somebody else could have written them, the bad ones among them."""

import contextlib
import time

from schemas.ids import WorkerId
from schemas.request import KVSource
from services.scheduler.placement.cost import Cost, CostLimits
from services.scheduler.placement.policy import Choice, Question

ALWAYS_SPLIT = Cost(CostLimits(unsplit_tokens_max=0))


def last(question: Question) -> Choice:
    """Choose the last pair by id."""
    ids = [question.fleet.worker(int(slot)).info.worker_id for slot in question.firsts]
    partners = question.partners(int(question.firsts[-1]))
    return Choice(ids[-1], question.fleet.worker(int(partners[-1])).info.worker_id)


def reads_what_it_can(question: Question) -> Choice | None:
    """Choose as `cost` does, and split always; read from stores whatever they have of the prompt, at any price."""
    chosen = ALWAYS_SPLIT(question)
    stores = [run for run in question.lenders if question.fleet.workers[run.worker_id].info.role == "store"]
    sources = tuple(KVSource(worker_id=x.worker_id, first_block=x.first_block, num_blocks=x.num_blocks) for x in stores)
    return chosen and chosen._replace(sources=sources or chosen.sources)


def raises(question: Question) -> Choice:
    raise LookupError("of no use")


def hangs(question: Question) -> Choice:
    while True:
        with contextlib.suppress(Exception):  # as bad code does
            time.sleep(0.001)


def says_nothing(question: Question) -> None:
    return None


def says_words(question: Question) -> str:
    return "p0"


def names_nobody(question: Question) -> Choice:
    return Choice(WorkerId("nobody"), WorkerId("d0"))


def swaps_roles(question: Question) -> Choice:
    return Choice(WorkerId("d0"), WorkerId("p0"))


def leaves_out_the_decode_worker(question: Question) -> Choice:
    return Choice(WorkerId("p0"))


def takes_who_is_excluded(question: Question) -> Choice:
    return Choice(WorkerId("p1"), WorkerId("d0"))


def reads_from_nobody(question: Question) -> Choice:
    return Choice(WorkerId("p0"), WorkerId("d0"), (KVSource(worker_id=WorkerId("x"), first_block=0, num_blocks=1),))


no_function = 7
