"""Pages that another process can map by a name of 64 bytes, as it maps a card's memory: a file without a path, opened
through its owner's descriptor. They go when the last process that has them does."""

import contextlib
import hashlib
import mmap
import os
import secrets
import struct

import numpy as np

from dataplane.memory.arena import ByteArray

HANDLE_BYTES = 64
_HEADER_BYTES = 4096
_HANDLE = struct.Struct("<8sIIQ16s8s8s8x")  # magic, process, its descriptor, bytes, nonce, card, owner
_MAGIC = b"KVFAKE01"


class FakePages:
    """`handle`: by which another process opens them. `array`: the bytes; views that others took of it stay valid."""

    def __init__(self, handle: bytes, fd: int, mapping: mmap.mmap, num_bytes: int) -> None:
        self.handle = handle
        self._fd: int | None = fd
        self._mapping = mapping
        self.array: ByteArray = np.frombuffer(mapping, np.uint8, num_bytes, _HEADER_BYTES)

    @classmethod
    def create(cls, num_bytes: int, card: bytes, owner: str) -> "FakePages":
        """Return zeroed pages of this card."""
        fd = os.memfd_create("kvmesh-card", os.MFD_CLOEXEC)
        nonce = secrets.token_bytes(16)
        os.ftruncate(fd, _HEADER_BYTES + num_bytes)
        mapping = mmap.mmap(fd, _HEADER_BYTES + num_bytes)
        mapping[: len(nonce)] = nonce
        handle = _HANDLE.pack(_MAGIC, os.getpid(), fd, num_bytes, nonce, card, _short(owner))
        return cls(handle, fd, mapping, num_bytes)

    @classmethod
    def open(cls, handle: bytes, num_bytes: int, cards: set[bytes], owner: str) -> "FakePages":
        """Map another process's pages of one of these cards. Raises OSError, ValueError."""
        if len(handle) != HANDLE_BYTES or not handle.startswith(_MAGIC):
            raise ValueError("not a handle")
        _, pid, number, size, nonce, card, its_owner = _HANDLE.unpack(handle)
        if (pid, its_owner) == (os.getpid(), _short(owner)):
            raise ValueError("it is this process's own")
        if card not in cards:
            raise ValueError("it is on a card that is no peer")
        if num_bytes > size:
            raise ValueError(f"{num_bytes} bytes of {size}")
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(fd, _HEADER_BYTES + size)
            if mapping[: len(nonce)] != nonce:
                raise ValueError("the owner has closed it")
        except BaseException:
            os.close(fd)
            raise
        return cls(handle, fd, mapping, num_bytes)

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        os.close(fd)
        self.array = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # views are alive: the last one unmaps
            self._mapping.close()


def card_of(uuid: str) -> bytes:
    """Return how a handle names a card."""
    return _short(uuid)


def _short(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
