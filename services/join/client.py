"""What a machine asks at a join port. Whom it speaks to it knows by the CA, and that by its hash in the token."""

import contextlib
import http.client
import ssl
import time
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from dataplane.addresses import in_url
from services.asgi import Refusal
from services.errors import UserError
from services.join.messages import JOIN_PORT, MAX_ANSWER_BYTES, Asks, FromHost
from services.trust.certificates import names_in
from services.trust.hosts import ca_hash, sign_as_host

TIMEOUT_S = 20.0
_OTHER_NAME = (62, 64)
"""OpenSSL's codes of a certificate for another name, or another address."""

AnswerT = TypeVar("AnswerT")


class JoinRefusedError(UserError):
    """The mesh's machine answers, and refuses."""


class JoinUnreachableError(UserError):
    """Nobody answers at the join port."""


class JoinUrl:
    """`tls://HOST:PORT`. Raises UserError for anything else."""

    def __init__(self, text: str) -> None:
        try:
            parts = urlsplit(text if "://" in text else f"tls://{text}")
            self.host, self.port = parts.hostname or "", parts.port or JOIN_PORT
        except ValueError:
            parts, self.host, self.port = None, "", 0
        if parts is None or parts.scheme != "tls" or not self.host or parts.path.strip("/"):
            raise UserError(f"{text!r} is no mesh to join: it is like tls://HOST:{JOIN_PORT}")

    def __str__(self) -> str:
        return f"tls://{in_url(self.host)}:{self.port}"


class Asking:
    """Asks at one join port. `ca`: the certificate that its own is to be signed by."""

    def __init__(self, url: JoinUrl, ca: bytes) -> None:
        self._url = url
        self.own_address = ""
        """Of this machine, as it was connected from at the last question."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_verify_locations(cadata=ca.decode())

    @classmethod
    def trusting(cls, url: JoinUrl, wanted_hash: str) -> "tuple[Asking, bytes]":
        """Return what asks there, and the CA's certificate, once that is the one whose hash is known. Raises UserError:
        it is another mesh."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is asked for what all know
        _, ca, _ = _exchange(url, context, "GET", Asks.CA, b"")
        if ca_hash(ca) != wanted_hash:
            raise UserError(
                f"{url} is another mesh than the token's, or somebody stands between: the secret was not sent"
            )
        return cls(url, ca), ca

    def ask(self, asks: Asks, question: msgspec.Struct, kind: type[AnswerT]) -> AnswerT:
        """Raises JoinRefusedError with the mesh's own line, JoinUnreachableError, UserError for what is no answer."""
        status, body, self.own_address = _exchange(
            self._url, self._context, "POST", asks, msgspec.json.encode(question)
        )
        try:
            if status != http.HTTPStatus.OK:
                raise JoinRefusedError(msgspec.json.decode(body, type=Refusal).error)
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise UserError(
                f"{self._url} answers what this kvmesh does not understand ({error}): is it as new?"
            ) from None

    def ask_as(self, host: FromHost, secret: str, asks: Asks, kind: type[AnswerT]) -> AnswerT:
        """Ask as a machine that has joined, which signs with its own key. Raises as `ask`."""
        host = msgspec.structs.replace(host, now_s=int(time.time()))
        return self.ask(
            asks, msgspec.structs.replace(host, signature=sign_as_host(secret, host.signed_text(asks))), kind
        )


def _names_at(url: JoinUrl) -> str:
    """Return the names that a certificate is for. It is not believed: they are for people."""
    with contextlib.suppress(OSError):
        return " or ".join(names_in(ssl.get_server_certificate((url.host, url.port), timeout=TIMEOUT_S)))
    return "another name"


def _exchange(url: JoinUrl, context: ssl.SSLContext, method: str, asks: Asks, body: bytes) -> tuple[int, bytes, str]:
    """Return the status, the body, and from which of our addresses it was asked. Raises UserError."""
    connection = http.client.HTTPSConnection(url.host, url.port, timeout=TIMEOUT_S, context=context)
    try:
        connection.connect()
        address = str(connection.sock.getsockname()[0])
        connection.request(method, asks, body, {"content-type": "application/json"})
        response = connection.getresponse()
        content = response.read(MAX_ANSWER_BYTES + 1)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _OTHER_NAME:
            raise UserError(f"the mesh's certificate is not for {url.host}: join by {_names_at(url)}") from None
        raise UserError(f"{url} does not show the mesh's certificate: {error.verify_message}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
        raise JoinUnreachableError(f"no mesh answers at {url} ({reason}): is its --join-port open?") from None
    finally:
        connection.close()
    if len(content) > MAX_ANSWER_BYTES:
        raise UserError(f"{url} answers more than a mesh has to say")
    return response.status, content, address
