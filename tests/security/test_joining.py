"""Joining with a token, and renewing, at a real join service."""

import asyncio
import contextlib
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections import deque
from dataclasses import replace
from datetime import timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton import addresses
from baton.security import identity, join_service, joining
from baton.security.authority import Authority, Token, new_key, request_for
from baton.security.errors import (
    AuthorityError,
    CAUnreachable,
    IdentityError,
    JoinRefused,
    SecurityError,
    TokenError,
)
from baton.security.identity import checked, name_in
from baton.security.join_service import JoinService
from baton.security.names import Name, Role
from harness.support import PATIENCE, eventually, free_port
from tests.security.conftest import TOPIC

WORKER = Name(TOPIC, Role.WORKER, "w1")


@pytest.fixture
async def service(ca):
    async with JoinService(ca, TOPIC, "127.0.0.1:0") as running:
        yield running.address


def token(ca, role=Role.WORKER, **changes):
    options = {"valid_s": 60, "uses": 1, "life_s": 3600, **changes}
    return ca.tokens.add(role, options.pop("topic", TOPIC), pin=ca.pin, **options)


async def join(service, with_, name=WORKER):
    return checked(await asyncio.to_thread(joining.join, service, with_, name), "here")


async def renew(service, last):
    return checked(await asyncio.to_thread(joining.renew, service, last), "here")


async def refused(match, call):
    with pytest.raises(JoinRefused, match=match) as error:
        await call
    return str(error.value)


async def test_join_and_renew(ca, service):
    first = await join(service, token(ca, life_s=600))
    assert first.name == WORKER
    assert first.ends - first.begins == timedelta(seconds=650)
    second = await renew(service, first)
    assert second.name == WORKER
    assert abs((second.ends - second.begins) - (first.ends - first.begins)) <= timedelta(seconds=2)
    assert second.pems.key != first.pems.key
    certificate = x509.load_pem_x509_certificate(second.pems.chain)
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.UniformResourceIdentifier) == ["spiffe://baton/test/worker/w1"]
    assert found.get_values_for_type(x509.DNSName) == ["worker.test.baton"]


async def test_a_token_has_a_number_of_uses(ca, service):
    twice, always = token(ca, uses=2), token(ca, Role.ROUTER, uses=None)
    await join(service, twice)
    await join(service, twice, replace(WORKER, worker_id="w2"))
    await refused(f"token {twice.id} has no uses left", join(service, twice))
    for _ in range(3):
        await join(service, always, Name(TOPIC, Role.ROUTER))


@pytest.mark.parametrize(
    ("role", "changes", "why"),
    [
        (Role.WORKER, {"valid_s": -1}, "has expired: make another"),
        (Role.WORKER, {"uses": 0}, "has no uses left"),
        (Role.ROUTER, {}, "is for a router of topic 'test', not for a worker of topic 'test'"),
        (Role.WORKER, {"topic": "other"}, "is for a worker of topic 'other', not"),
    ],
)
async def test_a_token_that_does_not_fit_is_refused(ca, service, role, changes, why):
    await refused(f"the CA at {service} refuses: token .*{why}", join(service, token(ca, role, **changes)))


async def test_a_caller_without_the_secret_learns_nothing(ca, service):
    """Expired and unknown tokens are refused with the same text."""
    known, expired = token(ca), token(ca, valid_s=-1)
    for one in (known, expired, Token("0" * 12, "0" * 32, ca.pin)):
        said = await refused(None, join(service, replace(one, secret="f" * 32)))
        why = f"token {one.id}: this CA does not know it, or the secret is wrong"
        assert said == f"the CA at {service} refuses: {why}"
    await join(service, known)  # it has not been used


async def test_a_revoked_token_is_unknown(ca, service):
    made = token(ca)
    assert ca.tokens.revoke(made.id)
    assert not ca.tokens.revoke(made.id)
    await refused("this CA does not know it", join(service, made))


async def test_a_revoked_token_stays_revoked_after_its_file_is_restored(ca, tmp_path):
    """On Kubernetes a pod copies its folder from a Secret, and a volume has the revocations."""
    made, spared = token(ca), token(ca)
    mine = checked(ca.issue(WORKER), "here")
    secret = {file.name: file.read_bytes() for file in ca.folder.iterdir()}
    (volume := tmp_path / "volume").mkdir()

    def pod(name):
        (folder := tmp_path / name).mkdir()
        for file, content in secret.items():
            (folder / file).write_bytes(content)
        (folder / "kept").symlink_to(volume)
        return Authority(folder)

    first = pod("first")
    first.revoked.add(serial(mine))
    assert first.revoke_token(made.id)
    assert not first.revoke_token("0" * 12)
    second = pod("second")
    assert set(second.revoked.all()) == {serial(mine).lower().lstrip("0"), made.id}
    async with JoinService(second, TOPIC, "127.0.0.1:0") as service:
        await refused("was revoked", join(service.address, made))
        await refused("was revoked", renew(service.address, mine))
        await join(service.address, spared)


async def test_another_ca_is_not_trusted(ca, service, tmp_path):
    other = Authority.create(tmp_path / "other")
    theirs = token(ca)
    async with JoinService(other, TOPIC, "127.0.0.1:0") as impostor:
        text = f"did not issue the token: its key has SHA-256 {other.pin}"
        await refused(text, join(impostor.address, theirs))
        mine = await join(service, theirs)
        await refused("cannot be trusted: CERTIFICATE_VERIFY_FAILED", renew(impostor.address, mine))


async def test_only_the_holder_of_a_valid_certificate_can_renew_it(ca, service, tmp_path):
    other = Authority.create(tmp_path / "other")
    request = request_for(new_key())
    mine, over = ca.issue(WORKER), ca.issue(WORKER, life_s=1)
    eventually(lambda: checked(over, "here").seconds_left() < 0, 5, "it is over")
    stolen = replace(mine, key=ca.issue(WORKER).key)  # a certificate is not secret
    unsigned = "the old certificate is not from this CA, or its key did not sign the request"
    for pems, why in (
        (stolen, unsigned),
        (other.issue(WORKER), unsigned),
        (over, "has expired: join with a token"),
    ):
        last = replace(checked(mine, "here"), pems=replace(pems, roots=ca.root_pem))
        await refused(why, renew(service, last))
    with pytest.raises(JoinRefused, match="did not sign"):
        ca.renew(mine.chain, request, b"")


async def test_the_name_in_a_certificate_is_authenticated_by_the_token(ca):
    made = token(ca)
    request = request_for(new_key())
    with pytest.raises(JoinRefused, match="secret is wrong"):
        ca.join(made.id, replace(WORKER, worker_id="w2"), request, made.mac(WORKER, request))
    with pytest.raises(JoinRefused, match="secret is wrong"):
        ca.join(made.id, WORKER, request_for(new_key()), made.mac(WORKER, request))
    issued = x509.load_pem_x509_certificate(ca.join(made.id, WORKER, request, made.mac(WORKER, request)))
    assert name_in(issued) == WORKER


def asked(path, status, **values):
    return path, json.dumps(values).encode(), status


ROUTER = {"token": "x", "request": "", "mac": ""}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/join", b"", 400),
        ("/join", b"[]", 400),
        asked("/join", 400, token="1"),
        asked("/join", 400, **ROUTER, name="spiffe://else/where"),
        asked("/join", 403, **ROUTER | {"mac": "é"}, name="spiffe://baton/test/router"),
        asked("/join", 403, **ROUTER, name="spiffe://baton/other/router"),
        asked("/renew", 400, certificate="x", request="", signature="zz"),
        asked("/renew", 403, certificate="x", request="", signature=""),
        ("/join", b" " * 20_000, 413),
        ("/ca.key", b"", 404),
    ],
)
async def test_malformed_requests_are_refused(service, path, body, status):
    unverified = ssl._create_unverified_context()

    def send():
        try:
            url = f"https://{service}{path}"
            return int(urllib.request.urlopen(url, body, timeout=10, context=unverified).status)
        except urllib.error.HTTPError as error:
            return error.code

    assert await asyncio.to_thread(send) == status


async def test_plain_text_is_refused(service):
    def ask():
        urllib.request.urlopen(f"http://{service}/ca", timeout=10)

    with pytest.raises(OSError):  # noqa: PT011 (of several kinds)
        await asyncio.to_thread(ask)


async def test_an_unreachable_ca(ca):
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(CAUnreachable, match=f"the CA at {address} does not answer .*is it up"):
        await join(address, token(ca))


async def test_a_port_in_use(ca, service):
    with pytest.raises(SecurityError, match=f"the CA cannot listen on {service}: .*--listen"):
        async with JoinService(ca, TOPIC, service):
            pass


async def test_its_own_certificate_is_renewed_after_a_failure(ca, monkeypatch, caplog):
    """A full disk must not end the renewals: after a day nobody could join or renew."""
    caplog.set_level(logging.INFO, join_service.__name__)
    monkeypatch.setattr(join_service, "RENEW_S", 0.01)
    monkeypatch.setattr(join_service, "RETRY_S", 0.01)
    problems = deque[Exception | None]([None, IdentityError("full"), IdentityError("full"), None])
    write = identity.write

    def may_fail(folder, pems):
        if problems and (problem := problems.popleft()):
            raise problem
        write(folder, pems)

    monkeypatch.setattr(identity, "write", may_fail)

    def shown(address):
        host, port = addresses.split(address)
        return ssl.get_server_certificate((host, port))

    async with JoinService(ca, TOPIC, "127.0.0.1:0") as running:
        first = await asyncio.to_thread(shown, running.address)
        renewed = lambda: not problems and shown(running.address) != first  # noqa: E731
        await asyncio.to_thread(eventually, renewed, 20, "it is renewed")
    said = [one.getMessage() for one in caplog.records if "own certificate" in one.getMessage()]
    assert len(said) == 2
    assert "was not renewed: full" in said[0]
    assert "was renewed" in said[1]


def test_the_ca_is_created_once_and_its_files_are_private(ca, tmp_path):
    with pytest.raises(AuthorityError, match="already"):
        Authority.create(ca.folder)
    assert Authority(ca.folder).pin == ca.pin
    token(ca)
    modes = {one.name: oct(one.stat().st_mode & 0o777) for one in ca.folder.iterdir()}
    assert modes == dict.fromkeys(("ca.key", "ca.crt", "tokens.json", "tokens.lock"), "0o600")
    assert oct(ca.folder.stat().st_mode & 0o777) == "0o700"
    with pytest.raises(AuthorityError, match="`baton ca init`"):
        Authority(tmp_path / "nowhere")
    (ca.folder / "tokens.json").write_text(json.dumps({"x": {"role": 1}}))
    with pytest.raises(AuthorityError, match="cannot be read"):
        ca.tokens.all()


@pytest.mark.parametrize(
    "text", ["", "a.b.c", "0" * 110, f"{'0' * 12}.{'0' * 32}", f"{'0' * 12}.{'0' * 32}.{'g' * 64}"]
)
def test_a_malformed_token_is_not_quoted(text):
    with pytest.raises(TokenError, match=r"ID\.SECRET\.PIN") as error:
        Token.parse(text)
    assert not text or text not in str(error.value)


def test_names():
    for name in (WORKER, Name("a.b-c_d", Role.ROUTER), Name("t", Role.CA)):
        assert Name.parse(name.uri) == name
    for uri in (
        *("spiffe://baton/t", "spiffe://baton/t/boss", "spiffe://else/t/router", "https://baton/t/router"),
        *("spiffe://baton/t/router/w1", "spiffe://baton//router", "spiffe://baton/t/worker/a/b", ""),
        *("spiffe://baton/t/worker/..", "spiffe://baton/t/worker/a b"),
    ):
        with pytest.raises(IdentityError):
            Name.parse(uri)


def serial(one):
    return f"{x509.load_pem_x509_certificate(one.pems.chain).serial_number:X}"


async def test_a_revoked_line_cannot_be_renewed(ca, service):
    """The running service refuses all certificates of the line, and so does a restarted one."""
    many = token(ca, uses=None)
    first, other = await join(service, many), await join(service, many)
    second = await renew(service, first)
    third = await renew(service, second)
    Authority(ca.folder).revoked.add(serial(first))  # as `baton ca revoke`, in another process
    for one in (first, second, third):
        await refused("the certificate of worker w1 was revoked: join with a token", renew(service, one))
    await renew(service, other)  # the same name, but another line of certificates
    async with JoinService(Authority(ca.folder), TOPIC, "127.0.0.1:0") as restarted:
        await refused("was revoked", renew(restarted.address, third))


async def test_a_revoked_name_may_join_again(ca, service):
    many = token(ca, uses=None)
    stolen = await join(service, many)
    neighbour = await join(service, many, replace(WORKER, worker_id="w2"))
    ca.revoked.add(WORKER.uri)
    since = ca.revoked.all()[WORKER.uri]
    await refused("worker w1 was revoked", renew(service, stolen))
    await renew(service, neighbour)
    # A certificate issued in the same second as the revocation counts as older.
    eventually(lambda: time.time() >= since + 2, 5, "the clock goes on")
    again = await join(service, many)
    await renew(service, again)
    await refused("worker w1 was revoked", renew(service, stolen))


def test_what_can_be_revoked(ca):
    made = checked(ca.issue(WORKER), "here")
    colons = ":".join(serial(made)[at : at + 2] for at in range(0, 40, 2))
    assert ca.revoked.add(colons).upper() == colons.replace(":", "").lstrip("0")
    assert ca.revoked.add("spiffe://baton/test/router") == "spiffe://baton/test/router"
    for what in ("", "w1", "spiffe://else/router", "g" * 40, "1" * 41):
        with pytest.raises(IdentityError):
            ca.revoked.add(what)
    assert len(ca.revoked.all()) == 2
    assert oct((ca.folder / "revoked.json").stat().st_mode & 0o777) == "0o600"


def test_nothing_is_renewed_with_a_damaged_list_of_revocations(ca):
    mine, request = ca.issue(WORKER), request_for(new_key())
    last = checked(mine, "here")
    (ca.folder / "revoked.json").write_text("[]")
    own = serialization.load_pem_private_key(last.pems.key, None)
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    with pytest.raises(AuthorityError, match=r"revocations in .* cannot be read"):
        ca.renew(mine.chain, request, own.sign(request, ec.ECDSA(hashes.SHA256())))


@pytest.mark.parametrize("begun", [None, b"", b"POST /join HTTP/1.1\r\n", b"GET /ca HTTP/1.1\r\nX: "])
async def test_connections_have_a_time_limit(service, monkeypatch, begun):
    """The limit includes the handshake, and does not start again with each byte."""
    monkeypatch.setattr(join_service, "CONNECTION_S", 0.5)
    host, port = addresses.split(service)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    reader, writer = await asyncio.open_connection(host, port, ssl=context if begun is not None else None)
    ended = asyncio.create_task(reader.read())
    deadline = time.monotonic() + 10
    while not ended.done() and time.monotonic() < deadline:
        if begun is not None:
            writer.write(begun)
            begun = b"x"
        await asyncio.sleep(0.1)
    assert ended.done()
    with contextlib.suppress(OSError):
        ended.result()
    writer.close()


async def test_joining_works_despite_many_idle_connections(ca, service, monkeypatch):
    monkeypatch.setattr(join_service, "CONNECTION_S", 0.5)
    monkeypatch.setattr(join_service, "MOST_CONNECTIONS", 8)
    host, port = addresses.split(service)
    crowd = [await asyncio.open_connection(host, port) for _ in range(40)]
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(crowd[-1][0].read(), 10) == b""  # above the limit
    made = token(ca, uses=None)  # an attempt may time out after its use
    given = None
    async with asyncio.timeout(10 * PATIENCE):
        while given is None:
            with contextlib.suppress(JoinRefused):
                given = await asyncio.to_thread(joining.join, service, made, WORKER, 10.0)
    assert name_in(x509.load_pem_x509_certificates(given.chain)[0]) == WORKER
    for _, writer in crowd:
        writer.close()


async def test_it_listens_on_both_address_families(ca):
    async with JoinService(ca, TOPIC, "[::]:0") as running:
        _, port = addresses.split(running.address)
        for host in ("127.0.0.1", "::1"):
            await join(addresses.join(host, port), token(ca))
