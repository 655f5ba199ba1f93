"""The keys of one mesh: made at its start, or by `kvmesh bus-config` for a broker of one's own.

Each role has a key of its own, which makes identities of that role and of no other. A service needs its role's key
file, or that of one member (`services/trust/members.py`), which is of use under one name and until its end. The broker
needs nobody's secret: public keys, and a certificate's own key where it speaks TLS.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

from dataplane.addresses import is_loopback
from schemas.broker import MAX_PAYLOAD_BYTES
from schemas.ids import is_subject_token, new_id
from schemas.permissions import GUESTS, SERVICE_NAMES, inbox_of
from schemas.subjects import Role
from services.config import READABLE_KEYS, MeshConfig, fresh_secret, takes_readable_keys
from services.errors import UserError
from services.files import create_private, private_folder, write_private
from services.trust import nats_jwt
from services.trust.certificates import CA_FILE, CERTIFICATE_FILE, KEY_FILE, BrokerCertificate, ca_file, new_certificate
from services.trust.credentials import TenantSigner
from services.trust.routes import BROKER_FILE, Routes

MESH_FILE = "mesh.key.json"
IDENTITY_LIFE_S = 24 * 3600
"""A service's identity ends so long after it was made; it makes itself another one before."""
_ROLE_SUFFIX = ".key.json"
_CREDENTIALS_SUFFIX = ".creds"


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who one instance is on the bus. `credentials`: what proves it to the broker, as a NATS credentials file."""

    role: Role
    name: str
    credentials: str

    @property
    def inbox(self) -> str:
        """The prefix of the subjects on which it awaits replies."""
        return inbox_of(self.role, self.name)


class BusAccess(NamedTuple):
    """How to get to a broker. Without an identity: one that lets anybody in. `url`: with commas, the servers of one
    cluster."""

    url: str
    identity: Identity | None = None
    ca: Path | None = None
    """The certificate of the CA that vouches for the broker; None: one of those that the system trusts."""
    renew: Callable[[], Identity] | None = None
    """Returns the same member's identity for the time to come. Raises UserError."""

    @property
    def shown(self) -> str:
        """The address without a password."""
        return without_password(self.url)

    @property
    def servers(self) -> list[str]:
        """The servers' addresses, in the order in which they are named. Raises UserError where there is none."""
        found = dict.fromkeys(url.strip() for url in self.url.split(","))
        if not all(found):
            raise UserError(f"{self.shown!r} is no broker's address: {_LIKE}")
        return list(found)

    @property
    def is_encrypted(self) -> bool:
        """TLS is insisted on: always where somebody with a key or a password connects to another machine. Raises
        UserError for what is no broker's address."""
        ways = {self._is_encrypted(url) for url in self.servers}
        if len(ways) > 1:
            raise UserError(f"of {self.shown!r} some would be spoken to in clear: name all of them as tls://HOST:4222")
        return ways.pop()

    def _is_encrypted(self, url: str) -> bool:
        # The client library takes anything else, `NATS://host` too, for the name of a host.
        is_known = url.startswith(("nats://", "tls://")) or "://" not in url
        parts = _split(url) if is_known else None
        if parts is None or not parts.hostname:
            raise UserError(f"{without_password(url)!r} is no broker's address: {_LIKE}")
        has_secret = self.identity is not None or parts.username is not None
        return parts.scheme == "tls" or self.ca is not None or (has_secret and not is_loopback(parts.hostname))


_LIKE = "it is like nats://127.0.0.1:4222 or tls://HOST:4222"


def without_password(url: str) -> str:
    """Return a broker's address as it may be shown."""
    return re.sub(r"//[^/]*@", "//", url)


def _split(url: str) -> SplitResult | None:
    """Return the parts of an address; None for no such port, or half of an IPv6 address."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        parts.port  # noqa: B018 -- it is looked at only when it is read
    except ValueError:
        return None
    return parts


class RoleKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The content of a key file: all that is secret to a role. Whoever has its seed can be any member of the role."""

    role: Role
    account: str
    """The mesh's public key."""
    seed: str = ""
    """Makes identities. Empty: this is the key of one member, which is called `name` and has `credentials`."""
    name: str = ""
    credentials: str = ""
    ticket_secrets: tuple[str, ...] = ()
    """Holders': the first signs the data plane's tickets, all of them verify."""
    content_secrets: tuple[str, ...] = ()
    """Holders': the first proves which content a block has, all of them are believed."""
    tenant_seed: str = ""
    """Gateways': what they sign with whose a request is."""
    tenant_public_key: str = ""
    """Holders': what verifies that."""

    def identity(self, name: str, life_s: int | None = IDENTITY_LIFE_S) -> Identity:
        """Return the member of this name, for so long; None: for ever. Raises UserError for what is no name, and for
        what is not this member's."""
        if not is_subject_token(name):
            raise UserError(f"{name!r} is no name for the bus: it may have letters, digits, - and _ only")
        if self.credentials:
            if name != self.name:
                raise UserError(f"this key is {self.name}'s alone: `kvmesh bus-config --member {name}` makes another")
            return Identity(role=self.role, name=name, credentials=self.credentials)
        signer, ends_s = nats_jwt.pair_of(self.seed), None if life_s is None else int(time.time()) + life_s
        credentials = nats_jwt.user_credentials(signer, self.account, name, ends_s)
        return Identity(role=self.role, name=name, credentials=credentials)

    def member(self, service_id: str) -> Identity:
        """Return the identity of a service that starts. A gateway's is another one in each of its lives, unless its key
        is of one name: what a worker has to send to the one before concerns nobody."""
        is_new = self.role is Role.GATEWAY and not self.credentials
        return self.identity(new_id(service_id) if is_new else service_id)


class Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user that was made for a member: its public key, and Unix times. What it was given until `revoked_s` is not
    taken any more; 0: it is not revoked."""

    public: str
    ends_s: int
    revoked_s: int = 0


class MeshKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file with which members are made and revoked. It is of whoever runs the mesh, and of no
    service."""

    seed: str
    """Of NATS' operator, who vouches for the mesh."""
    account: str
    system: str
    """The public keys of the mesh, and of the broker's own account."""
    signers: Mapping[Role, str]
    """Each role's public key."""
    people: Mapping[Role, str]
    """The seeds of people's roles."""
    system_seed: str = ""
    """Of the broker's own account: who tells a cluster what has changed is a user of it. Empty: keys of before."""
    members: Mapping[str, tuple[Made, ...]] = {}

    def account_token(self) -> str:
        """Return what the broker is to know of the mesh now."""
        operator = nats_jwt.pair_of(self.seed)
        made = [each for users in self.members.values() for each in users]
        revoked = {each.public: each.revoked_s for each in made if each.revoked_s and each.ends_s > time.time()}
        return nats_jwt.account_token(operator, self.account, self.signers, self.system, revoked)


@dataclass(frozen=True)
class MeshKeys:
    """All keys of a mesh, and what its broker must know. Make them with `fresh`."""

    broker_config: str
    """For nats-server's configuration. Public keys only."""
    roles: Mapping[Role, RoleKey]
    mesh: MeshKey
    certificate: BrokerCertificate | None = None
    """With it the broker speaks TLS only."""
    routes: Routes | None = None
    """With them it is of several servers."""

    @classmethod
    def fresh(cls, hosts: Sequence[str] = (), *, content_secret: str = "", has_routes: bool = False) -> "MeshKeys":
        """`hosts`: what clients call the broker, for its certificate; none: TLS is not used. `content_secret`: by which
        the blocks of its stores are believed; empty: a fresh one. `has_routes`: each host is a server of one broker.
        Raises UserError for what is no name or address."""
        # NATS has a chain of trust: the operator signs the accounts, and each role's key signs the users of that role.
        operator = nats_jwt.new_pair(nats_jwt.OPERATOR)
        account, system = nats_jwt.new_pair(nats_jwt.ACCOUNT), nats_jwt.new_pair(nats_jwt.ACCOUNT)
        signers = {role: nats_jwt.new_pair(nats_jwt.ACCOUNT) for role in Role}
        # Only the mesh's own key has the operator's seed, and those of guests, who get credentials but no key file.
        mesh = MeshKey(
            seed=nats_jwt.seed(operator), account=nats_jwt.public(account), system=nats_jwt.public(system),
            signers={role: nats_jwt.public(pair) for role, pair in signers.items()},
            people={role: nats_jwt.seed(signers[role]) for role in GUESTS}, system_seed=nats_jwt.seed(system),
        )  # fmt: skip
        # Gateways sign whose a request is. Holders only verify it, and so get the public key alone.
        tenant_seed = fresh_secret()
        own: dict[Role, dict[str, Any]] = {
            Role.GATEWAY: {"tenant_seed": tenant_seed},
            Role.HOLDER: {
                "ticket_secrets": (fresh_secret(),), "content_secrets": (content_secret or fresh_secret(),),
                "tenant_public_key": TenantSigner(tenant_seed).public_key,
            },
        }  # fmt: skip
        # The broker resolves accounts from memory: its configuration carries the tokens of both.
        config = (
            f"operator: {nats_jwt.operator_token(operator)}\nresolver: MEMORY\nsystem_account: {mesh.system}\n"
            f"resolver_preload: {{\n  {mesh.account}: {mesh.account_token()}\n"
            f"  {mesh.system}: {nats_jwt.system_token(operator, system)}\n}}\n"
        )
        roles = {
            role: RoleKey(role=role, account=mesh.account, seed=nats_jwt.seed(pair), **own.get(role, {}))
            for role, pair in signers.items()
        }
        certificate = new_certificate(hosts) if hosts else None
        return cls(config, roles, mesh, certificate, Routes(hosts) if has_routes else None)

    def files(self, folder: Path, people_life_s: int | None = None) -> dict[str, bytes]:
        """Return the content of each file by its name: each role's key, people's credentials, and last the broker's
        part, which is there only where all are. `folder`: where the broker finds its own. `people_life_s`: when their
        credentials end; None: never."""
        found: dict[str, bytes] = {}
        for role, key in self.roles.items():
            if role in GUESTS:
                found[f"{role}{_CREDENTIALS_SUFFIX}"] = key.identity(role, people_life_s).credentials.encode()
            else:
                found[f"{role}{_ROLE_SUFFIX}"] = msgspec.json.encode(key)
        config = f"max_payload: {MAX_PAYLOAD_BYTES}\n{self.broker_config}"
        if self.certificate:
            found[CA_FILE] = self.certificate.ca
            found[CERTIFICATE_FILE] = self.certificate.certificate
            found[KEY_FILE] = self.certificate.key
            certificate, key = (json.dumps(str(folder / name)) for name in (CERTIFICATE_FILE, KEY_FILE))
            config += f'tls: {{ cert_file: {certificate}, key_file: {key}, min_version: "1.3" }}\n'
        if self.routes:
            found |= self.routes.files(folder)
        return found | {BROKER_FILE: config.encode()}

    def save(self, folder: Path) -> None:
        """Write all files into a folder of ours, which only its owner may read from then on, in place of what is there.
        Raises UserError where it cannot be written."""
        try:
            private_folder(folder, is_ours=True)
            for name, content in self.files(folder.absolute()).items():
                write_private(folder / name, content)
        except OSError as error:
            raise UserError(f"the keys cannot be written to {folder}: {error.strerror}") from error

    def create(self, folder: Path, people_life_s: int, at: Path | None = None) -> None:
        """Write all files into a folder, which is made where it is missing, with what makes and revokes members. `at`:
        where the broker finds its own; None: there. Raises UserError where it cannot be written, or has one of them
        already: nothing is replaced, and no link is followed."""
        files = self.files(at or folder.absolute(), people_life_s)
        people = {role: nats_jwt.user_of(files[credentials_file(folder, role).name].decode()) for role in GUESTS}
        members = {name: (Made(public=user.sub, ends_s=user.iat + people_life_s),) for name, user in people.items()}
        files |= {MESH_FILE: msgspec.json.encode(msgspec.structs.replace(self.mesh, members=members))}
        if taken := [name for name in files if os.path.lexists(folder / name)]:
            raise UserError(
                f"{folder} has the keys of a mesh already ({taken[0]}): whoever uses them would be locked out; name "
                "another"
            )
        try:
            private_folder(folder)
            for name, content in files.items():
                create_private(folder / name, content)
        except OSError as error:
            raise UserError(f"the keys cannot be written to {folder}: {error.strerror}") from error


def key_file(folder: Path, role: Role) -> Path:
    return folder / f"{role}{_ROLE_SUFFIX}"


def credentials_file(folder: Path, role: Role) -> Path:
    """Return where the credentials of the people of this role lie."""
    return folder / f"{role}{_CREDENTIALS_SUFFIX}"


def load_role_key(path: Path) -> RoleKey:
    """Raises UserError where there is no such key, or others may read it."""
    key = read_key(path, RoleKey)
    try:
        nats_jwt.user_of(key.credentials) if key.credentials else nats_jwt.pair_of(key.seed)
    except ValueError as error:
        raise UserError(f"{path} is no role's key: `kvmesh bus-config` makes keys") from error
    return key


KeyT = TypeVar("KeyT", RoleKey, MeshKey)


def read_key(path: Path, kind: type[KeyT]) -> KeyT:
    """Raises UserError where there is no such file, or others may read it."""
    refuse_readable(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise UserError(
            f"cannot read the key {path}: {error.strerror}; `kvmesh bus-config` makes keys, --keys names their folder"
        ) from error
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is no key of a mesh: `kvmesh bus-config` makes keys") from error


def refuse_readable(path: Path) -> None:
    """Raises UserError for a key that others may read, as ssh does; for whoever has mounted it so, see the error."""
    try:
        mode = path.stat().st_mode & 0o777
    except OSError:
        return  # whoever reads it reports so
    if mode & 0o077 and not takes_readable_keys():
        raise UserError(
            f"others may read the key {path} (mode {mode:03o}): chmod 600 it, or set {READABLE_KEYS}=1 where it is "
            "mounted so"
        )


def with_key(config: MeshConfig, key: RoleKey) -> MeshConfig:
    """Return the configuration of a service of this role: with the role's own secrets."""
    secrets = {
        "ticket_secrets": key.ticket_secrets, "content_secrets": key.content_secrets, "tenant_seed": key.tenant_seed,
        "tenant_public_key": key.tenant_public_key,
    }  # fmt: skip
    return msgspec.structs.replace(config, **{name: secret for name, secret in secrets.items() if secret})


def person(path: Path, role: Role) -> Identity:
    """Return the identity in a person's credentials file. Raises UserError where there is none, or others may read
    it."""
    refuse_readable(path)
    try:
        credentials = path.read_text("utf-8")
        name = nats_jwt.user_of(credentials).name
    except OSError as error:
        raise UserError(f"cannot read the credentials {path}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} has no NATS credentials: take observer.creds or operator.creds of the mesh") from error
    return Identity(role=role, name=name, credentials=credentials)


def person_access(url: str, path: Path, role: Role) -> BusAccess:
    """Return how a person gets to the broker, with the credentials in a file, beside which its CA lies. Raises
    UserError."""
    return BusAccess(url, person(path, role), ca_file(path.parent), lambda: person(path, role))


assert set(SERVICE_NAMES) | set(GUESTS) == set(Role)
