import re

import pytest

from baton.services.tenants import model
from baton.services.tenants.model import ANYBODY, ApiKey, Book, BookError, Caller, Tenant, digest, salted

SHA = "a" * 64
KEY = {"tenant": "acme", "sha256": SHA}


def caller(tenant, **settings):
    return Caller("a key", tenant, model.Limits(), Tenant(**settings))


def test_a_secret_has_256_random_bits_and_only_its_hash_is_in_the_book():
    secrets = {model.new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert {len(one) for one in secrets} == {len("baton-") + 43}  # 6 bits a character
    secret = secrets.pop()
    book = Book().with_key("k", model.checked(ApiKey, tenant="t", sha256=digest(secret.encode()).hex()))
    assert secret not in book.model_dump_json()
    assert book.callers()[digest(secret.encode())].key == "k"


def test_a_tenant_that_is_not_listed_has_no_limits():
    book = model.book_of({"tenants": {"acme": {"concurrency": 3, "priority": 5}}, "keys": {"a": KEY}})
    assert book.callers()[bytes.fromhex(SHA)].settings == Tenant(concurrency=3, priority=5)
    other = model.book_of({"keys": {"a": {**KEY, "tenant": "other", "requests_per_s": 2}}})
    found = other.callers()[bytes.fromhex(SHA)]
    assert (found.tenant, found.settings, found.key_limits.requests_per_s) == ("other", Tenant(), 2)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "Input should be a valid dictionary"),
        ({"key": {}}, "did you mean 'keys'?"),
        ({"keys": {"a": {**KEY, "tenants": "x"}}}, "keys.a.tenants: .*did you mean 'tenant'?"),
        ({"tenants": {"t": {"request_per_s": 1}}}, "did you mean 'requests_per_s'?"),
        ({"tenants": {"t": {"requests_per_s": 0}}}, "tenants.t.requests_per_s: .*greater than or equal to 1"),
        ({"tenants": {"t": {"requests_per_s": True}}}, "tenants.t.requests_per_s: .*integer"),
        ({"tenants": {"t": {"priority": 101}}}, "tenants.t.priority: .*less than or equal to 100"),
        ({"tenants": {"t u": {}}}, "should match pattern"),
        ({"keys": {"a": {"tenant": "t", "sha256": "c4nary"}}}, "keys.a.sha256: .*should match pattern"),
        ({"keys": {"a": KEY, "b": KEY}}, "keys 'a' and 'b' have the same sha256"),
    ],
)
def test_an_invalid_book_is_reported_in_one_line_without_values(content, said):
    with pytest.raises(BookError) as error:
        model.book_of(content)
    assert re.search(said.replace("?", r"\?"), str(error.value)), str(error.value)
    assert "\n" not in str(error.value)
    assert "c4nary" not in str(error.value)


def test_edits():
    book = Book().with_key("a", ApiKey(**KEY)).with_tenant("acme", Tenant(priority=2))
    with pytest.raises(BookError, match="there is a key 'a' already"):
        book.with_key("a", ApiKey(**{**KEY, "sha256": "b" * 64}))
    with pytest.raises(BookError, match="the same sha256"):
        book.with_key("b", ApiKey(**KEY))
    with pytest.raises(BookError, match="there is no key 'A'"):
        book.without_key("A")
    with pytest.raises(BookError, match="should match pattern"):
        book.with_tenant("no name", Tenant())
    assert (book.without_key("a").keys, book.without_key("a").tenant("acme").priority) == ({}, 2)


def test_salts_keep_tenants_apart():
    acme, globex, shared = caller("acme"), caller("globex"), caller("initech", cache_salt=False)
    salts = [
        *(salted(who, own) for who in (acme, globex) for own in (None, "x", "y")),
        *(salted(shared, own) for own in ("x", "y")),
    ]
    assert len({*salts, None}) == len(salts) + 1
    assert salted(acme, None) == salted(caller("acme"), None)
    assert salted(acme, "x") == salted(acme, "x")
    assert salted(shared, None) is None
    assert (salted(ANYBODY, None), salted(ANYBODY, "x")) == (None, "x")  # without tenants: the client's own
    # A client cannot send another tenant's salt.
    assert not {salted(who, salt) for who in (globex, shared) for salt in salts} & {salts[0], salts[1]}
