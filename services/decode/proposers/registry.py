"""Find speculative methods by name.

Other packages add methods through entry points of the group `baton.speculative_methods` (docs/extending.md).
"""

from __future__ import annotations

from baton.registry import Registry
from baton.services.decode.proposers.method import Method
from baton.services.errors import ConfigError

_HERE = __package__
# vLLM's MTPModelTypes, and the names that FastDeploy and LMDeploy use
_MTP = (
    *("deepseek_mtp", "dots3_note_mtp", "mimo_mtp", "mimo_v2_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"),
    *("glm_ocr_mtp", "ernie_mtp", "nemotron_h_mtp", "exaone_moe_mtp", "exaone4_5_mtp", "qwen3_next_mtp"),
    *("qwen4_exp_mtp", "qwen3_5_mtp", "longcat_flash_mtp", "bailing_hybrid_v3_mtp", "minimax_m3_mtp"),
    *("bailing_hybrid_mtp", "kimi_k3_mtp", "pangu_ultra_moe_mtp", "step3p5_mtp", "hy_v3_mtp", "hy_v4_mtp"),
    *("gemma4_mtp", "inkling_mtp", "glm5_next_mtp"),
)

METHODS: Registry[type[Method]] = Registry(
    "speculative method",
    Method,
    {
        "mtp": f"{_HERE}.draft_models:Mtp",
        "eagle": f"{_HERE}.draft_models:Eagle",
        "eagle3": f"{_HERE}.draft_models:Eagle3",
        "draft_model": f"{_HERE}.draft_models:DraftModel",
        "medusa": f"{_HERE}.draft_models:Medusa",
        "ngram": f"{_HERE}.ngram:Ngram",
        "suffix": f"{_HERE}.suffix:Suffix",
    },
    group="baton.speculative_methods",
    aliases=dict.fromkeys(_MTP, "mtp") | {"[ngram]": "ngram", "ngram_match": "ngram"},
    error=lambda why: ConfigError(f"engine.speculative_config.method: {why}"),
)


def method(name: str) -> Method:
    """Return the method with this name or alias. Raises ConfigError if it cannot be loaded."""
    return METHODS.load(name)()
