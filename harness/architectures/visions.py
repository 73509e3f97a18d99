"""Tiny models that take images: random weights in transformers' classes, and a byte-level tokenizer.

Transformers' initial weights are so small that every prompt would get the same answer, so all matrices are
drawn anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from harness.checkpoints import byte_tokenizer

HIDDEN, VOCABULARY = 128, 512
MARKS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>"),
    *(
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        "<fake_token_around_image>",
        "<global-img>",
    ),
    *("\n" * number for number in range(1, 5)),  # vLLM's Gemma 3 looks these up; no text is tokenized to them
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)
_QWEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_QWEN_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_TOWER = {"hidden_size": 64, "intermediate_size": 128}
_SQUARE = {"image_size": 56, "patch_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2}


def token(mark: str) -> int:
    return 256 + MARKS.index(mark)


def _text(layers: int = 2, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 256),
    } | more


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections} | more


def _write(
    folder: Path,
    kind: str,
    config: dict[str, Any],
    seed: int,
    processor: dict[str, Any],
    *,
    dtype: str = "float32",
    gain: float = 1.5,
    embedding: float = 1.0,
    tokens: dict[str, str] | None = None,
    more: dict[str, dict[str, Any]] | None = None,
) -> None:
    """Write a checkpoint. kind: the prefix of transformers' classes; more: further files."""
    import transformers
    from safetensors.torch import save_file

    made = getattr(transformers, f"{kind}ForConditionalGeneration")
    model = made(getattr(transformers, f"{kind}Config")(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, one in sorted(model.named_parameters()):
            if one.ndim > 1:
                spread = embedding if "embed_tokens" in name else gain / one[0].numel() ** 0.5
                one.copy_(torch.randn(one.shape, generator=generator) * spread)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if "Qwen" not in kind and "Smol" not in kind:  # the hub's names, which transformers no longer writes
        from safetensors.torch import load_file

        path = folder / "model.safetensors"
        renamed = {
            name.replace("vision_tower.", "vision_tower.vision_model."): tensor
            for name, tensor in load_file(path).items()
        }
        save_file(renamed, path, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | {"dtype": dtype}
    files = {"config.json": described, "preprocessor_config.json": processor} | (more or {})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))
    (folder / "generation_config.json").unlink(missing_ok=True)
    named = tokens | {"extra_special_tokens": tokens} if tokens else {}
    byte_tokenizer(folder, VOCABULARY, MARKS, bos_token=MARKS[0], **named)


def qwen2_5_vl(folder: Path) -> None:
    """Write a model with M-RoPE, and window attention in its vision tower; an image has at most 64 tokens."""
    _qwen2_5_vl(folder, _text(), _TOWER | {"depth": 2, "num_heads": 2}, HIDDEN, most_pixels=224 * 224)


def qwen2_5_vl_large(folder: Path) -> None:
    """Write a larger Qwen2.5-VL for benches: 50 M parameters in bfloat16, up to 1,024 tokens for an image."""
    text = _text(8, hidden_size=768, intermediate_size=2304, num_attention_heads=12, num_key_value_heads=6)
    tower = {"hidden_size": 256, "intermediate_size": 704, "depth": 4, "num_heads": 4}
    _qwen2_5_vl(folder, text, tower, 768, most_pixels=896 * 896, dtype="bfloat16")


def _qwen2_5_vl(
    folder: Path,
    text: dict[str, Any],
    tower: dict[str, Any],
    hidden: int,
    *,
    most_pixels: int,
    dtype: str = "float32",
) -> None:
    config = {
        "text_config": text | {"rope_parameters": _rope([8, 12, 12])},
        "vision_config": tower
        | {"out_hidden_size": hidden, "patch_size": 14, "window_size": 112, "spatial_merge_size": 2}
        | {"temporal_patch_size": 2, "fullatt_block_indexes": [tower["depth"] - 1]},
        **dict(zip(_QWEN_IDS, map(token, _QWEN_MARKS), strict=True)),
    }
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": most_pixels,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **_CLIP,
    }
    _write(folder, "Qwen2_5_VL", config, 1, processor, dtype=dtype)


def _qwen3(
    folder: Path, kind: str, text: dict[str, Any], tower: dict[str, Any], seed: int, dtype: str
) -> None:
    config = {
        "text_config": text,
        "vision_config": _TOWER
        | {"num_heads": 2, "out_hidden_size": HIDDEN, "patch_size": 16, "spatial_merge_size": 2}
        | {"temporal_patch_size": 2, "num_position_embeddings": 256}
        | tower,
        **dict(zip(_QWEN_IDS, map(token, _QWEN_MARKS), strict=True)),
    }
    shared = {
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        **_HALF,
    }
    image = shared | {"image_processor_type": "Qwen2VLImageProcessor"}
    video = shared | {"video_processor_type": "Qwen3VLVideoProcessor"}
    _write(folder, kind, config, seed, image, dtype=dtype, more={"video_preprocessor_config.json": video})


def qwen3_vl(folder: Path) -> None:
    """Write a model with interleaved M-RoPE and DeepStack: two tower layers also feed language layers."""
    text = _text(3, head_dim=64, rope_parameters=_rope([12, 10, 10], mrope_interleaved=True))
    _qwen3(folder, "Qwen3VL", text, {"depth": 3, "deepstack_visual_indexes": [0, 1]}, 4, "float32")


def qwen3_5(folder: Path) -> None:
    """Write a hybrid of Gated DeltaNet and full attention."""
    rope = _rope([6, 5, 5], mrope_interleaved=True, partial_rotary_factor=0.25)
    text = _text(
        4,
        head_dim=128,
        layer_types=["linear_attention", "full_attention"] * 2,
        full_attention_interval=2,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        rope_parameters=rope,
    )
    _qwen3(folder, "Qwen3_5", text, {"depth": 2}, 6, "bfloat16")


def llava(folder: Path) -> None:
    """Write a CLIP tower in front of a Llama; an image has 16 tokens."""
    config = {
        "text_config": _text(model_type="llama", head_dim=64),
        "vision_config": _TOWER
        | _SQUARE
        | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 64},
        "image_token_index": token("<image>"),
        "image_seq_length": 16,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    processor = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_center_crop": True,
        "crop_size": {"height": 56, "width": 56},
        "size": {"shortest_edge": 56},
        **_CLIP,
    }
    whole = {
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        "patch_size": 14,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    }
    _write(folder, "Llava", config, 2, processor, more={"processor_config.json": whole})


def gemma3(folder: Path) -> None:
    """Write a model with sliding windows, and attention in both directions within an image of 4 tokens."""
    config = {
        "text_config": _text(
            3,
            head_dim=64,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
            sliding_window=64,
            query_pre_attn_scalar=64,
        ),
        "vision_config": _TOWER | _SQUARE | {"vision_use_head": False},
        "mm_tokens_per_image": 4,
        "boi_token_index": token("<start_of_image>"),
        "eoi_token_index": token("<end_of_image>"),
        "image_token_index": token("<image_soft_token>"),
        "tie_word_embeddings": True,
    }
    processor = {
        "image_processor_type": "Gemma3ImageProcessor",
        "processor_class": "Gemma3Processor",
        "size": {"height": 56, "width": 56},
        **_HALF,
    }
    marks = {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    }
    # The embeddings are tied: larger ones would make the model repeat the last token.
    _write(
        folder,
        "Gemma3",
        config,
        3,
        processor,
        gain=3.0,
        embedding=0.01,
        tokens=marks,
        more={"processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4}},
    )


def smolvlm(folder: Path) -> None:
    """Write a SigLIP tower and a Llama; an image becomes up to nine tiles and a small copy of the whole.

    Each tile has 4 tokens, after a mark that names its row and column; the copy has 4 tokens, too.
    """
    config = {
        "text_config": _text(model_type="llama", head_dim=64),
        "vision_config": _TOWER | _SQUARE,
        "image_token_id": token("<image>"),
        "scale_factor": 2,
        "pad_token_id": 256,
    }
    processor = {
        "image_processor_type": "SmolVLMImageProcessor",
        "processor_class": "SmolVLMProcessor",
        "size": {"longest_edge": 168},
        "max_image_size": {"longest_edge": 56},
        **_HALF,
    }
    marks = {
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "image_token": "<image>",
        "end_of_utterance_token": "<|im_end|>",
    }
    _write(
        folder,
        "SmolVLM",
        config,
        5,
        processor,
        tokens=marks,
        more={"processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}},
    )
