"""Choose how many tokens each step drafts, and observe how many are accepted.

A step in which no request continues to decode drafts nothing, except at the end of a prompt
(first_drafts.py). The drafter still runs over the prompts, because its KV is handed over too. vLLM's
scheduler looks up the number of tokens to draft, by the number of requests, in the list `dynamic_sd_lookup`,
which our objects replace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from baton.services.decode.draft_length_choice import DraftChoice, DraftLengthChooser, DraftStep
from baton.services.decode.proposers import registry
from baton.services.decode.proposers.hybrid import model_steps
from baton.services.engine.patches.replace import replace
from baton.services.errors import StartError
from baton.services.speculation import SpeculativeSettings

MOST_CAPTURED = 6  # draft lengths with CUDA graphs, each of which takes memory and seconds


class WhileDecoding:
    """A lookup that applies only while a running request may generate more than its next token."""

    def __init__(self, scheduler: Any, lookup: Any, least: int) -> None:
        """Replace `lookup`; draft `least` tokens if no request continues to decode. Raises StartError."""
        if scheduler.dynamic_sd_lookup is None:
            raise StartError("vLLM drafts a fixed number of tokens here: its scheduler does not look it up")
        self._scheduler = scheduler
        self._lookup = lookup
        self._least = least
        scheduler.dynamic_sd_lookup = self

    def __getitem__(self, requests: int) -> int:
        decoding = any(one.max_tokens - one.num_output_tokens > 1 for one in self._scheduler.running)
        return int(self._lookup[requests]) if decoding else self._least


class DraftLengthSeam:
    """Connects the scheduler with the chooser of draft lengths. Call it on the engine's thread."""

    def __init__(self, scheduler: Any, chooser: DraftLengthChooser) -> None:
        """Replace the scheduler's lookup of the draft length. Raises StartError if it has none."""
        if scheduler.dynamic_sd_lookup is None:
            raise StartError(
                "vLLM drafts a fixed number of tokens here: num_speculative_tokens cannot be 'auto'"
            )
        self._none = (0,) * chooser.limit
        self._chooser = chooser
        # The last step with results:
        self._stats: Any = None  # SpecDecodingStats
        self._output: Any = None  # SchedulerOutput
        self._handed: list[tuple[int, int]] = []  # (drafted, accepted) by request, of drafts made elsewhere
        # The step before it:
        self._before: Set[str] = frozenset()  # requests
        self._asked = 0  # tokens to draft
        # With asynchronous scheduling the next step is already scheduled when a step's results arrive.
        self._ahead = bool(scheduler.scheduler_config.async_scheduling)
        self._chosen = 0  # tokens that the scheduled step is to draft; 0 if the scheduler asked for no choice
        scheduler.dynamic_sd_lookup = self
        replace(scheduler, "update_from_output", self._update_from_output)

    def __getitem__(self, requests: int) -> int:
        self._chosen = self._chooser.choose(requests)
        return self._chosen

    @property
    def choice(self) -> DraftChoice:
        return self._chooser.choice

    def observe(self, seconds: float) -> None:
        """Learn from the last step, which took `seconds`. Called after every step."""
        output, self._output = self._output, None
        if output is None or not output.num_scheduled_tokens:
            return
        requests = output.num_scheduled_tokens.keys()
        drafted = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        only_decodes = output.total_num_scheduled_tokens == len(requests) + drafted
        stats = self._stats
        self._chooser.observe(
            DraftStep(
                requests=len(requests),
                tokens=output.total_num_scheduled_tokens,
                limit=output.num_spec_tokens_to_schedule,
                seconds=seconds if only_decodes else None,
                rows=len(requests & self._before),
                asked=self._asked,
                drafted=self._none if stats is None else self._own(stats.num_draft_tokens_per_pos, 0),
                accepted=self._none if stats is None else self._own(stats.num_accepted_tokens_per_pos, 1),
            )
        )
        # Drafts made only for handoffs are not verified here. Asynchronous steps make no such drafts.
        asked = output.num_spec_tokens_to_schedule if self._ahead else self._chosen
        self._before, self._asked, self._chosen = requests, asked, 0

    def _own(self, by_position: Sequence[int], which: int) -> Sequence[int]:
        """Leave out drafts that came with handoffs, because they were not made here."""
        if not self._handed:
            return by_position
        return [count - sum(one[which] > at for one in self._handed) for at, count in enumerate(by_position)]

    def _update_from_output(
        self, original: Callable[..., Any], scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        self._handed = _handed(scheduler_output, model_runner_output)
        outputs = original(scheduler_output, model_runner_output)
        self._output, self._stats = scheduler_output, None
        for one in outputs.values():  # keyed by client; only one has the statistics
            if one.scheduler_stats is not None and one.scheduler_stats.spec_decoding_stats is not None:
                self._stats = one.scheduler_stats.spec_decoding_stats
        return outputs


def _handed(scheduler_output: Any, model_runner_output: Any) -> list[tuple[int, int]]:
    """Return the numbers of drafted and accepted tokens of each request that brought its drafts."""
    found = []
    for one in scheduler_output.scheduled_new_reqs:
        if drafts := scheduler_output.scheduled_spec_decode_tokens.get(one.req_id):
            row = model_runner_output.req_id_to_index[one.req_id]
            accepted = len(model_runner_output.sampled_token_ids[row]) - 1
            found.append((len(drafts), accepted))
    return found


def lengths_by_batch(limit: int, max_num_seqs: int, *, adaptive: bool) -> list[tuple[int, int, int]]:
    """Return vLLM's list of how many tokens are drafted at which batch sizes: (from, to, tokens).

    Model runner V2 captures full CUDA graphs only for the numbers in the list, so it contains the lengths
    that may be chosen, `MOST_CAPTURED` at most; the scheduler uses DraftLengthSeam instead. With vLLM's
    batch sizes, 64 requests with up to 5 drafted tokens have 187 graphs instead of 41, which cover 69 %
    instead of 17 % of all pairs of batch size and length, and every length in batches of up to 4 requests.
    """
    most = min(limit, MOST_CAPTURED - 1)
    lengths = [limit * step // most for step in range(most)] if adaptive else []
    others = enumerate(lengths[: max_num_seqs - 1], start=1)
    table = [(requests, requests, length) for requests, length in others]
    return [*table, (1 + len(table), max_num_seqs, limit)]


def install(engine: Any, spec: SpeculativeSettings | None) -> DraftLengthSeam | None:
    """Choose the draft lengths of a loaded engine from now on. Return a DraftLengthSeam for "auto"."""
    if spec is None:
        return None
    seam = None
    if spec.adaptive:
        model_tokens = model_steps(spec) if spec.mtp_strategy != "default" else None
        if engine.vllm_config.speculative_config.method == "custom_class":  # drafts from tokens alone
            model_tokens = 0
        seam = DraftLengthSeam(engine.scheduler, DraftLengthChooser(spec.limit, model_tokens=model_tokens))
    in_gang = engine.vllm_config.parallel_config.data_parallel_size > 1
    if in_gang:
        # In a gang vLLM drops its list of draft lengths. Without a list it would pad a request's first step
        # after a handoff with tokens that are sure to be rejected, leaving no room for handed-over drafts.
        engine.scheduler.dynamic_sd_lookup = [spec.limit] * (1 + engine.scheduler.max_num_running_reqs)
    elif not registry.method(spec.method).fixed_length:
        WhileDecoding(engine.scheduler, engine.scheduler.dynamic_sd_lookup, least_drafts(engine.vllm_config))
    return seam


def least_drafts(config: Any) -> int:
    """Return how many tokens must be drafted during a prefill so that the drafter's KV is complete.

    If several MTP layers draft in sequence, the KV of each depends on the layer before it, and vLLM's model
    runner V2 runs as many layers over a prompt as tokens are drafted.
    """
    speculative = config.speculative_config
    if speculative.method != "mtp":
        return 0
    layers = int(getattr(speculative.draft_model_config.hf_config, "n_predict", None) or 1)
    return layers if layers > 1 else 0
