"""TLS on the bus: whom a client believes, and what it does not do in clear."""

import asyncio
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from schemas.subjects import Role
from services.bus.embedded import EmbeddedNats
from services.bus.nats import NatsBus
from services.errors import BrokerRefusesError, BrokerUnreachableError, UserError
from services.trust.certificates import CA_FILE, LASTS, CertificateFile, ca_file, client_context, new_certificate
from services.trust.keys import BROKER_FILE, BusAccess, MeshKeys
from tests.bus.test_nats import stopped
from tests.waiting import until

LOOPBACK = ("localhost", "127.0.0.1")


@pytest.fixture(scope="module")
def keys() -> MeshKeys:
    return MeshKeys.fresh(LOOPBACK)


@pytest.fixture(scope="module")
def broker(keys: MeshKeys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    folder = tmp_path_factory.mktemp("tls")
    server = serving(keys, folder)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def ca(keys: MeshKeys, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("client")
    assert keys.certificate is not None
    (folder / CA_FILE).write_bytes(keys.certificate.ca)
    found = ca_file(folder)
    assert found is not None
    return found


def serving(keys: MeshKeys, folder: Path, port: int | None = None) -> EmbeddedNats:
    keys.save(folder / "keys")
    return EmbeddedNats.launch(port, folder / "run", (folder / "keys" / BROKER_FILE).read_text())


def gateway(url: str, keys: MeshKeys, ca: Path | None) -> BusAccess:
    return BusAccess(url, keys.roles[Role.GATEWAY].identity("gateway-0"), ca)


async def refusal(access: BusAccess) -> str:
    with pytest.raises(BrokerRefusesError) as refused:
        await (await NatsBus.connect(access, "gateway-0")).close()
    return str(refused.value)


async def test_who_has_the_ca_comes_in_and_is_encrypted(broker: EmbeddedNats, keys: MeshKeys, ca: Path) -> None:
    bus = await NatsBus.connect(gateway(broker.url, keys, ca), "gateway-0")
    await bus.flush()
    transport = bus._client._transport._io_writer.transport
    assert transport.get_extra_info("cipher") and transport.get_extra_info("ssl_object").version() == "TLSv1.3"
    await bus.close()


async def test_who_lacks_the_ca_believes_nobody(broker: EmbeddedNats, keys: MeshKeys, ca: Path) -> None:
    refused = await refusal(gateway(broker.url, keys, None))
    assert "is not believed to be ours" in refused and "ca.pem" in refused
    other = ca.with_name("other.pem")
    other.write_bytes(new_certificate(LOOPBACK).ca)
    assert "is not believed to be ours" in await refusal(gateway(broker.url, keys, other))


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_broker_that_is_full_is_quoted(keys: MeshKeys, ca: Path, tmp_path: Path, is_encrypted: bool) -> None:
    keys.save(tmp_path / "keys")
    secured = (tmp_path / "keys" / BROKER_FILE).read_text() if is_encrypted else ""
    server = EmbeddedNats.launch(None, tmp_path / "run", f"max_connections: 1\n{secured}")
    access = gateway(server.url, keys, ca) if is_encrypted else BusAccess(server.url)
    first = await NatsBus.connect(access, "gateway-0")
    with pytest.raises(BrokerUnreachableError, match=r"does not let us in: maximum connections exceeded$"):
        await NatsBus.connect(access, "gateway-0")
    await first.close()
    server.stop()


async def test_a_certificate_for_another_name_is_refused_by_name(keys: MeshKeys, tmp_path: Path) -> None:
    elsewhere = MeshKeys.fresh(["nats.example.org"])
    server = serving(elsewhere, tmp_path)
    try:
        refused = await refusal(gateway(server.url, elsewhere, tmp_path / "keys" / CA_FILE))
        assert "127.0.0.1" in refused and "not valid for" in refused
    finally:
        server.stop()


async def test_an_expired_certificate_is_one_line(tmp_path: Path) -> None:
    current = MeshKeys.fresh(LOOPBACK)
    long_ago = datetime.datetime.now(datetime.UTC) - LASTS - datetime.timedelta(days=1)
    expired = replace(current, certificate=new_certificate(LOOPBACK, long_ago))
    server = serving(expired, tmp_path)
    try:
        refused = await refusal(gateway(server.url, expired, tmp_path / "keys" / CA_FILE))
        assert "certificate has expired" in refused and "kvmesh bus-config" in refused and "\n" not in refused
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("url", "has_identity", "is_encrypted"),
    [
        ("nats://127.0.0.1:4222", True, False),
        ("127.0.0.1:4222", True, False),
        ("tls://127.0.0.1:4222", True, True),
        ("tls://127.0.0.1:4222", False, True),
        ("nats://[::1]:4222", True, False),
        ("nats://10.0.0.5:4222", True, True),
        ("10.0.0.5:4222", True, True),
        ("nats://nats:4222", True, True),
        ("nats://10.0.0.5:4222", False, False),  # nobody is asked for anything there
        ("nats://worker:pass@10.0.0.5:4222", False, True),
        ("nats://worker:pass@localhost:4222", False, False),
        ("nats://a-token@10.0.0.5:4222", False, True),
    ],
)
def test_a_key_crosses_a_network_encrypted_only(
    keys: MeshKeys, url: str, has_identity: bool, is_encrypted: bool
) -> None:
    identity = keys.roles[Role.GATEWAY].identity("gateway-0") if has_identity else None
    assert BusAccess(url, identity).is_encrypted is is_encrypted


def info(**fields: object) -> bytes:
    said = {"server_id": "x", "version": "2.12.0", "max_payload": 1_048_576, "nonce": "abc", **fields}
    return b"INFO " + json.dumps(said).encode() + b"\r\n"


async def test_nothing_is_said_to_whoever_takes_the_encryption_away(nats_url: str, keys: MeshKeys, ca: Path) -> None:
    """Somebody on the way answers in the broker's place, and offers no TLS."""
    heard, is_over = bytearray(), asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(info())
        heard.extend(await reader.read())
        writer.close()
        is_over.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as middle:
        port = middle.sockets[0].getsockname()[1]
        refused = await refusal(gateway(f"nats://127.0.0.1:{port}", keys, ca))
        await is_over.wait()
    assert "does not encrypt" in refused and not heard
    assert "does not encrypt" in await refusal(BusAccess(nats_url.replace("nats:", "tls:"), None, ca))


async def test_nobody_is_gone_to_whom_the_first_line_names(keys: MeshKeys) -> None:
    """It comes in clear. A broker of a cluster names the others, on machines that nobody has judged."""
    came, lines = asyncio.Event(), list[bytes]()

    async def elsewhere(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.set()
        writer.close()

    async def first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(info(connect_urls=[f"127.0.0.2:{other.sockets[0].getsockname()[1]}"]))
        while line := await reader.readline():
            lines.append(line)
            if line.startswith(b"PING"):
                writer.write(b"PONG\r\n")
            if line.startswith(b"SUB"):
                writer.close()  # the client tries again

    async with (
        await asyncio.start_server(elsewhere, "127.0.0.2", 0) as other,
        await asyncio.start_server(first, "127.0.0.1", 0) as server,
    ):
        port = server.sockets[0].getsockname()[1]
        bus = await NatsBus.connect(gateway(f"nats://127.0.0.1:{port}", keys, None), "gateway-0")
        await until(lambda: sum(line.startswith(b"CONNECT") for line in lines) >= 4)
        assert not came.is_set()
        await bus.close()


async def test_a_broker_that_stands_still_is_left_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TLS has a goodbye, for which asyncio would wait, for half a minute or as here for ever."""
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 3_600.0)
    mine = MeshKeys.fresh(LOOPBACK)
    server = serving(mine, tmp_path)
    bus = await NatsBus.connect(gateway(server.url, mine, tmp_path / "keys" / CA_FILE), "gateway-0")
    with stopped(server):
        await bus._client.force_reconnect()
        await until(lambda: "lost the broker" in caplog.text)
        assert not bus.is_connected
    await until(lambda: bus.is_connected)
    await bus.flush()
    await bus.close()
    server.stop()


async def test_it_comes_back_encrypted_and_to_nobody_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = MeshKeys.fresh(LOOPBACK)
    server = serving(mine, tmp_path)
    port = int(server.url.rpartition(":")[2])
    bus = await NatsBus.connect(gateway(server.url, mine, tmp_path / "keys" / CA_FILE), "gateway-0")
    server.stop()
    await until(lambda: not bus.is_connected)
    forged = serving(replace(mine, certificate=new_certificate(LOOPBACK)), tmp_path / "forged", port)
    await until(lambda: "not believed to be ours" in caplog.text)
    assert not bus.is_connected
    forged.stop()
    in_clear = EmbeddedNats.launch(port, tmp_path / "clear", mine.broker_config)
    await until(lambda: "does not encrypt" in caplog.text)
    assert not bus.is_connected
    in_clear.stop()
    said = [record.getMessage() for record in caplog.records]
    reasons = ("not believed to be ours", "does not encrypt")
    assert [sum(reason in line for line in said) for reason in reasons] == [1, 1]
    server = serving(mine, tmp_path, port)
    await until(lambda: bus.is_connected)
    await bus.flush()
    await bus.close()
    server.stop()


async def test_a_ca_that_is_replaced_is_believed_from_then_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = MeshKeys.fresh(LOOPBACK)
    server = serving(mine, tmp_path)
    port = int(server.url.rpartition(":")[2])
    ca = tmp_path / CA_FILE
    assert mine.certificate is not None
    ca.write_bytes(mine.certificate.ca)
    bus = await NatsBus.connect(gateway(server.url, mine, ca), "gateway-0")
    server.stop()
    following = replace(mine, certificate=new_certificate(LOOPBACK))
    server = serving(following, tmp_path / "following", port)
    await until(lambda: "not believed to be ours" in caplog.text)
    ca.write_bytes(b"")  # it is being written
    ca.write_bytes(following.certificate.ca)
    await until(lambda: bus.is_connected)
    await bus.flush()
    await bus.close()
    server.stop()


async def test_an_end_that_is_near_is_said_once_and_counted_in_days(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that changes is read again; what cannot be read as a certificate has no end."""
    now = datetime.datetime.now(datetime.UTC)
    path = tmp_path / CA_FILE
    path.write_bytes(new_certificate(LOOPBACK, now - LASTS + datetime.timedelta(days=6, hours=12)).ca)
    file = CertificateFile(path, partial(client_context, path))
    assert 6 < file.days_left < 7
    with file.kept(0.01):
        path.write_bytes(new_certificate(LOOPBACK, now - LASTS - datetime.timedelta(days=2)).ca)
        await until(lambda: "was read again" in caplog.text)
        assert -3 < file.days_left < -1
        path.write_bytes(b"rubbish")
        await until(lambda: "stays in use" in caplog.text)
        assert -3 < file.days_left < -1
        path.unlink()
        await until(lambda: caplog.text.count("stays in use") == 2)
        path.write_bytes(new_certificate(LOOPBACK).ca)
        await until(lambda: caplog.text.count("was read again") == 2)
        assert file.days_left > 3_000
    said = [record.getMessage() for record in caplog.records if "put the next one" in record.getMessage()]
    assert ["has ended" in line for line in said] == [False, True]


def test_stock_tools_verify_it_too(broker: EmbeddedNats, ca: Path) -> None:
    """OpenSSL's own opinion of the chain, strictly."""
    port = broker.url.rpartition(":")[2]
    code = (
        "import socket, ssl, sys\n"
        "context = ssl.create_default_context(cafile=sys.argv[1])\n"
        "context.verify_flags |= ssl.VERIFY_X509_STRICT\n"
        "sock = socket.create_connection(('127.0.0.1', int(sys.argv[2])))\n"
        "assert sock.recv(4096).startswith(b'INFO')\n"
        "print(context.wrap_socket(sock, server_hostname='localhost').version())\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ca), port], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "TLSv1.3", done.stderr


def test_names_are_checked_before_keys_are_made(tmp_path: Path) -> None:
    for bad in ("tls://nats.example.org", "nats.example.org:4222", "two names", "", "*", "a;b", "x" * 300):
        with pytest.raises(UserError, match="no name or address"):
            MeshKeys.fresh([bad])
    (tmp_path / CA_FILE).write_text("no certificate")
    with pytest.raises(UserError, match="no CA's certificate"):
        client_context(tmp_path / CA_FILE)
    lost = tmp_path / "lost"
    lost.mkdir()
    (lost / CA_FILE).symlink_to("nowhere")
    found = ca_file(lost)
    assert found is not None
    with pytest.raises(UserError, match="no CA's certificate"):
        client_context(found)
