"""The tiers' server, one for the session: tests keep apart by their identity."""

from collections.abc import Iterator

import pytest

from tests.store.rig import Server, running_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(tmp_path_factory.mktemp("valkey")) as running:
        yield running
