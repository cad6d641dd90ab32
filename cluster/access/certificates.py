"""A certificate authority of the operator's own, and what it signs: for the data plane, and for a proxy in front."""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from planner.errors import InvalidConfiguration
from worker.tls import AUTHORITY, GATEWAY, WORKER, WORKER_NAME

AUTHORITY_KEY: Final = "ca-key.pem"
FRONT: Final = "front.pem"
"""Certificate and key in one file, as HAProxy wants them."""

CLOCKS_DIFFER_BY: Final = datetime.timedelta(minutes=5)


def make_certificates(folder: Path, names: Sequence[str], days: int) -> list[Path]:
    """Make all files, those with keys readable by their owner alone; `names` are those of the front, for clients.

    Raises `InvalidConfiguration` when one of them is there already, or the folder cannot be: nothing was written then.
    """
    paths = [folder / name for name in (AUTHORITY, AUTHORITY_KEY, *WORKER, *GATEWAY, *([FRONT] if names else []))]
    if there := [path.name for path in paths if path.exists()]:
        raise InvalidConfiguration(f"{folder} has {', '.join(there)} already; nothing was written", param="folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfiguration(f"{folder} cannot be made: {error.strerror}", param="folder") from error
    authority = _Authority(days)
    _write(folder / AUTHORITY, authority.pem, 0o644)
    _write(folder / AUTHORITY_KEY, authority.key_pem, 0o600)
    for (certificate_name, key_name), name, use in (
        (WORKER, WORKER_NAME, ExtendedKeyUsageOID.SERVER_AUTH),
        (GATEWAY, "gateway.raycomb.internal", ExtendedKeyUsageOID.CLIENT_AUTH),
    ):
        certificate, key = authority.sign([name], use)
        _write(folder / certificate_name, certificate, 0o644)
        _write(folder / key_name, key, 0o600)
    if names:
        _write(folder / FRONT, b"".join(authority.sign(names, ExtendedKeyUsageOID.SERVER_AUTH)), 0o600)
    return paths


class _Authority:
    """Signs, and is forgotten."""

    def __init__(self, days: int) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Raycomb's own authority")])
        now = datetime.datetime.now(datetime.UTC)
        self._from, self._until = now - CLOCKS_DIFFER_BY, now + datetime.timedelta(days=days)
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.pem = _pem(builder.add_extension(_usage(signs=True), critical=True).sign(self._key, hashes.SHA256()))
        self.key_pem = _key_pem(self._key)

    def sign(self, names: Sequence[str], use: x509.ObjectIdentifier) -> tuple[bytes, bytes]:
        """A certificate for all of `names`, which may be addresses, and its key; both PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        builder = (
            self._builder(subject, key.public_key())
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        )
        return _pem(builder.sign(self._key, hashes.SHA256())), _key_pem(key)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._from)
            .not_valid_after(self._until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Never readable by others for a moment, as a file that is changed afterwards would be."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
