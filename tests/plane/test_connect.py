"""Which carrier is taken, and why."""

import contextlib

import pytest

from dataplane.blocks.layout import KVLayout, uniform_shape
from dataplane.cards.card_arena import CardArena, CardPlace
from dataplane.cards.fakes.fake_communicator import FakeFabric, FakeLibrary
from dataplane.cards.fakes.fake_device import FakeDevice
from dataplane.cards.nccl.communicator import LibraryThreads
from dataplane.cards.nccl.pair import PairParts
from dataplane.carriers.host import HostArena, HostPlace
from dataplane.carriers.kv_arena import AUTO, ReaderPlace
from dataplane.ends.choice import BrokenCarriers, CarrierImpossibleError, Choice, choices
from schemas.handoff import Endpoint, PairOffer

PAIR = PairOffer(unique_id=b"id", generation=1)


def endpoint(*carriers: str, card: str = "", port: int = 1) -> Endpoint:
    return Endpoint(host="h", port=port, carriers=carriers, arena="a", arena_nonce="nobody's", card=card, pair=PAIR)


def place(*, same_host: bool = True, card: str = "", maps: tuple[str, ...] = (), has_nccl: bool = False) -> ReaderPlace:
    """Return where a reader is: on a card, or in host memory."""
    if not card:
        return HostPlace(lambda _: same_host)
    return CardPlace(lambda _: same_host, card, lambda uuid: uuid in (card, *maps), has_nccl)


ALL = ("loopback", "cuda", "nccl", "shm", "tcp")


@pytest.mark.parametrize(
    ("holder_card", "reader", "expected"),
    [
        ("", place(), ["shm", "tcp"]),
        ("", place(same_host=False), ["tcp"]),
        ("A", place(card="A"), ["cuda", "shm", "tcp"]),
        ("A", place(card="A", has_nccl=True), ["cuda", "shm", "tcp"]),
        ("A", place(card="B", maps=("A",), has_nccl=True), ["cuda", "nccl", "shm", "tcp"]),
        ("A", place(card="B", has_nccl=True), ["nccl", "shm", "tcp"]),
        ("A", place(card="B", has_nccl=True, same_host=False), ["nccl", "tcp"]),
        ("A", place(card="B"), ["shm", "tcp"]),
        ("A", place(card="A", same_host=False), ["tcp"]),
        ("A", place(), ["shm", "tcp"]),
        ("", place(card="A", has_nccl=True), ["shm", "tcp"]),
    ],
)
def test_auto_orders_what_leads_there(holder_card: str, reader: ReaderPlace, expected: list[str]) -> None:
    assert [c.carrier for c in choices(AUTO, endpoint(*ALL, card=holder_card), reader)] == expected


def test_only_what_is_offered() -> None:
    reader = place(card="A")
    assert [c.carrier for c in choices(AUTO, endpoint("shm", "tcp", card="A"), reader)] == ["shm", "tcp"]
    with pytest.raises(CarrierImpossibleError, match=r"'cuda'.*offers shm, tcp"):
        choices("cuda", endpoint("shm", "tcp", card="A"), reader)
    with pytest.raises(CarrierImpossibleError, match="offers none"):
        choices(AUTO, endpoint(), reader)
    with pytest.raises(CarrierImpossibleError):
        choices("carrier pigeon", endpoint("carrier pigeon"), reader)
    with pytest.raises(CarrierImpossibleError):
        choices("tcp", endpoint("tcp", port=0), reader)


def test_reasons_are_for_people() -> None:
    assert choices("tcp", endpoint("tcp"), place()) == [Choice("tcp", "a network; asked for")]
    assert choices(AUTO, endpoint("cuda", card="A"), place(card="A")) == [Choice("cuda", "one host, one card")]
    near = choices(AUTO, endpoint("cuda", "shm", card="A"), place(card="B", maps=("A",)))
    assert near[0] == Choice("cuda", "one host, cards that see each other's memory")
    assert near[1].reason == "one host, the holder's and the reader's card staged through host memory"
    mixed = choices(AUTO, endpoint("shm", "tcp"), place(card="B"))
    assert mixed[1].reason == "a network, the reader's card staged through host memory"


def test_what_is_broken_comes_only_where_nothing_else_is() -> None:
    broken = BrokenCarriers(60.0)
    found = [Choice("cuda", "c"), Choice("shm", "s")]
    broken.add("nonce", "cuda")
    assert broken.without("nonce", found) == found[1:]
    assert broken.without("another", found) == found
    broken.add("nonce", "shm")
    assert broken.without("nonce", found) == found


def test_broken_carriers_are_bounded_and_heal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.limits.MAX_BROKEN", 2)
    broken = BrokenCarriers(60.0)
    for nonce in ("one", "two", "three"):
        broken.add(nonce, "cuda")
    found = [Choice("cuda", "c"), Choice("shm", "s")]
    assert [len(broken.without(nonce, found)) for nonce in ("one", "two", "three")] == [2, 1, 1]
    healed = BrokenCarriers(0.0)
    healed.add("two", "cuda")
    assert healed.without("two", found) == found


def test_offered() -> None:
    shape = uniform_shape(
        KVLayout(weights="w", dtype="float32", num_layers=1, num_kv_heads=1, head_dim=8, block_size=16), 4
    )
    with contextlib.closing(HostArena.create(shape)) as host:
        assert host.offered(AUTO) == ("shm", "tcp") and host.offered("tcp") == ("tcp",)
    device = FakeDevice()
    with contextlib.closing(CardArena(device, shape, 1 << 20)) as card:
        assert card.offered(AUTO) == ("cuda", "shm", "tcp")
        library = FakeLibrary(FakeFabric(), device)
        card.pair_parts = PairParts(device, library, LibraryThreads())
        assert card.offered(AUTO) == ("cuda", "nccl", "shm", "tcp") and card.offered("tcp") == ("tcp",)
        library.refused = "the library is not installed"
        assert card.offered(AUTO) == ("cuda", "shm", "tcp")
    device.close()
