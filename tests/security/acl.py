"""A Redis with TLS and the ACL rules in docs/security.md."""

import re

from baton.security import identity as files
from baton.security.authority import Authority
from baton.security.names import Name, Role
from harness.scheduling import RedisServer
from harness.support import ROOT

PASSWORD = "open-sesame"
ADMIN = "user admin on nopass ~* &* +@all"  # changes the rules of the others


def rules(user, topic):
    """Return the page's rules for a user, as a line of an ACL file."""
    page = (ROOT / "docs" / "security.md").read_text()
    found = re.search(rf"^(user {user} .*?)(?:\n```|\nuser )", page, re.DOTALL | re.MULTILINE)
    assert found, f"docs/security.md has no rules for {user}"
    return " ".join(found[1].split()).replace("PASSWORD", PASSWORD).replace("TOPIC", topic)


class GuardedRedis:
    """A server with only these users."""

    def __init__(self, folder, *acl):
        # A certificate from Baton's CA has no address, so clients must not check it.
        authority = Authority.create(folder / "ca")
        files.write(folder, authority.issue(Name("redis", Role.SCHEDULER)))
        (folder / "users.acl").write_text("\n".join(["user default off", *acl, ""]))
        extra = (
            *("--aclfile", str(folder / "users.acl"), "--tls-auth-clients", "no"),
            *("--tls-cert-file", str(folder / files.CHAIN), "--tls-key-file", str(folder / files.KEY)),
            *("--tls-ca-cert-file", str(folder / files.ROOTS)),
        )
        self._trust = f"ssl_ca_certs={folder / files.ROOTS}&ssl_check_hostname=False"
        self._server = RedisServer(folder, extra=extra, tls=True)

    def __enter__(self):
        self._server.start()
        return self

    def __exit__(self, *_):
        self._server.stop()

    def url(self, user, password=PASSWORD):
        """Return the URL for a user, without a password if it is empty."""
        secret = f":{password}" if password else ""
        return f"rediss://{user}{secret}@127.0.0.1:{self._server.port}/0?{self._trust}"
