from collections.abc import Iterator

import pytest

from services.bus.embedded import EmbeddedNats


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real nats-server on a free port, for the whole session."""
    server = EmbeddedNats.start(None, tmp_path_factory.mktemp("nats"))
    yield server.url
    server.stop()
