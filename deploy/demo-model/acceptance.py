"""Acceptance of drafts by the trunk, measured in vLLM: greedy decoding of held-out prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chat import prompt_of
from dialogues import stream
from draft_folders import EAGLE3, MTP, WEIGHTS
from evaluate import VALIDATION_SEED
from outputs import offline_engine
from tokenizer import CONTEXT
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from vllm import LLM

# Measured separately: all kinds of chat as they come, and two kinds that copy much from the prompt.
KINDS: dict[str, str | None] = {"chat": None, "code edits": "edits", "extraction": "extraction"}
MAX_REPLY = 256


@dataclass(frozen=True, slots=True)
class Method:
    """A drafter: the folder that vLLM serves, and its speculative configuration without the draft length."""

    name: str
    folder: Path
    speculative: dict[str, Any]


METHODS = {
    "mtp": Method("MTP", MTP, {"method": "mtp"}),
    "eagle3": Method("EAGLE-3", WEIGHTS, {"method": "eagle3", "model": str(EAGLE3)}),
}


@dataclass(frozen=True, slots=True)
class Counters:
    """Counters of vLLM since its start: drafts, and accepted tokens by position in the draft."""

    drafts: int
    accepted: tuple[int, ...]

    @staticmethod
    def of(engine: LLM, length: int) -> Counters:
        found = {metric.name: metric for metric in engine.get_metrics()}
        drafts = found["vllm:spec_decode_num_drafts"].value
        accepted = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
        return Counters(int(drafts), tuple(int(count) for count in accepted[:length]))

    def since(self, before: Counters) -> Counters:
        pairs = zip(self.accepted, before.accepted, strict=True)
        return Counters(self.drafts - before.drafts, tuple(now - then for now, then in pairs))

    @property
    def shares(self) -> list[float]:
        return [count / max(1, self.drafts) for count in self.accepted]

    @property
    def mean_length(self) -> float:
        """Mean tokens per pass of the trunk: the accepted ones and the trunk's own."""
        return 1 + sum(self.shares)


def held_out_prompts(tokenizer: Tokenizer, domain: str | None, count: int) -> list[list[int]]:
    """Return `count` different encoded prompts of the validation part."""
    found: dict[str, None] = {}
    for _, dialogue in itertools.islice(stream(VALIDATION_SEED, held_out=True, domain=domain), 20 * count):
        found.setdefault(prompt_of(dialogue))
        if len(found) == count:
            break
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(list(found))]


def greedy(engine: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    from vllm import SamplingParams, TokensPrompt

    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_REPLY, detokenize=False)
    asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
    return [list(o.outputs[0].token_ids) for o in engine.generate(asked, sampling, use_tqdm=False)]


def _rows(
    method: Method, length: int, prompts: dict[str, list[list[int]]], plain: dict[str, list[list[int]]]
) -> Iterator[str]:
    """Measure one row for each kind of prompt; `plain` are the trunk's outputs without drafts."""
    config = method.speculative | {"num_speculative_tokens": length}
    engine = offline_engine(method.folder, speculative_config=config, dtype="float32", max_num_seqs=16)
    before = Counters(0, (0,) * length)
    for kind, asked in prompts.items():
        answers = greedy(engine, asked)
        now = Counters.of(engine, length)
        counted, before = now.since(before), now
        equal = sum(a == b for a, b in zip(answers, plain[kind], strict=True))
        shares = " / ".join(f"{100 * share:.0f}%" for share in counted.shares)
        yield (
            f"| {method.name} | {length} | {kind} | {shares} | {counted.mean_length:.2f} | {equal} of {len(asked)} |"
        )
    engine.llm_engine.engine_core.shutdown()


def report(heads: Sequence[str], count: int, lengths: Sequence[int]) -> Iterator[str]:
    """Return the figures of some drafters as lines of Markdown, for `count` prompts of each kind.

    In float32, so that a tie of two tokens falls the same way whether the trunk reads one token at a time or
    several.
    """
    tokenizer = Tokenizer.from_file(str(WEIGHTS / "tokenizer.json"))
    prompts = {kind: held_out_prompts(tokenizer, domain, count) for kind, domain in KINDS.items()}
    prompts = {kind: [p for p in asked if len(p) < CONTEXT - MAX_REPLY] for kind, asked in prompts.items()}
    plain = offline_engine(WEIGHTS, dtype="float32", max_num_seqs=16)
    answers = {kind: greedy(plain, asked) for kind, asked in prompts.items()}
    plain.llm_engine.engine_core.shutdown()
    yield "| drafter | k | prompts | accepted, by place | mean accepted length | same output as without |"
    yield "| --- | ---: | --- | ---: | ---: | ---: |"
    for head, length in itertools.product(heads, lengths):
        yield from _rows(METHODS[head], length, prompts, answers)
