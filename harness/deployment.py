"""A deployment of real processes for the end-to-end tests."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import openai
import psutil
import yaml
from google.protobuf.json_format import MessageToDict

from baton.protos import scheduler_pb2, scheduler_pb2_grpc
from baton.security.authority import Authority
from baton.security.names import Name, Role, host_of
from harness import zygote
from harness.ranks import fork_ranks
from harness.support import CALL_S, COMMAND, PATIENCE, PYTHON, ROOT, eventually, free_port, listener
from harness.zygote import Forked

START_S = 120.0
OPERATOR_S = 7200.0  # lifetime of a certificate, which is not renewed
# Channel options that reconnect at once after a test has killed a scheduler.
AT_ONCE_AGAIN = [(f"grpc.{which}_reconnect_backoff_ms", 50) for which in ("initial", "min", "max")]
STOCK = "vllm.entrypoints.launchers.api_server.entry"  # the module of `vllm serve`
MODEL = ROOT / "deploy" / "demo-model" / "weights"
MODEL_NAME = "baton-demo"
SOON = {"baton.services.fleet.budget:BACKOFF_S": 0.1}  # parts that die again restart soon
# The same model with an MTP layer, so that tests can compare answers with and without speculation.
ENGINE: dict[str, Any] = {
    "model": str(MODEL.parent / "weights-mtp"),
    "speculative_config": {"method": "mtp", "num_speculative_tokens": "auto", "max_speculative_tokens": 4},
    "served_model_name": MODEL_NAME,
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 16,
    "kv_cache_gib": 0.25,
    "tool_call_parser": "hermes",
}


@dataclass
class Process:
    name: str
    popen: subprocess.Popen[bytes] | Forked
    log: Path

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(CALL_S)

    def end(self, timeout_s: float = 30.0) -> int:
        """Terminate the process and return its status. Raises AssertionError if it has to be killed."""
        self.popen.terminate()
        return self.wait(timeout_s)

    def wait(self, timeout_s: float) -> int:
        try:
            return self.popen.wait(timeout_s * PATIENCE)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(CALL_S)
            late = f"{self.name} did not end within {timeout_s * PATIENCE:g} s"
            raise AssertionError(f"{late}:\n{self.text[-2000:]}") from None


@dataclass
class Deployment:
    """Processes on their own loopback ports that share a configuration file."""

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    cold: bool = False  # start commands as a user does; otherwise fork them: importing vLLM takes six seconds
    path: str = ""  # a folder of extra packages for its processes
    environment: Mapping[str, str] = field(default_factory=dict)  # extra variables of its processes
    constants: Mapping[str, float] = field(default_factory=dict)  # `module:NAME` -> value in its processes
    cores: int = 0  # how many its processes may use unless `cold`; 0: all
    port: int = field(default_factory=free_port)
    scheduler_port: int = field(default_factory=free_port)
    _clients: ExitStack = field(default_factory=ExitStack, repr=False)
    _scheduler: Any = field(default=None, repr=False)  # gRPC stub

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "engine": dict(ENGINE),
            "scheduler": {"address": self.scheduler_address},
            "router": {"port": self.port},
            "handoff": {"staging_mib": 128},
            "ops": {"listen": ""},  # no live page, whose default port another test may use
        }
        for section, values in self.config.items():
            config.setdefault(section, {}).update(values)
        self.config = config
        self.config_file.write_text(yaml.safe_dump(config))

    @property
    def config_file(self) -> Path:
        return self.folder / "baton.yaml"

    @property
    def scheduler_address(self) -> str:
        return f"127.0.0.1:{self.scheduler_port}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, name: str, *command: str) -> Process:
        """Start `baton COMMAND` with this deployment's configuration."""
        line = [*command, "--config", str(self.config_file)]
        log = self.folder / f"{name}.log"
        log.write_bytes(b"")
        if self.cold:
            process = Process(name, _popen([*COMMAND, *line], log, self.environment), log)
        else:
            forked = zygote.shared().baton(
                name, line, self.folder, self.path, self.environment, {**SOON, **self.constants}, self.cores
            )
            process = Process(name, forked, log)
        self.processes[name] = process
        return process

    def up(self, prefill: int = 1, decode: int = 1, mixed: int = 0, *flags: str) -> Deployment:
        """Start `baton up` with this fleet and wait until it is ready."""
        fleet = ["--prefill", str(prefill), "--decode", str(decode), "--mixed", str(mixed)]
        if "models" in self.config:  # it defines the fleet of each model
            fleet = []
        process = self.start("up", "up", *flags, *fleet, "--log-dir", str(self.folder / "logs"))

        def ready() -> bool:
            if process.popen.poll() is not None:
                raise AssertionError(f"baton up ended with {process.popen.returncode}:\n{process.text}")
            return "Ready." in process.text

        eventually(ready, START_S, f"baton up is ready; its output:\n{process.text}")
        return self

    def baton(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run an operator's command on this deployment."""
        return zygote.shared().command(*command, "--config", str(self.config_file))

    def status(self) -> dict[str, Any]:
        """Return the output of `baton status --json`."""
        done = self.baton("status", "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def describe(self, wait: bool = True) -> scheduler_pb2.Description:
        """Return the scheduler's description, faster than `status`. `wait`: until the scheduler answers."""
        if self._scheduler is None:
            channel = self._clients.enter_context(self._operator_channel())
            self._scheduler = scheduler_pb2_grpc.SchedulerStub(channel)  # type: ignore[no-untyped-call]
        request = scheduler_pb2.DescribeRequest()
        description: scheduler_pb2.Description = self._scheduler.Describe(
            request, timeout=5 * PATIENCE, wait_for_ready=wait
        )
        return description

    def _operator_channel(self) -> grpc.Channel:
        """Return a channel to the scheduler, with an operator's certificate if the parts use TLS."""
        security = self.config.get("security", {})
        if not security.get("tls"):
            return grpc.insecure_channel(self.scheduler_address, AT_ONCE_AGAIN)
        topic = self.config["scheduler"].get("topic", "baton")
        pems = Authority(Path(security["ca"])).issue(Name(topic, Role.OPERATOR), OPERATOR_S)
        return grpc.secure_channel(
            self.scheduler_address,
            grpc.ssl_channel_credentials(pems.roots, pems.key, pems.chain),
            [*AT_ONCE_AGAIN, ("grpc.ssl_target_name_override", host_of(topic, Role.SCHEDULER))],
        )

    def workers(self, role: str) -> list[dict[str, Any]]:
        """Return the status of a role's ready workers; empty if no scheduler answers."""
        try:
            description = self.describe(wait=False)
        except grpc.RpcError:
            return []
        wanted = scheduler_pb2.Role.Value(f"ROLE_{role.upper()}"), scheduler_pb2.WORKER_STATE_READY
        return [
            MessageToDict(one, preserving_proto_field_name=True)
            for one in description.workers
            if (one.identity.role, one.state) == wanted
        ]

    def worker(self, role: str) -> dict[str, Any]:
        """Wait for a ready worker of a role and return its status."""
        return eventually(lambda: self.workers(role), CALL_S, f"there is a {role} worker")[0]

    def worker_process(self, worker_id: str) -> psutil.Process:
        """Return the process of a worker of `baton up`, whose id ends with its process id."""
        return psutil.Process(int(worker_id.rpartition(".")[2]))

    def scheduler_process(self) -> psutil.Process:
        return listener(self.scheduler_port)

    def client(self, **options: Any) -> openai.OpenAI:
        """Return a client that the deployment closes."""
        return self._clients.enter_context(openai.OpenAI(**self._for_client(options)))

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """Return a client that the test closes in its event loop."""
        return openai.AsyncOpenAI(**self._for_client(options))

    def _for_client(self, options: dict[str, Any]) -> dict[str, Any]:
        defaults = {"base_url": f"{self.url}/v1", "api_key": "none", "timeout": CALL_S, "max_retries": 0}
        return {**defaults, **options}

    def healthy(self) -> bool:
        return status_of(f"{self.url}/health") == 200

    def close(self) -> None:
        """End all processes, newest first. Kill those that do not end in time, with their sessions."""
        self._clients.close()
        for process in reversed(self.processes.values()):
            if process.popen.poll() is None:
                process.popen.terminate()
        deadline = time.monotonic() + 30
        for process in reversed(self.processes.values()):
            try:
                process.popen.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.popen.pid, signal.SIGKILL)
                process.popen.wait(10)


def _popen(line: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    env = {**os.environ, **environment}
    with log.open("wb") as out:
        return subprocess.Popen(
            line, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=env, start_new_session=True
        )


@contextmanager
def deployment(
    folder: Path,
    *,
    cold: bool = False,
    path: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    constants: Mapping[str, float] = MappingProxyType({}),
    cores: int = 0,
    **config: Any,
) -> Iterator[Deployment]:
    """Yield a deployment; its processes end with the block."""
    more: dict[str, Any] = {"environment": environment, "constants": constants, "cores": cores}
    one = Deployment(folder, config=config, cold=cold, path=str(path or ""), **more)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def stock_vllm(
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    cold: bool = False,
    flags: Sequence[str] = (),
    **engine: Any,
) -> Iterator[tuple[str, Process]]:
    """Run vLLM's own API server, without Baton, as a reference. Yield its URL and process.

    Unless `cold`, it is forked, so that its API server and its engine need not import vLLM. `flags` are added
    to its command line.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    options = {**ENGINE, **engine}
    arguments = [
        *("--port", port, "--host", "127.0.0.1"),
        *("--model", options["model"], "--served-model-name", options["served_model_name"]),
        *("--dtype", options["dtype"], "--max-model-len", options["max_model_len"]),
        *("--max-num-seqs", options["max_num_seqs"], "--gpu-memory-utilization", 0.2),
        *("--kv-cache-memory-bytes", int(options["kv_cache_gib"] * 2**30)),
        *("--enable-auto-tool-choice", "--tool-call-parser", options["tool_call_parser"]),
        *("--block-size", 32, "--enforce-eager", "--no-async-scheduling"),
        *flags,
    ]
    line = [str(part) for part in arguments]
    environment = dict(env or {})
    log = folder / "vllm.log"
    popen: subprocess.Popen[bytes] | Forked
    if cold:
        popen = _popen([str(PYTHON), "-m", STOCK, *line], log, environment)
    else:
        popen = zygote.shared().start(
            "vllm", f"{__name__}:run_stock", folder, arguments=line, environment=environment
        )
    process = Process("vllm", popen, log)
    try:

        def ready() -> bool:
            if popen.poll() is not None:
                raise AssertionError(f"stock vLLM ended with {popen.returncode}:\n{process.text[-3000:]}")
            return status_of(f"http://127.0.0.1:{port}/health") == 200

        eventually(ready, START_S, "stock vLLM is ready")
        yield f"http://127.0.0.1:{port}", process
    finally:
        popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            popen.wait(20)
        # The server's engine processes sometimes outlive it.
        with suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait(10)


def run_stock(arguments: list[str], environment: dict[str, str]) -> None:
    """Run vLLM's command line in the forked process."""
    os.environ.update(environment)
    fork_ranks()
    sys.argv = ["vllm", *arguments]
    importlib.import_module(STOCK).main()


def status_of(url: str) -> int:
    """Return the HTTP status of a GET, 0 without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def free_blocks(one: Deployment) -> dict[str, int]:
    return {worker.identity.worker_id: worker.load.free_blocks for worker in one.describe().workers}


def idle(one: Deployment) -> bool:
    """Return whether no request is running or placed and no handoff is pinned.

    Encode workers keep embeddings for longer, on purpose.
    """
    description = one.describe()
    encode = scheduler_pb2.ROLE_ENCODE
    return not description.attempts and not any(
        worker.load.running
        or worker.load.waiting
        or (worker.load.pinned_handoffs and worker.identity.role != encode)
        for worker in description.workers
    )
