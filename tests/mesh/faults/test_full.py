"""Decode workers of which none has room for a request, on real processes: an answer moves, and nobody waits."""

from pathlib import Path

from schemas.request import SamplingParams
from services.engine.demo_model import DEMO_MODEL_DIR
from services.launch.options import Launch
from services.settings import changed
from tests.mesh.faults.harness import OPTIONS, fault_mesh
from tests.mesh.faults.test_drains import ended
from tests.mesh.faults.truth import Alone, Truth
from tests.mesh.forked import ForkingLoop
from tests.mesh.reference import Case, SingleProcess

BLOCK_BYTES = 32 << 10
"""Of 16 tokens of the demo model."""
ROOM = 2_400
"""Tokens that a worker has room for."""
LONG = 1_000
"""An answer's tokens, near enough: two fit into one worker, and keep it busy for seconds."""
LARGE = 1_700
"""Tokens that fit into a worker beside no such answer."""


def an_answer_makes_room(forking: ForkingLoop, tmp_path: Path, options: Launch, alone: Alone) -> None:
    """Let two long answers run, on a decode worker each, and ask for more than either has left. `options`: workers with
    room for `ROOM` tokens."""
    truth = Truth(DEMO_MODEL_DIR, num_cases=2, prompt_tokens=(40, 60), answer_tokens=(LONG, LONG), alone=alone)
    truth.cases.append(Case([7] * (LARGE - 60), SamplingParams(max_tokens=60, ignore_eos=True)))
    truth.answers.append(alone(truth.cases[2], 2))
    zygote = forking.zygote

    async def filled() -> None:
        async with fault_mesh(tmp_path, truth, zygote, options) as mesh:
            longs = [mesh.new_stream(number) for number in (0, 1)]
            for long in longs:
                mesh.start(long)
                await long.until_tokens(20)
            large = mesh.new_stream(2)
            mesh.start(large)
            await large.until_tokens(2)
            assert not [long for long in longs if long.ending], "it has not waited for their ends"
            await ended(mesh, [*longs, large])
            moved = [long for long in longs if long.num_resumed_tokens]
            assert len(moved) == 1 and not large.num_resumed_tokens
            assert moved[0].workers[1] in {long.workers[1] for long in longs if long is not moved[0]}
            await mesh.settle()

    forking.run(filled())


def test_a_full_worker_s_answer_goes_on_where_there_is_room_instead_of_another_s_wait(
    forking: ForkingLoop, tmp_path: Path
) -> None:
    options = changed(OPTIONS, {"config.worker.kv_bytes": ROOM // 16 * BLOCK_BYTES})
    an_answer_makes_room(forking, tmp_path, options, SingleProcess(DEMO_MODEL_DIR).run)
