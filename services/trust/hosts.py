"""Which machines have joined a mesh, and the tokens with which more of them may: a file beside the keys of the mesh.

A token is `kvj1.CAHASH.ID.SECRET`. CAHASH names the mesh's CA, so that who joins knows to whom it says the secret
(https://docs.k3s.io/cli/token has the same form). The file has a hash of the secret alone. What a token may be used for
is written with it: a role, names, how often, until when.
"""

import contextlib
import fnmatch
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from schemas.ids import is_subject_token
from schemas.permissions import SERVICE_NAMES
from schemas.subjects import Role
from services.errors import UserError
from services.files import locked, replace_private
from services.trust.keys import MESH_FILE
from services.trust.nats_jwt import is_user

HOSTS_FILE = "hosts.json"
MAX_HOSTS = 1_000
MAX_MEMBERS = 64
"""Of one machine."""
MAX_TOKENS = 1_000
_VERSION = "kvj1"
_TOKEN = re.compile(rf"{_VERSION}\.([0-9a-f]{{64}})\.([0-9a-f]{{8}})\.([A-Za-z0-9_-]{{43}})")


class TokenRefusedError(Exception):
    """This token is of no use: the text is for whoever shows it."""


class HostRefusedError(Exception):
    """A machine is refused what it asks for: the text is for it."""


class Token(NamedTuple):
    """What a person copies to a machine that is to join."""

    ca_hash: str
    token_id: str
    secret: str

    @classmethod
    def parse(cls, text: str) -> "Token":
        """Raises UserError for what is no token."""
        if found := _TOKEN.fullmatch(text.strip()):
            return cls(*found.groups())
        raise UserError("--token is what `kvmesh token` prints on the mesh's machine, all of it: kvj1.….….…")

    def __str__(self) -> str:
        return f"{_VERSION}.{self.ca_hash}.{self.token_id}.{self.secret}"


class TokenRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is kept of a token. `names`: which members it is for, a pattern as of file names; `host`: which machine,
    empty: any."""

    secret_hash: str
    role: Role
    names: str
    host: str
    num_uses: int
    """How often it may still be used."""
    ends_s: int


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine that has joined. `public`: of the key by which it is known again, Ed25519, 64 hexadecimal digits."""

    public: str
    members: tuple[str, ...]
    release: str
    joined_s: int
    has_secrets: str = ""
    """The digest of the holders' secrets that it has said last that it has."""
    seen_s: int = 0
    """When it has said so."""


class Hosts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file."""

    tokens: dict[str, TokenRecord] = {}
    hosts: dict[str, Host] = {}


def read_hosts(folder: Path) -> Hosts:
    """Return what is known beside the keys of a mesh. Raises UserError where the file cannot be read."""
    path = folder / HOSTS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Hosts)
    except FileNotFoundError:
        return Hosts()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is damaged ({error}): take it away, and have machines join anew") from error


@contextlib.contextmanager
def changing_hosts(folder: Path) -> Generator[Hosts]:
    """Give the content to one at a time, to be changed in place; it is written where the block ends well. Tokens that
    are over are left out. Raises UserError."""
    try:
        with locked(folder / HOSTS_FILE):
            found, now_s = read_hosts(folder), time.time()
            living = {name: each for name, each in found.tokens.items() if each.ends_s > now_s and each.num_uses}
            found = msgspec.structs.replace(found, tokens=living)
            before = msgspec.json.encode(found)
            yield found
            if (after := msgspec.json.encode(found)) != before:
                replace_private(folder / HOSTS_FILE, after)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from error


def ca_hash(ca: bytes) -> str:
    """Return what names a CA, by its certificate as it lies in ca.pem."""
    return hashlib.sha256(ca).hexdigest()


def new_token(folder: Path, ca: bytes, *, role: Role, names: str, host: str, num_uses: int, life_s: int) -> Token:
    """Return a fresh token. Raises UserError."""
    if not (folder / MESH_FILE).exists():
        raise UserError(f"{folder} has no {MESH_FILE}: name the folder that `kvmesh bus-config` has written by --keys")
    token = Token(ca_hash(ca), secrets.token_hex(4), secrets.token_urlsafe(32))
    record = TokenRecord(
        secret_hash=_hash(token.secret), role=role, names=names, host=host, num_uses=num_uses,
        ends_s=int(time.time()) + life_s,
    )  # fmt: skip
    with changing_hosts(folder) as found:
        if len(found.tokens) >= MAX_TOKENS:
            raise UserError(f"there are {MAX_TOKENS} tokens: revoke some by `kvmesh token revoke ID`")
        found.tokens[token.token_id] = record
    return token


def revoke_token(folder: Path, token_id: str) -> None:
    """Have a token be of no use any more. Raises UserError where there is none."""
    with changing_hosts(folder) as found:
        if found.tokens.pop(token_id, None) is None:
            raise UserError(f"there is no token {token_id!r}: `kvmesh token list` shows them")


def checked_token(found: Hosts, token_id: str, secret: str) -> TokenRecord:
    """Return what a token may be used for. Raises TokenRefusedError, with one text for all that is not to be told
    apart from outside."""
    record = found.tokens.get(token_id)
    is_right = hmac.compare_digest(record.secret_hash if record else "", _hash(secret))
    if record is None or not is_right or record.ends_s <= time.time() or not record.num_uses:
        raise TokenRefusedError(
            "this token is used up, over, revoked or of another mesh: `kvmesh token` on the mesh's machine makes one"
        )
    return record


def check_scope(record: TokenRecord, host: str, members: Iterable[str]) -> None:
    """Raises HostRefusedError where the token is not for this machine and these members."""
    if record.host and record.host != host:
        raise HostRefusedError(f"this token is for a machine called {record.host}, and this one is {host} (--name)")
    for name in members:
        if name.partition("-")[0] not in SERVICE_NAMES[record.role] or not fnmatch.fnmatchcase(name, record.names):
            allowed = f"{record.role}s" + (f" called {record.names}" if record.names != "*" else "")
            raise HostRefusedError(f"this token is for {allowed}, and not for {name}: make one that is")


def check_names(host: str, members: Iterable[str]) -> None:
    """Raises HostRefusedError for what no machine and no member of one is called."""
    if not is_subject_token(host) or len(host) > _MAX_HOST_CHARS:
        raise HostRefusedError(f"{host[:80]!r} is no name of a machine: letters, digits, - and _ (--name)")
    names = tuple(members)
    if not 0 < len(names) <= MAX_MEMBERS:
        raise HostRefusedError(f"a machine has 1 to {MAX_MEMBERS} members, not {len(names)}")
    for name in names:
        kind, _, rest = name.partition("-")
        number = rest.removeprefix(f"{host}-")
        if rest == number or not re.fullmatch("[0-9]|[1-9][0-9]", number):
            raise HostRefusedError(f"{name[:80]!r} is no member of {host}: they are called like {kind}-{host}-0")


_MAX_HOST_CHARS = 63


def new_host_key() -> tuple[str, str]:
    """Return the public and the secret half of a machine's own key (Ed25519), 64 hexadecimal digits each."""
    key = Ed25519PrivateKey.generate()
    return key.public_key().public_bytes_raw().hex(), key.private_bytes_raw().hex()


def sign_as_host(secret: str, text: bytes) -> str:
    """Return the signature of a text by a machine's own key."""
    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)).sign(text).hex()


def check_host(public: str, signature: str, text: bytes) -> None:
    """Raises HostRefusedError where a text is not signed by the machine that has this public key."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), text)
    except (InvalidSignature, ValueError):
        raise HostRefusedError("this is not signed by the machine that has joined by this name") from None


def check_keys(public: str, users: Sequence[str]) -> None:
    """Raises HostRefusedError for what are no public keys."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    except ValueError:
        raise HostRefusedError("the machine's own public key has 64 hexadecimal digits") from None
    if not all(map(is_user, users)) or len(set(users)) < len(users):
        raise HostRefusedError("each member has a public key of its own, as NATS writes a user's")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
