"""Checkpoints with random weights and a byte-level tokenizer, written within a second.

tiny_qwen2(folder)   loads at once, and its answers vary: for tests
qwen2_80m(folder)    80 million parameters, enough to keep a core busy: for benchmarks
qwen3_shape(folder)  a large model without weights, for `load_format: dummy`
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HEAD_DIM = 64
# Size in billions of parameters -> width, inner width, layers, heads and key heads of that Qwen3 model.
QWEN3 = {"tiny": (256, 512, 2, 4, 2), "1.7": (2048, 6144, 28, 16, 8), "8": (4096, 12288, 36, 32, 8)}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_qwen2(
    folder: Path, *, layers: int = 2, hidden: int = 128, vocabulary: int = 512, seed: int = 0
) -> Path:
    """Write a Qwen2 model with float32 weights into the new folder `folder`, and return it."""
    return _qwen2(folder, layers, hidden, 2 * hidden, vocabulary, seed)


def qwen2_80m(folder: Path) -> Path:
    """Write a Qwen2 model with 80 M bfloat16 weights into the new folder `folder`, and return it."""
    return _qwen2(folder, 8, 768, 2304, 16_000, 0, dtype="bfloat16", scale=0.5)


def _qwen2(
    folder: Path,
    layers: int,
    hidden: int,
    intermediate: int,
    vocabulary: int,
    seed: int,
    dtype: str = "float32",
    scale: float = 1.5,
) -> Path:
    import torch
    from safetensors.torch import save_file

    heads = hidden // HEAD_DIM
    key_heads = max(1, heads // 2)
    generator = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)

    def weight(*shape: int) -> Any:
        # Larger than a trained model's: with small weights every prompt gets the same answer.
        return (torch.randn(*shape, generator=generator) * (scale / shape[-1] ** 0.5)).to(kind)

    tensors = {
        "model.embed_tokens.weight": weight(vocabulary, hidden) * hidden**0.5 / scale,
        "model.norm.weight": torch.ones(hidden, dtype=kind),
        "lm_head.weight": weight(vocabulary, hidden),
    }
    for number in range(layers):
        layer = f"model.layers.{number}"
        for name, count in {"q_proj": heads, "k_proj": key_heads, "v_proj": key_heads}.items():
            tensors[f"{layer}.self_attn.{name}.weight"] = weight(count * HEAD_DIM, hidden)
            tensors[f"{layer}.self_attn.{name}.bias"] = weight(count * HEAD_DIM)
        tensors[f"{layer}.self_attn.o_proj.weight"] = weight(hidden, heads * HEAD_DIM)
        tensors[f"{layer}.mlp.gate_proj.weight"] = weight(intermediate, hidden)
        tensors[f"{layer}.mlp.up_proj.weight"] = weight(intermediate, hidden)
        tensors[f"{layer}.mlp.down_proj.weight"] = weight(hidden, intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(hidden, dtype=kind)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 4096,
        "head_dim": HEAD_DIM,
        "rope_theta": 10_000.0,
        "dtype": dtype,
    }
    return _describe(folder, config, hidden, intermediate, layers, heads, key_heads, vocabulary)


def qwen3_shape(folder: Path, size: str, length: int) -> Path:
    """Write a Qwen3 model of a size (see QWEN3) without weights, for prompts of `length` tokens."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": length,
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "attention_bias": False,
        "dtype": "bfloat16",
        "bos_token_id": 256,
    }
    folder.mkdir(parents=True, exist_ok=True)
    return _describe(folder, config, *QWEN3[size], 32_000)


def _describe(
    folder: Path,
    config: dict[str, Any],
    hidden: int,
    inner: int,
    layers: int,
    heads: int,
    key_heads: int,
    vocabulary: int,
) -> Path:
    """Write config.json and the tokenizer. Return the folder."""
    config |= {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "eos_token_id": 256,
        "pad_token_id": 256,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    byte_tokenizer(folder, vocabulary)
    return folder


def byte_tokenizer(folder: Path, vocabulary: int, special: tuple[str, ...] = SPECIAL, **more: Any) -> None:
    """Write a tokenizer: bytes are tokens 0 to 255; special tokens and words that never match follow.

    more: further entries of tokenizer_config.json.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    words = [f"Ġw{number}" for number in range(vocabulary - len(letters) - len(special))]
    vocab = {token: number for number, token in enumerate([*letters, *special, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [token for token in special if token.strip()]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    } | more
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _byte_of(letter: str) -> int:
    """Return the byte of a byte-level letter: printable bytes are themselves, others are U+0100 and up."""
    code, shown = ord(letter), (*range(33, 127), *range(161, 173), *range(174, 256))
    return code if code < 256 else [byte for byte in range(256) if byte not in shown][code - 256]
