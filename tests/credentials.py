"""What the meshes of the tests believe each other by: one signer, whose word every holder takes."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from dataplane.blocks.ticket import TicketSecrets
from schemas.kv import RequestLease
from schemas.request import RunAttempt
from schemas.subjects import CarriesT, Subject
from services.bus.typed import ReplyT, TypedBus
from services.trust.credentials import HolderCredentials, TenantSigner

SECRET = b"a secret of the tests"
SEED = "a seed of the tests"
SIGNER = TenantSigner(SEED)


def credentials_for(secrets: Sequence[bytes], signer: TenantSigner) -> HolderCredentials:
    """Return the credentials of a holder that believes this signer."""
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.public_key))
    return HolderCredentials(secrets=TicketSecrets(secrets), content_secrets=TicketSecrets(secrets), tenant_key=key)


CREDENTIALS = credentials_for([SECRET], SIGNER)

ProvedT = TypeVar("ProvedT", bound=RunAttempt | RequestLease)


def proved(request: ProvedT) -> ProvedT:
    """Return a request as its gateway would sign it."""
    proof = SIGNER.sign(request.request_id, request.tenant, request.deadline_ms)
    return msgspec.structs.replace(request, signature=proof)


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
        if isinstance(message, RunAttempt | RequestLease) and not message.signature:
            message = proved(message)  # type: ignore[assignment]
        return await super().ask(subject, ids, message, timeout_s, trace)
