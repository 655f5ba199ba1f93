"""What is asked at a join port, over TLS, as JSON, and what is answered."""

import enum
import hashlib
import importlib.metadata
from typing import Annotated

import msgspec

from services.config import MeshConfig

JOIN_PORT = 7843
MAX_BYTES = 64 * 1024
"""Of what is asked."""
MAX_ANSWER_BYTES = 1 << 20
Text = Annotated[str, msgspec.Meta(max_length=512)]


class Asks(enum.StrEnum):
    """What is asked: the path of the request."""

    CA = "/v1/ca"
    """The certificate by which all others are believed. Nobody has to say who he is."""
    LOOK = "/v1/look"
    """With a token: what the mesh is. The token is not used up."""
    JOIN = "/v1/join"
    POLL = "/v1/poll"
    RENEW = "/v1/renew"
    LEAVE = "/v1/leave"


class Look(msgspec.Struct, frozen=True, kw_only=True):
    token_id: Text
    secret: Text


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be the same on a machine that joins. `now_s`: Unix time."""

    release: str
    engine: str
    model: str
    model_path: str
    weights: str
    now_s: float


class Join(msgspec.Struct, frozen=True, kw_only=True):
    """A machine is to be part of the mesh. `public`: of its own key. `members`: each one's public key, as NATS writes
    it; the private halves stay where they are."""

    token_id: Text
    secret: Text
    host: Text
    public: Text
    members: dict[Text, Text]
    observer: Text
    """The public key of who looks at the mesh from there."""
    release: Text


class FromHost(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine that has joined asks. `signature`: by its own key, of the path and all other fields. `now_s`: what
    was signed long ago is not taken."""

    host: Text
    now_s: int
    has_secrets: Text = ""
    """The digest of those that it has."""
    members: dict[Text, Text] = {}
    observer: Text = ""
    signature: Text = ""

    def signed_text(self, asks: Asks) -> bytes:
        """Return what the signature is of."""
        return f"kvmesh host 1 {asks}\n".encode() + msgspec.json.encode(msgspec.structs.replace(self, signature=""))


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine's members prove by: holders all but the last, gateways that alone."""

    ticket_secrets: tuple[str, ...] = ()
    content_secrets: tuple[str, ...] = ()
    tenant_public_key: str = ""
    tenant_seed: str = ""


class Signed(msgspec.Struct, frozen=True, kw_only=True):
    """Keys that were signed. `members`: each one's token; `observer`: the same of who looks. `ends_s`: Unix time."""

    account: str
    members: dict[str, str]
    observer: str
    ends_s: int


class Admitted(msgspec.Struct, frozen=True, kw_only=True):
    """A machine is part of the mesh. `brokers`: as `nats.url` of mesh.toml. `config`: the head's, without what is the
    head's alone."""

    keys: Signed
    secrets: Secrets
    brokers: str
    config: MeshConfig


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """It is as it was asked."""


def release() -> str:
    """Return which kvmesh this is."""
    return importlib.metadata.version("kvmesh")


def digest_of(secrets: Secrets) -> str:
    """Return what tells secrets apart, and says nothing of them."""
    return hashlib.sha256(b"kvmesh secrets 1" + msgspec.json.encode(secrets)).hexdigest()[:32]
