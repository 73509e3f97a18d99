"""The CPU's and the GPU's form against the naive one, token for token."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.kernels.verify import DraftedTokens, Job, Sampling, cpu, verify
from harness.verify_cases import Shape, moved
from tests.kernels.verify import naive

PROPOSALS = ["one-hot", "probs", "logits"]
METHODS = ["standard", "block"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def gpu():
    """The Triton form: compiled on a GPU, interpreted without one."""
    pytest.importorskip("triton")
    from baton.kernels.verify import gpu as triton_form

    return triton_form.verify


@pytest.fixture(autouse=True)
def _poison(monkeypatch):
    """Fill new memory with nan, or with an impossible integer."""
    new = torch.empty

    def poisoned(*args, **kwargs):
        made = new(*args, **kwargs)
        return made.fill_(float("nan") if made.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)


def check(one, job, device="cpu", **more):
    """Run one form, and check its result against the naive form and that the logits are unchanged."""
    wanted = naive.verify(job)
    before = job.logits.clone()
    found = one(moved(job, device), **more)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.counts.tolist() == wanted.counts.tolist()
    assert torch.equal(job.logits.nan_to_num(-7e4), before.nan_to_num(-7e4))
    return found


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize("filters", ["", "k", "p", "m", "kp", "kpm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_cpu_form(method, proposal, filters, dtype):
    shape = Shape(requests=8, method=method, proposal=proposal, filters=filters, dtype=dtype)
    for seed, packed in enumerate((True, False)):
        check(cpu.verify, replace(shape, packed=packed).job(seed))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("proposal", "dtype"), list(zip(PROPOSALS, DTYPES, strict=True)))
def test_the_gpu_form(gpu, device, method, proposal, dtype):
    shape = Shape(method=method, proposal=proposal, dtype=dtype)
    for seed, packed in enumerate((True, False)):
        check(gpu, replace(shape, packed=packed).job(10 + seed), device)


@pytest.mark.parametrize(
    ("filters", "dtype", "method", "proposal", "room"),
    [
        ("k", torch.float32, "standard", "one-hot", 1 << 13),
        ("p", torch.float16, "block", "one-hot", 1 << 13),
        ("m", torch.bfloat16, "standard", "probs", 1 << 13),
        ("kp", torch.bfloat16, "block", "probs", 1 << 13),
        ("kpm", torch.float32, "standard", "logits", 1 << 13),
        ("kp", torch.float32, "block", "logits", 2),  # most rows' candidates do not fit
        ("p", torch.bfloat16, "standard", "one-hot", 2),
    ],
)
def test_filters_of_the_gpu_form(gpu, device, filters, dtype, method, proposal, room):
    shape = Shape(
        requests=2, most=2, filters=filters, dtype=dtype, method=method, proposal=proposal, greedy=0
    )
    check(gpu, shape.job(20), device, room=room)


@pytest.fixture(params=["gpu", "cpu"])
def form(request):
    return request.param


@pytest.fixture
def run(form, request):
    return cpu.verify if form == "cpu" else request.getfixturevalue("gpu")


@pytest.fixture
def where(form, device):
    return device if form == "gpu" else "cpu"


def test_an_odd_vocabulary(run, where):
    shape = Shape(requests=2, most=1, vocabulary=32_003, tile=1024, greedy=0)
    check(run, shape.job(30), where)
    if run is cpu.verify or where == "cuda":  # the interpreter would be too slow
        check(run, replace(shape, filters="p", method="block").job(31), where)


@pytest.mark.parametrize("method", METHODS)
class TestEdges:
    """Unusual shapes and values."""

    def test_drafts_and_positions_are_optional(self, run, where, method):
        assert check(run, Shape(requests=1, most=0, method=method).job(40), where).counts.tolist() == [1]
        job = Shape(requests=2, most=0, method=method).job(41)
        check(run, replace(job, drafts=replace(job.drafts, most=3)), where)
        check(run, replace(Shape(method=method).job(42), positions=None), where)

    def test_greedy_accepts_the_most_likely_token(self, run, where, method):
        """The first of two equal logits counts, in different tiles and within one."""
        logits = torch.zeros(4, 61)
        logits[0, [3, 40]] = logits[1, [20, 21]] = logits[2, 60] = 2.0
        drafts = DraftedTokens(
            torch.tensor([3, 20, 59], dtype=torch.int32), torch.tensor([4], dtype=torch.int32), 3
        )
        sampling = Sampling(torch.zeros(1), torch.zeros(1, dtype=torch.int64))
        found = check(run, Job(logits, drafts, sampling, method, tile=16), where)
        assert found.tokens.tolist() == [[3, 20, 60, -1]]

    def test_placeholders_end_the_drafts(self, run, where, method):
        """Their row is sampled as if there were no draft; here its token is certain."""
        logits = torch.full((3, 61), -100.0)
        logits[:, 7] = 100.0
        ends = torch.tensor([3], dtype=torch.int32)
        sampling = Sampling(torch.ones(1), torch.zeros(1, dtype=torch.int64))
        for placeholder in (-1, 61, 1 << 30):
            drafts = DraftedTokens(torch.tensor([7, placeholder], dtype=torch.int32), ends, 2)
            found = check(run, Job(logits, drafts, sampling, method, tile=16), where)
            assert found.tokens.tolist() == [[7, 7, -1]]

    def test_equal_logits_are_cut_in_vocabulary_order(self, run, where, method):
        """top-k 3 and top-p 0.5 of 61 equal tokens leave the first 2."""
        requests = 40 if where == "cuda" or run is cpu.verify else 4  # the interpreter is slow
        logits = torch.zeros(requests, 61)
        drafts = DraftedTokens(torch.zeros(0, dtype=torch.int32), torch.arange(1, requests + 1).int(), 0)
        sampling = Sampling(
            torch.ones(requests),
            torch.arange(requests),
            top_k=torch.full((requests,), 3, dtype=torch.int32),
            top_p=torch.full((requests,), 0.5),
        )
        found = check(run, Job(logits, drafts, sampling, method, tile=16), where)
        assert set(found.tokens.flatten().tolist()) <= {0, 1}

    def test_nan_is_never_sampled(self, run, where, method):
        job = Shape(requests=3, most=2, method=method).job(43)
        job.logits[:, ::3] = float("nan")
        job.logits[0] = float("-inf")
        found = check(run, job, where)
        assert int(found.tokens.max()) < 61


def test_no_requests(gpu, device):
    none = torch.zeros(0, dtype=torch.int32)
    job = Job(
        torch.zeros(0, 61),
        DraftedTokens(none, none, 2),
        Sampling(torch.zeros(0), torch.zeros(0).long()),
        "standard",
    )
    for found in (gpu(moved(job, device)), cpu.verify(job)):
        assert found.tokens.shape == (0, 3)
        assert found.counts.shape == (0,)


def test_shapes_that_do_not_match_are_refused():
    job = Shape(proposal="probs").job(50)
    logits, drafts, sampling = job.logits, job.drafts, job.sampling
    with pytest.raises(ValueError, match="contiguous"):
        verify(logits.t().contiguous().t(), drafts, sampling)
    with pytest.raises(ValueError, match="draft tokens"):
        verify(logits, replace(drafts, tokens=drafts.tokens[:-1]), sampling)
    with pytest.raises(ValueError, match="not both"):
        verify(logits, replace(drafts, logits=torch.zeros(4, 3, 61)), sampling)
    with pytest.raises(ValueError, match="temperature"):
        verify(logits, drafts, replace(sampling, temperature=sampling.temperature[1:]))
    with pytest.raises(ValueError, match=r"drafts\.probs"):
        verify(logits, replace(drafts, probs=torch.zeros(1, 61)), sampling)
    with pytest.raises(ValueError, match="give 'standard' or 'block'"):
        verify(logits, drafts, sampling, method="typical")


def test_literals_are_float32():
    """Triton turns literals below float32's normal numbers into float64."""
    for source in (Path(__file__).parents[3] / "kernels").glob("*/gpu/*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value:
                assert 2.0**-126 <= node.value < 2.0**128, f"{source}:{node.lineno}: {node.value}"
