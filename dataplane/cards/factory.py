"""The one way to KV on a card: whoever runs on one asks here, and nobody else imports what lies beside."""

from dataplane.blocks.layout import ArenaShape
from dataplane.cards.arena import CardArena
from dataplane.cards.card import CardError
from dataplane.cards.cupy_card import CupyCard
from dataplane.cards.pairs import NCCL
from dataplane.carriers.carrier import AUTO


class CardRefusedError(Exception):
    """No KV can lie on this card. The text is for people."""


def make_card_arena(index: int, shape: ArenaShape, *, carrier: str) -> CardArena:
    """Return an arena of this shape in the memory of the card of this number, owned by this process. `carrier`: the one
    that is asked for, or "auto".

    Raises CardRefusedError: no such card, no room on it, a layout or a carrier that it cannot have.
    """
    try:
        if carrier not in (AUTO, *CardArena.carriers):
            raise CardRefusedError(
                f"the carrier {carrier} does not lead from a card, but {', '.join(CardArena.carriers)}"
            )
        card = CupyCard(index)
        if carrier == NCCL and (refusal := card.no_communicators()) is not None:
            raise CardRefusedError(f"the carrier nccl cannot be had: {refusal}")
        return CardArena(card, shape)
    except (CardError, ValueError) as error:
        raise CardRefusedError(f"cuda:{index}: {error}") from error
