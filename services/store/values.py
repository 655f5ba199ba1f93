"""How a block is written behind memory: a header, then its bytes layer by layer, the keys before the values.

Nothing that is read back is believed before its header and its digest say that it is this very block, of this model
and this format. That finds damage, not malice: who may write to the folder or the server is trusted.
"""

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import xxhash

from dataplane.blocks.layout import KEY, VALUE, ArenaShape
from dataplane.memory.arena import ByteArray
from services.store.tiers import StoreKey

FORMAT_VERSION = 2
_MAGIC = b"KVBLOCK\0"
_HEADER = struct.Struct("<8sH6x16s24sQQ")
"""Magic, format version, digest of the layout's identity, key, bytes of KV, xxh3-64 of them."""
HEADER_BYTES = _HEADER.size


class BadValueError(Exception):
    """What was read back is not the block that was asked for."""


class BlockValues:
    """Makes values of an arena's blocks and puts values into them. Any thread, each into blocks of its own.

    `identity` names all that a value's bytes depend on: values of different ones are kept apart.
    """

    def __init__(self, array: ByteArray, shape: ArenaShape) -> None:
        layout = shape.layout
        self._array = array
        self._shape = shape
        self._num_bytes = layout.block_bytes
        self.value_bytes = HEADER_BYTES + layout.block_bytes
        self.identity = layout.fingerprint
        if layout.total_kv_heads not in (0, layout.num_kv_heads):  # a shard's bytes are not the whole model's
            self.identity += f"-{layout.first_head}-{layout.num_kv_heads}"
        self._digest = hashlib.blake2b(self.identity.encode(), digest_size=16).digest()

    def pack(self, key: StoreKey, block: int) -> bytearray:
        """Return the value of a block."""
        value = bytearray(self.value_bytes)
        body = np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
        at = 0
        for view in self.views(block):
            np.copyto(body[at : at + view.nbytes], view)  # lets other threads run
            at += view.nbytes
        digest = xxhash.xxh3_64_intdigest(body.data)
        _HEADER.pack_into(value, 0, _MAGIC, FORMAT_VERSION, self._digest, key, self._num_bytes, digest)
        return value

    def unpack(self, key: StoreKey, value: bytes, block: int) -> None:
        """Put a value into a block. Raises BadValueError before anything is written."""
        if len(value) < HEADER_BYTES:
            raise BadValueError(f"truncated to {len(value)} bytes")
        magic, version, identity, found, num_bytes, digest = _HEADER.unpack_from(value)
        if magic != _MAGIC:
            raise BadValueError("no KV block")
        if version != FORMAT_VERSION:
            raise BadValueError(f"format version {version}, not {FORMAT_VERSION}")
        if identity != self._digest or found != key:
            raise BadValueError("another block's or another model's")
        if num_bytes != self._num_bytes or len(value) != self.value_bytes:
            raise BadValueError(f"truncated to {len(value)} bytes of {self.value_bytes}")
        body = np.frombuffer(value, np.uint8, offset=HEADER_BYTES)
        if xxhash.xxh3_64_intdigest(body.data) != digest:
            raise BadValueError("the digest differs")
        at = 0
        for view in self.views(block):
            np.copyto(view, body[at : at + view.nbytes])
            at += view.nbytes

    def views(self, block: int) -> Sequence[ByteArray]:
        """Return a block's bytes as views, in the order in which a value has them."""
        layout = self._shape.layout
        size = layout.block_size * layout.token_bytes
        offsets = (
            self._shape.offset(layer, key_or_value, block * layout.block_size)
            for layer in range(layout.num_layers)
            for key_or_value in (KEY, VALUE)
        )
        return [self._array[at : at + size] for at in offsets]
