"""Callers are known by the hash of a token or by the one name in a certificate; a bad file changes nothing."""

import hashlib

import pytest

from protos.wire.errors import InvalidRequest, QuotaExceeded, Unauthenticated
from scheduler_svc.edge.caller_book import MAX_TENANT_CLASSES, MAX_TOKEN_BYTES, OTHER_CLASSES, CallerBook
from scheduler_svc.edge.caller_identity import ANONYMOUS, CallerIdentity, CallerLimits
from scheduler_svc.edge.caller_quotas import CallerQuotas
from tests.support.callers import caller_entry


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def book_of(tmp_path, text):
    path = tmp_path / "callers.toml"
    path.write_text(text)
    clock = Clock()
    return CallerBook(path, clock=clock), path, clock


def test_a_token_and_a_certificate_name_their_caller(tmp_path):
    book, _, _ = book_of(
        tmp_path,
        caller_entry("a", "secret-a", share=2.0, requests_per_minute=9, operator=True)
        + caller_entry("b", certificate='"spiffe://forwardplane/caller/b"', domain='"d"'),
    )
    a, b = book.of_token(b"secret-a"), book.of_certificate(["spiffe://forwardplane/caller/b"])

    assert (a.name, a.share, a.limits.requests_per_minute, sorted(a.roles)) == ("a", 2.0, 9, ["caller", "operator"])
    assert (b.name, b.domain, sorted(b.roles)) == ("b", "d", ["caller"])


@pytest.mark.parametrize(
    "token",
    [b"", b"secret", b"secret-a ", b"secret-aa", b"Secret-a", b"secret-a\0", b"x" * MAX_TOKEN_BYTES, b"x" * (1 << 20)],
)
def test_every_other_token_is_nobodys(tmp_path, token):
    book, _, _ = book_of(tmp_path, caller_entry("a", "secret-a"))
    with pytest.raises(Unauthenticated, match=r"^no caller has this token or certificate$"):
        book.of_token(token)


def test_the_hash_itself_is_no_token(tmp_path):
    book, _, _ = book_of(tmp_path, caller_entry("a", "secret-a"))
    with pytest.raises(Unauthenticated):
        book.of_token(hashlib.sha256(b"secret-a").hexdigest().encode())


@pytest.mark.parametrize("names", [(), ("spiffe://f/caller/b",), ("spiffe://f/caller/a", "spiffe://f/caller/a")])
def test_every_other_certificate_is_nobodys(tmp_path, names):
    book, _, _ = book_of(tmp_path, caller_entry("a", certificate='"spiffe://f/caller/a"'))
    with pytest.raises(Unauthenticated):
        book.of_certificate(names)


def test_a_token_that_was_taken_out_ends_and_a_new_one_begins(tmp_path):
    book, path, clock = book_of(tmp_path, caller_entry("a", "old"))
    path.write_text(caller_entry("a", "new") + caller_entry("b", "b"))
    assert book.of_token(b"old").name == "a"

    clock.now = 1.0
    assert book.of_token(b"new").name == "a"
    with pytest.raises(Unauthenticated):
        book.of_token(b"old")


BAD = [
    "caller = 3",
    "[[caller]]\nname = ''",
    "[[caller]]\nname = 'a'\ntoken = 'in-clear'",
    "[[caller]]\nname = 'a'\ntoken_sha256 = ['in-clear']",
    "[[caller]]\nname = 'a'\nshare = nan",
    "[[caller]]\nname = 'a'\nshare = 0",
    "[[caller]]\nname = 'a'\nrequests_per_minute = 0",
    "[[caller]]\nname = 'a'\nrequests_per_minute = -1",
    "[[caller]]\nname = 'a'\ncertificate = 'a'",
    caller_entry("a", "t") + caller_entry("b", "t"),
    caller_entry("a", "t") + caller_entry("a", "u"),
    "[[caller]\n",
    "\ufeff\0",
    "",
]


@pytest.mark.parametrize("text", BAD)
def test_a_file_that_cannot_be_used_is_refused_without_its_values(tmp_path, text):
    with pytest.raises(InvalidRequest) as refused:
        book_of(tmp_path, text)
    assert "in-clear" not in refused.value.message
    assert str(tmp_path) not in refused.value.message


@pytest.mark.parametrize("text", [*BAD, None])
def test_a_file_that_became_unusable_changes_nothing(tmp_path, text, caplog):
    book, path, clock = book_of(tmp_path, caller_entry("a", "t"))
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    for clock.now in (1.0, 2.0, 3.0):
        assert book.of_token(b"t").name == "a"
    (record,) = caplog.records
    assert "in-clear" not in record.error


# --- quotas


def caller(**limits):
    return CallerIdentity("a", limits=CallerLimits(**limits))


def test_requests_come_back_with_time():
    clock = Clock()
    quotas, a = CallerQuotas(clock), caller(requests_per_minute=60)
    quotas.take_requests(a, 60)
    with pytest.raises(QuotaExceeded, match="60 requests a minute") as refused:
        quotas.take_requests(a)
    assert refused.value.retry_after_ms == 1000

    clock.now = 1.0
    quotas.take_requests(a)
    with pytest.raises(QuotaExceeded):
        quotas.take_requests(a)
    quotas.take_requests(CallerIdentity("b", limits=CallerLimits(requests_per_minute=1)))


def test_tokens_are_those_of_prompts_and_of_outputs_and_a_debt_is_waited_off():
    clock = Clock()
    quotas, a = CallerQuotas(clock), caller(tokens_per_minute=120)
    quotas.open_stream(a, prompt_tokens=100)
    quotas.open_stream(a, prompt_tokens=19)
    quotas.close_stream(a, output_tokens=40)
    with pytest.raises(QuotaExceeded) as refused:
        quotas.open_stream(a, prompt_tokens=1)
    assert refused.value.retry_after_ms == 20_000

    clock.now = 20.5
    quotas.open_stream(a, prompt_tokens=1)


def test_streams_at_once_are_counted_up_and_down():
    quotas, a = CallerQuotas(Clock()), caller(max_streams=2)
    quotas.open_stream(a, prompt_tokens=1)
    quotas.open_stream(a, prompt_tokens=1)
    with pytest.raises(QuotaExceeded, match="2 streams at once"):
        quotas.open_stream(a, prompt_tokens=1)
    quotas.close_stream(a, output_tokens=0)
    quotas.open_stream(a, prompt_tokens=1)


def test_who_has_no_limits_is_not_counted():
    quotas = CallerQuotas(Clock())
    for _ in range(1000):
        quotas.take_requests(ANONYMOUS)
        quotas.open_stream(ANONYMOUS, prompt_tokens=10**6)


# --- domains


def test_a_caller_has_one_share_whatever_its_salts_and_its_own_prefixes():
    a, b = CallerIdentity("a"), CallerIdentity("b")
    shared = [CallerIdentity(name, domain="d") for name in "ab"]

    assert len({a.isolation_domain(""), a.isolation_domain("s"), b.isolation_domain(""), b.isolation_domain("s")}) == 4
    assert a.share_domain != b.share_domain
    assert shared[0].isolation_domain("s") == shared[1].isolation_domain("s")
    assert CallerIdentity("c", domain="a").isolation_domain("") != a.isolation_domain(""), "a name is not a domain"
    assert ANONYMOUS.share_domain == b""


def classes(*names):
    return "".join(caller_entry(name, f"token-{name}", tenant_class=f'"{name}"') for name in names)


def test_a_callers_tokens_are_counted_under_its_class(tmp_path):
    book, _, _ = book_of(tmp_path, classes("gold") + caller_entry("b", "token-b"))

    assert book.of_token(b"token-gold").tenant_class == "gold"
    assert book.of_token(b"token-b").tenant_class == ANONYMOUS.tenant_class == "default"


def test_classes_are_few_in_a_file_and_in_a_processs_life(tmp_path):
    names = [f"c{number}" for number in range(MAX_TENANT_CLASSES + 1)]
    with pytest.raises(InvalidRequest, match="more than 16 values of tenant_class"):
        book_of(tmp_path, classes(*names))
    book, path, clock = book_of(tmp_path, classes(*names[:-1]))
    path.write_text(classes("c0", names[-1]))
    clock.now += 10

    assert book.of_token(b"token-c0").tenant_class == "c0"
    assert book.of_token(f"token-{names[-1]}".encode()).tenant_class == OTHER_CLASSES


@pytest.mark.parametrize("name", ["Gold", "a b", "x" * 33, "1a"])
def test_a_class_that_could_not_be_a_label_is_refused(tmp_path, name):
    with pytest.raises(InvalidRequest, match="tenant_class"):
        book_of(tmp_path, classes(name))
