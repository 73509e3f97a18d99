"""Build batches for proposers from lists of tokens."""

import numpy as np

from baton.services.decode.proposers.drafting import DraftBatch

WIDTH = 256


def batch_of(texts, limits, *, names=None, prompts=None, drafted=None, width=WIDTH):
    """Return a row per text; `drafted`: how many of its last tokens are a draft model's."""
    rows = len(texts)
    # The rest of a row holds old tokens of other requests, which must not be read.
    tokens = np.full((rows, width), 7, dtype=np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    lengths = np.array([len(text) for text in texts], dtype=np.int32)
    return DraftBatch(
        request_ids=list(names or map(str, range(rows))),
        tokens=tokens,
        prompts=lengths.copy() if prompts is None else np.array(prompts, dtype=np.int32),
        settled=lengths - np.array(drafted or [0] * rows, dtype=np.int32),
        lengths=lengths,
        limits=np.array([limits] * rows if isinstance(limits, int) else limits, dtype=np.int32),
    )


def drafts_of(drafts):
    rows = zip(drafts.tokens.tolist(), drafts.counts.tolist(), strict=True)
    return [row[:count] for row, count in rows]
