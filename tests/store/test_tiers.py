"""What every tier behind memory does, and what a folder and a server do each in their own way."""

import os
import secrets
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas.ids import BlockHash
from services.config import StoreConfig
from services.errors import UserError
from services.store import disk
from services.store.disk import DiskTier
from services.store.load import open_tier
from services.store.remote import ValkeyTier
from services.store.tiers import BackTier, TierError, TierFullError
from tests.store.dict_tier import DictTier
from tests.store.rig import Memory, Server, key_at, keys_at, running_server

SIZE = 1000
Open = Callable[[], BackTier]
"""Opens the tier under test; what the one before wrote is there."""


def value(number: int) -> bytes:
    return bytes([number]) * SIZE


def values(*numbers: int) -> dict[BlockHash, bytes]:
    return {key_at(number): value(number) for number in numbers}


def remote(server: Server, identity: str, timeout_s: float = 5.0, ttl_s: int = 1_000) -> ValkeyTier:
    return ValkeyTier(server.url, identity, SIZE, timeout_s=timeout_s, ttl_s=ttl_s)


@pytest.fixture(params=["memory", "disk", "valkey"])
def open_again(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    opened: list[BackTier] = []
    kept = DictTier()
    identity = secrets.token_hex(8)

    def open_one() -> BackTier:
        while opened:
            opened.pop().close()
        if request.param == "memory":
            tier: BackTier = kept
        elif request.param == "disk":
            tier = DiskTier(tmp_path, identity, SIZE)
        else:
            tier = remote(request.getfixturevalue("server"), identity)
        opened.append(tier)
        return tier

    yield open_one
    for tier in opened:
        tier.close()


def test_what_is_written_is_read(open_again: Open) -> None:
    tier = open_again()
    tier.write(values(1, 2))
    assert tier.read(keys_at(2, 3, 1)) == [value(2), None, value(1)]
    assert tier.read([]) == []


def test_it_outlives_the_one_who_wrote_it(open_again: Open) -> None:
    open_again().write(values(1, 2))
    tier = open_again()
    assert {entry.key: entry.num_bytes for entry in tier.scan()} == dict.fromkeys(keys_at(1, 2), SIZE)
    assert tier.read(keys_at(1, 2)) == [value(1), value(2)]


def test_an_empty_tier_has_nothing(open_again: Open) -> None:
    assert open_again().scan() == []


def test_what_is_deleted_is_gone_and_only_that(open_again: Open) -> None:
    tier = open_again()
    tier.write(values(1, 2))
    tier.delete(keys_at(1, 3))
    tier.delete([])
    assert tier.read(keys_at(1, 2)) == [None, value(2)]
    assert [entry.key for entry in tier.scan()] == keys_at(2)


def test_a_value_is_written_over(open_again: Open) -> None:
    tier = open_again()
    tier.write(values(1))
    tier.write({key_at(1): bytearray(value(9))})
    assert tier.read(keys_at(1)) == [value(9)]
    assert len(tier.scan()) == 1


def test_more_than_a_page_is_found(open_again: Open) -> None:
    tier = open_again()
    tier.write({key_at(number): value(number % 256) for number in range(3_000)})
    assert {entry.key for entry in open_again().scan()} == set(keys_at(*range(3_000)))


def test_closing_twice_is_no_matter(open_again: Open) -> None:
    tier = open_again()
    tier.close()
    tier.close()


# The folder.


def test_the_disk_remembers_the_order_of_use(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "m", SIZE)
    tier.write(values(1, 2, 3))
    for second, number in enumerate((1, 2, 3)):
        os.utime(path_of(tmp_path, number), (second, second))
    tier.read(keys_at(1))
    assert [entry.key for entry in tier.scan()] == keys_at(2, 3, 1)
    tier.close()


def path_of(root: Path, number: int, identity: str = "m") -> Path:
    name = key_at(number).hex()
    return root / identity / name[:2] / f"{name}.kv"


def test_a_scan_clears_away_what_a_crash_left_and_nothing_else(tmp_path: Path) -> None:
    tier, other = DiskTier(tmp_path, "m", SIZE), DiskTier(tmp_path, "other", SIZE)
    tier.write(values(1, 2))
    other.write(values(1))
    half, cut = path_of(tmp_path, 3).with_suffix(".tmp"), path_of(tmp_path, 2)
    half.write_bytes(b"half")
    cut.write_bytes(value(2)[:-1])
    stranger = path_of(tmp_path, 1).with_name("notes.txt")
    stranger.write_text("somebody's")
    assert [entry.key for entry in tier.scan()] == keys_at(1)
    assert not half.exists() and not cut.exists()
    assert stranger.exists() and path_of(tmp_path, 1, "other").exists()
    tier.close()
    other.close()


def test_a_folder_that_is_deleted_under_it_is_a_miss_and_made_again(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "m", SIZE)
    tier.write(values(1))
    for path in sorted((tmp_path / "m").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (tmp_path / "m").rmdir()
    assert tier.read(keys_at(1)) == [None]
    tier.delete(keys_at(1))
    tier.write(values(2))
    assert tier.read(keys_at(2)) == [value(2)]
    tier.close()


def test_a_full_disk_says_what_is_there_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path, "m", SIZE)
    rename = Path.rename

    def full_at_the_second(path: Path, target: Path) -> Path:
        if target == path_of(tmp_path, 2):
            raise OSError(28, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full_at_the_second)
    with pytest.raises(TierFullError) as caught:
        tier.write(values(1, 2, 3))
    assert list(caught.value.written) == keys_at(1)
    assert [path.suffix for path in (tmp_path / "m").rglob("*.*")] == [".kv"]
    tier.close()


def test_a_really_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full takes nothing."""
    tier = DiskTier(tmp_path, "m", SIZE)
    monkeypatch.setattr(disk, "_create", lambda path: os.fdopen(os.open("/dev/full", os.O_WRONLY), "wb"))
    with pytest.raises(TierFullError, match="No space left"):
        tier.write(values(1))
    tier.close()


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


OTHERS: dict[str, Callable[[Path], object]] = {
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to nothing": lambda path: path.symlink_to("/nowhere"),
    "pipe": os.mkfifo,
    "socket": bind_socket,
    "folder": lambda path: path.mkdir(),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_is_no_plain_file_is_passed_over_and_stays(
    tmp_path: Path, make: Callable[[Path], object], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never followed, never waited for, never deleted by a purge: it is somebody else's."""
    tier = DiskTier(tmp_path, "m", SIZE)
    tier.write(values(1, 2))
    path_of(tmp_path, 1).unlink()
    monkeypatch.chdir(path_of(tmp_path, 1).parent)  # a socket's name may not be long
    make(Path(path_of(tmp_path, 1).name))
    assert [entry.key for entry in tier.scan()] == keys_at(2) and "no plain files" in caplog.text
    assert tier.read(keys_at(1, 2)) == [None, value(2)]
    notes = path_of(tmp_path, 2).with_name("mine.tmp")
    notes.write_text("somebody's")
    tier.delete_all()
    assert tier.read(keys_at(2)) == [None] and notes.exists() and os.path.lexists(path_of(tmp_path, 1))
    tier.close()


def test_a_link_where_a_value_is_to_be_written_is_not_followed(tmp_path: Path) -> None:
    tier, elsewhere = DiskTier(tmp_path, "m", SIZE), tmp_path / "elsewhere"
    elsewhere.write_text("somebody's")
    path_of(tmp_path, 1).parent.mkdir()
    for path in (path_of(tmp_path, 1), path_of(tmp_path, 1).with_suffix(".tmp")):
        path.symlink_to(elsewhere)
    tier.write(values(1))
    assert tier.read(keys_at(1)) == [value(1)] and elsewhere.read_text() == "somebody's"
    tier.close()


def test_a_purge_deletes_of_an_earlier_format_what_it_wrote(tmp_path: Path) -> None:
    old = DiskTier(tmp_path, "old", SIZE)
    old.write(values(1, 2))
    old.close()
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "notes").write_text("somebody's")
    (tmp_path / "linked").symlink_to(tmp_path / "kept")
    (path_of(tmp_path, 1, "old").with_name("notes")).write_text("somebody's")
    tier = DiskTier(tmp_path, "m", SIZE, earlier=("old", "linked", "missing"))
    tier.delete_all()
    assert not path_of(tmp_path, 1, "old").exists() and path_of(tmp_path, 1, "old").with_name("notes").exists()
    assert (tmp_path / "kept" / "notes").exists()
    path_of(tmp_path, 1, "old").with_name("notes").unlink()
    tier.delete_all()
    assert not (tmp_path / "old").exists()
    tier.close()


def test_two_stores_do_not_share_a_folder(tmp_path: Path) -> None:
    first = DiskTier(tmp_path, "m", SIZE)
    with pytest.raises(UserError, match="another store"):
        DiskTier(tmp_path, "m", SIZE)
    first.close()
    DiskTier(tmp_path, "m", SIZE).close()


def test_a_folder_that_cannot_be_made_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        DiskTier(tmp_path / "file", "m", SIZE)


# The server.


def test_a_server_remembers_the_order_of_use(server: Server) -> None:
    tier = remote(server, secrets.token_hex(8))
    tier.write(values(1, 2, 3))
    client = server.client()
    for key in client.keys(f"kvmesh:{tier._prefix.decode().split(':')[1]}:*"):
        client.expire(key, 100 * int(key[-18:-16], 16))
    tier.read(keys_at(1))
    assert [entry.key for entry in tier.scan()] == keys_at(2, 3, 1)
    tier.close()


def test_values_on_a_server_end_by_themselves_and_their_use_renews_them(server: Server) -> None:
    identity = secrets.token_hex(8)
    tier = remote(server, identity)
    tier.write(values(1, 2))
    client = server.client()
    for number in (1, 2):
        assert 0 < client.ttl(f"kvmesh:{identity}:{key_at(number).hex()}") <= 1_000
        client.expire(f"kvmesh:{identity}:{key_at(number).hex()}", 10)
    tier.read(keys_at(2))
    assert client.ttl(f"kvmesh:{identity}:{key_at(1).hex()}") <= 10
    assert client.ttl(f"kvmesh:{identity}:{key_at(2).hex()}") > 10
    tier.close()


def test_keys_that_are_not_ours_are_left_alone(server: Server) -> None:
    identity = secrets.token_hex(8)
    tier = remote(server, identity)
    tier.write(values(1))
    client = server.client()
    client.set(f"kvmesh:{identity}:not-a-hash", "x")
    client.set(f"kvmesh:{identity}:{key_at(2).hex()}", "another size")
    client.rpush(f"kvmesh:{identity}:{key_at(3).hex()}", "a list")
    assert [entry.key for entry in tier.scan()] == keys_at(1)
    assert tier.read(keys_at(3, 1)) == [None, value(1)]
    tier.close()


def test_a_server_at_its_memory_bound_is_full(tmp_path: Path) -> None:
    with running_server(tmp_path, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction") as small:
        tier = ValkeyTier(small.url, "m", 100_000, timeout_s=5.0, ttl_s=1_000)
        with pytest.raises(TierFullError) as caught:
            tier.write({key_at(number): bytes(100_000) for number in range(100)})
        assert set(caught.value.written) == {entry.key for entry in tier.scan()} != set()
        tier.close()


def test_a_server_that_goes_and_comes_back(tmp_path: Path) -> None:
    with running_server(tmp_path) as mortal:
        tier = remote(mortal, "m")
        tier.write(values(1))
        mortal.stop()
        for action in (
            lambda: tier.read(keys_at(1)),
            lambda: tier.write(values(2)),
            lambda: tier.delete(keys_at(1)),
        ):
            with pytest.raises(TierError):
                action()
        with pytest.raises(TierError):
            tier.scan()
        mortal.start()
        assert tier.read(keys_at(1)) == [None]
        tier.write(values(2))
        assert tier.read(keys_at(2)) == [value(2)]
        tier.close()


def test_a_server_that_does_not_answer_costs_its_timeout_only(tmp_path: Path) -> None:
    with running_server(tmp_path) as stuck:
        tier = remote(stuck, "m", timeout_s=0.1)
        stuck.suspend()
        with pytest.raises(TierError, match=r"[Tt]imeout"):
            tier.read(keys_at(1))
        stuck.resume()
        assert tier.read(keys_at(1)) == [None]
        tier.close()


def test_no_server_is_said_at_the_start_without_the_password(tmp_path: Path) -> None:
    with running_server(tmp_path) as gone:
        port = gone.port
    settings = StoreConfig(url=f"valkey://user:hunter2@127.0.0.1:{port}/0", timeout_ms=200)
    with pytest.raises(UserError, match=f"127.0.0.1:{port}") as caught:
        open_tier(settings, Memory().values)
    assert "hunter2" not in str(caught.value)


def test_a_wrong_password_is_said_at_the_start(tmp_path: Path) -> None:
    with running_server(tmp_path, "--requirepass", "right-password") as guarded:
        settings = StoreConfig(url=f"redis://:wrong-password@127.0.0.1:{guarded.port}/0")
        with pytest.raises(UserError, match="does not answer") as caught:
            open_tier(settings, Memory().values)
        assert "wrong-password" not in str(caught.value)


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:1/0", "redis://127.0.0.1:port/0", "redis", "disk://x"])
def test_a_bad_url_is_said_at_the_start(url: str) -> None:
    with pytest.raises(UserError, match="URL"):
        open_tier(StoreConfig(url=url), Memory().values)


def test_no_url_is_memory_alone() -> None:
    assert open_tier(StoreConfig(), Memory().values) is None
