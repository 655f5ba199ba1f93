"""One request's misfortune is not everybody's."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

log = logging.getLogger(__name__)


@contextmanager
def surviving(what: str) -> Generator[None]:
    """Log what goes wrong inside: it must not end the worker, and everybody's requests with it."""
    try:
        yield
    except Exception:
        log.exception("%s failed", what)
