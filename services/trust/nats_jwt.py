"""NATS' JSON web tokens, as nats-server reads them (NATS ADR-14): an operator vouches for an account, the account's
signing keys vouch for users. Each signing key has a scope, which says what its users may do; `{{name()}}` in it is the
user's name.
"""

import base64
import hashlib
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, Protocol, cast

import msgspec
import nkeys  # pyright: ignore[reportMissingTypeStubs]

from schemas.broker import DISCONNECTED
from schemas.permissions import permissions_of
from schemas.subjects import Role

OPERATOR, ACCOUNT, USER = nkeys.PREFIX_BYTE_OPERATOR, nkeys.PREFIX_BYTE_ACCOUNT, nkeys.PREFIX_BYTE_USER
"""Kinds of key pairs."""
ANSWER_WITHIN_S = 600
"""A question may be answered for so long: as long as a request may take by default."""
UNLIMITED = -1
TOKEN_BEGINS = "-----BEGIN NATS USER JWT-----"
SEED_BEGINS = "-----BEGIN USER NKEY SEED-----"
CLAIMS_UPDATE = "$SYS.REQ.CLAIMS.UPDATE"
"""Where a server that keeps accounts in a folder takes an account's next token."""
_ENDS = "$SYS.ACCOUNT.{}.DISCONNECT"
_NAME = "{{name()}}"
_USER = re.compile("U[A-Z2-7]{55}")
_USER_LIMITS = {"subs": UNLIMITED, "data": UNLIMITED, "payload": UNLIMITED}
_ACCOUNT_LIMITS = _USER_LIMITS | {
    "imports": UNLIMITED, "exports": UNLIMITED, "conn": UNLIMITED, "leaf": UNLIMITED, "wildcards": True,
}  # fmt: skip


class KeyPair(Protocol):
    """An Ed25519 key pair, in NATS' own text form (the library has no types)."""

    @property
    def seed(self) -> bytearray: ...
    @property
    def public_key(self) -> bytes: ...
    def sign(self, content: bytes, /) -> bytes: ...


def new_pair(kind: int) -> KeyPair:
    """Return a fresh key pair of a kind."""
    return _from_seed(nkeys.encode_seed(secrets.token_bytes(32), kind))  # pyright: ignore[reportUnknownMemberType]


def pair_of(seed: str) -> KeyPair:
    """Return the key pair of a seed. Raises ValueError where it is invalid."""
    try:
        return _from_seed(seed.encode())
    except nkeys.NkeysError as error:
        raise ValueError("this is no seed of a key") from error


def is_user(text: str) -> bool:
    """Return whether this has the form of a user's public key."""
    return _USER.fullmatch(text) is not None


def public(pair: KeyPair) -> str:
    return pair.public_key.decode()


def seed(pair: KeyPair) -> str:
    return pair.seed.decode()


def operator_token(operator: KeyPair) -> str:
    return _sign(operator, public(operator), "kvmesh", "operator", {})


def system_token(operator: KeyPair, system: KeyPair) -> str:
    """Return the broker's own account, of which nobody is a user. Each account may receive the ends of its own
    connections, and nothing else."""
    ends = {"subject": _ENDS.format("*"), "type": "stream", "account_token_position": 3}
    return _sign(operator, public(system), "system", "account", {"limits": _ACCOUNT_LIMITS, "exports": [ends]})


def account_token(
    operator: KeyPair, account: str, signers: Mapping[Role, str], system: str, revoked: Mapping[str, int]
) -> str:
    """Return the account of a mesh, of which `account` is the public key. `signers`: the public signing key of each
    role, which makes users of that role. `system`: the public key of the broker's own account. `revoked`: users' public
    keys, each with the Unix time until which it was given tokens that are taken no more."""
    scopes = [
        {"kind": "user_scope", "key": key, "role": role, "template": _template(role)} for role, key in signers.items()
    ]
    ends = {
        "subject": _ENDS.format(account), "account": system, "local_subject": DISCONNECTED, "type": "stream",
    }  # fmt: skip
    body = {"limits": _ACCOUNT_LIMITS, "signing_keys": scopes, "imports": [ends], "revocations": dict(revoked)}
    return _sign(operator, account, "mesh", "account", body)


def user_credentials(signer: KeyPair, account: str, name: str, ends_s: int | None = None) -> str:
    """Return the content of a credentials file, as stock NATS tools read it: a user of the signer's role, and its key.

    `account`: its public key. `ends_s`: Unix time after which the broker takes it no more; None: never.
    """
    user = new_pair(USER)
    return credentials_of(user, user_token(signer, account, name, public(user), ends_s))


def user_token(signer: KeyPair, account: str, name: str, user: str, ends_s: int | None = None) -> str:
    """Return the token of a user whose public key is `user`: whoever has its key makes credentials of both."""
    return _sign(signer, user, name, "user", {"issuer_account": account}, ends_s)


def system_credentials(system: KeyPair, name: str, inbox: str, ends_s: int) -> str:
    """Return the credentials of a user of the broker's own account, who may bring an account's next token and hear what
    came of it, and nothing else. It has no scope, so its limits are its own."""
    user = new_pair(USER)
    permissions = {"pub": {"allow": [CLAIMS_UPDATE]}, "sub": {"allow": [f"{inbox}.>"]}}
    return credentials_of(user, _sign(system, public(user), name, "user", {**permissions, **_USER_LIMITS}, ends_s))


def credentials_of(user: KeyPair, token: str) -> str:
    """Return a credentials file's content."""
    return (
        f"{TOKEN_BEGINS}\n{token}\n------END NATS USER JWT------\n\n"
        f"{SEED_BEGINS}\n{seed(user)}\n------END USER NKEY SEED------\n"
    )


class User(msgspec.Struct, frozen=True):
    """What a user's token has: its name, its public key, and in Unix time when it was made and when it ends."""

    name: str
    sub: str
    iat: int
    exp: int | None = None


def token_of(credentials: str) -> str:
    """Return the token in a credentials file. Empty: there is none."""
    return credentials.partition(TOKEN_BEGINS)[2].strip().partition("\n")[0]


def user_of(credentials: str) -> User:
    """Return whom credentials are for; that they are signed is the broker's to see. Raises ValueError where there are
    none."""
    pair_of(seed_of(credentials))
    claims = token_of(credentials).split(".")[1:2]
    return msgspec.json.decode(base64.urlsafe_b64decode(f"{claims[0]}==") if claims else b"", type=User)


def sign_nonce(credentials: str, nonce: str) -> bytes:
    """Return what proves to a broker that one has the credentials' key."""
    return base64.b64encode(pair_of(seed_of(credentials)).sign(nonce.encode()))


def seed_of(credentials: str) -> str:
    return credentials.partition(SEED_BEGINS)[2].strip().partition("\n")[0]


def _template(role: Role) -> dict[str, Any]:
    permissions = permissions_of(role, _NAME)
    template: dict[str, Any] = {
        "pub": {"allow": permissions.publish},
        "sub": {"allow": permissions.subscribe, "deny": permissions.undelivered},
        **_USER_LIMITS,
    }
    if permissions.may_answer:
        template["resp"] = {"max": 1, "ttl": ANSWER_WITHIN_S * 10**9}
    return template


def _sign(signer: KeyPair, subject: str, name: str, kind: str, body: dict[str, Any], ends_s: int | None = None) -> str:
    claims: dict[str, Any] = {
        "iat": int(time.time()),
        "iss": public(signer),
        "name": name,
        "sub": subject,
        "nats": {**body, "type": kind, "version": 2},
    }
    if ends_s is not None:
        claims["exp"] = ends_s
    claims["jti"] = base64.b32encode(hashlib.sha256(msgspec.json.encode(claims)).digest()).rstrip(b"=").decode()
    signed = f"{_part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_part(claims)}"
    return f"{signed}.{_unpadded(signer.sign(signed.encode()))}"


def _from_seed(seed: bytes) -> KeyPair:
    return cast("KeyPair", nkeys.from_seed(seed))  # pyright: ignore[reportUnknownMemberType]


def _part(value: dict[str, Any]) -> str:
    return _unpadded(msgspec.json.encode(value))


def _unpadded(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()
