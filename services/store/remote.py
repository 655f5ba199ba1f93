"""The remote tier: values on a Valkey or Redis server under `kvmesh:{identity}:{block hash}`. Only this file knows the
server's client.

Keys may vanish at any time (the server's own eviction, another store, a flush): that is a miss. Each has a time to
live, renewed by its use, so that nothing stays for ever when no store comes back.
"""

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, cast
from urllib.parse import urlsplit

import valkey
from valkey.backoff import NoBackoff
from valkey.exceptions import OutOfMemoryError
from valkey.retry import Retry

from schemas.directory import Tier
from services.errors import UserError
from services.store.limits import SCAN_PROGRESS_INTERVAL_S
from services.store.tiers import KEY_BYTES, Entry, StoreKey, TierError, TierFullError, Value

log = logging.getLogger(__name__)

_SCAN_COUNT = 1_000


class _Pipeline(Protocol):
    """What is used of the client's pipeline; the client itself is typed loosely."""

    def strlen(self, name: bytes) -> object: ...
    def pttl(self, name: bytes) -> object: ...
    def set(self, name: bytes, value: bytes, *, ex: int) -> object: ...
    def mget(self, names: Sequence[bytes]) -> object: ...
    def expire(self, name: bytes, time: int) -> object: ...
    def execute(self, raise_on_error: bool = True) -> list[object]: ...


class _Client(Protocol):
    """What is used of the client. Safe for threads: each call takes a connection of its own."""

    def ping(self) -> object: ...
    def pipeline(self, transaction: bool = True) -> _Pipeline: ...
    def scan(self, cursor: int, match: bytes, count: int) -> tuple[int, list[bytes]]: ...
    def unlink(self, *names: bytes) -> object: ...
    def close(self) -> None: ...


class ValkeyTier:
    """The values of one model's KV (`identity`) on a server. `timeout_s` bounds every exchange with it. `earlier`: of
    formats that are not believed any more."""

    name: Tier = Tier.REMOTE

    def __init__(
        self, url: str, identity: str, value_bytes: int, *, timeout_s: float, ttl_s: int, earlier: Sequence[str] = ()
    ) -> None:
        """Connect. Raises UserError for an invalid URL, or a server that does not answer."""
        self._prefix = _prefix_of(identity)
        self._earlier = tuple(map(_prefix_of, earlier))
        self._value_bytes = value_bytes
        self._ttl_s = ttl_s
        # Make the client. It connects with its first command, so only an invalid URL fails here.
        try:
            parts = urlsplit(url)
            self._address = f"{parts.hostname}:{parts.port or 6379}"  # in messages never the URL: it has the password
            client = valkey.Valkey.from_url(  # pyright: ignore[reportUnknownMemberType]
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 1, (valkey.ConnectionError,)),  # a pooled connection may have died unseen
                retry_on_error=[valkey.ConnectionError],
            )
        except ValueError as error:
            raise UserError(f"the store's URL is not one of a server: {error}") from error
        # A server that does not answer ends the start, and not the first read.
        self._client = cast("_Client", client)
        try:
            with self._errors():
                self._client.ping()
        except TierError as error:
            self.close()
            raise UserError(f"the store's server does not answer: {error}; start it or change --store") from error

    def scan(self) -> list[Entry]:
        ttls_ms: dict[StoreKey, int] = {}
        logged_at = time.monotonic()
        with self._errors():
            # Keys of earlier formats are only counted, for the warning below.
            num_earlier = sum(len(names) for prefix in self._earlier for names in self._pages(prefix))
            for names in self._pages(self._prefix):
                # Ask for size and time to live of all keys of a page in one round trip.
                pipeline = self._client.pipeline(transaction=False)
                for name in names:
                    pipeline.strlen(name)
                    pipeline.pttl(name)
                replies = pipeline.execute(raise_on_error=False)
                # A key may have vanished meanwhile or hold another type: only values of the right size count.
                for name, size, ttl_ms in zip(names, replies[::2], replies[1::2], strict=True):
                    key = self._key_of(name)
                    if key is not None and size == self._value_bytes and isinstance(ttl_ms, int):
                        ttls_ms[key] = ttl_ms
                # Log how far a long scan is: the store serves nothing before the scan ends.
                if time.monotonic() - logged_at > SCAN_PROGRESS_INTERVAL_S:
                    logged_at = time.monotonic()
                    log.warning("reading the keys of %s: %d blocks so far", self._address, len(ttls_ms))
        if num_earlier:
            log.warning(
                "%d blocks on %s are of an earlier format and not believed; `kvmesh purge --store` deletes them",
                num_earlier,
                self._address,
            )
        # Each use renews the time to live: it shows the order of use.
        return [Entry(key, self._value_bytes) for key in sorted(ttls_ms, key=ttls_ms.__getitem__)]

    def write(self, values: Mapping[StoreKey, Value]) -> None:
        pipeline = self._client.pipeline(transaction=False)
        for key, value in values.items():
            pipeline.set(self._name(key), bytes(value), ex=self._ttl_s)
        with self._errors():
            replies = pipeline.execute(raise_on_error=False)
        failed = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if failed is not None:
            written = [h for h, reply in zip(values, replies, strict=True) if not isinstance(reply, Exception)]
            kind = TierFullError if isinstance(failed, OutOfMemoryError) else TierError
            raise kind(f"{self._address} does not take values: {failed}", written) from failed

    def read(self, keys: Sequence[StoreKey]) -> list[bytes | None]:
        if not keys:
            return []
        names = [self._name(key) for key in keys]
        pipeline = self._client.pipeline(transaction=False)
        pipeline.mget(names)
        for name in names:
            pipeline.expire(name, self._ttl_s)
        with self._errors():
            replies = pipeline.execute(raise_on_error=False)
            values = replies[0]
            if isinstance(values, Exception):
                raise values
        return cast("list[bytes | None]", values)

    def delete(self, keys: Sequence[StoreKey]) -> None:
        if keys:
            with self._errors():
                self._client.unlink(*(self._name(key) for key in keys))

    def delete_all(self) -> None:
        with self._errors():
            for prefix in (self._prefix, *self._earlier):
                for names in self._pages(prefix):
                    self._client.unlink(*names)

    def close(self) -> None:
        self._client.close()

    def _name(self, key: StoreKey) -> bytes:
        return self._prefix + key.hex().encode()

    def _key_of(self, name: bytes) -> StoreKey | None:
        try:
            key = StoreKey(bytes.fromhex(name[len(self._prefix) :].decode("ascii")))
        except ValueError:  # not ours, whatever it begins with
            return None
        return key if len(key) == KEY_BYTES else None

    def _pages(self, prefix: bytes) -> Iterator[list[bytes]]:
        """Yield the names that begin so, some hundred at a time; a name may come twice."""
        cursor = 0
        while True:
            cursor, names = self._client.scan(cursor, match=prefix + b"*", count=_SCAN_COUNT)
            if names:
                yield names
            if cursor == 0:
                return

    @contextmanager
    def _errors(self) -> Generator[None]:
        """Translate the client's errors. Raises TierError."""
        try:
            yield
        except (valkey.ValkeyError, OSError) as error:
            raise TierError(f"{self._address}: {error}") from error


def _prefix_of(identity: str) -> bytes:
    return f"kvmesh:{identity}:".encode()
