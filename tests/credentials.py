"""What the meshes of the tests believe each other by: one signer, whose word every holder takes."""

from typing import TypeVar

import msgspec

from schemas.kv import RequestLease
from schemas.request import ReserveBlocks, RunPrefill
from schemas.subjects import CarriesT, Subject
from services.bus.typed import ReplyT, TypedBus
from services.trust.credentials import TenantSigner, credentials_for

SECRET = b"a secret of the tests"
SEED = "a seed of the tests"
SIGNER = TenantSigner(SEED)
CREDENTIALS = credentials_for([SECRET], SIGNER)

ProvedT = TypeVar("ProvedT", bound=RunPrefill | ReserveBlocks | RequestLease)


def proved(request: ProvedT) -> ProvedT:
    """Return a request as its gateway would sign it."""
    proof = SIGNER.sign(request.request_id, request.tenant, request.deadline_ms)
    return msgspec.structs.replace(request, proof=proof)


class GatewayBus(TypedBus):
    """A bus whose user signs what it asks for, as a gateway does."""

    async def ask(
        self,
        subject: Subject[CarriesT, ReplyT],
        ids: tuple[str, ...],
        message: CarriesT,
        timeout_s: float,
        trace: str = "",
    ) -> ReplyT:
        if isinstance(message, RunPrefill | ReserveBlocks | RequestLease) and not message.proof:
            message = proved(message)  # type: ignore[assignment]
        return await super().ask(subject, ids, message, timeout_s, trace)
