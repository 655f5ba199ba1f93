"""A machine that joins a mesh, and one that has: its keys, which it has made itself, and what it keeps of the mesh."""

import os
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from dataplane.addresses import in_url, is_loopback
from schemas.subjects import Role
from services.config import MeshConfig
from services.engine.checkpoint import Checkpoint, read_checkpoint
from services.engine.demo_model import DEMO_MODEL_DIR
from services.errors import UserError
from services.files import private_folder, replace_private
from services.join.client import Asking, JoinRefusedError, JoinUrl
from services.join.messages import Admitted, Asks, Done, FromHost, Join, Look, Secrets, Seen, Signed, digest_of, release
from services.settings import changed
from services.trust import nats_jwt
from services.trust.certificates import CA_FILE
from services.trust.hosts import Token, ca_hash, new_host_key
from services.trust.keys import RoleKey, key_file, load_role_key
from services.trust.members import role_of_member, write_member

HOST_FILE = "host.key.json"
KEYS_FOLDER = "keys"
CLOCK_REFUSED_S, CLOCK_NAMED_S = 3600.0, 1.0
"""Clocks that differ by more than so much are refused, or named."""
RENEW_SHARE = 1 / 3
"""Keys are signed again once so much of their life is left."""


class HostState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine that has joined keeps beside its members' keys. `secret`: its own key."""

    url: str
    host: str
    public: str
    secret: str
    members: tuple[str, ...]
    brokers: str = ""
    begins_s: int = 0
    ends_s: int = 0
    """Between these its members' keys are good."""
    config: MeshConfig = MeshConfig()


class JoinedHost:
    """A machine that has joined. `folder`: its state folder."""

    def __init__(self, folder: Path, state: HostState, asking: Asking | None = None) -> None:
        self.folder = folder
        self.state = state
        self._asking = asking or Asking(JoinUrl(state.url), self.ca)

    @property
    def keys(self) -> Path:
        """Where the keys lie: those of who looks, and a folder for each member."""
        return self.folder / KEYS_FOLDER

    @property
    def ca(self) -> bytes:
        """The certificate by which the mesh is known."""
        return (self.keys / CA_FILE).read_bytes()

    @property
    def is_member(self) -> bool:
        """It has keys. Where it has not, it was cut off while it joined, and needs a token."""
        return self.state.ends_s > 0

    def may_run(self, url: JoinUrl, host: str, members: Sequence[str]) -> bool:
        """Return whether it has keys for these members of that mesh."""
        state = self.state
        return self.is_member and (state.url, state.host) == (str(url), host) and set(members) <= set(state.members)

    @classmethod
    def found(cls, folder: Path) -> "JoinedHost | None":
        """Return what has joined from this folder; None: nothing has. Raises UserError."""
        path = folder / HOST_FILE
        try:
            return cls(folder, msgspec.json.decode(path.read_bytes(), type=HostState))
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise UserError(f"{path} cannot be used ({error}): take it away, and join with a new token") from error

    @property
    def own_address(self) -> str:
        """Of this machine, as the mesh's machine sees it; empty: nothing was asked yet."""
        return self._asking.own_address

    def look_after(self) -> bool:
        """Take the secrets that the mesh has now, and have the keys signed again where their end is near. Return
        whether anything has changed. Raises JoinRefusedError: it was removed; JoinUnreachableError, UserError."""
        has = self._secrets()
        asked = FromHost(host=self.state.host, now_s=0, has_secrets=digest_of(has))
        found = self._asking.ask_as(asked, self.state.secret, Asks.POLL, Secrets)
        if changed := found != has:
            for name in self.state.members:
                key = load_role_key(key_file(self.keys / name, role_of_member(name)))
                write_member(self.keys / name, _with_secrets(key, found))
        left_s = self.state.ends_s - time.time()
        if left_s < RENEW_SHARE * (self.state.ends_s - self.state.begins_s):
            self._renew()
            changed = True
        return changed

    def leave_mesh(self) -> None:
        """Have all that this machine was given revoked, and forget it. Raises UserError."""
        self._asking.ask_as(FromHost(host=self.state.host, now_s=0), self.state.secret, Asks.LEAVE, Done)
        self.drop_keys()

    def drop_keys(self) -> None:
        """Take away what was given to this machine."""
        shutil.rmtree(self.keys, ignore_errors=True)
        (self.folder / HOST_FILE).unlink(missing_ok=True)

    def _renew(self) -> None:
        pairs = {name: _pair_in(self.keys / name, role_of_member(name)) for name in self.state.members}
        observer = nats_jwt.pair_of(nats_jwt.seed_of((self.keys / f"{Role.OBSERVER}.creds").read_text("utf-8")))
        asked = FromHost(
            host=self.state.host, now_s=0, observer=nats_jwt.public(observer),
            members={name: nats_jwt.public(pair) for name, pair in pairs.items()},
        )  # fmt: skip
        signed = self._asking.ask_as(asked, self.state.secret, Asks.RENEW, Signed)
        _write_keys(self.keys, signed, self._secrets(), pairs, observer)
        self.state = msgspec.structs.replace(self.state, begins_s=int(time.time()), ends_s=signed.ends_s)
        _write_state(self.folder, self.state)

    def _secrets(self) -> Secrets:
        """Return what the members' keys have."""
        keys = [load_role_key(key_file(self.keys / name, role_of_member(name))) for name in self.state.members]
        holder = next((key for key in keys if key.role is Role.HOLDER), RoleKey(role=Role.HOLDER, account=""))
        return Secrets(
            ticket_secrets=holder.ticket_secrets, content_secrets=holder.content_secrets,
            tenant_public_key=holder.tenant_public_key,
            tenant_seed=next((key.tenant_seed for key in keys if key.tenant_seed), ""),
        )  # fmt: skip


def join(folder: Path, url: JoinUrl, token: Token, host: str, members: Sequence[str], model: str) -> JoinedHost:
    """Join a mesh: check what must be the same here and there, then use the token. `model`: the checkpoint's folder;
    empty: where the mesh has its own. Raises UserError."""
    before = JoinedHost.found(folder)
    if before is not None and (before.state.host != host or ca_hash(before.ca) != token.ca_hash):
        raise UserError(
            f"this machine has joined {before.state.url} as {before.state.host}: `kvmesh leave` first, or set "
            "KVMESH_STATE_DIR to another folder"
        )
    asking, ca = Asking.trusting(url, token.ca_hash)
    seen = asking.ask(Asks.LOOK, Look(token_id=token.token_id, secret=token.secret), Seen)
    check_seen(seen, model)
    # A machine that joins anew is known again by its key. Its members' keys are fresh: the old ones may be revoked.
    public, secret = (before.state.public, before.state.secret) if before else new_host_key()
    state = HostState(url=str(url), host=host, public=public, secret=secret, members=tuple(members))
    pairs = {name: nats_jwt.new_pair(nats_jwt.USER) for name in members}
    observer = nats_jwt.new_pair(nats_jwt.USER)
    asked = Join(
        token_id=token.token_id, secret=token.secret, host=host, public=public, release=release(),
        members={name: nats_jwt.public(pair) for name, pair in pairs.items()}, observer=nats_jwt.public(observer),
    )  # fmt: skip
    # Its own key is written first: were it lost with the answer, nobody could join by this name again.
    keys = folder / KEYS_FOLDER
    if before is None:
        private_folder(folder, is_ours=True)
        private_folder(keys)
        replace_private(keys / CA_FILE, ca)
        _write_state(folder, state)
    joined = JoinedHost(folder, state, asking)
    try:
        admitted = asking.ask(Asks.JOIN, asked, Admitted)
    except JoinRefusedError:
        if before is None:
            joined.drop_keys()
        raise
    for stale in set(before.state.members if before else ()) - set(members):
        shutil.rmtree(keys / stale, ignore_errors=True)
    _write_keys(keys, admitted.keys, admitted.secrets, pairs, observer)
    joined.state = msgspec.structs.replace(
        state, brokers=reached(admitted.brokers, url.host), begins_s=int(time.time()), ends_s=admitted.keys.ends_s,
        config=_reached_config(admitted.config, url.host),
    )  # fmt: skip
    _write_state(folder, joined.state)
    return joined


def check_seen(seen: Seen, model: str) -> Checkpoint:
    """Return this machine's model. Raises UserError where something that must be the same is not."""
    if seen.release != release():
        raise UserError(
            f"the mesh is kvmesh {seen.release}, and this machine has {release()}: install that one here "
            f"(pip install kvmesh=={seen.release})"
        )
    ahead_s = time.time() - seen.now_s
    if abs(ahead_s) > CLOCK_REFUSED_S:
        raise UserError(
            f"this machine's clock differs from the mesh's by {abs(ahead_s) / 3600:.1f} hours: set it, keys end by it"
        )
    path = model or _same_model(seen)
    checkpoint = read_checkpoint(path, "vllm" if seen.engine == "vllm" else "transformers")
    if checkpoint.weights != seen.weights:
        raise UserError(
            f"the weights in {checkpoint.path} are not those of {seen.model} ({seen.weights[:12]}), which the mesh "
            f"serves from {seen.model_path}: copy that folder here, and name it by --model"
        )
    return checkpoint


def _same_model(seen: Seen) -> str:
    """Return where this machine may have the mesh's model. Raises UserError."""
    demo = str(DEMO_MODEL_DIR)
    if Path(seen.model_path).is_dir():
        return seen.model_path
    if seen.model_path.endswith(f"/{DEMO_MODEL_DIR.name}"):
        return demo
    raise UserError(f"the mesh serves {seen.model} from {seen.model_path}, which is not here: name its copy by --model")


def clock_line(seen_s: float, now_s: float) -> str:
    """Return what is to be said of two clocks; empty: nothing."""
    ahead_s = now_s - seen_s
    return f"this machine's clock is {ahead_s:+.1f} s from the mesh's" if abs(ahead_s) > CLOCK_NAMED_S else ""


def reached(brokers: str, host: str) -> str:
    """Return a list of brokers as another machine reaches them: what is the head's loopback is the head."""
    found: list[str] = []
    for url in brokers.split(","):
        parts = urlsplit(url.strip())
        is_own = is_loopback(parts.hostname or "")
        found.append(f"tls://{in_url(host)}:{parts.port or 4222}" if is_own else url.strip())
    return ",".join(found)


def _reached_config(config: MeshConfig, host: str) -> MeshConfig:
    """Return the mesh's configuration with its collector of spans as another machine reaches it."""
    parts = urlsplit(config.telemetry.otlp_endpoint)
    if not is_loopback(parts.hostname or ""):
        return config
    port = f":{parts.port}" if parts.port else ""
    endpoint = parts._replace(netloc=f"{in_url(host)}{port}").geturl()
    return changed(config, {"telemetry.otlp_endpoint": endpoint})


def host_name() -> str:
    """Return what this machine is called, as a word of subjects."""
    name = socket.gethostname().split(".")[0]
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in name)[:63]


def _write_keys(
    keys: Path, signed: Signed, secrets: Secrets, pairs: dict[str, nats_jwt.KeyPair], observer: nats_jwt.KeyPair
) -> None:
    """Write each member's key into a folder of its own, and who looks into this one. Raises UserError."""
    looks = nats_jwt.credentials_of(observer, signed.observer)
    write_member(keys, RoleKey(role=Role.OBSERVER, account=signed.account, credentials=looks))
    for name, pair in pairs.items():
        credentials = nats_jwt.credentials_of(pair, signed.members[name])
        key = RoleKey(role=role_of_member(name), account=signed.account, name=name, credentials=credentials)
        write_member(keys / name, _with_secrets(key, secrets))
        replace_private(keys / name / CA_FILE, (keys / CA_FILE).read_bytes())


def _with_secrets(key: RoleKey, secrets: Secrets) -> RoleKey:
    """Return a member's key with what its role has of these secrets, and no more."""
    if key.role is Role.GATEWAY:
        return msgspec.structs.replace(key, tenant_seed=secrets.tenant_seed)
    return msgspec.structs.replace(
        key, ticket_secrets=secrets.ticket_secrets, content_secrets=secrets.content_secrets,
        tenant_public_key=secrets.tenant_public_key,
    )  # fmt: skip


def _pair_in(folder: Path, role: Role) -> nats_jwt.KeyPair:
    return nats_jwt.pair_of(nats_jwt.seed_of(load_role_key(key_file(folder, role)).credentials))


def _write_state(folder: Path, state: HostState) -> None:
    try:
        replace_private(folder / HOST_FILE, msgspec.json.encode(state))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {os.strerror(error.errno or 0)}") from error
