"""`verify` for `python -m bench kernels`, against plain torch, vLLM's samplers and one read of the logits.

Logits are bfloat16, at temperature 0.8. `vllm_v1` does what vLLM's model runner V1 does, with its kernels: it
copies the logits to float32, scales them, and writes probabilities and exponential noise. `vllm_v2` copies
and scales them as V2 does and calls V2's own function. On the CPU vLLM's real V1 sampler runs, with the patch
that it needs, if vLLM is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch

from baton.kernels.verify import DraftedTokens, Job, Method, Sampling, cpu, verify
from bench import vllm_source
from bench.kernels import Case
from harness.verify_cases import Shape, moved

BATCHES, DRAFTED, VOCABULARIES = (1, 16, 64, 256), (1, 3, 7), (32_000, 128_256, 152_064)
ON_CPU = ((1, 3, 32_000), (16, 3, 32_000), (1, 3, 152_064), (16, 3, 4096))
TEMPERATURE = 0.8
METHODS: tuple[Method, ...] = ("standard", "block")
_V1 = "v1/sample/rejection_sampler.py"
_V2 = ("v1/worker/gpu/sample/gumbel.py", "v1/worker/gpu/spec_decode/rejection_sampler_utils.py")


class Step:
    """A batch with the same number of drafts for each request, 70 % of them likely tokens."""

    def __init__(
        self, batch: int, drafted: int, vocabulary: int, device: str, *, drawn: bool = False
    ) -> None:
        make = torch.Generator(device).manual_seed(batch)
        rows = batch * (drafted + 1)
        self.batch, self.drafted, self.vocabulary, self.rows = batch, drafted, vocabulary, rows
        self.logits = torch.randn(rows, vocabulary, generator=make, device=device).bfloat16().mul_(2)
        fed = torch.randint(vocabulary, (rows,), generator=make, device=device)
        place = torch.arange(rows, device=device) % (drafted + 1)
        self.is_draft = place > 0
        likely = self.is_draft & (torch.rand(rows, generator=make, device=device) < 0.7)
        self.logits[likely.roll(-1), fed[likely]] = 25.0
        self.fed, self.place = fed.int(), place
        self.tokens = self.fed[self.is_draft]
        self.request = torch.arange(rows, device=device) // (drafted + 1)
        self.ends = torch.arange(1, batch + 1, device=device, dtype=torch.int32) * (drafted + 1)
        self.temperature = torch.full((batch,), TEMPERATURE, device=device)
        self.seeds = torch.arange(batch, device=device)
        self.proposed = (
            torch.randn(batch, drafted, vocabulary, generator=make, device=device).bfloat16()
            if drawn
            else None
        )

    def job(self, method: Method = "standard", **filters: torch.Tensor) -> Job:
        drafts = DraftedTokens(self.fed, self.ends, self.drafted, logits=self.proposed)
        return Job(self.logits, drafts, Sampling(self.temperature, self.seeds, **filters), method)

    def filters(self) -> dict[str, torch.Tensor]:
        return {
            "top_k": torch.full((self.batch,), 50, dtype=torch.int32, device=self.logits.device),
            "top_p": torch.full((self.batch,), 0.95, device=self.logits.device),
        }


def _run(job: Job) -> Any:
    return verify(job.logits, job.drafts, job.sampling, method=job.method, positions=job.positions)


def plain_torch(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify one-hot drafts with tensor operations. Return each request's last position and token."""
    probabilities = (step.logits.float() / TEMPERATURE).softmax(1)
    width = step.drafted + 1
    drafts = step.tokens.view(step.batch, step.drafted).long()
    rows = torch.arange(step.rows, device=drafts.device).view(step.batch, width)
    chances = probabilities[rows[:, :-1], drafts]
    place = (torch.rand_like(chances) < chances).long().cumprod(1).sum(1)
    last = probabilities[rows.gather(1, place.unsqueeze(1)).squeeze(1)]
    rejected = torch.cat([drafts, drafts.new_full((step.batch, 1), -1)], 1).gather(1, place.unsqueeze(1))
    last.scatter_(1, rejected.clamp(min=0), torch.where(rejected < 0, last[:, :1], 0.0))
    return place, (last / torch.empty_like(last).exponential_()).argmax(1)


def plain_filtered(step: Step) -> torch.Tensor:
    """Apply only the filters, by sorting every row."""
    logits = step.logits.float() / TEMPERATURE
    ordered, order = logits.sort(1)
    ordered[:, :-50] = float("-inf")
    below = ordered.softmax(1).cumsum_(1) <= 1 - 0.95
    below[:, -1] = False
    return logits.scatter_(1, order, ordered.masked_fill_(below, float("-inf")))


@cache
def _v1() -> ModuleType | None:
    kernels = "rejection_random_sample_kernel", "sample_recovered_tokens_kernel", "expand_kernel"
    return vllm_source.load("vllm_v1_rejection", [_V1], only=kernels)


@cache
def _v2() -> ModuleType | None:
    prelude = (
        "from triton.language.extra import libdevice as tldevice",
        "philox_gumbel_block_argmax = None  # for watermarks, which are not used",
    )
    return vllm_source.load("vllm_v2_rejection", _V2, prelude)


def vllm_v1(step: Step, kernels: Any) -> torch.Tensor:
    """Do what RejectionSampler.forward does for sampled requests. Return tokens [batch, drafted + 1]."""
    behind, before = (~step.is_draft).roll(-1).nonzero().flatten(), step.is_draft.roll(-1).nonzero().flatten()
    batch, drafted, vocabulary = step.batch, step.drafted, step.vocabulary
    device = step.logits.device
    bonus = step.logits[behind].float().div_(step.temperature.unsqueeze(1)).softmax(1)
    bonus_tokens = bonus.div_(torch.empty_like(bonus).exponential_()).argmax(1).int()
    target = step.logits[before].float().clone()
    ends = torch.arange(1, batch + 1, device=device, dtype=torch.int32) * drafted
    temperature = torch.empty(batch * drafted, device=device)
    kernels.expand_kernel[(batch,)](temperature, step.temperature, ends, 0, 1, MAX_NUM_TOKENS=128)
    probabilities = target.div_(temperature.unsqueeze(1)).softmax(1)
    written = torch.full((batch, drafted + 1), -1, dtype=torch.int32, device=device)
    chances = torch.rand(batch * drafted, dtype=torch.float64, device=device)
    inverse = torch.empty(batch, vocabulary, device=device).exponential_().reciprocal()
    recovered = torch.empty_like(step.tokens)
    kernels.sample_recovered_tokens_kernel[(batch, drafted)](
        recovered, ends, step.tokens, None, probabilities, inverse, vocabulary,
        BLOCK_SIZE=8192, NO_DRAFT_PROBS=True, USE_FP64_GUMBEL=False,
    )  # fmt: skip
    kernels.rejection_random_sample_kernel[(batch,)](
        written, ends, step.tokens, None, probabilities, bonus_tokens, recovered, chances,
        step.temperature == 0, drafted, vocabulary, None, NO_DRAFT_PROBS=True, SYNTHETIC_MODE=False,
    )  # fmt: skip
    return written


def vllm_v2(step: Step, kernels: Any, ends: torch.Tensor, block: bool) -> Any:
    """Do what V2's sampler does. Return tokens [batch, drafted + 1] and the accepted counts."""
    slots = step.seeds
    scaled = step.logits.float().div_(step.temperature[step.request].unsqueeze(1))
    return kernels.rejection_sample(
        scaled, step.proposed, step.fed, ends, step.place, slots, step.request, step.place,
        step.temperature, step.seeds, step.drafted, use_block_verification=block,
    )  # fmt: skip


def check(device: str) -> None:
    """Compare `verify` with its CPU form, and check its alternatives. Raises AssertionError."""
    for seed, (proposal, filters) in enumerate(
        (one, more) for one in ("one-hot", "probs", "logits") for more in ("", "kp", "m")
    ):
        for method in METHODS:
            shape = Shape(8, 3, 2051, 1024, method, proposal, filters, torch.bfloat16)
            job = shape.job(seed)
            found, wanted = _run(moved(job, device)), cpu.verify(job)
            if found.tokens.tolist() != wanted.tokens.tolist():
                raise AssertionError(f"verify is wrong: {shape}")
    step = _certain(device)
    wanted_tokens = [[*step.tokens.view(step.batch, -1)[row].tolist(), 5] for row in range(step.batch)]
    ways: dict[str, Callable[[], Any]] = {"verify": partial(_run, step.job()), **_against(step, "standard")}
    for name, run in ways.items():
        if name.startswith(("verify", "vLLM")):
            made = run()
            tokens = made[0] if isinstance(made, tuple) else getattr(made, "tokens", made)
            if tokens.tolist() != wanted_tokens:
                raise AssertionError(f"{name} rejects certain drafts")


def _certain(device: str) -> Step:
    """Make a batch in which every draft, and then token 5, is certain."""
    step = Step(3, 2, 3000, device)
    step.logits.fill_(-50.0)
    step.logits[step.is_draft.roll(-1).nonzero().flatten(), step.tokens.long()] = 50.0
    step.logits[(~step.is_draft).roll(-1).nonzero().flatten(), 5] = 50.0
    return step


def _against(step: Step, method: Method) -> dict[str, Callable[[], object]]:
    """Return the alternatives for one-hot or drawn drafts without filters."""
    made: dict[str, Callable[[], object]] = {}
    plain = step.proposed is None and method == "standard"
    if step.logits.is_cuda:
        first, second = _v1(), _v2()
        if first is not None and plain:
            made["vLLM V1"] = partial(vllm_v1, step, first)
        if second is not None:
            ends = torch.cat([step.ends.new_zeros(1), step.ends])
            made["vLLM V2"] = partial(vllm_v2, step, second, ends, method == "block")
    elif plain and (shipped := _vllm_on_cpu(step)) is not None:
        made["vLLM V1"] = shipped
    if plain:
        made["plain torch"] = partial(plain_torch, step)
    made["one read"] = partial(torch.amax, step.logits, 1)
    return made


def _vllm_on_cpu(step: Step) -> Callable[[], object] | None:
    """Return vLLM's RejectionSampler, with this process set up as a CPU worker; None without vLLM."""
    try:
        from vllm.platforms import current_platform
        from vllm.v1.sample.logits_processor import LogitsProcessors
        from vllm.v1.sample.metadata import SamplingMetadata
        from vllm.v1.sample.rejection_sampler import RejectionSampler
        from vllm.v1.sample.sampler import Sampler
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    except ImportError:
        return None
    from baton.services.engine.patches import table

    if not hasattr(RejectionSampler, "_baton_bench"):
        table.install()
        current_platform.import_kernels()
        current_platform.register_triton_kernel_overrides()
        RejectionSampler._baton_bench = True
    zeros = torch.zeros(step.batch)
    sampling = SamplingMetadata(
        step.temperature, False, True, None, None, {}, None, True, None, zeros, zeros, zeros,
        [[]] * step.batch, None, {}, LogitsProcessors(),
    )  # fmt: skip
    drafts = SpecDecodeMetadata.make_dummy(step.tokens.view(step.batch, -1).tolist(), step.logits.device)
    drafts.bonus_logits_indices = (~step.is_draft).roll(-1).nonzero().flatten()
    drafts.target_logits_indices = step.is_draft.roll(-1).nonzero().flatten()
    sampler = RejectionSampler(Sampler())
    return lambda: sampler(drafts, None, step.logits, sampling).sampled_token_ids


def cases(device: str) -> Iterator[Case]:
    """Yield sampled one-hot drafts for the whole grid, then the other modes at medium sizes."""
    grid = [(b, k, v) for v in VOCABULARIES for k in DRAFTED for b in BATCHES] if device == "cuda" else ON_CPU
    for batch, drafted, vocabulary in grid:
        yield _case("sampled", Step(batch, drafted, vocabulary, device), "standard")
    batches, vocabulary = ((1, 64), 128_256) if device == "cuda" else ((4,), 32_000)
    for batch in batches:
        step = Step(batch, 3, vocabulary, device)
        yield _case("top-k 50, top-p 0.95", step, "standard", **step.filters())
        yield _case("greedy", step, "standard", greedy=True)
        drawn = Step(batch, 3, vocabulary, device, drawn=True)
        yield _case("drawn drafts", drawn, "standard")
        yield _case("drawn drafts, block", drawn, "block")


def _case(name: str, step: Step, method: Method, *, greedy: bool = False, **filters: torch.Tensor) -> Case:
    job = step.job(method, **filters)
    against: dict[str, Callable[[], object]] = {"one read": partial(torch.amax, step.logits, 1)}
    if filters:
        against["plain torch, filters alone"] = partial(plain_filtered, step)
    elif greedy:
        job = replace(job, sampling=replace(job.sampling, temperature=torch.zeros_like(step.temperature)))
    else:
        against = _against(step, method)
    size = step.logits.numel() * step.logits.element_size()
    if step.proposed is not None:
        size += step.proposed.numel() * step.proposed.element_size()
    return Case(
        name=f"verify {name} {step.batch} x {step.drafted} x {step.vocabulary}",
        shape={"requests": step.batch, "drafts": step.drafted, "vocabulary": step.vocabulary, "mode": name},
        bytes_moved=size + 4 * step.batch * (step.drafted + 2),
        run=partial(_run, job),
        against=against,
    )
