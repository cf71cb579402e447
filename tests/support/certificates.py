"""An authority and certificates of roles, as folders that the services read."""

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from protos.service.credentials import ChannelSecurity, channel_security
from protos.service.tls_files import TlsFolder

DOMAIN = "forwardplane"


@dataclass
class Authority:
    """Signs certificates, each into a folder of its own."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, name: str = "authority") -> "Authority":
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, name, key, valid_s=3600).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        return cls(builder.sign(key, hashes.SHA256()), key)

    def write(
        self,
        folder: Path,
        *,
        uris: tuple[str, ...] = (),
        names: tuple[str, ...] = ("localhost",),
        valid_s: float = 3600.0,
        begins_s: float = -5.0,
    ) -> Path:
        """A new certificate with the files `tls.crt`, `tls.key` and `ca.crt`."""
        folder.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [
            *(x509.DNSName(name) for name in names),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            *(x509.UniformResourceIdentifier(uri) for uri in uris),
        ]
        builder = _builder(
            "peer", "authority", key, valid_s=valid_s, begins_s=begins_s, issuer=self.certificate.subject
        )
        made = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        signed = made.sign(self.key, hashes.SHA256())
        secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        replace(folder / "ca.crt", self.certificate.public_bytes(Encoding.PEM))
        replace(folder / "tls.key", secret)
        replace(folder / "tls.crt", signed.public_bytes(Encoding.PEM))
        return folder

    def role(self, parent: Path, role: str, **choices: object) -> Path:
        """A folder of a process of ours."""
        names = ("localhost", f"worker.{DOMAIN}") if role == "worker" else ("localhost",)
        uris = (f"spiffe://{DOMAIN}/{role}",)
        return self.write(parent / role.replace("/", "-"), **({"uris": uris, "names": names} | choices))

    def revoke(
        self, path: Path, *folders: Path, valid_s: float = 3600.0, key: ec.EllipticCurvePrivateKey | None = None
    ) -> Path:
        """A list of the certificates in those folders; signed by another `key` it is nobody's."""
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(now - datetime.timedelta(seconds=3600))
            .next_update(now + datetime.timedelta(seconds=valid_s))
        )
        for folder in folders:
            taken = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
            entry = x509.RevokedCertificateBuilder().serial_number(taken.serial_number).revocation_date(now).build()
            builder = builder.add_revoked_certificate(entry)
        replace(path, builder.sign(key or self.key, hashes.SHA256()).public_bytes(Encoding.PEM))
        return path


def replace(path: Path, content: bytes) -> None:
    """In one step, as Kubernetes does it."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def security_of(folder: Path, *, server_name: str | None = None) -> ChannelSecurity:
    return channel_security(TlsFolder(folder, needs_authority=True).current(), server_name=server_name)


def _builder(
    name: str,
    issuer_name: str,
    key: ec.EllipticCurvePrivateKey,
    *,
    valid_s: float,
    begins_s: float = -5.0,
    issuer: x509.Name | None = None,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer_name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(seconds=begins_s))
        .not_valid_after(now + datetime.timedelta(seconds=valid_s))
    )
