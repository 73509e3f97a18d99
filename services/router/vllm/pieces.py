"""Tokenize a long text a piece at a time, with exactly the ids of the whole text.

Hugging Face's tokenizer takes 90 to 180 bytes per byte of text, most of them before it has the first id; with
pieces, it needs them for one piece only. A text may be cut where its tokens certainly do not depend on what
follows the cut. We know such positions for byte-level BPE with one of the common pre-tokenizers:

- Between a letter and a space, digit or sign. No alternative of the patterns below continues from a letter to
  one of those, looks back, or looks ahead further than it matches. NFC changes neither side, and no added
  token contains such a pair.
- Deep within a run of one class of characters, such as spaces, that the pre-tokenizer takes as one word. The
  piece then ends within the run, and the next piece begins at one of the first piece's last tokens. If that
  token is also the first one of the next piece, the pieces join exactly: whether BPE ever merges across the
  boundary between two tokens depends on these two alone, and both pieces show that boundary on one side of
  the common token.

Without such a position a piece grows until there is one. Other tokenizers get the whole text.

Leans on: transformers.TokenizersBackend.{_encode_plus, _tokenizer, split_special_tokens, truncation_side},
PreTrainedTokenizerBase.__call__; vllm.tokenizers.hf's max_chars_per_token and ThreadSafeHFTokenizerMixin; the
JSON form of the parts of a tokenizers.Tokenizer.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import TokenizersBackend
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin

PIECE = 32 << 10  # characters
LONGEST_TOKEN = 512  # characters

# Letters and signs that NFC leaves alone, of classes that are the same in every version of Unicode.
_LETTERS = "A-Za-zÀ-ÖØ-öø-ɏА-яぁ-んァ-ヶ一-龥가-힣"
_SIGNS = " \t\n" + '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~' + "0123456789" + "。，、；：！？（）「」"

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K_UPPER, _O200K_LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _cl100k(digits: str) -> str:
    return _SHORT + rf"|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|" + _END


# The pre-tokenizers for which we know where to cut. GPT-2's pattern is built into ByteLevel.
PATTERNS = (
    GPT2,
    _cl100k(r"\p{N}"),  # Qwen 2 and 3
    _cl100k(r"\p{N}{1,3}"),  # Llama 3
    f"{_SHORT}|{_LEAD}" + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _END,  # Qwen 3.5
    f"{_LEAD}{_O200K_UPPER}*{_O200K_LOWER}+{_SHORT}?|{_LEAD}{_O200K_UPPER}+{_O200K_LOWER}*{_SHORT}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _END,  # gpt-oss, Llama 4
)


@dataclass(frozen=True)
class Run:
    """A class of characters whose runs are one word, or part of one."""

    inside: re.Pattern[str]
    width: int  # bytes per character


SPACES = Run(re.compile(" +"), 1)
IDEOGRAPHS = Run(re.compile("[一-龥]+"), 3)
RUNS = (
    SPACES,
    IDEOGRAPHS,
    Run(re.compile("[a-z]+"), 1),
    Run(re.compile(r"[!-&(-/:-@\[-`{-~]+"), 1),  # ASCII punctuation and symbols, except the apostrophe
    Run(re.compile("[\U0001f600-\U0001f64f]+"), 4),
)


def ids_in_pieces(tokenizer: Any, text: str, **kwargs: Any) -> list[int] | None:
    """Return the ids of `tokenizer(text, **kwargs)`, or None if the text cannot be tokenized in pieces.

    kwargs: add_special_tokens, truncation and max_length, from TokenizeParams.get_encode_kwargs().
    """
    cutter = cutter_of(tokenizer)
    if cutter is None:
        return None
    before, after = cutter.frame if kwargs["add_special_tokens"] else ([], [])
    if not kwargs["truncation"]:
        found = cutter.ids(text)
        return None if found is None else [*before, *found, *after]
    kept = kwargs["max_length"] - len(before) - len(after)
    if kept <= 0:
        return None
    left = tokenizer.truncation_side == "left"
    found = cutter.ids(text, None if left else kept)
    if found is None:
        return None
    if left:
        del found[: max(0, len(found) - kept)]
    else:
        del found[kept:]
    return [*before, *found, *after]


class Cutter:
    """Tokenizes texts in pieces with one tokenizer. Made by `cutter_of`."""

    def __init__(self, tokenizer: Any, pattern: str, frame: tuple[list[int], list[int]]) -> None:
        self.frame = frame  # the ids that the tokenizer puts before and after a text
        self._tokenizer = tokenizer
        added = _added_texts(tokenizer._tokenizer)
        within = {two for text in added for two in re.findall(f"(?<=[{_LETTERS}]).", text)}
        signs = [sign for sign in _SIGNS if sign not in within]
        self.cut = re.compile(f"(?<=[{_LETTERS}])[{re.escape(''.join(signs))}]") if signs else None
        self.runs = [run for run in RUNS if not any(run.inside.fullmatch(text) for text in added)]
        if _O200K_UPPER in pattern and IDEOGRAPHS in self.runs:
            self.runs.remove(
                IDEOGRAPHS
            )  # whether capitals after such a run belong to its word depends on the word's start
        # A seam lies in the middle of a run's block of twice this many characters, several tokens from the
        # edges of the block.
        self.margin = max(64, 4 * tokenizer.max_chars_per_token)

    def ids(self, text: str, enough: int | None = None) -> list[int] | None:
        """Return a text's ids, or at least the first `enough`; None if two pieces do not join."""
        backend = self._backend()
        places = _Places(self, text)
        found: list[int] = []
        same: dict[int, int] = {}  # equal ids share one object
        due: int | None = None  # after a seam, the id with which the next piece must begin
        start = 0
        while start < len(text) and (enough is None or len(found) < enough):
            end, run = places.next(start)
            ids = backend.encode_batch_fast([text[start:end]], add_special_tokens=False)[0].ids
            if due is not None and due != ids[0]:
                return None
            due = None
            if run is not None:
                kept, length = self._seam(backend, ids, run)
                if kept == 0:
                    return None
                due = ids[kept]
                del ids[kept:]
                end -= length
            found.extend(map(same.setdefault, ids, ids))
            start = end
        return found

    def _seam(self, backend: Tokenizer, ids: list[int], run: Run) -> tuple[int, int]:
        """Return the number of tokens before the seam and of characters after it; (0, 0) if there is none."""
        size = 0  # number of bytes: each character of a byte-level token stands for one
        for kept in range(len(ids) - 1, 0, -1):
            size += len(backend.id_to_token(ids[kept]) or "")
            length, odd = divmod(size, run.width)
            if length >= self.margin - 1:
                break
            if length >= self.margin // 2 and not odd:
                return kept, length
        return 0, 0

    def _backend(self) -> Tokenizer:
        """Return the Rust tokenizer, configured as the tokenizer's own call configures it."""
        tokenizer = self._tokenizer
        backend: Tokenizer = tokenizer._tokenizer
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != tokenizer.split_special_tokens:
            backend.encode_special_tokens = tokenizer.split_special_tokens
        return backend


class _Places:
    def __init__(self, cutter: Cutter, text: str) -> None:
        self._cutter = cutter
        self._text = text
        self._spaces_end = 0

    def next(self, start: int) -> tuple[int, Run | None]:
        """Return where the piece that begins at `start` ends, and the run in which it ends, if any."""
        text, block = self._text, 2 * self._cutter.margin
        for at in range(start + PIECE, len(text), PIECE):
            if self._cutter.cut and (found := self._cutter.cut.search(text, at, at + PIECE)):
                return found.start(), None
            for begin in range(at, min(at + PIECE, len(text) - block), block):
                run = self._run(begin, begin + block)
                if run is not None:
                    return begin + self._cutter.margin, run
        return len(text), None

    def _run(self, begin: int, end: int) -> Run | None:
        for run in self._cutter.runs:
            if run.inside.fullmatch(self._text, begin, end):
                return run if run is not SPACES or self._text_follows(end) else None
        return None

    def _text_follows(self, at: int) -> bool:
        """Return whether text follows the spaces at `at`: a newline would take all spaces before it."""
        if at > self._spaces_end:
            run = SPACES.inside.match(self._text, at)
            self._spaces_end = run.end() if run else at
        return not self._text[self._spaces_end : self._spaces_end + 1].isspace()


@functools.lru_cache(maxsize=32)
def cutter_of(tokenizer: Any) -> Cutter | None:
    """Return a cutter for this tokenizer, or None if we do not know where texts may be cut."""
    kind, backend = type(tokenizer), getattr(tokenizer, "_tokenizer", None)
    if not isinstance(tokenizer, TokenizersBackend) or not isinstance(backend, Tokenizer):
        return None
    calls_itself = kind.__call__ is PreTrainedTokenizerBase.__call__ or isinstance(
        tokenizer, ThreadSafeHFTokenizerMixin
    )
    if not calls_itself or kind._encode_plus is not TokenizersBackend._encode_plus:
        return None
    if getattr(tokenizer, "max_chars_per_token", LONGEST_TOKEN + 1) > LONGEST_TOKEN:
        return None
    added = backend.get_added_tokens_decoder().values()
    if any(one.lstrip or one.rstrip or one.single_word for one in added):
        return None
    if not _is_byte_level_bpe(backend) or not _keeps_ascii(backend):
        return None
    pattern, frame = _pattern(backend), _frame(backend)
    return Cutter(tokenizer, pattern, frame) if pattern is not None and frame is not None else None


def _pattern(backend: Tokenizer) -> str | None:
    state = _state(backend.pre_tokenizer)
    *splits, last = state.get("pretokenizers", [state])
    if last.get("type") != "ByteLevel" or last["add_prefix_space"]:
        return None
    found = [GPT2] if last["use_regex"] else []
    for split in splits:
        if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
            return None
        found.append(split["pattern"].get("Regex"))
    return found[0] if len(found) == 1 and found[0] in PATTERNS else None


def _is_byte_level_bpe(backend: Tokenizer) -> bool:
    """Return whether the model is BPE with a token for every byte, so its tokens add up to the text."""
    model = backend.model
    return (
        isinstance(model, models.BPE)
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
        and all(model.token_to_id(byte) is not None for byte in ByteLevel.alphabet())
    )


def _keeps_ascii(backend: Tokenizer) -> bool:
    state = _state(backend.normalizer)
    return all(one.get("type", "NFC") == "NFC" for one in state.get("normalizers", [state]))


def _frame(backend: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the ids put before and after a text, or None if the text's own ids change too."""
    backend.no_truncation()
    backend.no_padding()
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a").ids
    at = [one for one in range(len(whole)) if whole[one : one + len(bare)] == bare]
    if len(at) != 1 or len(whole) - len(bare) != backend.num_special_tokens_to_add(False):
        return None
    return whole[: at[0]], whole[at[0] + len(bare) :]


def _added_texts(backend: Tokenizer) -> set[str]:
    texts = {one.content for one in backend.get_added_tokens_decoder().values()}
    return texts | {unicodedata.normalize("NFC", text) for text in texts}


def _state(part: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(part.__getstate__()) if part is not None else {}
    return found
