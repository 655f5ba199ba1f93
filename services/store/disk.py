"""The disk tier: one file a block, in a folder for each model. What is there is there under its name and whole.

A file is written beside its place and renamed into it. It is not synced: after a power cut it may be short or empty,
which its digest finds.

No embedded store: LMDB writes and deletes faster, but a data file that was cut, or a page of its tree that went bad,
ends the process that reads it; here it costs a block.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
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
_OWN = re.compile(rf"[0-9a-f]{{48}}(\.kv|\{_TEMPORARY_SUFFIX})")
"""What we have written."""
_AS_IT_IS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""Through no link, and without waiting for whoever writes into a pipe."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class DiskTier:
    """The files of one model's KV (`identity`) under `root`. One process at a time: the folder is locked. `earlier`: of
    formats that are not believed any more."""

    name: Tier = Tier.DISK

    def __init__(self, root: Path, identity: str, value_bytes: int, earlier: Sequence[str] = ()) -> None:
        """Open the folder, made if need be. Raises UserError when it cannot be written, or another store has it."""
        self.folder = root / identity
        self._earlier = [root / name for name in earlier]
        self._value_bytes = value_bytes
        try:
            private_folder(self.folder, is_ours=True)
            self._lock: int | None = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | _AS_IT_IS, 0o600)
        except OSError as error:
            raise UserError(f"the store cannot write to {root}: {error.strerror}; give it another folder") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise UserError(f"another store uses {root}: give each one a folder of its own") from error

    def scan(self) -> list[Entry]:
        """Also removes files that are half written or of another size. Other models' folders are left alone, as is what
        is no plain file."""
        found: list[tuple[int, Entry]] = []
        num_removed = num_passed_over = 0
        logged_at = time.monotonic()
        try:
            for folder in _folders_of(self.folder):
                for file in os.scandir(folder):
                    # A link is seen as itself and passed over: what it leads to may be anybody's.
                    named = _NAME.fullmatch(file.name)
                    status = file.stat(follow_symlinks=False)
                    if not stat.S_ISREG(status.st_mode):
                        num_passed_over += 1
                    elif named and status.st_size == self._value_bytes:
                        entry = Entry(StoreKey(bytes.fromhex(named[1])), status.st_size)
                        found.append((status.st_mtime_ns, entry))
                    elif _OWN.fullmatch(file.name):
                        Path(file.path).unlink(missing_ok=True)
                        num_removed += 1
                # Log how far a long scan is: the store serves nothing before the scan ends.
                if time.monotonic() - logged_at > SCAN_PROGRESS_INTERVAL_S:
                    logged_at = time.monotonic()
                    log.warning("reading %s: %d blocks so far", self.folder, len(found))
        except OSError as error:
            raise TierError(f"cannot read {self.folder}: {error.strerror}") from error
        # Log what is not used: folders of earlier formats, entries that are no plain files, and removed files.
        for folder in self._earlier:
            if folder.exists():
                log.warning("%s is of an earlier format and not believed; `kvmesh purge --store` deletes it", folder)
        if num_passed_over:
            log.warning(
                "passed over %d in %s that are no plain files: links, folders, pipes", num_passed_over, self.folder
            )
        if num_removed:
            log.warning("removed %d unfinished or cut files from %s", num_removed, self.folder)
        # Each read renews a file's modification time, so the least recently used values come first.
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

    def delete_all(self) -> None:
        try:
            for root in (self.folder, *self._earlier):
                if root.is_symlink() or not root.is_dir():
                    continue
                for folder in _folders_of(root):
                    for file in os.scandir(folder):
                        if _OWN.fullmatch(file.name) and file.is_file(follow_symlinks=False):
                            Path(file.path).unlink(missing_ok=True)
                if root is not self.folder:
                    _remove_empty(root)
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
            descriptor = os.open(path, os.O_RDONLY | _AS_IT_IS)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    return _pass_over(path)
                if status.st_size != self._value_bytes:
                    return b""  # a damaged value
                with open(descriptor, "rb", buffering=0, closefd=False) as file:
                    value = file.readall()
                os.utime(descriptor)  # the order of use, for the next start
            finally:
                os.close(descriptor)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):  # a link, a socket
                return _pass_over(path)
            if error.errno == errno.EIO:
                return b""  # this file cannot be read: a damaged value, not a tier that is down
            raise TierError(f"cannot read from {self.folder}: {error.strerror}") from error
        return value


def _pass_over(path: Path) -> None:
    """Log that something lies where a value was to be: nobody of ours has put it there."""
    log.warning("passed over %s: it is no plain file", path)


def _ask_for(path: Path) -> None:
    """Let the kernel begin to read a file: those of a batch come side by side."""
    with contextlib.suppress(OSError), os.fdopen(os.open(path, os.O_RDONLY | _AS_IT_IS), "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def _folders_of(root: Path) -> list[Path]:
    """Return the folders that values lie in."""
    return [Path(entry.path) for entry in os.scandir(root) if entry.is_dir(follow_symlinks=False)]


def _remove_empty(root: Path) -> None:
    """Remove what is left of a folder that was ours, but for what others have put there."""
    with contextlib.suppress(OSError):
        (root / "lock").unlink(missing_ok=True)
    for folder in (*_folders_of(root), root):
        with contextlib.suppress(OSError):
            folder.rmdir()


def _create(path: Path) -> IO[bytes]:
    """Open a new file; its folder is made where it is missing, also when somebody has deleted it since."""
    path.unlink(missing_ok=True)  # of a life before, or somebody's link
    try:
        return open_private(path, "wb")
    except FileNotFoundError:
        private_folder(path.parent.parent)
        private_folder(path.parent)
        return open_private(path, "wb")
