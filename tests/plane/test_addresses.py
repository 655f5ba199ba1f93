"""Addresses of IPv4 and IPv6: what is this machine's own, and who reaches a server that listens there."""

import contextlib
import socket
from pathlib import Path

import numpy as np
import pytest

from dataplane import addresses
from dataplane.addresses import address_of, in_url, is_loopback, listen, own_address
from tests.plane.harness import Holder, Target, random_kv

HAS_IPV6 = socket.has_ipv6 and Path("/proc/net/if_inet6").exists()
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="this machine has no IPv6")


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=10).close()
    except OSError:
        return False
    return True


@needs_ipv6
@pytest.mark.parametrize(
    ("host", "by"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("0.0.0.0", {"127.0.0.1"}),
        ("", {"127.0.0.1"}),
        ("::1", {"::1"}),
        ("::", {"127.0.0.1", "::1"}),
        ("localhost", None),
    ],
)
def test_who_reaches_a_server(host: str, by: set[str] | None) -> None:
    with listen(host, 0) as sock:
        port = sock.getsockname()[1]
        found = {address for address in ("127.0.0.1", "::1") if reaches(address, port)}
    assert found == by if by is not None else found


@pytest.mark.parametrize("host", ["no.such.name.invalid", "192.0.2.1", "300.1.1.1"])
def test_what_nobody_can_listen_on(host: str) -> None:
    with pytest.raises(OSError):
        listen(host, 0)


def test_a_port_that_is_taken() -> None:
    with listen("127.0.0.1", 0) as sock, pytest.raises(OSError, match="in use"):
        listen("127.0.0.1", sock.getsockname()[1])


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("0:0:0:0:0:0:0:1", True),
        ("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False), ("10.0.0.1", False), ("::", False), ("0.0.0.0", False),
        ("fe80::1%eth0", False), ("localhost.example", False), ("", False),
    ],
)  # fmt: skip
def test_what_only_this_machine_reaches(host: str, is_own: bool) -> None:
    assert is_loopback(host) is is_own


def test_one_address_in_several_spellings() -> None:
    assert address_of("::ffff:10.0.0.1") == address_of("10.0.0.1")
    assert address_of("0:0::1") == address_of("::1") != address_of("127.0.0.1")
    assert address_of("gateway") is None
    assert [in_url(host) for host in ("::1", "10.0.0.1", "gateway")] == ["[::1]", "10.0.0.1", "gateway"]


@pytest.mark.parametrize("there", ["127.0.0.1", "::1", "neither"])
def test_the_own_address_is_one_that_there_is(there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(host: str, port: int) -> contextlib.closing[socket.socket]:
        if host != there:
            raise OSError("no such address")
        return socket.socket()  # type: ignore[return-value]

    monkeypatch.setattr(addresses, "listen", fake)
    assert own_address.__wrapped__() == ("::1" if there == "::1" else "127.0.0.1")


@needs_ipv6
@pytest.mark.parametrize(("host", "readers_are_told"), [("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")])
def test_kv_crosses_between_addresses_of_ipv6(host: str, readers_are_told: str, target: Target) -> None:
    with contextlib.closing(Holder(("tcp",), host=host, advertise_host=readers_are_told)) as holder:
        holder.compute_all()
        assert target.read_from(holder, "tcp").stats.digest_kind == "gmac", "not encrypted: this machine's own address"
        assert np.array_equal(target.landed(300), random_kv(300))
