"""An engine in a process of its own, for comparisons in turns: it measures on request and idles otherwise.

Requests come as a decode worker gets them: prefilled (here: a prefix cache hit, after the first time), with
their first token. So only decoding is timed.

Besides what services/worker uses, this depends on vllm.v1.engine.core.EngineCore (preprocess_add_request,
add_request, step_fn, post_step) and its scheduler (dynamic_sd_lookup; kv_cache_manager.coordinator.
eagle_group_ids).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from baton.services.engine.patches.continuation import GENERATED_KEY, VOCABULARY_KEY

START_S = 180.0
MEASURE_S = 120.0
MAX_ANSWER = 192  # tokens
AUTO = "auto"
# The clocks. The thread's own time is for a machine that is busy with other things: an engine on one core
# computes in the thread that steps it.
CLOCKS = {"wall": time.monotonic, "cpu": time.thread_time}


@dataclass(frozen=True)
class Failed:
    """An error that is sent instead of an answer."""

    reason: str


@dataclass(frozen=True)
class Prefilled:
    """A prompt and the first token of its answer."""

    prompt: list[int]
    written: list[int]


@dataclass
class Run:
    """The result of a measurement."""

    seconds: float = 0.0  # of steps that all streams were in
    tokens: int = 0  # of these steps, all streams
    streams: int = 1
    drafted: int = 0
    accepted: int = 0
    limits: Counter[int] = field(default_factory=Counter)  # steps by the limit on their drafts
    answers: list[list[int]] = field(default_factory=list)  # whole, in the order of the prompts

    @property
    def ms_per_token(self) -> float:
        """The time per output token that one stream sees."""
        return 1e3 * self.seconds * self.streams / max(1, self.tokens)


class EngineProcess:
    """An engine on one core. The constructor returns at once; `ready` waits until it is loaded."""

    def __init__(self, engine: dict[str, Any], core: int, clock: str = "wall") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["bench.drafting_preload"])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, engine, core, clock), daemon=True)
        self._process.start()
        theirs.close()

    def ready(self) -> None:
        """Wait until the engine is loaded. Raises RuntimeError with the reason when it could not load."""
        self._answer(START_S)

    def measure(self, prompts: Sequence[Prefilled], streams: int, limit: int | str | None) -> Run:
        """Answer the prompts, so many streams at a time. `limit`: drafted tokens a step, "auto", or None."""
        self._pipe.send((prompts, streams, limit))
        run: Run = self._answer(MEASURE_S)
        return run

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10.0)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RuntimeError(f"the engine did not answer within {timeout_s:.0f} s")
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise RuntimeError("the engine's process ended: its reason is above") from None
        if isinstance(answer, Failed):
            raise RuntimeError(f"the engine could not load: {answer.reason}")  # noqa: TRY004
        return answer


def _serve(pipe: Connection, engine: dict[str, Any], core: int, clock: str) -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    try:
        bench = _Engine(engine, core, clock)
    except Exception as error:
        pipe.send(Failed(str(error)))
        raise
    pipe.send(None)
    while True:
        try:
            prompts, streams, limit = pipe.recv()
        except EOFError:
            return
        pipe.send(bench.measure(prompts, streams, limit))


class _Engine:
    """An engine built as a mixed worker builds its own, and stepped as its thread does."""

    def __init__(self, engine: dict[str, Any], core: int, clock: str) -> None:
        from baton.services.config import Settings
        from baton.services.engine.build import EnginePlan, build_engine
        from baton.services.engine.patches import draft_length

        settings = Settings(**{"engine": engine, "worker": {"cpu": str(core)}})
        plan = EnginePlan(settings=settings, worker_id="bench", fingerprint="", needs_handoffs=False)
        self._engine = build_engine(plan, lambda: None)
        self._chooser = draft_length.install(self._engine, settings.engine.speculative_config)
        # Where a drafter has KV, vLLM recomputes the last block of a cached prompt for its hidden states. A
        # handed-over prompt is not recomputed: with a token generated these states are not needed.
        self._engine.scheduler.kv_cache_manager.coordinator.eagle_group_ids.clear()
        self._clock = CLOCKS[clock]
        self._count = 0

    def measure(self, prompts: Sequence[Prefilled], streams: int, limit: int | str | None) -> Run:
        engine, scheduler, chooser = self._engine, self._engine.scheduler, self._chooser
        if limit is not None:
            slots = engine.vllm_config.scheduler_config.max_num_seqs + 1
            scheduler.dynamic_sd_lookup = chooser if limit == AUTO else [limit] * slots
        run = Run(streams=streams, answers=[list(asked.written) for asked in prompts])
        waiting, numbers = list(enumerate(prompts)), dict[str, int]()
        while waiting or numbers:
            while waiting and len(numbers) < streams:
                number, prompt = waiting.pop(0)
                numbers[self._add(prompt)] = number
            full = len(numbers) == streams
            began = self._clock()
            outputs, executed = engine.step_fn()
            engine.post_step(executed)
            took = self._clock() - began
            if chooser is not None and limit == AUTO:
                chooser.observe(took)
                run.limits[chooser.choice.limit] += 1
            written = _take(outputs or {}, run, numbers)
            if full:
                run.seconds += took
                run.tokens += written
        return run

    def _add(self, asked: Prefilled) -> str:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        config = self._engine.vllm_config.model_config
        self._count += 1
        name = f"request {self._count}"
        sampling = SamplingParams(
            temperature=0.0, max_tokens=MAX_ANSWER, stop_token_ids=[config.hf_config.eos_token_id]
        )
        if asked.written:
            sampling.extra_args = {GENERATED_KEY: len(asked.written), VOCABULARY_KEY: config.get_vocab_size()}
        core = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=asked.prompt,
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        request, wave = self._engine.preprocess_add_request(core)
        if asked.written:
            request.append_output_token_ids(asked.written)
            request.prefill_stats = None
        self._engine.add_request(request, wave)
        return name


def _take(outputs: dict[int, Any], run: Run, numbers: dict[str, int]) -> int:
    """Record a step's outputs, and return the number of its tokens."""
    written = 0
    for client in outputs.values():
        stats = client.scheduler_stats
        if stats is not None and stats.spec_decoding_stats is not None:
            run.drafted += stats.spec_decoding_stats.num_draft_tokens
            run.accepted += stats.spec_decoding_stats.num_accepted_tokens
        for output in client.outputs:
            run.answers[numbers[output.request_id]].extend(output.new_token_ids)
            written += len(output.new_token_ids)
            if output.finish_reason is not None:
                del numbers[output.request_id]
    return written
