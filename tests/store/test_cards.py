"""Workers on cards, fake ones, and a store, which never has its memory on one: in real time, as a card's work is."""

from pathlib import Path

import pytest

from dataplane.blocks.layout import KVLayout
from tests.store.fleet import LAYOUT, config_of
from tests.store.rig import WHOLE
from tests.store.test_service import behind, cooled_blocks_outlive_their_worker


@pytest.mark.parametrize("kind", ["memory", "disk", "valkey"])
@pytest.mark.parametrize("layout", [LAYOUT, WHOLE], ids=["any", "whole"])
async def test_cooled_blocks_outlive_their_worker(
    kind: str, layout: KVLayout, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = config_of(carrier="tcp", **behind(kind, tmp_path, request))
    await cooled_blocks_outlive_their_worker(kind, config, layout, on_cards=True)
