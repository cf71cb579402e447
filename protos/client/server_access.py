"""Where a server is, and as whom to ask it: TLS, a caller's certificate, a token. `credentials` reads the files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import grpc
from cyclopts import Parameter

from protos.client.flag_types import Target
from protos.service.credentials import ChannelSecurity
from protos.wire.errors import InvalidRequest

DEFAULT_TARGET = "127.0.0.1:50051"
Metadata = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerCredentials:
    """As whom to call. Never shown: the representation holds no secret."""

    uses_tls: bool = False
    authority: bytes | None = None
    """PEM, of the server's certificate; None: the machine's authorities."""
    certificate: bytes | None = field(default=None, repr=False)
    """The caller's own, PEM."""
    key: bytes | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)

    def security(self) -> ChannelSecurity | None:
        """Of a channel; None: plain text."""
        if not self.uses_tls:
            return None
        return ChannelSecurity(credentials=grpc.ssl_channel_credentials(self.authority, self.key, self.certificate))

    def metadata(self) -> Metadata:
        """Of each call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """Where to ask, and as whom."""

    target: Target = DEFAULT_TARGET
    """HOST:PORT of a scheduler."""
    tls: Annotated[bool, Parameter(negative=())] = False
    """Connect over TLS and trust the machine's authorities."""
    tls_ca: Path | None = None
    """Connect over TLS and trust this file of authorities (PEM)."""
    tls_dir: Path | None = None
    """Connect over TLS as the caller in this folder: its tls.crt and tls.key, and ca.crt of the server."""
    token_file: Path | None = None
    """File with the caller's token."""

    def credentials(self) -> CallerCredentials:
        """What the files hold.

        Raises:
            InvalidRequest: one cannot be read.
        """
        folder = self.tls_dir
        authority = self.tls_ca or (folder / "ca.crt" if folder else None)
        token = None if self.token_file is None else _read(self.token_file, "token_file").decode("ascii", "replace")
        return CallerCredentials(
            uses_tls=self.tls or authority is not None,
            authority=None if authority is None else _read(authority, "tls_ca"),
            certificate=None if folder is None else _read(folder / "tls.crt", "tls_dir"),
            key=None if folder is None else _read(folder / "tls.key", "tls_dir"),
            token=None if token is None else token.strip(),
        )


def _read(path: Path, name: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        message = f"{name}: {path.name} cannot be read: {error.strerror}"
        raise InvalidRequest(message, field=name) from None
