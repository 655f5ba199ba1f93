"""Who may sign whose request it is, and who is a holder.

A gateway signs each request's id, tenant and deadline with Ed25519; everybody who keeps KV has the gateways' public key
and takes no such word unsigned, nor one that is over. Its times are by the gateway's own clock, of which a holder knows
only what the gateway has signed: it was so late, at least, when the holder received it. Holders know each other by the
ticket secrets, which no gateway has: a holder that copies blocks for their own sake, without a request behind it,
signs that with them. What signing and verifying take is in docs/benchmarks.md.
"""

import hashlib
import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from dataplane.blocks.ticket import TicketSecrets
from schemas.ids import RequestId, WorkerId
from schemas.kv import RequestLease
from schemas.request import RefusalReason, Refused, RunAttempt, refuse
from services.config import MIN_SECRET_CHARS, MeshConfig, require_content_secrets, require_secrets
from services.errors import UserError
from services.runtime import now_ms

MAX_SIGNERS = 1_024
"""Of so many gateways a holder knows how late it is at least."""


class TenantSignature(msgspec.Struct, frozen=True, array_like=True):
    """A gateway's signature of whose a request is, good from `signed_ms` to `until_ms` by the clock of `signer`, one
    life of a gateway."""

    signer: str
    signed_ms: int
    until_ms: int
    signature: bytes


_SIGNATURES = msgspec.msgpack.Decoder(TenantSignature)


class TenantSigner:
    """What a gateway signs with. `seed`: any text that nobody can guess."""

    def __init__(self, seed: str) -> None:
        self._name = secrets.token_hex(8)
        self._key = Ed25519PrivateKey.from_private_bytes(hashlib.blake2b(seed.encode(), digest_size=32).digest())

    @property
    def public_key(self) -> str:
        """What verifies: 64 hexadecimal digits, no secret."""
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, request_id: RequestId, tenant: str, deadline_ms: int) -> bytes:
        """Return the signature that this request is this tenant's until its deadline: some 100 bytes."""
        proof = TenantSignature(self._name, now_ms(), deadline_ms, b"")
        signature = self._key.sign(_tenant_text(request_id, tenant, proof))
        return msgspec.msgpack.encode(msgspec.structs.replace(proof, signature=signature))


class SignerClocks:
    """How late it is at least by each signer's clock: its time and this process's go on alike, and no word comes before
    it is sent. A word of a signer that was never seen before is always new."""

    def __init__(self) -> None:
        self._ahead_ms: OrderedDict[str, int] = OrderedDict()

    def is_over(self, proof: TenantSignature, now_ms: int) -> bool:
        """Return whether a word that is the signer's is good no more."""
        ahead_ms = max(proof.signed_ms - now_ms, self._ahead_ms.get(proof.signer, proof.signed_ms - now_ms))
        self._ahead_ms[proof.signer] = ahead_ms
        self._ahead_ms.move_to_end(proof.signer)
        if len(self._ahead_ms) > MAX_SIGNERS:
            self._ahead_ms.popitem(last=False)
        return proof.until_ms < now_ms + ahead_ms


@dataclass(frozen=True, kw_only=True)
class HolderCredentials:
    """What whoever keeps KV believes others by, and is believed by. `secrets` may be replaced while it runs.
    `content_secrets` outlive the mesh, as a store's blocks do."""

    secrets: TicketSecrets
    content_secrets: TicketSecrets
    tenant_key: Ed25519PublicKey
    clocks: SignerClocks = field(default_factory=SignerClocks)

    def refusal(self, request: RunAttempt | RequestLease, holder: WorkerId) -> Refused | None:
        """Return the refusal of a request to this holder of which nobody has proved whose it is, or None."""
        if isinstance(request, RequestLease) and request.is_copy:
            if self.secrets.proves(_copy_text(request, holder), request.signature):
                return None
            detail = f"{request.reader} does not prove that it is a holder: are its ticket_secrets the same?"
            return refuse(request, RefusalReason.UNSIGNED, detail)
        try:
            proof = _SIGNATURES.decode(request.signature)
            self.tenant_key.verify(proof.signature, _tenant_text(request.request_id, request.tenant, proof))
        except (InvalidSignature, msgspec.DecodeError):
            detail = f"no gateway has signed that it is {request.tenant or 'no tenant'}'s: is tenant_public_key right?"
            return refuse(request, RefusalReason.UNSIGNED, detail)
        if self.clocks.is_over(proof, now_ms()):
            return refuse(request, RefusalReason.UNSIGNED, "the deadline that a gateway has signed is over")
        return None

    def sign_copy(self, request: RequestLease, holder: WorkerId) -> RequestLease:
        """Return the request of a copy with the MAC that a holder asks for, good for this holder alone."""
        return msgspec.structs.replace(request, signature=self.secrets.mac(_copy_text(request, holder)))


def signer_of(config: MeshConfig) -> TenantSigner:
    """Return what this mesh's gateways sign with. Raises UserError."""
    if len(config.tenant_seed) < MIN_SECRET_CHARS:
        raise UserError(
            f"no tenant seed: set `tenant_seed` in the gateway's mesh.toml to {MIN_SECRET_CHARS} characters or more"
        )
    return TenantSigner(config.tenant_seed)


def holder_credentials(config: MeshConfig) -> HolderCredentials:
    """Return a worker's or store's credentials. Without a public key that of the seed is taken. Raises UserError."""
    secrets = TicketSecrets(require_secrets(config))
    if not config.tenant_public_key and not config.tenant_seed:
        raise UserError("no tenant key: it stands in the holders' key file that `kvmesh bus-config` writes")
    try:
        key = bytes.fromhex(config.tenant_public_key or signer_of(config).public_key)
        content_secrets = TicketSecrets(require_content_secrets(config))
        public_key = Ed25519PublicKey.from_public_bytes(key)
        return HolderCredentials(secrets=secrets, content_secrets=content_secrets, tenant_key=public_key)
    except ValueError as error:
        raise UserError("tenant_public_key has 64 hexadecimal digits, as `kvmesh bus-config` writes them") from error


def _tenant_text(request_id: RequestId, tenant: str, proof: TenantSignature) -> bytes:
    return msgspec.json.encode(("kvmesh tenant 2", request_id, tenant, proof.signer, proof.signed_ms, proof.until_ms))


def _copy_text(request: RequestLease, holder: WorkerId) -> bytes:
    blocks = hashlib.blake2b(request.block_hashes, digest_size=16).hexdigest()
    who = (request.reader, holder, request.request_id, request.tenant)
    return msgspec.json.encode(("kvmesh copy 2", *who, request.first_block, blocks))
