"""`python -m tests.kernels.verify.compile_all [every]`: compile verify's kernels for Hopper.

Every branch is compiled to Triton's own form, which finds type errors, and some variants, or with `every` all
of them, to machine code. It asserts that only `cut_kernel` computes in float64, for which a GPU has few
units.
"""

import itertools
import sys
from dataclasses import replace

import torch

from baton.kernels.verify import gpu
from harness.verify_cases import Shape
from tests.kernels.compiling import compile_launches, report

KERNELS = ["stats_kernel", "gather_kernel", "cut_kernel", "accept_kernel", "residual_kernel", "settle_kernel"]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
METHODS, PROPOSALS = ["standard", "block"], ["one-hot", "probs", "logits"]
EVERY = list(itertools.product(METHODS, PROPOSALS, ["", "kpm"], [True, False], DTYPES))
# Each branch of the kernels, with each filter alone.
BRANCHES = [
    *itertools.product(METHODS, PROPOSALS, ["", "kpm"], [True], [torch.bfloat16]),
    *(("standard", "one-hot", one, False, torch.float16) for one in ("k", "p", "m")),
]
WHOLE = [
    ("standard", "one-hot", "", False, torch.bfloat16),
    ("standard", "probs", "", True, torch.bfloat16),
    ("block", "logits", "kpm", True, torch.float32),
]


def jobs(method, proposal, filters, packed, dtype):
    """Return jobs of this shape as the tests, model runner V1 and model runner V2 make them."""
    shape = Shape(3, 3, 2048, 1024, method, proposal, filters, dtype, packed)
    job = shape.job(0)
    made = [job, replace(job, positions=None)]
    drafts = job.drafts.logits
    if drafts is not None:  # processed logits are float32, the drafter's are not
        made.append(replace(job, drafts=replace(job.drafts, logits=drafts.bfloat16())))
        short = job.logits[:, :2047]
        made.append(replace(job, logits=short, drafts=replace(job.drafts, logits=drafts[:, :, :2047])))
    if job.sampling.slots is not None:
        made.append(replace(job, sampling=replace(job.sampling, slots=job.sampling.slots.int())))
    return made


def main():
    seen = {}
    whole = {}
    for one in EVERY if "every" in sys.argv else BRANCHES + WHOLE:
        for job in jobs(*one):
            compile_launches(gpu, KERNELS, lambda job=job: gpu.verify(job), seen, whole=False)
        if "every" in sys.argv or one in WHOLE:
            job = jobs(*one)[0]
            compile_launches(gpu, KERNELS, lambda job=job: gpu.verify(job), whole)
    for form in (seen, whole):
        report(KERNELS, form)
        for key, text in form.items():
            assert key[0] == "cut_kernel" or "f64" not in text, f"{key} computes in float64"


if __name__ == "__main__":
    main()
