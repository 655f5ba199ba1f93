"""The memory that holds a worker's KV: a file in /dev/shm that readers on the same host may map too.

A header page comes first. It holds a nonce, by which a reader knows that it opened the arena that was named to it.
The owner's lock on the file shows whoever cleans up that the owner is alive, whatever its process id is to them.
"""

import atexit
import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
import time
from pathlib import Path
from typing import Self

import numpy as np

from dataplane.blocks.layout import ArenaShape

SHM_DIR = Path("/dev/shm")
HEADER_BYTES = 4096
READERS_LET_GO_S = 2.0
"""Within this time readers have seen that an arena's name is gone, and unmapped it: they look at each tick."""
_HEADER = struct.Struct("<8s32sQ")  # magic, nonce, bytes of KV
_MAGIC = b"KVARENA1"
_NAME = re.compile(r"kvmesh-\d{1,10}-[0-9a-f]{16}")

_owned: set[Path] = set()

ByteArray = np.ndarray[tuple[int], np.dtype[np.uint8]]


class ArenaMissingError(Exception):
    """There is no arena of this name and nonce on this host, or this process may not read it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"arena {name!r}: {reason}")
        self.name = name


class ArenaTooLargeError(Exception):
    """The shared memory has no room. Sizes in bytes."""

    def __init__(self, needed: int, available: int) -> None:
        mib = 1 << 20
        super().__init__(
            f"the KV arena needs {needed / mib:.0f} MiB of shared memory, but {SHM_DIR} has {available / mib:.0f} MiB "
            "left: take less (--kv-mib, --memory-gib), or give the container more (docker: --shm-size)"
        )
        self.needed = needed
        self.available = available


class Arena:
    """Memory for whole blocks, mapped from /dev/shm. All pages are taken at once: that there is too little
    room must show at the start, not as SIGBUS in the middle of a request.

    `array` and `buffer` are the KV without the header; both are empty once closed. Views that others took of them stay
    valid: the memory goes when the last of them does.
    """

    def __init__(self, name: str, nonce: str, mapping: mmap.mmap, *, owned: bool) -> None:
        self.name = name
        self.nonce = nonce
        self.owned = owned
        self._mapping: mmap.mmap | None = mapping
        self.array: ByteArray = np.frombuffer(mapping, np.uint8, offset=HEADER_BYTES)
        self.buffer = memoryview(mapping)[HEADER_BYTES:]

    @classmethod
    def create(cls, shape: ArenaShape) -> Self:
        """Return a new arena of this shape, owned by this process. Raises ArenaTooLargeError."""
        return cls.create_bytes(shape.arena_bytes)

    @classmethod
    def create_bytes(cls, num_bytes: int) -> Self:
        """Return so much new memory, owned by this process. Raises ArenaTooLargeError."""
        # A predecessor's memory, which nobody else may be there to give back. Its readers have it until they see that.
        until_s = time.monotonic() + (READERS_LET_GO_S if remove_stale_arenas() else 0.0)
        needed = HEADER_BYTES + num_bytes
        while (available := _available_bytes()) is not None and needed > available:
            if time.monotonic() >= until_s:
                raise ArenaTooLargeError(needed, available)
            time.sleep(0.02)
        path, fd = _new_file()
        name, nonce = path.name, secrets.token_hex(16)
        try:
            os.posix_fallocate(fd, 0, needed)
            mapping = mmap.mmap(fd, needed)  # keeps the open file, and with it the lock
        except BaseException as error:
            path.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.ENOMEM):  # others were quicker
                raise ArenaTooLargeError(needed, _available_bytes() or 0) from error
            raise
        finally:
            os.close(fd)
        mapping[: _HEADER.size] = _HEADER.pack(_MAGIC, nonce.encode(), num_bytes)
        return cls(name, nonce, mapping, owned=True)

    @classmethod
    def attach(cls, name: str, nonce: str, *, writes: bool = False) -> Self:
        """Map another process's arena, read-only unless one `writes` for its owner. Raises ArenaMissingError."""
        if not _NAME.fullmatch(name):
            raise ArenaMissingError(name, "no arena has such a name")
        try:
            access = os.O_RDWR if writes else os.O_RDONLY
            fd = os.open(SHM_DIR / name, access | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise ArenaMissingError(name, error.strerror or str(error)) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size < HEADER_BYTES:
                raise ArenaMissingError(name, "no header")
            prot = mmap.PROT_READ | mmap.PROT_WRITE if writes else mmap.PROT_READ
            mapping = mmap.mmap(fd, status.st_size, prot=prot)
        except (OSError, ValueError) as error:
            raise ArenaMissingError(name, str(error)) from error
        finally:
            os.close(fd)
        magic, found, num_bytes = _HEADER.unpack_from(mapping)
        if (magic, found, num_bytes) != (_MAGIC, nonce.encode(errors="replace"), status.st_size - HEADER_BYTES):
            mapping.close()
            raise ArenaMissingError(name, "another arena has this name")
        return cls(name, nonce, mapping, owned=False)

    @property
    def num_bytes(self) -> int:
        return self.array.nbytes

    def close(self) -> None:
        """Let go of the memory and, as its owner, of its name. Idempotent."""
        mapping, self._mapping = self._mapping, None
        if mapping is None:
            return
        if self.owned:
            _owned.discard(SHM_DIR / self.name)
            (SHM_DIR / self.name).unlink(missing_ok=True)
        self.array = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # somebody made a view of it
            self.buffer.release()
        self.buffer = memoryview(b"")
        with contextlib.suppress(BufferError):  # views are alive: the last one unmaps
            mapping.close()


def check_room(num_bytes: int) -> None:
    """Raise ArenaTooLargeError where an arena of so many bytes cannot be made now."""
    needed, available = HEADER_BYTES + num_bytes, _available_bytes()
    if available is not None and needed > available:
        raise ArenaTooLargeError(needed, available)


def _available_bytes() -> int | None:
    """Return how much room is left; None: the file system has no limit."""
    room = os.statvfs(SHM_DIR)
    return room.f_bavail * room.f_frsize if room.f_blocks else None


def _new_file() -> tuple[Path, int]:
    """Return a new file whose lock is ours, open."""
    while True:
        path = SHM_DIR / f"kvmesh-{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Until it was locked somebody may have taken it for a dead one's: then there is another name.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                _owned.add(path)
                return path, fd
        os.close(fd)


@atexit.register
def unlink_owned() -> None:
    """Give back the names that this process has made and not closed; one that was forked has made none."""
    for path in list(_owned):
        if path.name.startswith(f"kvmesh-{os.getpid()}-"):
            path.unlink(missing_ok=True)


def remove_stale_arenas() -> list[str]:
    """Unlink the arenas whose owners have died without closing them, and return their names. An owner that lives has
    its lock; its PID says nothing, as each container has a process 1."""
    removed: list[str] = []
    for path in SHM_DIR.glob("kvmesh-*"):
        if _NAME.fullmatch(path.name) is None:
            continue
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(fd)
    return removed
