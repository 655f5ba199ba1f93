"""A back tier that is a dict."""

import threading
from collections.abc import Mapping, Sequence

from schemas.directory import Tier
from services.store.tiers import Entry, StoreKey, Value


class DictTier:
    """A back tier that lies in this process and ends with it."""

    name: Tier = "disk"

    def __init__(self) -> None:
        self.values: dict[StoreKey, bytes] = {}
        self._lock = threading.Lock()

    def scan(self) -> list[Entry]:
        with self._lock:
            return [Entry(key, len(value)) for key, value in self.values.items()]

    def write(self, values: Mapping[StoreKey, Value]) -> None:
        with self._lock:
            for key, value in values.items():
                self.values.pop(key, None)
                self.values[key] = bytes(value)

    def read(self, keys: Sequence[StoreKey]) -> list[bytes | None]:
        with self._lock:
            found = [self.values.pop(key, None) for key in keys]
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    self.values[key] = value
            return found

    def delete(self, keys: Sequence[StoreKey]) -> None:
        with self._lock:
            for key in keys:
                self.values.pop(key, None)

    def delete_all(self) -> None:
        with self._lock:
            self.values.clear()

    def close(self) -> None:
        """Nothing is held open."""
