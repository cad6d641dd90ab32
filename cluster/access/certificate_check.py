"""Whether the files of a data plane's TLS belong together and hold now: told before anything is started with them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from planner.errors import InvalidConfiguration
from worker.tls import AUTHORITY, GATEWAY, WORKER, read_file


def check_certificates(folder: Path, now: datetime) -> datetime:
    """When the first of them ends, in UTC; `now` is in UTC, too.

    Raises `InvalidConfiguration` naming the file that is missing, is none, does not hold yet or any more, was not
    signed by the authority, or is not the key of its certificate.
    """
    authorities = _certificates(folder / AUTHORITY)
    leaves = [_checked(folder / name, folder / key_name, authorities) for name, key_name in (WORKER, GATEWAY)]
    for path, certificate in [(folder / AUTHORITY, authorities[0]), *leaves]:
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not begins <= now <= ends:
            raise _refused(path, f"holds from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC, not now")
    return min(certificate.not_valid_after_utc for certificate in (authorities[0], *(leaf for _, leaf in leaves)))


def _checked(path: Path, key_path: Path, authorities: Sequence[x509.Certificate]) -> tuple[Path, x509.Certificate]:
    certificate, *others = _certificates(path)
    if not any(_issued(certificate, issuer) for issuer in (*others, *authorities)):
        raise _refused(path, f"was not signed by {AUTHORITY}")
    try:
        key = load_pem_private_key(read_file(key_path), password=None)
    except (ValueError, TypeError) as error:  # the second: it asks for a password
        raise _refused(key_path, f"is no private key: {_first_line(error)}") from error
    if key.public_key() != certificate.public_key():
        raise _refused(key_path, f"is not the key of {path.name}")
    return path, certificate


def _certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(read_file(path))
    except ValueError as error:
        raise _refused(path, f"is no certificate: {_first_line(error)}") from error


def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _refused(path: Path, why: str) -> InvalidConfiguration:
    return InvalidConfiguration(f"{path} {why}; `raycomb certs` makes a whole folder", param="data_plane_tls")
