"""gRPC credentials from a folder of certificates: servers read it at each handshake, channels when they are made.

gRPC's Python channels cannot change their certificate (grpc#15735), so whoever keeps one open makes a new one when
`TlsFolder.current` has new material. A client cannot see the URI names of a server either: gRPC's check
of the host name, given a fixed name of the role, takes its place.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

if TYPE_CHECKING:  # whoever has a folder has loaded the library of certificates; others need not
    from protos.service.tls_files import TlsFolder, TlsMaterial


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """How a channel is opened over TLS."""

    credentials: grpc.ChannelCredentials
    server_name: str | None = None
    """DNS name that the server's certificate must have; None: the host of the target."""


def server_credentials(files: "TlsFolder", *, needs_client: bool) -> grpc.ServerCredentials:
    """Of a port. Handshakes after a renewal use the new files; connections that stand are not touched.

    Args:
        files: of this process.
        needs_client: clients without a certificate of the folder's authority cannot connect.
    """
    in_use = files.current()
    configuration = _configuration(in_use)

    def newest() -> grpc.ServerCertificateConfiguration:
        nonlocal in_use, configuration
        found = files.current()
        if found is not in_use:
            in_use, configuration = found, _configuration(found)
        return configuration

    return grpc.dynamic_ssl_server_credentials(configuration, newest, require_client_authentication=needs_client)


def channel_security(material: "TlsMaterial", *, server_name: str | None = None) -> ChannelSecurity:
    """Of a channel whose server has to have a certificate of the same authority and that name."""
    credentials = grpc.ssl_channel_credentials(material.authority or None, material.key, material.certificate)
    return ChannelSecurity(credentials=credentials, server_name=server_name)


def _configuration(material: "TlsMaterial") -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.authority or None)
