"""A long text tokenized in pieces has the tokenizer's own ids, and takes little memory."""

import functools
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from vllm.renderers.params import TokenizeParams
from vllm.tokenizers import get_tokenizer
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

from baton.services.router.vllm import pieces, tokenizing
from harness import zygote
from harness.deployment import MODEL

WHOLE = {"truncation": False, "add_special_tokens": True}
RUNS = (
    *(" ", "\n", "\t", "a", "ab", "the", "A", "/", "-_", "'", "'s", "1"),
    *("\u4e2d", "\u4e2d\u56fd", "\U0001f600", "\u00e9"),
)
WORDS = (
    *("Hello", " world", ". ", "I'll", "it's", "'S", "don\u2019t", "\u017f", " THE", "camelCaseWord"),
    *("x1y22z333", "2024-01-01", "\n", "\n\n", " \n ", "\r\n", "\t", "  ", "\u00a0", "\u3000", "\u2028"),
    *("!", "?!", "//", "/home/x ", "#include <a>", '{"a": 1}', "e\u0301", "\u0301", "\u1100\u1161\u11a8"),
    *("\uac00\u11a8", "\u212b", "\u037e", "\u4e2d\u6587\u3002", "\u65e5\u672c\uff0c", "\u0410\u0431\u0432"),
    *("\U0001f468\u200d\U0001f469", "\ufe0f", "\U0001f3fd", "\u0e01\u0e33", "\u0939\u093f", "\u00df"),
    *("\u01c5", "\u02b0", "<|im_start|>", "<|im_end|>", "<|im_", "start|>", "<tool_call>"),
    "</tool_response>",
    *("<", "|>", "_", "im_start", "\x00", "\ufffd"),
)


@functools.cache
def made(pattern=None, *, frame=False, added="", **kinds):
    backend = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    if pattern == pieces.GPT2:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.normalizer = None
    elif pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    if frame:
        backend.post_processor = TemplateProcessing(
            single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
        )
    if added:
        backend.add_tokens([AddedToken(added, **kinds)])
    return get_cached_tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", 100)


def text_of(rng):
    """Return a random text of words, any characters, and runs that are much longer than a piece."""
    parts = []
    for _ in range(rng.randrange(1, 30)):
        kind = rng.random()
        if kind < 0.15:
            unit = rng.choice(RUNS)
            parts.append(unit * (rng.choice((5, 300, 600, 2_000)) // len(unit)))
        elif kind < 0.25:
            parts.append("".join(rng.choices("abcdefghij", k=rng.randrange(1, 1_500))))
        elif kind < 0.3:
            every = (
                chr(rng.choice((rng.randrange(0xD800), rng.randrange(0xE000, 0x110000)))) for _ in range(40)
            )
            parts.append("".join(every))
        else:
            parts += rng.choices(WORDS, k=rng.randrange(1, 60))
    return "".join(parts)


@pytest.mark.parametrize("frame", [False, True])
@pytest.mark.parametrize("pattern", [None, *pieces.PATTERNS])
def test_the_ids_are_the_tokenizers_own(pattern, frame):
    tokenizer = made(pattern, frame=frame)
    rng = random.Random(f"{pattern}{frame}")
    in_pieces = 0
    for text in [text_of(rng) for _ in range(15)]:
        for special in (False, True):
            options = {**WHOLE, "add_special_tokens": special}
            found = pieces.ids_in_pieces(tokenizer, text, **options)
            in_pieces += found is not None
            assert found is None or found == tokenizer(text, **options)["input_ids"], repr(text)
    assert in_pieces > 27


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("length", [1, 2, 3, 500, 100_000])
def test_a_text_is_cut_as_the_tokenizer_cuts_it(length, side):
    tokenizer = made(frame=True)
    tokenizer.truncation_side = side
    text = text_of(random.Random(7)) * 2
    for special in (True, False):
        options = {"truncation": True, "max_length": length, "add_special_tokens": special}
        found = pieces.ids_in_pieces(tokenizer, text, **options)
        assert (found is None) == (special and length <= 2)
        assert found is None or found == tokenizer(text, **options)["input_ids"]


@pytest.mark.parametrize("added", [" ", "d W", "e.", "\u4e2d", "  \n", "//////"])
def test_a_cut_never_splits_an_added_token(added):
    tokenizer = made(added=added, normalized=False)
    rng = random.Random(added)
    for _ in range(20):
        text = text_of(rng) + added.join(rng.choices(WORDS, k=300))
        found = pieces.ids_in_pieces(tokenizer, text, **WHOLE)
        assert found is None or found == tokenizer(text, **WHOLE)["input_ids"], repr(text)


def test_split_special_tokens_stay_split():
    tokenizer = made(added="<extra>")
    text = "a <|im_end|> b <extra> c" * 50
    whole = pieces.ids_in_pieces(tokenizer, text, **WHOLE)
    tokenizer.split_special_tokens = True
    try:
        split = pieces.ids_in_pieces(tokenizer, text, **WHOLE)
        assert split == tokenizer(text, **WHOLE)["input_ids"] != whole
    finally:
        tokenizer.split_special_tokens = False


def test_a_run_ends_within_a_piece_or_begins_a_large_one():
    """A run that is one word is cut. A run of newlines is not: the pattern may take all of it."""
    cutter = pieces.cutter_of(made())
    for unit, most in {**dict.fromkeys((" ", "a", "/", "\u4e2d", "\U0001f600"), 500), "\n": 9_000}.items():
        places = pieces._Places(cutter, unit * 9_000)
        assert places.next(0)[0] <= most, unit


def test_other_tokenizers_get_the_text_whole():
    assert pieces.cutter_of(made()) is not None
    assert pieces.cutter_of(maybe_make_thread_pool(get_tokenizer(str(MODEL)))) is not None
    assert pieces.cutter_of(made("[^a]+")) is None
    for kind in ("lstrip", "rstrip", "single_word"):
        assert pieces.cutter_of(made(added="<odd>", **{kind: True})) is None
    plain = made()
    assert pieces.cutter_of(object()) is None
    assert pieces.cutter_of(PreTrainedTokenizerFast(tokenizer_object=plain._tokenizer)) is None  # not vLLM's
    assert pieces.ids_in_pieces(object(), "a", **WHOLE) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "normalizer", normalizers.NFKC()),
        lambda backend: setattr(backend, "normalizer", normalizers.Sequence([normalizers.Lowercase()])),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.Metaspace()),
        lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda backend: setattr(backend, "model", models.BPE(backend.get_vocab(), [], dropout=0.1)),
        lambda backend: setattr(backend, "model", models.BPE({"a": 0}, [])),
        lambda backend: setattr(backend, "model", models.WordLevel(backend.get_vocab(), unk_token="a")),
    ],
)
def test_tokenizers_with_other_parts_get_the_text_whole(change):
    backend = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    change(backend)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.max_chars_per_token = 50
    assert pieces.cutter_of(tokenizer) is None


def memory(name):
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) << 10


def measure():
    """Print the tokens of long texts and the bytes that each character took. Runs in a forked process."""
    from vllm.renderers.base import BaseRenderer

    tokenizing.bound_tokenizing()
    tokenizer = get_tokenizer(str(MODEL))
    renderer = SimpleNamespace(
        get_tokenizer=lambda: tokenizer,
        model_config=SimpleNamespace(max_model_len=1 << 20),
        _wants_offsets=lambda *_: False,
        _build_tokens_prompt=BaseRenderer._build_tokens_prompt,
    )

    def run(text):
        params = TokenizeParams(max_total_tokens=1 << 20)
        prompt = {"prompt": text}
        return BaseRenderer._tokenize_prompt(renderer, prompt, params)["prompt_token_ids"]

    run("Hello world. " * 10_000)
    for text in (" " * 900_000, "Hello world. " * 70_000, "/home/x/1 " * 100_000):
        Path("/proc/self/clear_refs").write_text("5")  # resets the highest use
        before = memory("VmRSS")
        ids = run(text)
        print(len(ids), (memory("VmHWM") - before) / len(text), flush=True)
        del ids


def test_a_long_text_that_fits_takes_little_memory(tmp_path):
    """Whole texts take 90 to 180 bytes per character. Measured in a separate process."""
    process = zygote.shared().start("measure", f"{__name__}:measure", tmp_path)
    assert process.wait(420) == 0, process.text
    rows = [line.split() for line in process.text.splitlines()]
    assert len(rows) == 3
    assert all(int(tokens) > 25_000 and float(per_character) < 20 for tokens, per_character in rows), rows
