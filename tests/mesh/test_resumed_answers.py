"""An answer that another attempt began goes on where it was, token for token. The fake engine reads its KV."""

import asyncio
import random
from typing import Any

import msgspec
import pytest

from schemas import subjects
from schemas.block import pack_tokens
from schemas.ids import HandoffId, RequestId, WorkerId
from schemas.request import AttemptAccepted, OtherEnd, RunAttempt, SamplingParams
from services.engine.fake import fake_answer
from services.runtime import now_ms
from tests.mesh.one_process import LAYOUT, VOCAB, Answer, Client, make_parts, one_process_mesh
from tests.promises import same_tokens

pytestmark = pytest.mark.virtual_time

NUM_TOKENS = 12


async def resume(
    client: Client, number: int, prompt: list[int], params: SamplingParams, so_far: list[int], *, split: bool
) -> Answer:
    """Ask for the rest of an answer of which `so_far` is known, and return all of it."""
    request_id, handoff_id = RequestId(f"r{number}"), HandoffId(f"r{number}-1")
    answer = client.expect(request_id)
    answer.tokens.update(enumerate(so_far))
    run = RunAttempt(
        request_id=request_id, attempt=1, deadline_ms=now_ms() + 60_000, gateway_id=client.gateway_id,
        prompt=pack_tokens([*prompt, *so_far]), sampling=params, num_answered_tokens=len(so_far), tenant="t",
        downstream=OtherEnd(worker_id=WorkerId("d0"), handoff_id=handoff_id) if split else None,
    )  # fmt: skip
    asked = [client.bus.ask(subjects.RUN, ("p0",), run, 30)]
    if split:
        source = OtherEnd(worker_id=WorkerId("p0"), handoff_id=handoff_id)
        other = msgspec.structs.replace(run, upstream=source, downstream=None)
        asked.append(client.bus.ask(subjects.RUN, ("d0",), other, 30))
    replies = await asyncio.gather(*asked)
    assert all(isinstance(reply, AttemptAccepted) for reply in replies)
    await answer.end()
    return answer


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "bad_words": ((5,), (6, 7)), "allowed_token_ids": (5, 6, 7, 8)},
        {"temperature": 0.0, "logprobs": 3, "min_tokens": 9, "stop_token_ids": tuple(range(0, VOCAB, 2))},
    ],
    ids=str,
)
async def test_an_answer_goes_on_from_any_of_its_tokens(split: bool, sampling: dict[str, Any]) -> None:
    rng = random.Random(11)
    prompt = [rng.randrange(1, VOCAB) for _ in range(21)]
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=7, ignore_eos=True, **sampling)
    reference = fake_answer(LAYOUT, prompt, params, vocab_size=VOCAB)
    async with one_process_mesh(make_parts("p0", "prefill"), make_parts("d0", "decode")) as client:
        for number in range(len(reference)):
            answer = await resume(client, number, prompt, params, reference[:number], split=split)
            assert answer.failure is None
            same_tokens(answer.token_ids, reference)
            report = answer.report or answer.prefill_report
            assert report is not None
            total = report.cached_tokens + report.transferred_tokens + report.recomputed_tokens
            assert total == len(prompt) + number
        await client.until_free()
