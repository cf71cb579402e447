"""TLS of the HTTP front over a folder of certificates, read again when it changes.

Each handshake takes the newest context that could be made; connections that stand keep theirs.
"""

import logging
import ssl
from pathlib import Path

from protos.service.tls_files import AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE, TlsFolder

_logger = logging.getLogger(__name__)


def http_context(files: TlsFolder, folder: Path, *, needs_client: bool) -> ssl.SSLContext:
    """The context a port listens with.

    Args:
        files: say when there is something new, and that it can be used.
        folder: the same one; Python's contexts read paths.
        needs_client: clients without a certificate of the folder's authority cannot connect.
    """
    in_use, newest = files.current(), _context(folder, needs_client=needs_client)

    def choose(connection: ssl.SSLObject, _name: str | None, _context_asked: ssl.SSLContext) -> None:
        nonlocal in_use, newest
        found = files.current()
        if found is not in_use:
            try:
                newest = _context(folder, needs_client=needs_client)
            except (OSError, ssl.SSLError):
                _logger.warning("new certificates cannot be used by the HTTP front yet")
            else:
                in_use = found
        connection.context = newest

    listening = _context(folder, needs_client=needs_client)
    listening.sni_callback = choose
    return listening


def _context(folder: Path, *, needs_client: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(folder / CERTIFICATE_FILE, folder / KEY_FILE)
    if needs_client:
        context.load_verify_locations(folder / AUTHORITY_FILE)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
