"""How a block is written behind memory: a header, then its bytes layer by layer, the keys before the values.

Others than holders may write to a folder or a server. So nothing that is read back is believed before a MAC over all of
it (GMAC, NIST SP 800-38D, with a key of this value alone) proves that somebody with a content secret has written it for
this block, of this model and this format. The block's own tag (`dataplane/memory/content_macs.py`) is kept with it.
"""

import hmac
import secrets
import struct

import numpy as np

from dataplane.memory.arena import ByteArray
from dataplane.memory.checksum import FrameHash
from dataplane.memory.content_macs import TAG_BYTES, BlockContents
from services.store.tiers import StoreKey

FORMAT_VERSION = 3
_MAGIC = b"KVBLOCK\0"
_NONCE_BYTES, _MAC_BYTES = 16, 16
_HEADER = struct.Struct(f"<8sH6x16s24sQ{TAG_BYTES}s{_NONCE_BYTES}s{_MAC_BYTES}s")
"""Magic, format version, digest of the block's format, key, bytes of KV, the block's tag, what makes the MAC's key one
of this value alone, the MAC over all before it and the KV."""
HEADER_BYTES = _HEADER.size


class BadValueError(Exception):
    """What was read back is not the block that was asked for."""


class BlockValues:
    """Makes values of an arena's blocks and puts values into them. Any thread, each into blocks of its own.

    `identity` names all that a value's bytes depend on: values of different ones are kept apart. `earlier`: the same of
    earlier formats, which are not believed.
    """

    def __init__(self, contents: BlockContents) -> None:
        layout = contents.shape.layout
        self.contents = contents
        self.value_bytes = HEADER_BYTES + layout.block_bytes
        self.identity = f"{layout.fingerprint}.v{FORMAT_VERSION}"
        self.earlier = (layout.fingerprint,)  # of formats 1 and 2
        self._num_bytes = layout.block_bytes

    def pack(self, key: StoreKey, block: int, tag: bytes) -> bytearray:
        """Return the value of a block."""
        value = bytearray(self.value_bytes)
        body = np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
        at = 0
        for view in self.contents.views(block):
            np.copyto(body[at : at + view.nbytes], view)  # lets other threads run
            at += view.nbytes
        nonce = secrets.token_bytes(_NONCE_BYTES)
        signed = (_MAGIC, FORMAT_VERSION, self.contents.format_digest, key, self._num_bytes, tag, nonce)
        _HEADER.pack_into(value, 0, *signed, bytes(_MAC_BYTES))
        mac = _mac(self.contents.secrets.keys_for(b"value" + nonce)[0], memoryview(value), body)
        value[HEADER_BYTES - _MAC_BYTES : HEADER_BYTES] = mac
        return value

    def unpack(self, key: StoreKey, value: bytes, block: int) -> bytes:
        """Put a value into a block, and return the block's tag. Raises BadValueError before anything is written."""
        if len(value) < HEADER_BYTES:
            raise BadValueError(f"truncated to {len(value)} bytes")
        magic, version, format_digest, found, num_bytes, tag, nonce, mac = _HEADER.unpack_from(value)
        if magic != _MAGIC:
            raise BadValueError("no KV block")
        if version != FORMAT_VERSION:
            raise BadValueError(f"format version {version}, not {FORMAT_VERSION}")
        if format_digest != self.contents.format_digest or found != key:
            raise BadValueError("another block's or another model's")
        if num_bytes != self._num_bytes or len(value) != self.value_bytes:
            raise BadValueError(f"truncated to {len(value)} bytes of {self.value_bytes}")
        body = np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
        mac_keys = self.contents.secrets.keys_for(b"value" + nonce)
        if not any(hmac.compare_digest(mac, _mac(mac_key, memoryview(value), body)) for mac_key in mac_keys):
            raise BadValueError("damaged, or written by nobody who has a content secret of this mesh")
        at = 0
        for view in self.contents.views(block):
            np.copyto(view, body[at : at + view.nbytes])
            at += view.nbytes
        return tag


def _mac(key: bytes, value: memoryview, body: ByteArray) -> bytes:
    """Return the MAC over a value's header, up to the MAC, and its bytes."""
    mac = FrameHash("gmac", key).new(0)
    assert mac is not None, "that kind has one"
    mac.update(value[: HEADER_BYTES - _MAC_BYTES])
    mac.update(body.data)
    return mac.intdigest().to_bytes(_MAC_BYTES, "little")
