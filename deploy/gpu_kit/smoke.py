"""Check the kit on a GPU, without an engine: extensions, driver, FlashAttention 3, pinned memory."""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
import traceback
from collections.abc import Callable

import torch

FAILED: list[str] = []


def check(name: str) -> Callable[[Callable[[], str]], None]:
    """Run the decorated function at once, and print its result."""

    def run(function: Callable[[], str]) -> None:
        began = time.perf_counter()
        try:
            said = function()
            print(f"ok    {name}: {said} ({time.perf_counter() - began:.2f} s)", flush=True)
        except Exception as error:  # noqa: BLE001
            FAILED.append(name)
            print(f"FAIL  {name}: {error!r}", flush=True)
            traceback.print_exc(limit=4)

    return run


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@check("versions")
def versions() -> str:
    import triton

    return f"python {sys.version.split()[0]}, torch {torch.__version__}, triton {triton.__version__}"


@check("NVML without CUDA (baton up forks, so the parent must not initialize CUDA)")
def counting() -> str:
    ctypes.CDLL("libnvidia-ml.so.1")
    count = torch.cuda._device_count_nvml()
    if count < 1:
        raise AssertionError(f"NVML counts {count} GPUs: baton up cannot fork its workers")
    if torch.cuda.is_initialized():
        raise AssertionError("CUDA was initialized")
    return f"{count} GPU(s)"


@check("extensions load with this torch")
def extensions() -> str:
    import vllm._C_stable_libtorch
    import vllm._moe_C_stable_libtorch
    import vllm.vllm_flash_attn._vllm_fa3_C  # noqa: F401

    return "_C, _moe_C, fa3"


@check("device")
def device() -> str:
    free, total = torch.cuda.mem_get_info()
    card = f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}"
    return f"{card}, {free >> 30} of {total >> 30} GiB free"


@check("rms_norm")
def norm() -> str:
    x = torch.randn(64, 2048, device="cuda", dtype=torch.bfloat16)
    weight, out = torch.randn(2048, device="cuda", dtype=torch.bfloat16), torch.full_like(x, float("nan"))
    torch.ops._C.rms_norm(out, x, weight, 1e-6)
    wanted = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    if not error_of(out, wanted) < 1e-2:
        raise AssertionError(f"error {error_of(out, wanted)}")
    return f"error {error_of(out, wanted):.1e}"


@check("cache write and paged FlashAttention 3")
def attention() -> str:
    from vllm import _custom_ops as ops
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    draw = torch.Generator("cuda").manual_seed(0)
    heads, key_heads, size, block, tokens = 16, 8, 128, 16, 300
    blocks = -(-tokens // block)
    q, k, v = (
        torch.randn(tokens, count, size, generator=draw, device="cuda").bfloat16()
        for count in (heads, key_heads, key_heads)
    )
    cache = torch.full((2, 2 * blocks, block, key_heads, size), 1e3, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(2 * blocks, generator=draw, device="cuda")[:blocks].int()
    position = torch.arange(tokens, device="cuda")
    slots = table.long()[position // block] * block + position % block
    one = torch.ones(1, device="cuda")
    ops.reshape_and_cache_flash(k, v, cache[0], cache[1], slots, "auto", one, one)
    out = flash_attn_varlen_func(
        q=q,
        k=cache[0],
        v=cache[1],
        cu_seqlens_q=torch.tensor([0, tokens], device="cuda", dtype=torch.int32),
        seqused_k=torch.tensor([tokens], device="cuda", dtype=torch.int32),
        max_seqlen_q=tokens,
        max_seqlen_k=tokens,
        block_table=table[None],
        softmax_scale=size**-0.5,
        causal=True,
        fa_version=3,
    )
    group = heads // key_heads
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double().repeat_interleave(group, 1)) * size**-0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens, device="cuda").triu(1).bool(), float("-inf"))
    wanted = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double().repeat_interleave(group, 1))
    if not error_of(out, wanted) < 1e-2:
        raise AssertionError(f"error {error_of(out, wanted)}")
    return f"error {error_of(out, wanted):.1e}"


@check("pinned memory of shared memory")
def pinning() -> str:
    memory = mmap.mmap(-1, 64 << 20)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    if torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0) != 0:
        raise AssertionError("cudaHostRegister refused it")
    if not host.is_pinned():
        raise AssertionError("torch does not see it as pinned")
    device = torch.ones(host.nbytes, dtype=torch.uint8, device="cuda")
    host.copy_(device, non_blocking=True)
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
    if int(host[-1]) != 1:
        raise AssertionError("the copy did not arrive")
    return "64 MiB"


sys.exit(len(FAILED))
