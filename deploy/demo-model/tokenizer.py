"""A byte-level BPE of 4,096 tokens, in the format of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from chat import END_OF_TEXT, IM_END, MARKER_TOKENS, SPECIAL_TOKENS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 4096
CONTEXT = 2048
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# Qwen2's normaliser and pre-tokenizer, because transformers 5 uses them for a Qwen2 model whatever
# tokenizer.json says: words with their leading space, single digits, runs of punctuation, line ends,
# indentation.
_PIECES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Return the id of a token. Raises KeyError."""
    found = tokenizer.token_to_id(text)
    if found is None:
        raise KeyError(f"{text} is not in the vocabulary: the tokenizer has to be trained again")
    return found


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from `texts`. Special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    markers = [AddedToken(text, normalized=False, special=False) for text in MARKER_TOKENS]
    specials = [AddedToken(text, normalized=False, special=True) for text in SPECIAL_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[*specials, *markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # The trainer makes the markers special, so `skip_special_tokens` would drop them.
    saved = json.loads(tokenizer.to_str())
    for token in saved["added_tokens"]:
        token["special"] = token["content"] in SPECIAL_TOKENS
    return Tokenizer.from_str(json.dumps(saved))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copyfile(TEMPLATE, folder / TEMPLATE.name)
