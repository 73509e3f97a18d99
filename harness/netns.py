"""Simulate hosts on a network with Linux namespaces on this machine.

    with Network(tmp_path) as network:
        a = network.host("a")
        b = network.host("b", ["redis-server"])      # ends with its first process
        a.run(["ping", "-c1", "b"])
        with a.inside():                             # this thread opens its sockets on a
            urllib.request.urlopen(f"http://{b.address}:6379")

Each host has its own addresses (IPv4 and IPv6, with every host's name in /etc/hosts), process ids, host name,
System V IPC and /dev/shm. It shares the machine's file system. The network is isolated.

Nothing remains, however the test ends. The bridge has its own network namespace, so interfaces, addresses and
names cannot clash with the machine's or another run's. A namespace ends with its first process, which the
kernel kills, with everything on that host, when the test process ends. Needs root, iproute2 and util-linux
(ip, unshare, nsenter, setpriv).
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from harness.support import eventually

DIE_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
# A first process that only sleeps; ignoring SIGCHLD reaps the processes that it adopts.
IDLE = ("env", "--ignore-signal=CHLD", "sleep", "infinity")
END_S = 10.0
_CLONE_NEWNS = 0x20000
# A bridge without a fixed MAC address takes the lowest of its ports' addresses. When that port goes, the
# others keep sending to the old address until their ARP entries expire.
_BRIDGE = """
ip link set lo up
ip link add bridge address 02:00:00:00:00:01 type bridge
ip address add 10.77.0.1/16 dev bridge
ip -6 address add fd77::1/64 dev bridge nodad
ip link set bridge up
echo up
exec sleep infinity
"""
_HOST = """
ip link set lo up
ip link add eth0 type veth peer name port$NUMBER netns $BRIDGE
nsenter --net=/proc/$BRIDGE/ns/net ip link set port$NUMBER master bridge up
ip address add $ADDRESS/16 dev eth0
ip -6 address add $ADDRESS6/64 dev eth0 nodad
ip link set eth0 up
ip route add default via 10.77.0.1
hostname "$NAME"
mount --bind "$HOSTS" /etc/hosts
mount -t tmpfs -o "size=${SHM_MIB}m,mode=1777" tmpfs /dev/shm
"""


def why_not() -> str:
    """Return why this machine cannot make such networks, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "setpriv") if not shutil.which(tool)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    bridge, pair = "ip link add name br0 type bridge", "ip link add name v0 type veth peer name v1"
    script = f"{bridge} && {pair} && mount -t tmpfs none /dev/shm"
    command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
    return f"no namespaces here: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class User:
    """The user of a host's processes: root, or a user who may read every file."""

    number: int = 0

    @property
    def prefix(self) -> list[str]:
        """A command prefix that switches to this user."""
        if not self.number:
            return list(DIE_WITH_PARENT)
        one = "-all,+dac_read_search"  # enough to read a checkout in root's home
        ids = [f"--reuid={self.number}", f"--regid={self.number}", "--clear-groups"]
        sets = ["--inh-caps", one, "--ambient-caps", one, "--bounding-set", one]
        return ["setpriv", *ids, *sets, *DIE_WITH_PARENT[1:]]


@dataclass(eq=False)
class Host:
    name: str
    address: str
    address6: str
    process: subprocess.Popen[bytes]  # ends with the first process and has its exit status
    log: Path
    user: User
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        """The first process's id outside the host; 0 before it starts."""
        outer = self.process.pid
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
            # During the set-up, the only child is one of its commands.
            if children and _is_first(int(children[0])):
                return int(children[0])
        return 0

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        out: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on the host; it is killed with the host."""
        popen = subprocess.Popen(self._enter(command, cwd), env=env, stdout=out, stderr=subprocess.STDOUT)
        self._started.append(popen)
        return popen

    def run(
        self,
        command: Sequence[str],
        timeout_s: float,
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host and wait for it. Raises subprocess.TimeoutExpired."""
        return subprocess.run(
            self._enter(command, cwd), env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread open its sockets on this host."""
        with _network_of(self.pid):
            yield

    def terminate(self) -> None:
        if self.process.poll() is None and self.pid:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill every process on the host."""
        self.process.kill()
        self.process.wait(END_S)
        for popen in self._started:
            popen.kill()
            popen.wait(END_S)

    def _enter(self, command: Sequence[str], cwd: Path | None) -> list[str]:
        enter = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--uts", "--ipc", "--pid", "--"]
        return [*DIE_WITH_PARENT, *enter, "env", "--chdir", str(cwd or "/"), *self.user.prefix, *command]


class Network:
    """A bridge and its hosts."""

    def __init__(self, folder: Path) -> None:
        """Store logs and the hosts' /etc/hosts in `folder`."""
        self._folder = folder
        self._numbers = itertools.count(2)
        self._hosts_file = folder / "hosts"
        self.hosts: dict[str, Host] = {}
        self._bridge: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._hosts_file.write_text("127.0.0.1 localhost\n::1 localhost\n")
        command = [*DIE_WITH_PARENT, "unshare", "--net", "sh", "-ec", _BRIDGE]
        self._bridge = subprocess.Popen(command, stdout=subprocess.PIPE)
        if not self._bridge.stdout or self._bridge.stdout.readline() != b"up\n":
            raise AssertionError("the bridge could not be created")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in reversed(self.hosts.values()):
            host.kill()
        if self._bridge:
            self._bridge.kill()
            self._bridge.communicate(timeout=END_S)

    def host(
        self,
        name: str,
        command: Sequence[str] = IDLE,
        *,
        service: str = "",
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        user: User = User(),
        shm_mib: int = 64,
        setup: str = "",
    ) -> Host:
        """Start a host with `command` as its first process and wait for its set-up.

        service: a second name, which several hosts may share; setup: a shell script that runs as root in the
        host's mount namespace before the first process.
        """
        if self._bridge is None:
            raise RuntimeError("enter the Network first")
        number = next(self._numbers)
        address, address6 = f"10.77.0.{number}", f"fd77::{number:x}"
        names = f"{name} {service}"
        with self._hosts_file.open("a") as hosts:
            hosts.write(f"{address} {names}\n{address6} {names}\n")
        variables = {
            "BRIDGE": str(self._bridge.pid),
            "NUMBER": str(number),
            "ADDRESS": address,
            "ADDRESS6": address6,
            "NAME": name,
            "HOSTS": str(self._hosts_file),
            "SHM_MIB": str(shm_mib),
        }
        # The set-up needs its own environment; the command gets only `env`.
        own = [f"{key}={value}" for key, value in (os.environ if env is None else env).items()]
        then = 'exec unshare --pid --fork --kill-child --mount-proc "$@"'
        script = f"{_HOST}\n{setup}\n{then}"
        apart = ["unshare", "--net", "--mount", "--uts", "--ipc", "sh", "-ec", script, "host"]
        first = ["env", "--chdir", str(cwd or "/"), *user.prefix, "env", "-i", *own, *command]
        log = self._folder / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*DIE_WITH_PARENT, *apart, *first],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        host = self.hosts[name] = Host(name, address, address6, process, log, user)
        eventually(lambda: host.pid or process.poll() is not None, END_S, f"{name} is set up")
        if not host.pid:
            raise AssertionError(f"{name} could not start:\n{host.text}")
        return host

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let this thread open its sockets on the bridge, 10.77.0.1."""
        if self._bridge is None:
            raise RuntimeError("enter the Network first")
        with _network_of(self._bridge.pid):
            yield


def move_to(pid: int) -> None:
    """Move this single-threaded process to the host whose first process is `pid`.

    It keeps its process id and the machine's /proc, gets a new /dev/shm, and has no name server: torch looks
    up names of addresses, and would wait for a server that does not answer.
    """
    for kind in ("net", "uts", "ipc"):
        namespace = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
        _move(namespace)
        os.close(namespace)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare failed")
    own = """
mount --make-rprivate /
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mkdir /dev/shm/etc
cp "$0" /dev/shm/etc/hosts
mount --bind /dev/shm/etc/hosts /etc/hosts
mount --bind /dev/null /etc/resolv.conf
"""
    subprocess.run(["sh", "-ec", own, f"/proc/{pid}/root/etc/hosts"], check=True, timeout=END_S)


def _move(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")


@contextmanager
def _network_of(pid: int) -> Iterator[None]:
    own = os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY)
    try:
        other = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            _move(other)
            yield
        finally:
            _move(own)
            os.close(other)
    finally:
        os.close(own)


def _is_first(pid: int) -> bool:
    """Return whether a process has id 1 in its pid namespace."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) > 2 and line.split()[-1] == "1"
    return False
