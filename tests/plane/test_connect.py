"""Which carrier is taken, and why."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dataplane.blocks.layout import KVLayout, uniform_shape
from dataplane.cards.arena import CardArena
from dataplane.carriers.carrier import AUTO, KVArena
from dataplane.carriers.host import HostArena
from dataplane.ends.choice import BrokenCarriers, CarrierChoice, CarrierImpossibleError, choices
from dataplane.ends.connections import Cancellation, connect_tcp
from dataplane.protocol.stream import TransferFailedError
from schemas.handoff import Endpoint
from schemas.kv import ReadEnd
from tests.plane.fake_card import Fabric, FakeCard

SHAPE = uniform_shape(
    KVLayout(weights="w", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16), 4
)


def endpoint(*carriers: str, card: str = "", port: int = 1) -> Endpoint:
    return Endpoint(host="h", port=port, carriers=carriers, arena="a", arena_nonce="nobody's", card=card)


@contextlib.contextmanager
def place(
    *, same_host: bool = True, card: str = "", maps: tuple[str, ...] = (), has_nccl: bool = False
) -> Iterator[KVArena]:
    """Open an arena on a card, or in host memory."""
    one = FakeCard(card, peers=maps, fabric=Fabric() if has_nccl else None)
    arena = CardArena(one, SHAPE) if card else HostArena.create(SHAPE)
    arena._attached.can_attach = lambda _: same_host  # type: ignore[method-assign]
    with contextlib.closing(arena):
        yield arena


ALL = ("loopback", "cuda", "nccl", "shm", "tcp")


@pytest.mark.parametrize(
    ("holder_card", "reader", "expected"),
    [
        ("", {}, ["shm", "tcp"]),
        ("", {"same_host": False}, ["tcp"]),
        ("A", {"card": "A"}, ["cuda", "tcp"]),
        ("A", {"card": "A", "has_nccl": True}, ["cuda", "tcp"]),
        ("A", {"card": "B", "maps": ("A",), "has_nccl": True}, ["cuda", "nccl", "tcp"]),
        ("A", {"card": "B", "has_nccl": True}, ["nccl", "tcp"]),
        ("A", {"card": "B", "has_nccl": True, "same_host": False}, ["nccl", "tcp"]),
        ("A", {"card": "B"}, ["tcp"]),
        ("A", {"card": "A", "same_host": False}, ["tcp"]),
        ("", {"card": "A", "has_nccl": True}, ["tcp"]),
    ],
)
def test_auto_orders_what_leads_there(holder_card: str, reader: dict[str, Any], expected: list[str]) -> None:
    with place(**reader) as arena:
        assert [c.carrier for c in choices(AUTO, endpoint(*ALL, card=holder_card), arena)] == expected


def test_only_what_is_offered() -> None:
    with place(card="A") as reader:
        assert [c.carrier for c in choices(AUTO, endpoint("shm", "tcp", card="A"), reader)] == ["tcp"]
        with pytest.raises(CarrierImpossibleError, match=r"'cuda'.*offers shm, tcp"):
            choices("cuda", endpoint("shm", "tcp", card="A"), reader)
        with pytest.raises(CarrierImpossibleError, match="offers none"):
            choices(AUTO, endpoint(), reader)
        with pytest.raises(CarrierImpossibleError):
            choices("carrier pigeon", endpoint("carrier pigeon"), reader)
        with pytest.raises(CarrierImpossibleError):
            choices("tcp", endpoint("tcp", port=0), reader)


def test_reasons_are_for_people() -> None:
    with place() as host:
        assert choices("tcp", endpoint("tcp"), host) == [CarrierChoice("tcp", "a network; asked for")]
        [from_card] = choices(AUTO, endpoint("tcp", card="A"), host)
        assert from_card.reason == "a network, the holder's card staged through host memory"
    with place(card="A") as same:
        assert choices(AUTO, endpoint("cuda", card="A"), same) == [CarrierChoice("cuda", "one host, one card")]
    with place(card="B", maps=("A",)) as peer:
        near = choices(AUTO, endpoint("cuda", "tcp", card="A"), peer)
        assert near[0] == CarrierChoice("cuda", "one host, cards that see each other's memory")
        assert near[1].reason == "a network, the holder's and the reader's card staged through host memory"
    with place(card="B") as mixed:
        assert choices(AUTO, endpoint("tcp"), mixed)[0].reason == (
            "a network, the reader's card staged through host memory"
        )


def test_what_is_broken_comes_only_where_nothing_else_is() -> None:
    broken = BrokenCarriers(60.0)
    found = [CarrierChoice("cuda", "c"), CarrierChoice("shm", "s")]
    broken.note_broken("nonce", "cuda")
    assert broken.without("nonce", found) == found[1:]
    assert broken.without("another", found) == found
    broken.note_broken("nonce", "shm")
    assert broken.without("nonce", found) == found


def test_broken_carriers_are_bounded_and_heal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.limits.MAX_BROKEN", 2)
    broken = BrokenCarriers(60.0)
    for nonce in ("one", "two", "three"):
        broken.note_broken(nonce, "cuda")
    found = [CarrierChoice("cuda", "c"), CarrierChoice("shm", "s")]
    assert [len(broken.without(nonce, found)) for nonce in ("one", "two", "three")] == [2, 1, 1]
    healed = BrokenCarriers(0.0)
    healed.note_broken("two", "cuda")
    assert healed.without("two", found) == found


def test_offered() -> None:
    with place() as host:
        assert host.offered(AUTO) == ("shm", "tcp") and host.offered("tcp") == ("tcp",)
    with place(card="A") as card:
        assert card.offered(AUTO) == ("cuda", "tcp")
    with place(card="A", has_nccl=True) as card:
        assert card.offered(AUTO) == ("cuda", "nccl", "tcp") and card.offered("tcp") == ("tcp",)


def test_an_address_of_a_family_that_this_machine_lacks_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        families, address = (10_000, socket.AF_INET), ("127.0.0.1", port)
        lacking, there = ((family, socket.SOCK_STREAM, 0, "", address) for family in families)
        holder = msgspec.structs.replace(endpoint("tcp"), host="holder.example", port=port)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [lacking, there])
        connect_tcp(holder, 5.0, Cancellation()).close()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [lacking])
        with pytest.raises(TransferFailedError, match="not supported") as caught:
            connect_tcp(holder, 5.0, Cancellation())
        assert caught.value.code is ReadEnd.CONNECT
