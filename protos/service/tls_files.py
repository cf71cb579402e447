"""Certificate, key and authority of this process, from a folder laid out like a Kubernetes TLS secret.

Knows nothing of gRPC. Guards: what is in use was whole and valid when it was read; files that cannot be used are logged
once and change nothing.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from protos.service.watched_file import FileStamp, bounded_bytes, file_stamp
from protos.wire.errors import InvalidCertificate

_logger = logging.getLogger(__name__)

CERTIFICATE_FILE = "tls.crt"
KEY_FILE = "tls.key"
AUTHORITY_FILE = "ca.crt"
REVOCATION_FILE = "ca.crl"
"""Need not be there."""
_MAX_FILE_BYTES = 1 << 20

Stamp = tuple[FileStamp | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsMaterial:
    """One reading of the folder, in PEM."""

    certificate: bytes
    """The process's own, and the ones between it and its authority."""
    key: bytes
    authority: bytes
    """Whose certificates peers must have; empty when the folder has none."""
    expires_at: float
    """End of the certificate's time, seconds since 1970."""


class TlsFolder:
    """Made at start by a composition root, lives as long as the process. Safe to use from gRPC's threads."""

    def __init__(self, folder: Path, *, needs_authority: bool, clock: Callable[[], float] = time.time) -> None:
        """Read the folder.

        Raises:
            InvalidCertificate: a file is missing or cannot be used.
        """
        self.revocation_file = folder / REVOCATION_FILE
        """Where the lists of certificates that the authority took back may be."""
        self._folder = folder
        self._needs_authority = needs_authority
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._material = self._read()

    def current(self) -> TlsMaterial:
        """What was last read and could be used; the files are read again if they have changed.

        The same object until there is something new, so that whoever keeps it can tell.
        """
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._renew()
            return self._material

    def _renew(self) -> None:
        try:
            material = self._read()
        except InvalidCertificate as error:
            _logger.warning("new certificates cannot be used, keeping the old ones", extra={"error": error.message})
            return
        if material != self._material:
            self._material = material
            _logger.info("certificates were read again", extra={"expires_at": int(material.expires_at)})

    def _look(self) -> Stamp:
        return tuple(file_stamp(self._folder / name) for name in (CERTIFICATE_FILE, KEY_FILE, AUTHORITY_FILE))

    def _read(self) -> TlsMaterial:
        certificate = self._bytes(CERTIFICATE_FILE)
        key = self._bytes(KEY_FILE)
        has_authority = self._needs_authority or (self._folder / AUTHORITY_FILE).exists()
        authority = self._bytes(AUTHORITY_FILE) if has_authority else b""
        own = _certificates(certificate, CERTIFICATE_FILE)[0]
        if has_authority:
            _certificates(authority, AUTHORITY_FILE)
        _check_key(own, key)
        begins, ends = own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp()
        if not begins <= self._clock() < ends:
            raise InvalidCertificate(f"{CERTIFICATE_FILE} is not valid now: its time has passed or is to come")
        return TlsMaterial(certificate=certificate, key=key, authority=authority, expires_at=ends)

    def _bytes(self, name: str) -> bytes:
        try:
            content = bounded_bytes(self._folder / name, most=_MAX_FILE_BYTES)
        except OSError as error:
            raise InvalidCertificate(f"{name} cannot be read: {error.strerror}", field=name) from None
        if content is None:
            raise InvalidCertificate(f"{name} has more than {_MAX_FILE_BYTES} bytes", field=name)
        return content


def _certificates(content: bytes, name: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(content)
    except ValueError:
        raise InvalidCertificate(f"{name} holds no certificate in PEM", field=name) from None


def _check_key(certificate: x509.Certificate, key: bytes) -> None:
    try:
        private = load_pem_private_key(key, password=None)
        theirs = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise InvalidCertificate(
            f"{KEY_FILE} holds no private key in PEM without a passphrase", field=KEY_FILE
        ) from None
    if private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) != theirs:
        raise InvalidCertificate(f"{KEY_FILE} is not the key of {CERTIFICATE_FILE}", field=KEY_FILE)
