"""The disk tier: one file a block, in a folder for each model. What is there is there under its name and whole.

A file is written beside its place and renamed into it. It is not synced: after a power cut it may be short or empty,
which its digest finds.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from schemas.directory import Tier
from services.errors import UserError
from services.files import open_private, private_folder
from services.store.limits import SCAN_PROGRESS_INTERVAL_S
from services.store.tiers import Entry, StoreKey, TierError, TierFullError, Value

log = logging.getLogger(__name__)

_NAME = re.compile(r"([0-9a-f]{48})\.kv")
_TEMPORARY_SUFFIX = ".tmp"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskTier:
    """The files of one model's KV (`identity`) under `root`. One process at a time: the folder is locked. `earlier`: of
    formats that are not believed any more."""

    name: Tier = "disk"

    def __init__(self, root: Path, identity: str, value_bytes: int, earlier: Sequence[str] = ()) -> None:
        """Open the folder, made if need be. Raises UserError when it cannot be written, or another store has it."""
        self.folder = root / identity
        self._earlier = [root / name for name in earlier]
        self._value_bytes = value_bytes
        try:
            private_folder(self.folder, is_ours=True)
            self._lock: int | None = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"the store cannot write to {root}: {error.strerror}; give it another folder") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise UserError(f"another store uses {root}: give each one a folder of its own") from error

    def scan(self) -> list[Entry]:
        """Also removes files that are half written or of another size. Other models' folders are left alone."""
        found: list[tuple[int, Entry]] = []
        num_removed = 0
        logged_at = time.monotonic()
        try:
            for folder in [path for path in self.folder.iterdir() if path.is_dir()]:
                for file in os.scandir(folder):
                    named = _NAME.fullmatch(file.name)
                    status = file.stat(follow_symlinks=False)
                    if named and status.st_size == self._value_bytes:
                        entry = Entry(StoreKey(bytes.fromhex(named[1])), status.st_size)
                        found.append((status.st_mtime_ns, entry))
                    elif named or file.name.endswith(_TEMPORARY_SUFFIX):
                        Path(file.path).unlink(missing_ok=True)
                        num_removed += 1
                if time.monotonic() - logged_at > SCAN_PROGRESS_INTERVAL_S:
                    logged_at = time.monotonic()
                    log.warning("reading %s: %d blocks so far", self.folder, len(found))
        except OSError as error:
            raise TierError(f"cannot read {self.folder}: {error.strerror}") from error
        for folder in self._earlier:
            if folder.exists():
                log.warning("%s is of an earlier format and not believed; `kvmesh purge --store` deletes it", folder)
        if num_removed:
            log.warning("removed %d unfinished or cut files from %s", num_removed, self.folder)
        found.sort(key=lambda pair: pair[0])
        return [entry for _, entry in found]

    def write(self, values: Mapping[StoreKey, Value]) -> None:
        written: list[StoreKey] = []
        for key, value in values.items():
            path = self._path(key)
            temporary = path.with_suffix(_TEMPORARY_SUFFIX)
            try:
                with _create(temporary) as file:
                    file.write(value)
                temporary.rename(path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                kind = TierFullError if error.errno in _FULL else TierError
                raise kind(f"cannot write to {self.folder}: {error.strerror}", written) from error
            written.append(key)

    def read(self, keys: Sequence[StoreKey]) -> list[bytes | None]:
        paths = [self._path(key) for key in keys]
        for path in paths:
            _ask_for(path)
        return [self._read(path) for path in paths]

    def delete(self, keys: Sequence[StoreKey]) -> None:
        for key in keys:
            try:
                self._path(key).unlink()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise TierError(f"cannot delete from {self.folder}: {error.strerror}") from error

    def clear(self) -> None:
        try:
            for path in self.folder.glob("??/*"):
                if _NAME.fullmatch(path.name) or path.name.endswith(_TEMPORARY_SUFFIX):
                    path.unlink(missing_ok=True)
            for folder in self._earlier:
                if folder.exists():
                    shutil.rmtree(folder)
        except OSError as error:
            raise TierError(f"cannot delete from {self.folder.parent}: {error.strerror}") from error

    def close(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _path(self, key: StoreKey) -> Path:
        name = key.hex()
        return self.folder / name[:2] / f"{name}.kv"

    def _read(self, path: Path) -> bytes | None:
        try:
            value = path.read_bytes()
            os.utime(path)  # the order of use, for the next start
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                return b""  # this file cannot be read: a damaged value, not a tier that is down
            raise TierError(f"cannot read from {self.folder}: {error.strerror}") from error
        return value


def _ask_for(path: Path) -> None:
    """Let the kernel begin to read a file: those of a batch come side by side."""
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _create(path: Path) -> IO[bytes]:
    """Open a new file; its folder is made where it is missing, also when somebody has deleted it since."""
    try:
        return open_private(path, "wb")
    except FileNotFoundError:
        private_folder(path.parent.parent)
        private_folder(path.parent)
        return open_private(path, "wb")
