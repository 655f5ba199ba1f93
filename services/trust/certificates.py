"""TLS: the certificate of a broker of one's own, whom its clients believe, and certificates that are replaced.

The CA signs this one certificate, and its key is forgotten: there is nothing of it to be stolen, and nothing to be
renewed. A mesh whose certificates come from elsewhere puts that CA's certificate in place of CA_FILE.
"""

import asyncio
import contextlib
import datetime
import ipaddress
import logging
import math
import re
import ssl
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dataplane.addresses import is_loopback
from dataplane.lasting import lasting_task
from services.errors import UserError

log = logging.getLogger(__name__)

CA_FILE = "ca.pem"
CERTIFICATE_FILE = "broker.crt"
KEY_FILE = "broker.key"
LASTS = datetime.timedelta(days=3_650)
"""Nobody renews it: a mesh outlives one of a year, and would then stand still."""
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_DAY = datetime.timedelta(days=1)
_ENDS_SOON = 7 * _DAY
_CLOCKS_DIFFER = datetime.timedelta(hours=1)


class BrokerCertificate(NamedTuple):
    """PEM texts. `ca`: what whoever connects must have; `key`: the broker's secret."""

    ca: bytes
    certificate: bytes
    key: bytes


def new_certificate(
    hosts: Sequence[str], now: datetime.datetime | None = None, *, is_client_too: bool = False
) -> BrokerCertificate:
    """Return a certificate for a broker that clients call by these names and addresses, of a CA of its own.
    `is_client_too`: its servers show it to each other. Raises UserError for what is neither."""
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, *([ExtendedKeyUsageOID.CLIENT_AUTH] if is_client_too else ())]
    begins = now or datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = _named("kvmesh CA")
    signs = ca_key.public_key()
    authority = (
        _begun(ca_name, ca_name, signs, signs, begins)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    certificate = (
        _begun(_named("kvmesh broker"), ca_name, key.public_key(), signs, begins)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return BrokerCertificate(authority.public_bytes(pem), certificate.public_bytes(pem), secret)


def names_in(certificate: str) -> list[str]:
    """Return the names and addresses that a certificate is for, but those of the machine itself."""
    names = x509.load_pem_x509_certificate(certificate.encode()).extensions
    found = names.get_extension_for_class(x509.SubjectAlternativeName).value
    each = [*found.get_values_for_type(x509.IPAddress), *found.get_values_for_type(x509.DNSName)]
    return [str(name) for name in each if not is_loopback(str(name))]


def ca_file(folder: Path) -> Path | None:
    """Return the certificate of the CA that lies in a folder of keys; None where there is none. Raises UserError where
    that cannot be known."""
    path = folder / CA_FILE
    try:
        path.lstat()  # a link that leads nowhere is a mistake, not "none"
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return path


def client_context(ca: Path | None) -> ssl.SSLContext:
    """Return how to connect to whom this CA vouches for; None: to whom one of the system's does. Raises UserError."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:  # an SSLError too
        raise UserError(f"{ca} is no CA's certificate that can be read: {error.strerror or error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class WatchedFile:
    """A file that may be replaced while this process runs. `load` takes into use what it has now; it raises UserError
    where that is of no use. `others`: files that change together with it."""

    def __init__(self, path: Path, load: Callable[[], object], *others: Path) -> None:
        self._path = path
        self._load = load
        self._files = (path, *others)
        self._loaded = self._seen = self._state()

    @contextlib.contextmanager
    def kept(self, look_s: float) -> Generator[None]:
        """Look at the files so often while the block runs. What has changed is loaded once it stays as it is from one
        look to the next: two files are not written at once."""
        keeping = lasting_task(partial(self._keep, look_s), f"watch {self._path.name}")
        try:
            yield
        finally:
            keeping.cancel()

    def reload(self) -> None:
        """Take into use what the files have now, whether they have changed or not."""
        self._loaded = self._seen = self._state()
        self.read_again()

    def looked(self) -> None:
        """The files were looked at."""

    def read_again(self) -> bool:
        """Return whether what the files have now is in use."""
        try:
            self._load()
        except UserError as error:
            log.warning("%s is of no use, and what was read before stays in use: %s", self._path, error)
            return False
        return True

    async def _keep(self, look_s: float) -> None:
        while True:
            await asyncio.sleep(look_s)
            state = self._state()
            if state == self._seen != self._loaded:
                self._loaded = state
                self.read_again()
            self._seen = state
            self.looked()

    def _state(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(map(_state_of, self._files))


class CertificateFile(WatchedFile):
    """A PEM file of certificates that this process shows or believes: what it has now, and when the first of them ends.
    `key`: a file that changes together with it."""

    def __init__(self, path: Path, load: Callable[[], object], key: Path | None = None) -> None:
        super().__init__(path, load, *(() if key is None else (key,)))
        self._ends = _first_end(path)
        self._warned_at: datetime.datetime | None = None
        """When it was last logged that the end is near."""
        self.looked()

    @property
    def days_left(self) -> float:
        """Days until the first certificate ends, negative after that; NaN where the file does not say."""
        return math.nan if self._ends is None else (self._ends - datetime.datetime.now(datetime.UTC)) / _DAY

    def read_again(self) -> bool:
        if is_read := super().read_again():
            self._ends, self._warned_at = _first_end(self._path), None
            log.warning("%s has changed and was read again, its end is %s", self._path, self._ends)
        return is_read

    def looked(self) -> None:
        """Log once a day that the end is near."""
        now = datetime.datetime.now(datetime.UTC)
        if self._ends is None or self._ends - now > _ENDS_SOON or (self._warned_at and now - self._warned_at < _DAY):
            return
        self._warned_at = now
        word = "ends" if self._ends > now else "has ended"
        log.warning("a certificate in %s %s at %s: put the next one in its place", self._path, word, self._ends)


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file; None: there is none to be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _first_end(path: Path) -> datetime.datetime | None:
    """Return when the first certificate of a PEM file ends; None where it cannot be known."""
    try:
        return min(found.not_valid_after_utc for found in x509.load_pem_x509_certificates(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _begun(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuers_key: ec.EllipticCurvePublicKey,
    begins: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins - _CLOCKS_DIFFER)
        .not_valid_after(begins + LASTS)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuers_key), critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if _NAME.fullmatch(host):
            return x509.DNSName(host)
    raise UserError(f"{host!r} is no name or address of a machine: without tls:// and without a port")
