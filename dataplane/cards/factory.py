"""The one way to KV on a card: whoever runs on one asks here, and nobody else imports what lies beside."""

from dataplane.blocks.layout import ArenaShape
from dataplane.cards.card_arena import NCCL, CardArena
from dataplane.cards.cuda.cuda_driver import find_device
from dataplane.cards.device import DeviceError
from dataplane.cards.nccl.library import pair_parts
from dataplane.memory.arena import ArenaTooLargeError


class CardRefusedError(Exception):
    """No KV can lie on this card. The text is for people."""


def make_card_arena(card: int, shape: ArenaShape, *, staging_bytes: int, carrier: str) -> CardArena:
    """Return an arena of this shape in the memory of the card of this number, owned by this process. `staging_bytes`:
    of pinned host memory beside it. `carrier`: the one that is asked for, or "auto".

    Raises CardRefusedError: no such card, no room on it or in shared memory, a layout or a carrier that it cannot have.
    """
    try:
        device = find_device(card)
        parts = pair_parts(device, card)
        if carrier == NCCL and (refusal := parts.refusal()) is not None:
            raise CardRefusedError(f"the carrier nccl cannot be had: {refusal}")
        arena = CardArena(device, shape, staging_bytes)
        arena.pair_parts = parts
    except (DeviceError, ValueError, ArenaTooLargeError) as error:
        raise CardRefusedError(f"cuda:{card}: {error}") from error
    return arena
