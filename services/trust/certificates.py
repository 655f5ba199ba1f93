"""TLS on the bus: the certificate of a broker of one's own, and whom its clients believe.

The CA signs this one certificate, and its key is forgotten: there is nothing of it to be stolen, and nothing to be
renewed. A mesh whose certificates come from elsewhere puts that CA's certificate in place of CA_FILE.
"""

import datetime
import ipaddress
import re
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.errors import UserError

CA_FILE = "ca.pem"
CERTIFICATE_FILE = "broker.crt"
KEY_FILE = "broker.key"
LASTS = datetime.timedelta(days=3_650)
"""Nobody renews it: a mesh outlives one of a year, and would then stand still."""
_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")
_CLOCKS_DIFFER = datetime.timedelta(hours=1)


class BrokerCertificate(NamedTuple):
    """PEM texts. `ca`: what whoever connects must have; `key`: the broker's secret."""

    ca: bytes
    certificate: bytes
    key: bytes


def new_certificate(hosts: Sequence[str], now: datetime.datetime | None = None) -> BrokerCertificate:
    """Return a certificate for a broker that clients call by these names and addresses, of a CA of its own. Raises
    UserError for what is neither."""
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
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return BrokerCertificate(authority.public_bytes(pem), certificate.public_bytes(pem), secret)


def ca_file(folder: Path) -> Path | None:
    """Return the certificate of the CA that lies in a folder of keys; None where there is none. Raises UserError where
    that cannot be told."""
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
