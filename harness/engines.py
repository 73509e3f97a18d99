"""vLLM engines in child processes that a test drives step by step.

`with EngineProcess(options) as engine: engine.call(function, *arguments)` runs `function(Engine, *arguments)`
in the child. The function must be importable, and its arguments and result picklable.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from baton.handoff.load.loader import State
from baton.handoff.params import load_params, save_params
from baton.handoff.reports import Begun, Loaded, Saved
from baton.protos.handoff_pb2 import Manifest
from baton.services.config import HandoffSettings
from baton.services.engine.patches.continuation import GENERATED_KEY
from harness import zygote
from harness.ranks import fork_ranks

P = ParamSpec("P")
T = TypeVar("T")
BLOCK_SIZE = 32
# Log-probability gap: three bfloat16 steps between 32 and 64, the range of the checkpoints' best logits.
CLEAR = 0.75
KV_CACHE_BYTES = 64 << 20  # the engine writes to all of it when it starts
FIRST_S = 20.0  # longest wait for a pull's first bytes
QUIET_S = 0.3  # a pull that brings no bytes for this long has paused
START_S, CALL_S, END_S = 180.0, 120.0, 20.0  # generous: other engines may keep the machine busy
_numbers = itertools.count()


@dataclass(frozen=True)
class Options:
    model: Path
    worker_id: str
    cores: str = "0"
    transports: tuple[str, ...] = ("shm", "tcp")  # NIXL takes a third of a second to start
    drafter: Path | None = None
    handoff: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    images: bool = False  # whether it takes images, and has the guard of Baton's workers
    prepare: Callable[[], None] | None = None  # the child calls it before vLLM starts


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    begun: Begun | None = None
    saved: Saved | None = None
    saved_with_first_token: bool = False
    loaded: Loaded | None = None
    gaps: list[float] = field(default_factory=list)  # log-probability gaps to the second-best, if requested


class Engine:
    """An EngineCore in the child process, and its answers."""

    def __init__(self, options: Options) -> None:
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor

        extra = HandoffSettings(listen="127.0.0.1:0", staging_mib=64).connector
        extra |= {"worker_id": options.worker_id, "transports": options.transports}
        arguments: dict[str, Any] = {
            "model": str(options.model),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK_SIZE,
            "max_model_len": 1024,
            "max_num_batched_tokens": 128,  # so that a prompt of 300 tokens takes several steps
            "gpu_memory_utilization": 0.2,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "disable_log_stats": True,
            "kv_transfer_config": KVTransferConfig(
                kv_connector="BatonConnector",
                kv_connector_module_path="baton.handoff.vllm.connector",
                kv_role="kv_both",
                kv_load_failure_policy="fail",
                kv_connector_extra_config=extra | options.handoff,
            ),
        }
        if options.drafter is not None:
            arguments["speculative_config"] = {
                "method": "eagle",
                "model": str(options.drafter),
                "num_speculative_tokens": 2,
            }
        if options.images:
            from baton.services.engine.build import image_connector

            arguments["ec_transfer_config"] = image_connector()
        config = EngineArgs(**(arguments | options.engine)).create_engine_config()
        self.core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self.connector = self.core.scheduler.get_kv_connector()
        if self.connector is not None:
            self.connector.wake_on_loads(lambda: None)
        self.answers: dict[str, Answer] = {}

    def add(self, request_id: str, *given: Any, **more: Any) -> Answer:
        """Queue a request; see `made`."""
        answer = self.answers[request_id] = Answer()
        self.core.add_request(self.made(request_id, *given, **more))
        return answer

    def made(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        params: Mapping[str, Any] | None = None,
        logprobs: int | None = None,
        written: Sequence[int] = (),
        features: Sequence[Any] = (),
    ) -> Any:
        """Return a greedy request; `written` are its output tokens that another engine generated."""
        from vllm.sampling_params import SamplingParams

        from baton.services.engine import wire

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        if written:
            sampling.extra_args = {GENERATED_KEY: len(written)}
        made, _ = self.core.preprocess_add_request(
            wire.new_request(request_id, prompt, sampling, mm_features=list(features) or None)
        )
        made.kv_transfer_params = params
        if written:
            made.append_output_token_ids(list(written))
            made.prefill_stats = None
        return made

    def step(self) -> bool:
        """Run a step and record its outputs and reports. Return False if the engine is idle."""
        if not self.core.scheduler.has_requests() and not self.core.batch_queue:
            return False
        if self.connector is not None:
            self.connector.promote(self.core.scheduler)
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)  # takes the drafts
        if not executed:
            time.sleep(0.0005)  # releases the GIL for the pulling threads
        first = set()
        for group in (outputs or {}).values():
            for output in group.outputs:
                answer = self.answers[output.request_id]
                if output.new_token_ids and not answer.tokens:
                    first.add(output.request_id)
                answer.tokens += output.new_token_ids
                if output.new_logprobs is not None:  # a row is: sampled, best, second-best token
                    answer.gaps += [float(best - second) for _, best, second in output.new_logprobs.logprobs]
                if output.finish_reason is not None:
                    answer.finish_reason = str(output.finish_reason)
        if self.connector is None:
            return True
        reports = self.connector.scheduler_side.take_reports()
        for begun in reports.begun:
            self.answers[begun.request_id].begun = begun
        for saved in reports.saved:
            self.answers[saved.request_id].saved = saved
            self.answers[saved.request_id].saved_with_first_token = saved.request_id in first
        for loaded in reports.loaded:
            self.answers[loaded.request_id].loaded = loaded
        return True

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Step until the engine is idle or `until` returns True."""
        deadline = time.monotonic() + CALL_S / 2
        while not (until is not None and until()) and self.step():
            if time.monotonic() > deadline:
                raise TimeoutError("the engine did not become idle")

    def resume(self, request_id: str, tokens: Sequence[int], manifest: Manifest) -> None:
        """Give a waiting request its first tokens and its KV, as the worker does."""
        self.give(request_id, tokens)
        self.connector.complete_load(request_id, manifest.epoch, manifest)

    def give(self, request_id: str, tokens: Sequence[int]) -> None:
        """Give a request tokens that another engine generated."""
        request = self.core.scheduler.requests[request_id]
        request.sampling_params.extra_args = {GENERATED_KEY: len(tokens)}
        request.append_output_token_ids(list(tokens))
        request.prefill_stats = None

    @property
    def free_blocks(self) -> int:
        return int(self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def queue_batches(engine: Engine, depth: int) -> None:
    """Keep `depth` steps in flight, as vLLM does with asynchronous scheduling; 1: as on a CPU.

    The scheduler is still the synchronous one: do not use this with drafts, whose steps it would mix up.
    """
    core = engine.core
    core.async_scheduling = depth > 1
    core.batch_queue_size, core.batch_queue = depth, deque(maxlen=depth) if depth > 1 else None
    core.step_fn = core.step_with_batch_queue if depth > 1 else core.step


def prefer(engine: Engine, name: str) -> None:
    """Prefer a transport for pulls. The scheduler and the rank must share the process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    transports = get_kv_transfer_group()._worker.loader.transports
    transports.sort(key=lambda transport: transport.name != name)


def generate(engine: Engine, request_id: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Generate an answer without a handoff."""
    answer = engine.add(request_id, prompt, max_tokens)
    engine.run()
    return answer.tokens


def least_gaps(engine: Engine, prompts: dict[str, list[int]], max_tokens: int) -> dict[str, float]:
    """Return each answer's smallest log-probability gap between the best and the second-best token."""
    answers = {name: engine.add(name, prompt, max_tokens, logprobs=2) for name, prompt in prompts.items()}
    engine.run()
    assert all(len(answer.gaps) == max_tokens for answer in answers.values())
    return {name: min(answer.gaps) for name, answer in answers.items()}


def prefill(engine: Engine, request_id: str, prompt: list[int], epoch: int = 1) -> Answer:
    answer = engine.add(request_id, prompt, 1, save_params(epoch))
    engine.run()
    return answer


def begin_prefill(engine: Engine, request_id: str, prompt: list[int]) -> Manifest | None:
    """Prefill until the first KV can be pulled. Return None if the prompt is complete before that."""
    answer = engine.add(request_id, prompt, 1, save_params(1))
    engine.run(lambda: answer.begun is not None)
    return answer.begun.manifest if answer.begun is not None else None


def begin_decode(engine: Engine, request_id: str, prompt: list[int], max_tokens: int, early: Manifest) -> int:
    """Start to pull from a prompt that is still being prefilled. Return the bytes until the pull pauses."""
    engine.add(request_id, prompt, max_tokens, load_params(early.epoch, early.num_tokens))
    engine.connector.begin_load(request_id, early.epoch, early)
    deadline = time.monotonic() + FIRST_S
    while not (seen := pulled(engine, request_id, early.epoch)) and time.monotonic() < deadline:
        pass  # on a busy machine the first bytes come late
    return seen


def pulled(engine: Engine, request_id: str, epoch: int) -> int:
    """Step until an early load is complete, or pulls nothing for QUIET_S. Return its bytes so far."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    engine.step()
    loader = get_kv_transfer_group()._worker.loader
    seen, since = 0, time.monotonic()
    while time.monotonic() < since + QUIET_S:
        engine.step()
        load = loader._loads.get((request_id, epoch))
        if load is not None and load.state is State.HELD:
            break
        if load is not None and load.state is State.PULLING and load.progress.bytes != seen:
            seen, since = load.progress.bytes, time.monotonic()
    return seen


def end_prefill(engine: Engine, request_id: str) -> Answer:
    engine.run()
    return engine.answers[request_id]


def end_decode(engine: Engine, request_id: str, written: Sequence[int], manifest: Manifest) -> Answer:
    """Finish an early load and run its request to the end."""
    engine.resume(request_id, written, manifest)
    engine.run()
    return engine.answers[request_id]


def decode(
    engine: Engine,
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    manifest: Manifest,
    epoch: int = 1,
    written: Sequence[int] = (),
) -> Answer:
    """Continue from the manifest's KV. Without `written` tokens, the prompt's last token is recomputed."""
    answer = engine.add(
        request_id, prompt, max_tokens, load_params(epoch, manifest.num_tokens, manifest), written=written
    )
    engine.run()
    return answer


def serve(connection: Connection) -> None:
    """Run an engine in the forked process: receive its options, then functions to call."""
    options: Options = connection.recv()
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": options.cores,
        "VLLM_CONFIGURE_LOGGING": "0",  # takes a tenth of a second; warnings are shown without it
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps a single rank in this process
    }
    with zygote.reporting(connection):
        if options.prepare is not None:
            options.prepare()
        if options.engine.get("distributed_executor_backend") == "mp":
            fork_ranks()
        engine = Engine(options)
    connection.send((True, None))
    while (asked := connection.recv()) is not None:
        function, arguments = asked
        with suppress(Exception), zygote.reporting(connection):
            connection.send((True, function(engine, *arguments)))
    # EngineCore.shutdown would also spend 1.4 s on garbage collection in a process that ends anyway.
    engine.core.model_executor.shutdown()
    engine.core.scheduler.shutdown()
    if engine.core.vllm_config.parallel_config.world_size > 1:
        del engine
        gc.collect()  # removes the shared memory of vLLM's queues between ranks
    connection.send((True, None))


def clear_prompt(engine: EngineProcess, draw: Callable[[], list[int]], max_tokens: int) -> list[int]:
    """Return a drawn prompt whose answer has no near-ties.

    On some CPUs (AMX) the rest of the batch changes the order of summation and so the last bit in bfloat16.
    With random weights, that can flip the answers of half of all prompts.
    """
    for _ in range(10):
        prompts = {f"drawn-{next(_numbers)}": draw() for _ in range(8)}
        gaps = engine.call(least_gaps, prompts, max_tokens)
        clearest = max(gaps, key=gaps.__getitem__)
        if gaps[clearest] >= CLEAR:
            return prompts[clearest]
    raise AssertionError("every prompt's answer has a near-tie")


class EngineProcess:
    """A process with one engine, forked from the zygote."""

    def __init__(self, options: Options) -> None:
        self.name = options.worker_id
        self._remote = zygote.Remote(options.worker_id, f"{__name__}:serve", options)

    def __enter__(self) -> EngineProcess:
        self._remote.receive(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._remote.process.poll() is None:
                self._remote.send(None)
                self._remote.receive(CALL_S)
        finally:
            self._remote.close(END_S)

    def kill(self) -> None:
        self._remote.process.kill()
        self._remote.process.wait(END_S)

    def call(self, function: Callable[Concatenate[Engine, P], T], *arguments: P.args, **_: P.kwargs) -> T:
        self._remote.send((function, arguments))
        result: T = self._remote.receive(CALL_S)
        return result
