"""What proves that a block is what it is claimed to be, by whoever it is handed on.

A block's tag is made by the first host that has the block's bytes in its memory: who computed them, or who read them
from a card, or compressed. It is kept with the block, and checked by each reader before it believes what it has read.
It says that these bytes are the KV of this content (tenant and block hash) in this format: a MAC (HMAC-SHA-256 under
the holders' content secret) over these and over xxh3-128 of the bytes. That finds damage and mix-ups wherever the block
has lain. Where others than holders can write, a stronger MAC goes over the bytes besides (`services/store/values.py`).
"""

import hashlib
from collections.abc import Sequence
from typing import Protocol

import xxhash

from dataplane.blocks.kept import Content
from dataplane.blocks.layout import KEY, VALUE, ArenaShape
from dataplane.blocks.ticket import MAC_BYTES, TicketSecrets
from dataplane.memory.arena import ByteArray

TAG_BYTES = MAC_BYTES


class HostMemory(Protocol):
    """An arena, as long as it is open."""

    @property
    def host_array(self) -> ByteArray | None: ...


class BlockContents:
    """Makes and checks the tags of an arena's blocks. Any thread. Not for layouts with windows."""

    def __init__(self, arena: HostMemory, shape: ArenaShape, secrets: TicketSecrets) -> None:
        self.shape = shape
        self.secrets = secrets
        self.format_digest = hashlib.blake2b(shape.layout.fingerprint.encode(), digest_size=16).digest()
        self._arena = arena

    def views(self, block: int) -> list[ByteArray]:
        """Return a block's bytes as views: layer by layer, the keys before the values."""
        layout, array = self.shape.layout, self._arena.host_array
        assert array is not None and array.nbytes >= self.shape.arena_bytes, (
            "the arena is open, and the host can read it"
        )
        size = layout.block_size * layout.token_bytes
        offsets = (
            self.shape.offset(layer, key_or_value, block * layout.block_size)
            for layer in range(layout.num_layers)
            for key_or_value in (KEY, VALUE)
        )
        return [array[at : at + size] for at in offsets]

    def digest(self, block: int) -> bytes:
        """Return xxh3-128 of a block's bytes."""
        hasher = xxhash.xxh3_128()
        for view in self.views(block):
            hasher.update(view.data)
        return hasher.digest()

    def tag(self, content: Content, block: int) -> bytes:
        """Return the tag of a block whose bytes are this content's."""
        return self.tag_of(content, self.digest(block))

    def tag_of(self, content: Content, digest: bytes) -> bytes:
        """Return the tag of bytes with this digest, which are this content's."""
        return self.secrets.mac(self._signed(content, digest))

    def is_right(self, content: Content, block: int, tag: bytes) -> bool:
        """Return whether somebody who has a content secret has signed these bytes as this content's."""
        return self.secrets.proves(self._signed(content, self.digest(block)), tag)

    def _signed(self, content: Content, digest: bytes) -> bytes:
        fixed = (b"kvmesh content 1", self.format_digest, digest, content.block_hash)
        return b"".join((*fixed, content.tenant.encode()))


class ExpectedContent:
    """What a read of lent blocks is to bring: `content[i]` into block `blocks[i]`.

    `tags`: of the blocks that were found right, once they are checked; none where the holder has sent none.
    """

    def __init__(self, contents: BlockContents, content: Sequence[Content], blocks: Sequence[int]) -> None:
        self.content = content
        self.blocks = blocks
        self.tags: list[bytes] = []
        self._contents = contents

    def num_right(self, joined_tags: bytes, num_landed_blocks: int) -> int:
        """Return how many of the blocks that have landed, from the first on, are what they are claimed to be."""
        tags = [joined_tags[at : at + TAG_BYTES] for at in range(0, len(joined_tags), TAG_BYTES)]
        self.tags = []
        for content, block, tag in zip(self.content[:num_landed_blocks], self.blocks, tags, strict=False):
            if not self._contents.is_right(content, block, tag):
                break
            self.tags.append(tag)
        return len(self.tags)
