"""Certificates that their authority took back: revocation lists (X.509 CRLs in PEM) in a file beside those it signed.

Knows nothing of gRPC. Guards: what is in use was signed by an authority that peers must have; a file that cannot be
used is logged once and changes nothing. A list whose time is over stays in force, with a warning: it names who is
revoked as well as before, and turning everybody away would make an outage of a late job.
"""

import functools
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from cryptography import x509

from protos.service.tls_files import REVOCATION_FILE, TlsFolder
from protos.service.watched_file import bounded_bytes, file_stamp
from protos.wire.errors import InvalidCertificate

_logger = logging.getLogger(__name__)

_MAX_FILE_BYTES = 16 << 20
_LOOK_EVERY_S = 1.0
_WARN_EVERY_S = 3600.0
_ONE_LIST = re.compile(rb"-----BEGIN X509 CRL-----.*?-----END X509 CRL-----", re.DOTALL)
_PEM = b"-----BEGIN"

_Name = tuple[bytes, int]
"""Issuer's name in DER, and serial number."""


class RevocationList:
    """Made at start by a composition root, lives as long as the process. Safe to use from several threads."""

    def __init__(self, files: TlsFolder, *, clock: Callable[[], float] = time.time) -> None:
        """Read the folder's file, if it is there; it is read again when it changes, or appears.

        Args:
            files: each list must be signed by one of their authorities.
            clock: seconds since 1970.

        Raises:
            InvalidCertificate: it cannot be used.
        """
        self._path = files.revocation_file
        self._files = files
        self._clock = clock
        self._lock = threading.Lock()
        self._stamp = file_stamp(self._path)
        self._looked_at = clock()
        self._warned_at = float("-inf")
        self._revoked: frozenset[_Name] = frozenset()
        self._ends_at = float("inf")
        if self._stamp is not None:
            self._take()
            self._warn_if_old()

    def holds(self, certificate: bytes) -> bool:
        """Whether a peer's certificate, in PEM or DER, is revoked; the file is looked at once a second at most."""
        with self._lock:
            self._refresh()
            return _name_of(certificate) in self._revoked

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = file_stamp(self._path)
        if stamp != self._stamp:
            self._stamp = stamp
            self._renew()
        self._warn_if_old()

    def _renew(self) -> None:
        try:
            self._take()
        except InvalidCertificate as error:
            _logger.warning("a new revocation list cannot be used, keeping the old one", extra={"error": error.message})

    def _take(self) -> None:
        self._revoked, self._ends_at = self._read()
        _logger.info("revocation lists were read", extra={"revoked": len(self._revoked)})

    def _warn_if_old(self) -> None:
        now = self._clock()
        if now >= self._ends_at and now - self._warned_at >= _WARN_EVERY_S:
            self._warned_at = now
            _logger.warning("a revocation list should have been replaced; it stays in force")

    def _read(self) -> tuple[frozenset[_Name], float]:
        """Who is revoked, and when the first of the lists should be replaced, in seconds since 1970."""
        authorities = x509.load_pem_x509_certificates(self._files.current().authority)
        lists = [_signed_list(text, authorities) for text in _ONE_LIST.findall(self._content())]
        if not lists:
            raise InvalidCertificate("ca.crl holds no revocation list in PEM", field=REVOCATION_FILE)
        revoked = frozenset((one.issuer.public_bytes(), entry.serial_number) for one in lists for entry in one)
        ends = [one.next_update_utc.timestamp() for one in lists if one.next_update_utc is not None]
        return revoked, min(ends, default=float("inf"))

    def _content(self) -> bytes:
        try:
            content = bounded_bytes(self._path, most=_MAX_FILE_BYTES)
        except OSError as error:
            message = f"ca.crl cannot be read: {error.strerror}"
            raise InvalidCertificate(message, field=REVOCATION_FILE) from None
        if content is None:
            message = f"ca.crl has more than {_MAX_FILE_BYTES} bytes"
            raise InvalidCertificate(message, field=REVOCATION_FILE)
        return content


def _signed_list(text: bytes, authorities: list[x509.Certificate]) -> x509.CertificateRevocationList:
    try:
        found = x509.load_pem_x509_crl(text)
        is_ours = any(_signed(found, authority) for authority in authorities)
    except (ValueError, TypeError):
        raise InvalidCertificate("a revocation list is malformed", field=REVOCATION_FILE) from None
    if not is_ours:
        raise InvalidCertificate("a revocation list is not signed by an authority of ca.crt", field=REVOCATION_FILE)
    return found


def _signed(found: x509.CertificateRevocationList, authority: x509.Certificate) -> bool:
    key: Any = authority.public_key()
    return found.issuer == authority.subject and found.is_signature_valid(key)


@functools.lru_cache(maxsize=4096)
def _name_of(certificate: bytes) -> _Name:
    load = x509.load_pem_x509_certificate if certificate.startswith(_PEM) else x509.load_der_x509_certificate
    found = load(certificate)
    return found.issuer.public_bytes(), found.serial_number
