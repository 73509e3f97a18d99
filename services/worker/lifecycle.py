"""Start and end a worker's process: `run_worker`, also in a process forked from one that called `preload`."""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from baton.security.names import Role
from baton.services import identities, logs, roles
from baton.services.config import Settings
from baton.services.decode.proposers import validation
from baton.services.engine.adapters import read_adapters
from baton.services.engine.args import check_model, check_version, from_hub
from baton.services.engine.errors import EngineFailed, RankLost
from baton.services.engine.fingerprint import model_fingerprint
from baton.services.engine.grammars.helper import fork_helper
from baton.services.engine.grammars.house import GrammarHouse
from baton.services.errors import StartError
from baton.services.imports import import_all
from baton.services.leave import ENGINE_FAILED, leave
from baton.services.printing import complain
from baton.services.worker.gang import is_limb

# Seconds. How long the engine's thread and the event loop's wait for the interpreter while the other one runs
# Python code. On two busy cores a step's outputs reached the loop in 22 us (p50), against 215 to 335 us with
# Python's own 5 ms; with 0.1 ms the steps took a third longer.
SWITCH_INTERVAL_S = 0.0005

_HEAVY = (
    "transformers",
    "vllm.engine.arg_utils",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.spec_decode.ngram_proposer",
    "vllm.v1.structured_output.backend_guidance",
    "vllm.v1.structured_output.backend_outlines",
    "vllm.v1.structured_output.backend_xgrammar",
    "baton.services.engine.grammars.trial",
    "vllm.model_executor.layers.quantization.online.base",
    "baton.handoff.vllm.connector",
    "baton.kernels.kv_pack.cpu",
    "baton.services.worker.process",
    "baton.services.worker.servicer",
)


def preload() -> None:
    """Import slow modules, for quick forks. Starts no threads or connections: they do not survive forks."""
    import_all(_HEAVY)


def run_worker(settings: Settings, role: str) -> None:
    """Run a worker of `role`, or a limb of one, until a signal, an operator or a failure ends it.

    Raises ConfigError, StartError, PeerRefused or SecurityError if it cannot start. Otherwise the
    process exits: if the engine failed, with a line on stderr and status ENGINE_FAILED (1 if a rank was
    lost). SIGTERM, SIGINT and SIGHUP drain the worker; a second SIGTERM or SIGINT ends the process at once.
    """
    from baton.services.worker.limb import Limb
    from baton.services.worker.process import WorkerProcess

    worker_id = settings.worker.worker_id or f"{role}-{socket.gethostname()}-{os.getpid()}"
    names = worker_id, worker_id.removesuffix(f".{os.getpid()}")  # as `baton up` names its workers
    logs.configure(settings.log_format, worker_id)
    # Fork first, because joining a CA may start threads.
    house = None if is_limb(settings) else GrammarHouse(fork_helper())
    the_role = roles.role(role)
    if not the_role.generates:
        settings = roles.encoder_settings(settings)
    roles.check(the_role, settings)
    check_model(settings.engine)
    settings.scheduler.check_shared()
    validation.check(settings.engine)
    check_version()
    try:
        fingerprint = model_fingerprint(settings.engine.model, **from_hub(settings.engine))
    except OSError as error:
        raise StartError(f"cannot read the model {settings.engine.model!r}: {error}") from None
    adapters = read_adapters(settings.engine)
    identities.take_on(settings, Role.WORKER, worker_id)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        if house is None:
            run = Limb(settings, the_role, worker_id, fingerprint, preload, adapters=adapters).run
        else:
            process = WorkerProcess(
                settings, the_role, names, fingerprint, preload, adapters=adapters, house=house
            )
            run = process.run
        status = asyncio.run(run())
    except EngineFailed as error:
        # `leave` does not wait for threads and ranks, which may hang.
        complain(f"baton: error: {error}")
        status = 1 if isinstance(error.__cause__, RankLost) else ENGINE_FAILED
    leave(status)
