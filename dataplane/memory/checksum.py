"""With what frames are digested.

Where only the owner's processes can write what is digested, on one host, a quick digest that finds errors will do: its
value is sealed (`Seal` in `protocol/stream.py`). Bytes that cross a network are digested with GMAC, the half of
AES-256-GCM (NIST SP 800-38D) that authenticates: nobody without the stream's key can find other bytes of the same
digest. Or they are encrypted as well, with all of it, whose tag is their digest then.

`sum64` can be summed in any order, as a kernel that copies does; the host gets the same number. Of the frame's bytes as
little-endian 64-bit words w[0], w[1], …, the end padded with zeros, it is

    sum over i of mix(w[i] ^ ((i + 1) · 0x9E3779B97F4A7C15))   mod 2^64

with splitmix64's finalizer as `mix` (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014; its
constants are Stafford's variant 13). A word that changes, or that stands elsewhere, changes its summand.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import xxhash
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM

from dataplane.memory.arena import ByteArray

DigestKind = Literal["xxh3", "sum64", "gmac", "aes256gcm"]
"""What a frame is digested with: xxh3-64; where one end computes it as it copies, in any order, the sum below; where
others could have changed it on its way, GMAC; where they could read it, AES-256-GCM."""


class Hasher(Protocol):
    """Digests bytes as they come."""

    def update(self, data: memoryview, /) -> None: ...
    def intdigest(self) -> int: ...


@dataclass(frozen=True)
class FrameHash:
    """With what the frames of one stream are digested; `kind` None: with nothing. `key`: the stream's own."""

    kind: DigestKind | None = None
    key: bytes = b""

    @property
    def encrypts(self) -> bool:
        """Frames cross encrypted: `encrypted` at the holder's end, `opening` at the reader's."""
        return self.kind == "aes256gcm"

    def opening(self, sequence: int, tag: int) -> Hasher | None:
        """Return what digests the bytes of this frame as they arrive, and decrypts them in place where they are
        encrypted. `tag`: of its Data header."""
        return _Opening(self.key, sequence, tag) if self.encrypts else self.new(sequence)

    def encrypted(self, sequence: int, sources: Iterable[ByteArray], target: ByteArray) -> int:
        """Encrypt the frame's bytes into `target`, which has room for exactly these; return the tag."""
        cipher, at = Cipher(AES(self.key), GCM(_iv_of(sequence))).encryptor(), 0
        for source in sources:
            at += cipher.update_into(source.data, target[at : at + source.nbytes].data)
        cipher.finalize()
        return int.from_bytes(cipher.tag, "little")

    def new(self, sequence: int) -> Hasher | None:
        """Return a digest of nothing yet, for the frame of this number."""
        match self.kind:
            case None | "aes256gcm":
                return None
            case "xxh3":
                return xxhash.xxh3_64()
            case "sum64":
                return Sum64()
            case "gmac":
                return _Gmac(self.key, sequence)


GOLDEN = 0x9E3779B97F4A7C15
WORD_BYTES = 8
_TAG_BYTES, _IV_BYTES = 16, 12
_MASK = (1 << 64) - 1
_PIECE_WORDS = 16 << 10
"""What is mixed at a time: the piece, its positions and two arrays between must fit into a core's second cache."""

Words = npt.NDArray[np.uint64]
_STEPS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
_POSITIONS: Words = np.arange(1, _PIECE_WORDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)
"""(i + 1) · GOLDEN of a frame's first words; a later piece's are these plus a multiple of GOLDEN."""
_POSITIONS.flags.writeable = False


class _Gmac:
    """AES-256-GCM of bytes that stay in the clear: it only authenticates them."""

    def __init__(self, key: bytes, sequence: int) -> None:
        self._cipher = Cipher(AES(key), GCM(_iv_of(sequence))).encryptor()
        self.update = self._cipher.authenticate_additional_data

    def intdigest(self) -> int:
        self._cipher.finalize()
        return int.from_bytes(self._cipher.tag, "little")


class _Opening:
    """Decrypts a frame in place. Its digest is the tag that came if that is right, else another number."""

    def __init__(self, key: bytes, sequence: int, tag: int) -> None:
        mode = GCM(_iv_of(sequence), tag.to_bytes(_TAG_BYTES, "little"))
        self._cipher = Cipher(AES(key), mode).decryptor()
        self._tag = tag

    def update(self, data: memoryview) -> None:
        self._cipher.update_into(data, data)

    def intdigest(self) -> int:
        try:
            self._cipher.finalize()
        except InvalidTag:
            return self._tag ^ 1
        return self._tag


def _iv_of(sequence: int) -> bytes:
    """Return the initialization vector of a frame: its number, which comes once under one key."""
    return sequence.to_bytes(_IV_BYTES, "big")


class Sum64:
    """The digest of bytes that come piece by piece, of any lengths. For one thread."""

    def __init__(self) -> None:
        self._sum = 0
        self._num_words = 0
        self._rest = b""
        """Bytes of a word that is not whole yet."""
        self._mixed: Words = np.empty(_PIECE_WORDS, np.uint64)
        self._shifted: Words = np.empty(_PIECE_WORDS, np.uint64)

    def update(self, data: ByteArray | bytes | bytearray | memoryview) -> None:
        """Add what comes next. An array must be contiguous."""
        view = (data.data if isinstance(data, np.ndarray) else memoryview(data)).cast("B")
        if self._rest:
            missing = WORD_BYTES - len(self._rest)
            self._rest += bytes(view[:missing])
            view = view[missing:]
            if len(self._rest) < WORD_BYTES:
                return
            self._add(np.frombuffer(self._rest, "<u8"))
            self._rest = b""
        num_words = len(view) // WORD_BYTES
        self._add(np.frombuffer(view, "<u8", num_words) if num_words else np.empty(0, np.uint64))
        self._rest = bytes(view[num_words * WORD_BYTES :])

    def intdigest(self) -> int:
        """Return the digest of what has come so far."""
        if not self._rest:
            return self._sum
        word = int.from_bytes(self._rest, "little")
        return (self._sum + mix(word ^ ((self._num_words + 1) * GOLDEN & _MASK))) & _MASK

    def _add(self, words: Words) -> None:
        total = 0
        for at in range(0, len(words), _PIECE_WORDS):
            piece = words[at : at + _PIECE_WORDS]
            mixed, shifted = self._mixed[: len(piece)], self._shifted[: len(piece)]
            np.add(_POSITIONS[: len(piece)], np.uint64((self._num_words + at) * GOLDEN & _MASK), out=mixed)
            np.bitwise_xor(mixed, piece, out=mixed)
            for shift, factor in _STEPS:
                np.right_shift(mixed, shift, out=shifted)
                np.bitwise_xor(mixed, shifted, out=mixed)
                np.multiply(mixed, factor, out=mixed)
            np.right_shift(mixed, _LAST_SHIFT, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            total += int(mixed.sum())
        self._num_words += len(words)
        self._sum = (self._sum + total) & _MASK


def sum64(data: ByteArray | bytes | bytearray | memoryview) -> int:
    """Return the digest of these bytes."""
    hasher = Sum64()
    hasher.update(data)
    return hasher.intdigest()


def mix(word: int) -> int:
    """Return splitmix64's finalizer of a word."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31
