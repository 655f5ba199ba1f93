"""In which form a worker asks for KV over the network: as it lies in memory, or compressed. The choice is pure; how
quick the codec is is measured once."""

import time
from dataclasses import dataclass, field

import numpy as np

from dataplane.blocks.layout import ITEM_BYTES, KVLayout
from dataplane.memory.codec import BlockCodec, WireDtype
from schemas.ids import WorkerId
from services.config import WireDtype as WireSetting
from services.holder.limits import CODEC_ROUNDS, CODEC_SAMPLE_BLOCKS, COMPRESSION_GAIN_MIN
from services.worker.observe.measured_rates import MeasuredRates

PACKED_DTYPE: WireDtype = "int8"
"""What `auto` compresses to: as many bytes as fp8, and closer."""


def compresses(link_bytes_per_s: float, codec_bytes_per_s: float, item_bytes: int) -> bool:
    """Return whether a link is so slow that it pays to send one byte for each number instead of `item_bytes`.

    Packing and unpacking do not overlap with sending, so their time adds to it. Rates are bytes of KV a second; 0: not
    known.
    """
    if link_bytes_per_s <= 0 or codec_bytes_per_s <= 0:
        return False
    plain = 1 / link_bytes_per_s
    packed = plain / item_bytes + 1 / codec_bytes_per_s
    return plain > COMPRESSION_GAIN_MIN * packed


def measure_codec(layout: KVLayout) -> float:
    """Return how many bytes of KV a second one thread packs and unpacks. Takes some milliseconds."""
    num_tokens, numbers = CODEC_SAMPLE_BLOCKS * layout.block_size, layout.num_kv_heads * layout.head_dim
    codec = BlockCodec("int8", layout.dtype, layout.num_kv_heads, layout.head_dim, layout.block_size)
    rows = np.zeros((num_tokens, numbers * ITEM_BYTES[layout.dtype]), np.uint8)
    wire = np.empty(codec.wire_bytes(0, num_tokens), np.uint8)
    best_s = float("inf")
    for _ in range(CODEC_ROUNDS):
        started = time.perf_counter()
        codec.encode(rows, 0, wire)
        codec.decode(wire, 0, rows)
        best_s = min(best_s, time.perf_counter() - started)
    return rows.nbytes / best_s


@dataclass
class WireChoice:
    """Chooses for each read. With `auto` the first read from a source is uncompressed: it measures the link."""

    setting: WireSetting
    layout: KVLayout
    rates: MeasuredRates
    _codec_bytes_per_s: float = field(default=0.0)

    def measure(self) -> None:
        """Measure the codec, where the choice depends on it. Blocks for some milliseconds."""
        if self.setting == "auto":
            self._codec_bytes_per_s = measure_codec(self.layout)

    def dtype(self, source: WorkerId, now_ms: int) -> WireDtype:
        """Return in which form to ask `source` for its KV at `now_ms`."""
        if self.setting != "auto":
            return self.setting
        link = self.rates.link_bytes_per_s(source, now_ms)
        return PACKED_DTYPE if compresses(link, self._codec_bytes_per_s, ITEM_BYTES[self.layout.dtype]) else "same"
