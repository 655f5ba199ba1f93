"""In which order a member tries a broker's servers, and when its own one is lonely."""

from collections import Counter

import pytest

from services.bus.servers import ClusterView, in_order, num_advertised
from services.errors import UserError
from services.trust.keys import BusAccess

SERVERS = ["tls://a:4222", "tls://b:4222", "tls://c:4222"]


def test_each_member_begins_with_its_own_one_and_all_are_spread_evenly() -> None:
    orders = [in_order(SERVERS, f"decode-{number}") for number in range(300)]
    assert all(order in (SERVERS, SERVERS[1:] + SERVERS[:1], SERVERS[2:] + SERVERS[:2]) for order in orders)
    assert min(Counter(order[0] for order in orders).values()) > 70
    assert in_order(SERVERS, "decode-7") == orders[7] and in_order(SERVERS[:1], "decode-7") == SERVERS[:1]


@pytest.mark.parametrize(
    ("num_servers", "first", "then", "is_lonely"),
    [
        (3, 3, 2, False),
        (3, 3, 1, True),
        (3, 1, None, True),
        (3, 6, 2, True),  # two addresses each
        (3, 6, 4, False),
        (5, 5, 3, False),
        (5, 5, 2, True),
        (3, 0, None, False),  # none is advertised
        (3, 3, 0, True),
        (2, 2, 1, False),
        (1, 0, None, False),
    ],
)
def test_who_sees_half_or_less_is_lonely(num_servers: int, first: int, then: int | None, is_lonely: bool) -> None:
    view = ClusterView(num_servers)
    view.connected(first)
    if then is not None:
        view.told(then)
    assert view.is_lonely is is_lonely


def test_only_a_word_of_fewer_is_a_reroute() -> None:
    view = ClusterView(3)
    view.connected(3)
    for num_seen, num_reroutes in ((2, 1), (3, 1), (3, 1), (1, 2)):
        view.told(num_seen)
        assert view.num_reroutes == num_reroutes
    view.connected(3)
    assert view.num_reroutes == 2 and not view.is_lonely


@pytest.mark.parametrize("info", [{}, {"connect_urls": None}, {"connect_urls": "abc"}, {"connect_urls": {"a": 1}}])
def test_what_is_no_list_advertises_nothing(info: dict[str, object]) -> None:
    assert num_advertised(info) == 0
    assert ClusterView(3).is_mute


def test_a_list_is_all_encrypted_or_not_at_all() -> None:
    assert BusAccess(",".join(SERVERS)).is_encrypted
    assert not BusAccess("nats://127.0.0.1:1, nats://127.0.0.1:2").is_encrypted
    assert BusAccess("nats://127.0.0.1:1, nats://127.0.0.1:2").servers == ["nats://127.0.0.1:1", "nats://127.0.0.1:2"]
    with pytest.raises(UserError, match="in clear"):
        _ = BusAccess("tls://a:4222,nats://127.0.0.1:4222").is_encrypted
    for url in ("", "tls://a:4222,", "tls://a:4222,,tls://b:4222", "tls://a:4222,http://b"):
        with pytest.raises(UserError, match="no broker's address"):
            _ = BusAccess(url).is_encrypted
    assert BusAccess("tls://a:4222,tls://ann:secret@b:4222").shown == "tls://a:4222,tls://b:4222"
