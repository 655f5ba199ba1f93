"""The broker of `kvmesh up`: found, started, stopped, and never left behind."""

import asyncio
import os
import stat
import sys
from pathlib import Path

import pytest

from services.bus import embedded
from services.bus.base import MessageTooLargeError
from services.bus.embedded import EmbeddedNats, find_server
from services.bus.limits import MAX_PAYLOAD_BYTES, MIN_PAYLOAD_BYTES
from services.bus.nats import NatsBus
from services.errors import UserError
from services.trust.keys import BROKER_FILE, BusAccess, MeshKeys
from tests.waiting import until

PARENT = """
import sys, time
from pathlib import Path
from services.bus.embedded import EmbeddedNats
print(EmbeddedNats.launch(None, Path(sys.argv[1])).pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Say whether the process runs (a zombie does not). Without /proc: whether it exists."""
    try:
        os.kill(pid, 0)
        if sys.platform != "linux":
            return True
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def fake_server(folder: Path, version: str) -> Path:
    binary = folder / "nats-server"
    binary.write_text(f"#!/bin/sh\necho 'nats-server: v{version}'\n")
    binary.chmod(stat.S_IRWXU)
    return binary


async def test_it_answers_with_our_limits_and_stops(tmp_path: Path) -> None:
    folder = tmp_path / 'a "quoted" folder'
    server = EmbeddedNats.launch(None, folder)
    bus = await NatsBus.connect(BusAccess(server.url), "test")
    assert server.url.startswith("nats://127.0.0.1:")
    assert bus._client.max_payload == MAX_PAYLOAD_BYTES
    await bus.close()
    server.stop()
    server.stop()
    assert not is_alive(server.pid)
    assert "Server is ready" in (folder / "nats.log").read_text()


async def test_a_broker_may_take_less_but_not_too_little(tmp_path: Path) -> None:
    small = EmbeddedNats.launch(None, tmp_path / "small", f"max_payload: {MIN_PAYLOAD_BYTES}\n")
    bus = await NatsBus.connect(BusAccess(small.url), "test")
    assert bus.max_bytes == MIN_PAYLOAD_BYTES
    ear = await bus.subscribe("a")
    with pytest.raises(MessageTooLargeError, match=rf" {MIN_PAYLOAD_BYTES + 1} bytes.* {MIN_PAYLOAD_BYTES} "):
        await bus.publish("a", bytes(MIN_PAYLOAD_BYTES - 11), {})
    await bus.publish("a", bytes(MIN_PAYLOAD_BYTES - 12), {})
    assert len((await anext(aiter(ear))).payload) == MIN_PAYLOAD_BYTES - 12
    await bus.close()
    small.stop()
    tiny = EmbeddedNats.launch(None, tmp_path / "tiny", f"max_payload: {MIN_PAYLOAD_BYTES - 1}\n")
    with pytest.raises(UserError, match=rf" {MIN_PAYLOAD_BYTES - 1} bytes.* {MIN_PAYLOAD_BYTES} .*max_payload"):
        await NatsBus.connect(BusAccess(tiny.url), "test")
    tiny.stop()


async def test_bus_config_asks_for_all_that_we_use(tmp_path: Path) -> None:
    keys = MeshKeys.fresh()
    keys.save(tmp_path / "keys")
    assert f"max_payload: {MAX_PAYLOAD_BYTES}\n" in (tmp_path / "keys" / BROKER_FILE).read_text()


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    first = EmbeddedNats.launch(None, tmp_path)
    try:
        port = int(first.url.rsplit(":", 1)[1])
        with pytest.raises(UserError, match=f"port {port} is in use"):
            EmbeddedNats.launch(port, tmp_path)
    finally:
        first.stop()
    again = EmbeddedNats.launch(port, tmp_path)
    assert again.url == first.url
    again.stop()


def test_several_share_a_folder(tmp_path: Path) -> None:
    servers = [EmbeddedNats.launch(None, tmp_path) for _ in range(2)]
    assert len({server.url for server in servers}) == 2
    for server in servers:
        server.stop()


def test_an_old_server_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(tmp_path, "2.10.9")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server() == str(Path(sys.executable).with_name("nats-server"))
    new = fake_server(tmp_path, "2.12.0")
    assert find_server() == str(new)


def test_no_server_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"no nats-server 2\.12 or newer"):
        EmbeddedNats.launch(None, tmp_path)


def test_a_server_that_ends_at_once_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_server", lambda: str(fake_server(tmp_path, "2.12.0")))
    with pytest.raises(UserError, match=r"did not start; its log is .*nats\.log"):
        EmbeddedNats.launch(None, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
async def test_it_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    await parent.wait()
    await until(lambda: not is_alive(pid))
