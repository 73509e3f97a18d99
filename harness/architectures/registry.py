"""Tiny models for every way of drafting, by name.

    one = ARCHITECTURES["mtp-mimo"]
    folder = one.checkpoint()                    # takes a second, then cached until the code changes
    engine arguments: model=one.target(folder), speculative_config=one.speculative(folder), **one.engine
    prompts = one.prompts(20)                    # token ids whose answers do not depend on rounding

Two to six in ten greedy drafts are accepted: draft models know the language of language.py but not the
target's layers.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.architectures import dense, experts, hybrids, language, visions, windows
from harness.support import ROOT

CACHE = ROOT / ".pytest_cache" / "architectures"


@dataclass(frozen=True)
class Architecture:
    """A target, its drafter if that has its own folder, and the engine's arguments."""

    name: str
    model: Callable[[Path], None]  # writes the target's checkpoint
    spec: dict[str, Any]  # --speculative-config without the drafter's folder
    drafter: Callable[[Path], None] | None = None
    dtype: str = "float32"
    engine: dict[str, Any] = field(default_factory=dict)  # further engine arguments
    reference: str | None = None  # transformers' class, if its float32 output equals vLLM's
    texts: tuple[int, ...] = tuple(range(100))  # numbers of the prompts' texts
    mark: str = ""  # stands for an image in a prompt; empty: the model takes no images

    def build(self, folder: Path) -> None:
        """Write the target, and the drafter if there is one, into `folder`."""
        self.model(folder / "target")
        if self.drafter is not None:
            self.drafter(folder / "drafter")

    def target(self, folder: Path) -> Path:
        return folder / "target"

    def speculative(self, folder: Path) -> dict[str, Any]:
        return self.spec | ({"model": str(folder / "drafter")} if self.drafter is not None else {})

    def prompts(self, count: int) -> list[list[int]]:
        """Return prompts of 20 to 60 token ids. Raises ValueError if there are fewer than `count`."""
        if count > len(self.texts):
            raise ValueError(f"{self.name} has {len(self.texts)} prompts, not {count}")
        return [language.prompt(number) for number in self.texts[:count]]

    def checkpoint(self) -> Path:
        """Return the checkpoint's folder, building it if it is missing. Several processes may call this."""
        folder = CACHE / _version() / self.name
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(dir=folder.parent))
            self.build(made)
            try:
                os.rename(made, folder)
            except OSError:  # another process was faster
                shutil.rmtree(made)
        return folder


def _version() -> str:
    """Return a digest of the code that writes the checkpoints."""
    sources = [*sorted(Path(__file__).parent.glob("*.py")), ROOT / "harness" / "checkpoints.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


def _spec(method: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"method": method, "num_speculative_tokens": tokens} | more


# Prefix caching of linear attention's states needs a Triton kernel that CPUs lack.
_HYBRID: dict[str, Any] = {
    "dtype": "bfloat16",
    "engine": {"enable_prefix_caching": False},
    "texts": hybrids.CLEAR,
}
_NGRAM = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}

_ALL = (
    Architecture("eagle", dense.qwen2, _spec("eagle", 3), drafter=dense.eagle, reference="Qwen2ForCausalLM"),
    Architecture("eagle3", dense.qwen2, _spec("eagle3", 3), drafter=dense.eagle3),
    Architecture("draft-model", dense.qwen2, _spec("draft_model", 3), drafter=dense.small_qwen2),
    Architecture("medusa", dense.qwen2, _spec("medusa", 2), drafter=dense.medusa),
    Architecture("ngram", dense.qwen3, _spec("ngram", 3, **_NGRAM), reference="Qwen3ForCausalLM"),
    Architecture("mtp-mimo", dense.mimo, _spec("mtp", 3)),
    Architecture("mtp-glm4-moe", experts.glm4_moe, _spec("mtp", 2), reference="Glm4MoeForCausalLM"),
    Architecture("mtp-ernie4.5-moe", experts.ernie4_5_moe, _spec("mtp", 2)),
    Architecture("mtp-deepseek-v3", experts.deepseek_v3, _spec("mtp", 2), reference="DeepseekV3ForCausalLM"),
    Architecture("mtp-qwen3.5", hybrids.qwen3_5, _spec("mtp", 2), **_HYBRID),
    Architecture("mtp-qwen3-next", hybrids.qwen3_next, _spec("mtp", 2), **_HYBRID),
    Architecture("ngram-gemma3", windows.gemma3, _spec("ngram", 3, **_NGRAM)),
    Architecture("eagle3-gpt-oss", windows.gpt_oss, _spec("eagle3", 3), drafter=dense.eagle3),
    Architecture(
        "ngram-granite4",
        hybrids.granite4,
        _spec("ngram", 3, **_NGRAM),
        engine={"enable_prefix_caching": False},
    ),
)
ARCHITECTURES = {one.name: one for one in _ALL}

# Models that take images. Their weights are random, so drafts are rarely accepted.
_DRAFTS, _QWEN = _spec("ngram", 3, **_NGRAM), "<|vision_start|><|image_pad|><|vision_end|>"
_SEEING = (
    Architecture("qwen2.5-vl", visions.qwen2_5_vl, _DRAFTS, mark=_QWEN),
    Architecture("llava", visions.llava, _DRAFTS, mark="<image>"),
    Architecture("qwen3-vl", visions.qwen3_vl, _DRAFTS, mark=_QWEN),
    Architecture("qwen3.5-vision", visions.qwen3_5, _DRAFTS, mark=_QWEN, **_HYBRID | {"texts": ()}),
    Architecture("gemma3-vision", visions.gemma3, _DRAFTS, mark="<start_of_image>"),
    Architecture("smolvlm", visions.smolvlm, _DRAFTS, mark="<image>"),
)
VISIONS = {one.name: one for one in _SEEING}
