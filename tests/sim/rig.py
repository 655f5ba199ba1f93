"""A simulation with a holder and a reader, and a fault of one's choice."""

import random
from typing import Any

import numpy as np
import pytest

from dataplane.ends.reader import Landed
from dataplane.protocol.stream import TransferFailedError
from services.sim.platform import threads
from services.sim.platform.plane import SimNetwork
from tests.plane.harness import LAYOUT, Holder, Target, use_network
from tests.virtual import OneFault

NUM_TOKENS = 300
NUM_BYTES = NUM_TOKENS * 2 * LAYOUT.num_layers * LAYOUT.token_bytes
CARRIERS = ("loopback", "tcp")


class Plane:
    """A holder and a reader on one network. Use inside `virtually`."""

    def __init__(self, carrier: str, faults: OneFault | None = None, **options: Any) -> None:
        self.carrier = carrier
        self.network = SimNetwork(random.Random(1), faults=faults or OneFault())
        use_network(self.network)
        self.holder = Holder((carrier,), NUM_TOKENS, **options)
        self.target = Target()

    def __enter__(self) -> "Plane":
        return self

    def __exit__(self, *_: object) -> None:
        use_network(None)
        self.holder.close()
        self.target.close()

    def compute(self, chunk: int = 50, step_s: float = 0.01) -> None:
        """Compute chunk by chunk, as time goes by."""
        threads.spawn(lambda: self._compute(chunk, step_s), "compute")

    def _compute(self, chunk: int, step_s: float) -> None:
        for start in range(0, NUM_TOKENS, chunk):
            threads.pause(step_s)
            self.holder.compute(chunk, start, min(NUM_TOKENS, start + chunk))
        self.holder.progress.complete(b"token 0")

    async def read(self, deadline_s: float = 5.0) -> Landed:
        holder, target = self.holder, self.target
        return await target.reader.read_kv(
            target.request(holder.endpoint, holder.ticket(), self.carrier, NUM_TOKENS, deadline_s=deadline_s)
        )

    async def failure(self, deadline_s: float = 5.0) -> TransferFailedError:
        with pytest.raises(TransferFailedError) as raised:
            await self.read(deadline_s)
        error = raised.value
        landed = self.target.landed(error.num_landed_tokens)
        assert np.array_equal(landed, self.holder.kv[:, :, : error.num_landed_tokens]), "what is said to have landed"
        return error

    def is_right(self) -> bool:
        return np.array_equal(self.target.landed(NUM_TOKENS), self.holder.kv)
