"""A model folder without weights, whose tokenizer has 150,000 tokens: bytes, syllables, numbers, signs."""

import itertools
import json

SIZE = 150_000


def big_tokenizer(folder):
    """Write config.json and the tokenizer's files. Return the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    letters = pre_tokenizers.ByteLevel.alphabet()
    words = itertools.chain(sorted(letters), _words())
    chosen = itertools.islice(dict.fromkeys(words), SIZE - 1)
    vocabulary = {word: number for number, word in enumerate(chosen)}
    vocabulary["<eos>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048},
        **{"vocab_size": SIZE, "eos_token_id": SIZE - 1, "bos_token_id": SIZE - 1},
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _words():
    yield from map(str, range(1000))
    yield from map("".join, itertools.product('{}[]":,.<>/=-+_ĠĊ', repeat=2))
    yield from map("".join, itertools.product('{}[]":,Ġ', repeat=3))
    syllables = ["".join(pair) for pair in itertools.product("bcdfghjklmnprstvwz", "aeiou")]
    for length in (1, 2, 3):
        for parts in itertools.product(syllables, repeat=length):
            word = "".join(parts)
            yield word
            yield "Ġ" + word
