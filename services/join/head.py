"""What the head of a mesh answers to machines at its join port. It knows the mesh's own keys, and no bus."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from pathlib import Path

import msgspec

from dataplane.addresses import IPV4_LOOPBACK
from schemas.subjects import Role
from services.asgi import Refusal
from services.config import GatewayConfig, MeshConfig, NatsConfig, StoreConfig, TelemetryConfig, with_device
from services.engine.checkpoint import Checkpoint
from services.errors import UserError
from services.join.messages import (
    Admitted,
    Asks,
    Done,
    FromHost,
    Join,
    Look,
    Secrets,
    Seen,
    Signed,
    release,
)
from services.trust.certificates import CA_FILE
from services.trust.hosts import (
    MAX_HOSTS,
    Host,
    HostRefusedError,
    TokenRefusedError,
    changing_hosts,
    check_host,
    check_keys,
    check_names,
    check_scope,
    checked_token,
    read_hosts,
)
from services.trust.keys import key_file, load_role_key
from services.trust.members import revoke_member, role_of_member, sign_member

MEMBER_LIFE_S = 30 * 24 * 3600
"""A machine's keys end so long after they were signed; it has them signed again a third before that."""
MAX_TRIES, TRIES_WITHIN_S = 5, 60.0
"""So many wrong tokens in so long from one address; then it is told to wait."""
MAX_ADDRESSES = 10_000
"""Of so many it is known how often they have tried."""
SIGNED_WITHIN_S = 2 * 3600
"""What a machine has signed is taken for so long: its clock may be off by half of it."""


class TriesError(Exception):
    """This address has tried too often."""


class WrongTokens:
    """Counts the wrong tokens that came from each address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Raises TriesError."""
        times = self._wrong.get(address, deque[float]())
        while times and times[0] <= self._clock() - TRIES_WITHIN_S:
            times.popleft()
        if len(times) >= MAX_TRIES:
            raise TriesError

    def note_wrong(self, address: str) -> None:
        self._wrong.setdefault(address, deque()).append(self._clock())
        self._wrong.move_to_end(address)
        if len(self._wrong) > MAX_ADDRESSES:
            self._wrong.popitem(last=False)


class Head:
    """Answers one question after another. `keys`: what `kvmesh bus-config` has written; `config`: of the mesh."""

    def __init__(self, keys: Path, config: MeshConfig, checkpoint: Checkpoint) -> None:
        self._keys = keys
        self._config = config
        self._checkpoint = checkpoint
        self._wrong_tokens = WrongTokens()
        self._handlers: Mapping[Asks, Callable[[bytes], msgspec.Struct]] = {
            Asks.LOOK: self._look, Asks.JOIN: self._join, Asks.POLL: self._poll, Asks.RENEW: self._renew,
            Asks.LEAVE: self._leave,
        }  # fmt: skip

    @property
    def ca(self) -> bytes:
        return (self._keys / CA_FILE).read_bytes()

    def answer(self, asks: Asks, body: bytes, address: str) -> tuple[HTTPStatus, msgspec.Struct]:
        """Return the status and the answer to a question. `address`: whose it is, without the port."""
        try:
            self._wrong_tokens.check(address)
            return HTTPStatus.OK, self._handlers[asks](body)
        except TriesError:
            return HTTPStatus.TOO_MANY_REQUESTS, Refusal("too many wrong tokens from this address: wait a minute")
        except msgspec.DecodeError as error:
            return HTTPStatus.BAD_REQUEST, Refusal(f"this is no question of a machine that joins: {error}")
        except TokenRefusedError as error:
            self._wrong_tokens.note_wrong(address)
            return HTTPStatus.UNAUTHORIZED, Refusal(str(error))
        except HostRefusedError as error:
            return HTTPStatus.FORBIDDEN, Refusal(str(error))
        except UserError as error:  # the head cannot: whoever runs it reads why in its log
            return HTTPStatus.INTERNAL_SERVER_ERROR, Refusal(f"the mesh's machine could not do it: {error}")

    def _look(self, body: bytes) -> Seen:
        asked = msgspec.json.decode(body, type=Look)
        checked_token(read_hosts(self._keys), asked.token_id, asked.secret)
        checkpoint = self._checkpoint
        return Seen(
            release=release(), engine=self._config.engine.name, model=self._config.model.name or checkpoint.name,
            model_path=checkpoint.path, weights=checkpoint.weights, now_s=time.time(),
        )  # fmt: skip

    def _join(self, body: bytes) -> Admitted:
        asked = msgspec.json.decode(body, type=Join)
        check_names(asked.host, asked.members)
        check_keys(asked.public, (*asked.members.values(), asked.observer))
        with changing_hosts(self._keys) as found:
            record = checked_token(found, asked.token_id, asked.secret)
            check_scope(record, asked.host, asked.members)
            if asked.release != release():
                raise HostRefusedError(f"the mesh is kvmesh {release()}, and this machine has {asked.release}")
            # A name is of the machine that has it, until that leaves or is removed.
            known = found.hosts.get(asked.host)
            if known is not None and known.public != asked.public:
                raise HostRefusedError(
                    f"another machine has joined as {asked.host}: join by another --name, or first "
                    f"`kvmesh remove {asked.host}` on the mesh's machine"
                )
            if known is None and len(found.hosts) >= MAX_HOSTS:
                raise HostRefusedError(f"{MAX_HOSTS} machines have joined: remove one first")
            # Sign before the token counts as used: what fails here can be tried again with it.
            keys = self._sign(asked.host, asked.members, asked.observer)
            found.tokens[asked.token_id] = msgspec.structs.replace(record, num_uses=record.num_uses - 1)
            now_s = int(time.time())
            found.hosts[asked.host] = Host(
                public=asked.public, members=tuple(asked.members), release=asked.release,
                joined_s=known.joined_s if known else now_s, seen_s=now_s,
            )  # fmt: skip
        has_gateway = any(role_of_member(name) is Role.GATEWAY for name in asked.members)
        return Admitted(
            keys=keys, secrets=self._secrets(asked.members), brokers=self._config.nats.url,
            config=_of_the_mesh(self._config, has_gateway=has_gateway),
        )  # fmt: skip

    def _poll(self, body: bytes) -> Secrets:
        asked, host = self._known(body, Asks.POLL)
        if asked.has_secrets != host.has_secrets:
            with changing_hosts(self._keys) as found:
                if asked.host in found.hosts:
                    found.hosts[asked.host] = msgspec.structs.replace(
                        found.hosts[asked.host], has_secrets=asked.has_secrets, seen_s=int(time.time())
                    )
        return self._secrets(host.members)

    def _renew(self, body: bytes) -> Signed:
        asked, host = self._known(body, Asks.RENEW)
        if set(asked.members) != set(host.members):
            raise HostRefusedError(f"{asked.host} joined with other members: join with a new token")
        check_keys(host.public, (*asked.members.values(), asked.observer))
        return self._sign(asked.host, asked.members, asked.observer)

    def _leave(self, body: bytes) -> Done:
        asked, host = self._known(body, Asks.LEAVE)
        forget_host(self._keys, asked.host, host)
        return Done()

    def _known(self, body: bytes, asks: Asks) -> tuple[FromHost, Host]:
        """Return what a machine that has joined asks, and what is known of it. Raises HostRefusedError."""
        asked = msgspec.json.decode(body, type=FromHost)
        host = read_hosts(self._keys).hosts.get(asked.host)
        if host is None:
            raise HostRefusedError(f"{asked.host[:80]!r} is no machine of this mesh (any more): join with a new token")
        check_host(host.public, asked.signature, asked.signed_text(asks))
        if abs(time.time() - asked.now_s) > SIGNED_WITHIN_S:
            raise HostRefusedError("the clocks of this machine and the mesh's differ by hours: set them")
        return asked, host

    def _sign(self, host: str, members: Mapping[str, str], observer: str) -> Signed:
        signed = {name: sign_member(self._keys, name, public, MEMBER_LIFE_S) for name, public in members.items()}
        looks = sign_member(self._keys, f"{Role.OBSERVER}-{host}", observer, MEMBER_LIFE_S)
        return Signed(
            account=looks.account, members={name: key.credentials for name, key in signed.items()},
            observer=looks.credentials, ends_s=int(time.time()) + MEMBER_LIFE_S,
        )  # fmt: skip

    def _secrets(self, members: Iterable[str]) -> Secrets:
        """Return what these members prove by, as the key files have it now: they may have been replaced."""
        return secrets_of(self._keys, members)


def secrets_of(keys: Path, members: Iterable[str]) -> Secrets:
    """Return what these members prove by, by the mesh's own keys. Raises UserError."""
    roles, found = {role_of_member(name) for name in members}, Secrets()
    if Role.HOLDER in roles:
        holder = load_role_key(key_file(keys, Role.HOLDER))
        found = Secrets(
            ticket_secrets=holder.ticket_secrets, content_secrets=holder.content_secrets,
            tenant_public_key=holder.tenant_public_key,
        )  # fmt: skip
    if Role.GATEWAY in roles:
        seed = load_role_key(key_file(keys, Role.GATEWAY)).tenant_seed
        found = msgspec.structs.replace(found, tenant_seed=seed)
    return found


def forget_host(keys: Path, name: str, host: Host) -> None:
    """Revoke what a machine has been given, which the broker then has to be told, and forget it. Raises UserError."""
    revoke_member(keys, *host.members, f"{Role.OBSERVER}-{name}")
    with changing_hosts(keys) as found:
        found.hosts.pop(name, None)


def _of_the_mesh(config: MeshConfig, *, has_gateway: bool) -> MeshConfig:
    """Return what other machines have of the head's configuration: nothing that is secret, or of this machine."""
    config = with_device(config, "auto")  # its dtype stays
    worker = msgspec.structs.replace(
        config.worker, plane_host=IPV4_LOOPBACK, plane_ports="", advertise_host="", num_threads=0
    )
    gateway = msgspec.structs.replace(config.gateway, tls_cert="", tls_key="") if has_gateway else GatewayConfig()
    telemetry = TelemetryConfig(
        otlp_endpoint=config.telemetry.otlp_endpoint, sample_ratio=config.telemetry.sample_ratio,
        slow_ttft_ms=config.telemetry.slow_ttft_ms, slow_request_ms=config.telemetry.slow_request_ms,
    )  # fmt: skip
    return MeshConfig(
        nats=NatsConfig(connect_timeout_s=config.nats.connect_timeout_s), model=config.model, gateway=gateway,
        scheduler=config.scheduler, worker=worker, engine=config.engine, store=StoreConfig(), telemetry=telemetry,
        times=config.times,
    )  # fmt: skip
