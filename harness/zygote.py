"""A process that imports vLLM once and forks the processes of tests, which saves seconds for each.

All workers of a pytest run share one. `python -m harness.zygote FOLDER` listens on a socket in that folder,
reads commands as JSON lines and answers each with a line:
    {"start": name, "call": "module:function", "arguments": {...}, "log_dir": folder}
        ->  {"pid": n, "log": path}
    {"ended": [pid, ...]}  ->  {"ended": {pid: exit code}}
Processes end with the connection that started them; the zygote ends with its last connection.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest import mock

from baton.services.imports import import_all
from harness import netns
from harness.support import CALL_S, PYTHON, ROOT, eventually

ANSWER_S = 300.0  # the first answer waits for the imports, on a busy machine
STOP_S = 20.0
STREAMS = ("stdout", "stderr")  # files of a command's output
# Imported by commands when they need them.
_LATE = (
    "baton.services.cli.status",
    "baton.services.cli.up",
    "baton.services.fleet.routers",
    "baton.services.fleet.scheduler",
    "baton.services.router.serving",
)


@dataclass
class Forked:
    """A forked process, with the methods of subprocess.Popen."""

    zygote: Zygote
    pid: int
    log: Path
    returncode: int | None = None

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.zygote.ended([self.pid]).get(self.pid)
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return its exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired([self.log.stem], timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Zygote:
    """A connection to the zygote. Methods are thread-safe and block for milliseconds."""

    def __init__(self, folder: Path) -> None:
        """Connect to the zygote that listens in the folder, or start one."""
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = _connected(folder)
            if found is None:
                _launch(folder)
                found = eventually(lambda: _connected(folder), 20, "the zygote listens")
        self._socket = found
        self._socket.settimeout(ANSWER_S)
        self._stream = found.makefile("rw")
        self._lock = threading.Lock()

    def start(self, name: str, call: str, log_dir: Path, /, **arguments: Any) -> Forked:
        """Fork a process that calls `module:function`. Processes with the same name append to NAME.log."""
        answer = self._ask({"start": name, "call": call, "arguments": arguments, "log_dir": str(log_dir)})
        return Forked(self, answer["pid"], Path(answer["log"]))

    def baton(
        self,
        name: str,
        arguments: list[str],
        log_dir: Path,
        path: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
        constants: Mapping[str, Any] = MappingProxyType({}),
        cores: int = 0,
    ) -> Forked:
        """Fork a process that runs `baton ARGUMENT ...`; see `run_baton`."""
        more: dict[str, Any] = {
            "environment": dict(environment),
            "constants": dict(constants),
            "cores": cores,
        }
        return self.start(name, "harness.zygote:run_baton", log_dir, arguments=arguments, path=path, **more)

    def command(self, *arguments: str, host: int = 0) -> subprocess.CompletedProcess[str]:
        """Run `baton ARGUMENT ...` in a fork and return its output. Raises subprocess.TimeoutExpired.

        host: the first process of a host of harness/netns.py to run it on
        """
        call = "harness.zygote:run_command"
        with tempfile.TemporaryDirectory() as name:
            process = self.start("command", call, Path(name), arguments=arguments, folder=name, host=host)
            code = process.wait(CALL_S)
            out, err = (Path(name, stream).read_text() for stream in STREAMS)
            return subprocess.CompletedProcess(["baton", *arguments], code, out, err)

    def ended(self, pids: list[int]) -> dict[int, int]:
        return {int(pid): code for pid, code in self._ask({"ended": pids})["ended"].items()}

    def close(self) -> None:
        """End all processes that this connection started."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._stream.read()  # returns when the processes have ended
        self._socket.close()

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self._stream.write(json.dumps(command) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        if not line:
            raise RuntimeError("the zygote ended")
        return dict(json.loads(line))


@functools.cache
def shared() -> Zygote:
    """Return the zygote of this pytest run, or of this process; start it on first use."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or str(os.getpid())
    made = Zygote(Path(tempfile.gettempdir()) / f"baton-zygote-{run}")
    atexit.register(made.close)
    return made


def _connected(folder: Path) -> socket.socket | None:
    one = socket.socket(socket.AF_UNIX)
    try:
        one.connect(str(folder / "socket"))
    except OSError:
        one.close()
        return None
    return one


def _launch(folder: Path) -> None:
    """Start a zygote in its own session, so that Ctrl-C reaches only pytest."""
    subprocess.run(
        ["setsid", "--fork", PYTHON, "-m", "harness.zygote", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=ROOT,
        # More OpenMP threads would spin on a busy machine. torch and gRPC read their log levels on import; a
        # cold start sets them before that (services/logs.py, services/cli/entry.py).
        env={
            **os.environ,
            **{"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GRPC_VERBOSITY": "NONE"},
        },
        check=True,
    )


def connected(name: str, call: str, folder: Path) -> tuple[Forked, Connection]:
    """Fork a process that calls `module:function` with a connection. Return the process and our end."""
    address = str(folder / "connection")
    process = shared().start(name, "harness.zygote:run_connected", folder, call=call, address=address)

    def accepted() -> Connection | None:
        assert process.poll() is None, process.text
        with contextlib.suppress(OSError):  # not listening yet
            return Client(address)
        return None

    return process, eventually(accepted, 20, f"{name} listens", every_s=0.01)


def run_connected(call: str, address: str) -> None:
    """Accept a connection and pass it to `module:function`. Runs in the forked process."""
    with Listener(address) as listener, listener.accept() as connection:
        _function(call)(connection)


@contextlib.contextmanager
def reporting(connection: Connection) -> Iterator[None]:
    """Send an error of the block to a `Remote`. Raises it, too."""
    try:
        yield
    except BaseException:
        connection.send((False, traceback.format_exc()))
        raise


class Remote:
    """A forked process that runs `module:function` with a connection.

    The function receives the order, and sends (True, result) or an error (`reporting`) for every message.
    """

    def __init__(self, name: str, call: str, order: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"baton-{name}-")
        self.process, self._connection = connected(name, call, Path(self._folder.name))
        self.send = self._connection.send
        self.send(order)

    def receive(self, timeout_s: float) -> Any:
        """Return the next result. Raises TimeoutError, or RuntimeError with the process's traceback."""
        if not self._connection.poll(timeout_s):
            self.process.kill()
            raise TimeoutError(f"no answer from {self.process.log.stem}'s process within {timeout_s:g} s")
        ok, result = self._connection.recv()
        if not ok:
            raise RuntimeError(result)
        return result

    def close(self, within_s: float) -> None:
        """Kill the process if it does not end in time."""
        end_all([self.process], within_s)
        self._connection.close()
        self._folder.cleanup()


def end_all(processes: Sequence[Forked], timeout_s: float) -> None:
    """Send SIGTERM to all processes, then SIGKILL to those that remain after `timeout_s`."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
        process.kill()


def prepare(path: str, environment: Mapping[str, str], constants: Mapping[str, Any]) -> None:
    """Prepare this process and those that it forks.

    path: a folder of extra packages; constants: `module:NAME` -> value.
    """
    for name, value in constants.items():
        module, _, constant = name.partition(":")
        setattr(importlib.import_module(module), constant, value)
    os.environ.update(environment)
    if path:  # has the effect of PYTHONPATH
        sys.path.insert(0, path)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))


def run_baton(
    arguments: list[str],
    path: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
    constants: Mapping[str, Any] = MappingProxyType({}),
    cores: int = 0,
) -> None:
    """Run Baton's command line as the entry point does, in the forked process.

    cores: how many this process may use, 0 for all; the other parameters: see `prepare`.
    """
    from baton.services.cli.main import main
    from baton.services.fleet import processes

    forking = SimpleNamespace(Popen=_fork_supervisor, PIPE=subprocess.PIPE)
    mock.patch.object(processes, "subprocess", forking).start()
    prepare(path, environment, constants)
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    sys.argv = ["baton", *arguments]
    main()


def run_command(arguments: list[str], folder: str, host: int) -> None:
    """Run Baton's command line with its output in files. Runs in the forked process."""
    for descriptor, stream in enumerate(STREAMS, 1):
        file = os.open(Path(folder, stream), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
        os.close(file)
    if host:
        netns.move_to(host)
    run_baton(arguments)


def _fork_supervisor(command: list[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[str]:
    """Fork `python -P -m MODULE ARGUMENT ...` from this process, which has imported vLLM."""
    module, *arguments = command[3:]

    def become() -> None:
        """Run in the child, in place of an exec."""
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Popen returns once its pipe to the child is closed
        os.environ.clear()
        os.environ.update(env)
        sys.argv = [module, *arguments]
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (multiprocessing has replaced it)
        importlib.import_module(module).main()

    # Without an exec, a restored SIGPIPE would end the child at its first write to a closed socket.
    return subprocess.Popen(command, preexec_fn=become, restore_signals=False, **options)  # noqa: PLW1509


class _Client:
    """A client's connection and the processes that were forked for it."""

    def __init__(self, connection: socket.socket) -> None:
        from baton.services.fleet import processes

        self._processes = processes
        self._connection = connection
        self._stream = connection.makefile("rw")
        self._children: dict[int, processes.Child] = {}

    def answer(self) -> bool:
        """Carry out a command. Return False if the client has closed the connection."""
        line = self._stream.readline()
        if not line:
            return False
        command = json.loads(line)
        if "start" in command:
            child = self._processes.spawn(
                command["start"],
                lambda: _function(command["call"])(**command["arguments"]),  # imports only in the child
                Path(command["log_dir"]),
            )
            self._children[child.process.pid or 0] = child
            answer: dict[str, Any] = {"pid": child.process.pid, "log": str(child.log)}
        else:
            codes = {pid: self._children[pid].process.exitcode for pid in command["ended"]}
            answer = {"ended": {pid: code for pid, code in codes.items() if code is not None}}
        self._stream.write(json.dumps(answer) + "\n")
        self._stream.flush()
        return True

    def close(self) -> None:
        self._processes.stop_all(list(self._children.values()), STOP_S / 2)
        self._connection.shutdown(socket.SHUT_RDWR)  # close is not enough: forked processes have a copy
        self._stream.close()
        self._connection.close()

    def fileno(self) -> int:
        return self._connection.fileno()


def _serve(folder: Path) -> None:
    """Serve until the last connection ends."""
    with socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
        listener.bind(str(folder / "socket"))
        listener.listen()  # clients can connect during the imports
        _preload()
        selector.register(listener, selectors.EVENT_READ)
        clients = 0
        while True:
            for key, _ in selector.select():
                if isinstance(key.fileobj, socket.socket):
                    selector.register(_Client(listener.accept()[0]), selectors.EVENT_READ)
                    clients += 1
                elif isinstance(key.fileobj, _Client) and not key.fileobj.answer():
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    clients -= 1
            if not clients:
                break
    shutil.rmtree(folder, ignore_errors=True)


def _preload() -> None:
    from typer.main import get_command

    from baton.services.cli import main
    from baton.services.router import app
    from baton.services.worker import lifecycle

    setattr(main, "app", get_command(main.app))  # noqa: B010 (built once, not in each fork)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lifecycle.preload()
        app.preload()
        import_all(_LATE)
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        EngineArgs.add_cli_args(FlexibleArgumentParser())  # takes half a second; vLLM caches the result
    gc.freeze()


def _function(name: str) -> Callable[..., None]:
    module, _, function = name.partition(":")
    found: Callable[..., None] = getattr(importlib.import_module(module), function)
    return found


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
