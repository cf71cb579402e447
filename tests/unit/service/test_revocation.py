"""Revocation lists are used when an authority signed them, read again when they change, and kept past their time."""

import logging
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from protos.service.revocation import RevocationList
from protos.service.tls_files import TlsFolder
from protos.wire.errors import InvalidCertificate
from tests.support.certificates import Authority, replace


class Clock:
    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def authority():
    return Authority.new()


@pytest.fixture
def folders(authority, tmp_path):
    good, taken = (authority.write(tmp_path / name) for name in ("good", "taken"))
    return good, taken


def certificate(folder) -> bytes:
    return (folder / "tls.crt").read_bytes()


def read(folder, clock=time.time) -> RevocationList:
    return RevocationList(TlsFolder(folder, needs_authority=True), clock=clock)


def test_only_the_certificates_of_the_list_are_revoked(authority, folders, tmp_path):
    good, taken = folders
    authority.revoke(good / "ca.crl", taken)
    revoked = read(good)
    assert revoked.holds(certificate(taken))
    assert not revoked.holds(certificate(good))
    assert not revoked.holds(certificate(Authority.new("other").write(tmp_path / "other")))


def test_several_lists_in_one_file_count_together(authority, folders, tmp_path):
    good, taken = folders
    both = authority.revoke(tmp_path / "a", taken).read_bytes() + authority.revoke(tmp_path / "b", good).read_bytes()
    replace(good / "ca.crl", both)
    revoked = read(good)
    assert revoked.holds(certificate(taken))
    assert revoked.holds(certificate(good))


def test_a_new_list_is_read_and_one_that_cannot_be_used_changes_nothing(authority, folders, caplog):
    good, taken = folders
    clock = Clock()
    path = good / "ca.crl"
    revoked = read(good, clock)
    assert not revoked.holds(certificate(taken))
    authority.revoke(path, taken)
    clock.now += 2
    assert revoked.holds(certificate(taken))
    for content in (b"", b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", None):
        replace(path, content) if content is not None else path.unlink()
        clock.now += 2
        assert revoked.holds(certificate(taken))
        assert "keeping the old one" in caplog.text
        caplog.clear()
    authority.revoke(path, good)
    clock.now += 2
    assert revoked.holds(certificate(good))
    assert not revoked.holds(certificate(taken))


@pytest.mark.parametrize("signed_by", ["another key", "another authority"])
def test_a_list_that_no_authority_of_ours_signed_is_refused(authority, folders, signed_by):
    good, taken = folders
    path = good / "ca.crl"
    if signed_by == "another key":
        authority.revoke(path, taken, key=ec.generate_private_key(ec.SECP256R1()))
    else:
        Authority.new("other").revoke(path, taken)
    with pytest.raises(InvalidCertificate, match="not signed by an authority"):
        read(good)


@pytest.mark.parametrize("content", [b"", b"\0" * (17 << 20), b"-----BEGIN X509 CRL-----\n!\n-----END X509 CRL-----"])
def test_a_file_without_a_list_is_refused_and_names_no_path(folders, tmp_path, content):
    (folders[0] / "ca.crl").write_bytes(content)
    with pytest.raises(InvalidCertificate) as refused:
        read(folders[0])
    assert str(tmp_path) not in refused.value.message


def test_a_list_past_its_time_stays_in_force_and_is_warned_of(authority, folders, caplog):
    good, taken = folders
    caplog.set_level(logging.WARNING)
    authority.revoke(good / "ca.crl", taken, valid_s=-1)
    revoked = read(good)
    assert "should have been replaced" in caplog.text
    assert revoked.holds(certificate(taken))
    assert not revoked.holds(certificate(good))
