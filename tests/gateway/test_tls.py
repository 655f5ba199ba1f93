"""The gateway over https, and certificates that cannot be used."""

import asyncio
import json
import re
import ssl
from pathlib import Path

import httpx
import openai
import pytest

from services.errors import UserError
from services.gateway.server import tls_context
from tests.certificates import Certificate, make_certificate
from tests.gateway.conftest import OpenRig, Rig
from tests.waiting import until


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_certificate(tmp_path_factory.mktemp("tls"))


def settings_of(certificate: Certificate) -> dict[str, str]:
    return {"tls_cert": str(certificate.cert), "tls_key": str(certificate.key)}


def address(rig: Rig) -> str:
    return f"https://localhost:{rig.http.base_url.port}/v1"


async def test_openais_client_over_https(open_rig: OpenRig, own: Certificate) -> None:
    trusting = ssl.create_default_context(cafile=own.cert)
    async with open_rig(gateway=settings_of(own)) as rig, httpx.AsyncClient(verify=trusting) as http:
        client = openai.AsyncOpenAI(base_url=address(rig), api_key="x", max_retries=0, http_client=http)
        answer = await client.completions.create(model=rig.model.name, prompt="Hi", max_tokens=100)
        assert answer.choices[0].text == rig.text
        stream = await client.completions.create(model=rig.model.name, prompt="Hi", max_tokens=100, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == rig.text


async def test_curl_over_https(open_rig: OpenRig, own: Certificate) -> None:
    async with open_rig(gateway=settings_of(own)) as rig:
        body = json.dumps({"model": rig.model.name, "prompt": "Hi", "max_tokens": 100})
        command = ["curl", "-sS", "--cacert", str(own.cert), f"{address(rig)}/completions"]
        command += ["-H", "Content-Type: application/json", "-d", body]
        curl = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        said, _ = await curl.communicate()
        assert json.loads(said)["choices"][0]["text"] == rig.text


async def test_http_is_not_answered_where_https_is_served(open_rig: OpenRig, own: Certificate) -> None:
    async with open_rig(gateway=settings_of(own)) as rig:
        with pytest.raises(httpx.HTTPError):
            await rig.http.get("/health")


async def test_a_handshake_has_a_time_limit(open_rig: OpenRig, own: Certificate) -> None:
    async with open_rig(gateway=settings_of(own), times={"head_s": 0.2}) as rig:
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.http.base_url.port)
        assert await reader.read() == b""
        writer.close()


async def test_a_certificate_that_is_replaced_is_served_at_once(
    open_rig: OpenRig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where its key comes later; connections that are open stay. That it ends soon is said."""
    served = make_certificate(tmp_path)
    following = make_certificate(tmp_path / "next")
    trusting = ssl.create_default_context(cafile=served.cert)
    async with open_rig(gateway=settings_of(served)) as rig, httpx.AsyncClient(verify=trusting) as kept:
        health = f"https://localhost:{rig.http.base_url.port}/health"
        assert (await kept.get(health)).is_success
        [warned] = [line for line in caplog.messages if "put the next one in its place" in line]
        assert str(served.cert) in warned
        served.cert.write_bytes(following.cert.read_bytes())
        await until(lambda: "what was read before stays in use" in caplog.text)
        async with httpx.AsyncClient(verify=trusting) as other:
            assert (await other.get(health)).is_success
        served.key.write_bytes(following.key.read_bytes())
        await until(lambda: "was read again" in caplog.text)
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=following.cert)) as other:
            assert (await other.get(health)).is_success
        async with httpx.AsyncClient(verify=trusting) as other:
            with pytest.raises(httpx.ConnectError):
                await other.get(health)
        assert (await kept.get(health)).is_success
        rig.metrics.sample()
        [days] = re.findall(rb"^kvmesh_gateway_certificate_days_left (\S+)$", rig.metrics.render()[0], re.MULTILINE)
        assert 0 < float(days) <= 1


def test_what_cannot_be_used_is_one_line(own: Certificate, tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "other")
    locked = make_certificate(tmp_path, "locked", b"password")
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("rubbish")
    pairs = [
        (tmp_path / "none.crt", own.key), (own.cert, tmp_path / "none.key"), (own.cert, other.key), (rubbish, own.key),
        (own.cert, rubbish), locked, (tmp_path, own.key),
    ]  # fmt: skip
    for cert, key in pairs:
        with pytest.raises(UserError) as caught:
            tls_context(str(cert), str(key))
        said = str(caught.value)
        assert str(cert) in said and str(key) in said and "PEM" in said and not re.search(r"\n|\[SSL\]:? *$", said)
