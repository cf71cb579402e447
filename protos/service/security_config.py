"""Settings of identity and exposure that both services share, and the rules they must keep.

Knows nothing of certificates; `tls_files` reads them.
"""

import ipaddress
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from protos.service.config import ConfigGroup, UserPath

if TYPE_CHECKING:
    from protos.service.revoked_peers import RevokedPeers
    from protos.service.tls_files import TlsFolder

# By name, so that the library of certificates is loaded only where settings ask for TLS.
_TLS_FOLDER = "protos.service.tls_files:TlsFolder"
_REVOCATION_LIST = "protos.service.revocation:RevocationList"
_REVOKED_PEERS = "protos.service.revoked_peers:RevokedPeers"


class TlsConfig(ConfigGroup):
    """Who may connect, and how links are protected. Read by composition roots."""

    tls_dir: UserPath | None = Field(
        default=None,
        description="Folder with tls.crt, tls.key and ca.crt of this process for links between scheduler and workers; "
        "re-read when they change; unset = plain text.",
    )
    trust_domain: str = Field(
        default="forwardplane",
        pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$",
        description="Domain of the names in certificates: spiffe://DOMAIN/scheduler, and DNS name worker.DOMAIN.",
    )
    insecure: bool = Field(
        default=False, description="Accept plain text on addresses that other machines can reach: true or false."
    )
    hardened: bool = Field(
        default=False, description="No reflection, and no patience with clients that ping too often: true or false."
    )

    @property
    def worker_name(self) -> str:
        """DNS name that a worker's certificate must have."""
        return f"worker.{self.trust_domain}"


def open_tls_folder(folder: Path | None, *, needs_authority: bool = True) -> "TlsFolder | None":
    """The certificates of that folder; None without one.

    Raises:
        InvalidCertificate: a file is missing or cannot be used.
    """
    if folder is None:
        return None
    opened: TlsFolder = pkgutil.resolve_name(_TLS_FOLDER)(folder, needs_authority=needs_authority)
    return opened


def open_revoked_peers(files: "TlsFolder | None") -> "RevokedPeers":
    """Who is kept out by the lists in that folder; nobody without one.

    Raises:
        InvalidCertificate: they cannot be used.
    """
    revoked = None if files is None else pkgutil.resolve_name(_REVOCATION_LIST)(files)
    made: RevokedPeers = pkgutil.resolve_name(_REVOKED_PEERS)(revoked)
    return made


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches that address. A name other than localhost may lead anywhere."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def host_of(target: str) -> str:
    """The host of HOST:PORT."""
    return target.rpartition(":")[0]
