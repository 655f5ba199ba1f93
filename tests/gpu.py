"""Which tests need a graphics card, and why they are left out where there is none."""

import functools

import pytest

from dataplane.cards.card import CardError
from dataplane.cards.cupy_card import CupyCard, count_cards


@functools.cache
def why_no_card() -> str:
    """Say why no card can be used here; empty: one can."""
    try:
        return "" if count_cards() else "there is none"
    except CardError as error:
        return str(error)


def needs_gpu(test):
    """Mark a test, or a parameter's `marks`: it runs on a card, and is skipped with the reason elsewhere."""
    return pytest.mark.gpu(pytest.mark.skipif(bool(why_no_card()), reason=f"no card: {why_no_card()}")(test))


GPU_MARKS = (pytest.mark.gpu, pytest.mark.skipif(bool(why_no_card()), reason=f"no card: {why_no_card()}"))
"""The same for `pytest.param(..., marks=GPU_MARKS)`."""


def card(index: int = 0) -> CupyCard:
    """Return a card."""
    return CupyCard(index)
