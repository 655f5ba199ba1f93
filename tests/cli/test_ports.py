"""Ports for servers that are started again where they were."""

import socket

import pytest

from services import ports


def test_a_port_is_of_those_that_nobody_is_lent_and_free() -> None:
    lent_from = ports._first_lent_port()
    for _ in range(20):
        port = ports.free_port()
        assert ports.FIRST_PORT <= port < lent_from
        with socket.create_server(("127.0.0.1", port)):
            assert not ports.is_free(port)
        assert ports.is_free(port)


def test_where_all_are_lent_it_is_one_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_first_lent_port", lambda: ports.FIRST_PORT)
    assert ports.is_free(ports.free_port())


def test_what_the_system_does_not_say_is_taken_for_usual(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(ports, "_RANGE_FILE", tmp_path / "none")
    assert ports._first_lent_port() == 32_768
