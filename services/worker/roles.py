"""The cores of one worker, together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dataplane.blocks.cache import BlockCache
from dataplane.blocks.layout import BlockTables
from schemas.ids import BlockHash, GatewayId
from schemas.observe import HeldRequest
from services.worker.core.attempts import Attempt, SentAnswer
from services.worker.core.checks import WorkerLimits
from services.worker.core.content import AttemptKey
from services.worker.core.copies import CopyCore
from services.worker.core.leases import LeaseTable
from services.worker.core.lending import LendCore
from services.worker.core.role import RoleCore
from services.worker.core.rules import Rules

MakeRoles = Callable[[WorkerLimits, BlockCache, LeaseTable], tuple[RoleCore[Any], ...]]
"""Makes the cores of a worker's roles, which share its blocks and leases."""


@dataclass(frozen=True, slots=True)
class Cores:
    """All that decide for one worker: its roles, the copies that it keeps of others' blocks, the leases that others
    ask for."""

    roles: tuple[RoleCore[Any], ...]
    copies: CopyCore
    lending: LendCore

    def table(self) -> Rules:
        """Return what they do with each event, in this order; blocks may have become free, so each role then begins
        what waits for some."""
        cores = (*self.roles, self.copies, self.lending)
        return Rules([core.rules() for core in cores], [role.admit for role in self.roles])

    @property
    def num_running(self) -> int:
        """Attempts and reads of copies, those that wait for blocks among them."""
        return sum(len(role.attempts) for role in self.roles) + len(self.copies.reading)

    def attempts(self) -> Iterator[Attempt]:
        """Yield the records of all that is known here."""
        return (attempt for role in self.roles for attempt in role.attempts.values())

    def find(self, key: AttemptKey) -> Attempt | None:
        """Return the record of an attempt, whatever its role."""
        for role in self.roles:
            if (attempt := role.attempts.get(key)) is not None:
                return attempt
        return None

    def is_computing(self, block_hash: BlockHash, place: int, tenant: str) -> bool:
        """Say whether the engine is computing this block, the `place`-th of a sequence of this tenant. Whoever reads it
        may wait for it: who computes waits for nobody."""
        return any(
            attempt.stage == "computing"
            and attempt.num_stored_blocks <= place < len(attempt.hasher.hashes)
            and attempt.hasher.hashes[place] == block_hash
            and attempt.request.tenant == tenant
            for attempt in self.attempts()
        )

    def answer_of(self, key: AttemptKey) -> SentAnswer | None:
        """Return what an attempt has sent so far; None: it is not known here (any more)."""
        answers = (role.answer_of(key) for role in self.roles)
        return next((answer for answer in answers if answer is not None), None)

    def wanted_by(self) -> dict[AttemptKey, GatewayId]:
        """Return the attempts that go on here, and whose they are."""
        return {key: gateway_id for role in self.roles for key, gateway_id in role.wanted_by().items()}

    def held(self, now_ms: int) -> Iterator[HeldRequest]:
        """Yield what goes on here, for people."""
        yield from (attempt.held(now_ms) for attempt in self.attempts())
        yield from self.copies.held(now_ms)

    def tables(self) -> Iterator[BlockTables]:
        """Yield the tables whose blocks somebody here holds references to. Those of leases are the lease table's."""
        yield from (attempt.tables for attempt in self.attempts() if attempt.tables)
        yield from (copy.tables for copy in self.copies.reading.values())
