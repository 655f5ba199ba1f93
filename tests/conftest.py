"""What all tests share."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from services.bus.embedded import EmbeddedNats

# No test is judged by the clock: CI's machines are slow at times.
settings.register_profile("kvmesh", deadline=None)
settings.load_profile("kvmesh")


@pytest.fixture(scope="session")
def nats_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real nats-server on a free port, for the whole session."""
    server = EmbeddedNats.start(None, tmp_path_factory.mktemp("nats"))
    yield server.url
    server.stop()
