"""1P1D deployments with drafts, compared with transformers: greedy answers and accepted drafts."""

import functools
import warnings

import pytest
import torch
import transformers

from harness.architectures.registry import ARCHITECTURES
from harness.speculation.fleets import FLEETS, deployment, measure

PROMPTS, MAX_TOKENS = 4, 48
ENGINE = {"max_model_len": 512, "max_num_seqs": 8, "kv_cache_gib": 0.125, "enable_prefix_caching": False}
REFERENCES = [name for name, one in ARCHITECTURES.items() if one.reference is not None]
WITH_MTP = [name for name in REFERENCES if ARCHITECTURES[name].spec["method"] == "mtp"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def outcome_of(tmp_path_factory):
    """A function: the outcome of an architecture's 1P1D deployment, which runs once."""
    kept = tmp_path_factory.mktemp("references")

    @functools.cache
    def outcome(name):
        model = ARCHITECTURES[name]
        folder = model.checkpoint()
        engine = ENGINE | {
            "model": str(model.target(folder)),
            "dtype": model.dtype,
            "speculative_config": model.speculative(folder),
            **model.engine,
        }
        if name in WITH_MTP:  # a step drafts one token, as in transformers
            engine["speculative_config"]["num_speculative_tokens"] = 1
        with deployment(kept / name, FLEETS["1P1D"], engine) as one:
            return measure(one, model.prompts(PROMPTS), MAX_TOKENS)

    return outcome


@pytest.fixture(autouse=True)
def _quiet():
    """Silence transformers, which warns of its own deprecations and of MTP layers that it skips."""
    before, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # two threads would wait for each other while another process uses a core
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    transformers.logging.set_verbosity(before)
    torch.set_num_threads(threads)


def loaded(model):
    """Load the target with transformers, in float32."""
    kind = getattr(transformers, model.reference or "")
    return kind.from_pretrained(model.target(model.checkpoint()), dtype=torch.float32).eval()


@pytest.mark.parametrize("name", REFERENCES)
def test_every_answer_equals_transformers(name, outcome_of):
    outcome = outcome_of(name)
    assert outcome.handoffs >= PROMPTS
    assert outcome.accepted > 0
    model = loaded(ARCHITECTURES[name])
    equal = 0
    for prompt, answer in zip(ARCHITECTURES[name].prompts(PROMPTS), outcome.answers, strict=True):
        assert len(answer) == MAX_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        equal += logits.argmax(-1).tolist() == answer
    print(
        f"{name}: {equal} of {PROMPTS} equal; {outcome.accepted} of {outcome.drafted} drafted tokens accepted"
    )
    assert equal == PROMPTS
    assert outcome.together == outcome.answers


@pytest.mark.parametrize("name", WITH_MTP)
def test_as_many_drafts_are_accepted_as_in_transformers(name, outcome_of):
    """With one drafted token per step, the MTP layer drafts the same in transformers and in vLLM."""
    outcome = outcome_of(name)
    model = loaded(ARCHITECTURES[name])
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_hidden_layers}\."]
    drafts = 0

    class Counting(transformers.generation.candidate_generator.MTPCandidateGenerator):
        def get_candidates(self, *args, **kwargs):
            nonlocal drafts
            drafts += not kwargs["is_first_iteration"]
            return super().get_candidates(*args, **kwargs)

    options = transformers.GenerationConfig(
        use_mtp=True, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformers.generation.utils, "MTPCandidateGenerator", Counting)
        for prompt, answer in zip(ARCHITECTURES[name].prompts(PROMPTS), outcome.answers, strict=True):
            written = model.generate(torch.tensor([prompt]), generation_config=options)
            assert written[0, len(prompt) :].tolist() == answer
    accepted = PROMPTS * (MAX_TOKENS - 1) - drafts  # the first token has no draft
    print(f"{name}: {accepted} of {drafts} in transformers, {outcome.accepted} of {outcome.drafts} here")
    assert accepted / drafts == pytest.approx(outcome.accepted / outcome.drafts, abs=0.02)
