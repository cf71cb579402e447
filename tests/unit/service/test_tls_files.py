"""Certificates are read whole, re-read when they change, and kept when the new ones cannot be used."""

import pytest

from protos.service.tls_files import TlsFolder
from protos.wire.errors import InvalidCertificate
from tests.support.certificates import Authority, replace


@pytest.fixture(scope="module")
def authority():
    return Authority.new()


def test_the_same_object_until_there_is_something_new(authority, tmp_path):
    folder = authority.role(tmp_path, "worker")
    files = TlsFolder(folder, needs_authority=True)
    first = files.current()

    assert files.current() is first
    authority.role(tmp_path, "worker")
    second = files.current()
    assert second is not first
    assert second.certificate == (folder / "tls.crt").read_bytes()
    assert files.current() is second


@pytest.mark.parametrize(
    ("name", "content"),
    [("tls.crt", b"x"), ("tls.key", b"x"), ("ca.crt", b""), ("tls.crt", b"\0" * (2 << 20)), ("tls.key", None)],
)
def test_files_that_cannot_be_used_change_nothing_and_are_said_once(authority, tmp_path, caplog, name, content):
    folder = authority.role(tmp_path, "worker")
    files = TlsFolder(folder, needs_authority=True)
    first = files.current()

    if content is None:
        (folder / name).unlink()
    else:
        replace(folder / name, content)

    assert [files.current() for _ in range(3)] == [first] * 3
    (record,) = caplog.records
    assert name in record.error
    assert str(tmp_path) not in record.error
    authority.role(tmp_path, "worker")
    assert files.current() is not first


def test_a_key_of_another_certificate_is_refused(authority, tmp_path):
    folder, other = authority.role(tmp_path, "worker"), authority.role(tmp_path, "scheduler")
    replace(folder / "tls.key", (other / "tls.key").read_bytes())

    with pytest.raises(InvalidCertificate, match=r"tls.key is not the key of tls.crt"):
        TlsFolder(folder, needs_authority=True)


@pytest.mark.parametrize("times", [{"valid_s": -1.0, "begins_s": -9.0}, {"begins_s": 60.0}])
def test_a_certificate_of_another_time_is_refused(authority, tmp_path, times):
    with pytest.raises(InvalidCertificate, match="not valid now"):
        TlsFolder(authority.role(tmp_path, "worker", **times), needs_authority=True)


def test_an_authority_may_be_absent_where_it_is_not_needed(authority, tmp_path):
    folder = authority.role(tmp_path, "worker")
    (folder / "ca.crt").unlink()

    assert TlsFolder(folder, needs_authority=False).current().authority == b""
    with pytest.raises(InvalidCertificate, match=r"ca.crt cannot be read"):
        TlsFolder(folder, needs_authority=True)
