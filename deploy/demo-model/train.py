"""Train the demo model and its drafters; see README.md in this folder.

python deploy/demo-model/train.py trunk --minutes 100
python deploy/demo-model/train.py replies                      # generates the trunk's replies, in .work/
python deploy/demo-model/train.py drafter mtp --minutes 40     # or eagle3
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from pathlib import Path

import numpy as np
import torch
from chat import rendered
from corpus import SHARES, Tokens, library_texts, training_tokens
from dialogues import stream
from drafting import DraftLoss, load_trunk, new_head
from heads import HEADS
from model import HERE, TARGETS, WEIGHTS, NextToken, new_model, write_drafter, write_trunk
from replies import trunk_replies
from tokenizer import train_tokenizer
from trainer import Batches, Schedule, train

REPLIES = HERE / ".work" / "replies.npz"
# Nearly every reply is shorter, and each further length would be compiled.
DRAFT_WINDOW = 512

logger = logging.getLogger("demo-model")


def trunk(options: argparse.Namespace) -> None:
    """Train the tokenizer on dialogues and library text, then the model."""
    texts = (rendered(dialogue) for _, dialogue in itertools.islice(stream(options.seed), 30_000))
    code = itertools.islice(library_texts("code"), 250)
    prose = itertools.islice(library_texts("prose"), 3_000)
    tokenizer = train_tokenizer(itertools.chain(texts, code, prose))
    tokens = training_tokens(tokenizer, options.dialogues, options.seed)
    for domain, found in tokens.items():
        logger.info("%s: %.2f M tokens", domain, len(found.ids) / 1e6)
    model = new_model(tokenizer)
    schedule, batches = Schedule(60 * options.minutes, options.steps), Batches(tokens, SHARES, options.seed)
    train(model, NextToken(model), batches, schedule, 2)
    write_trunk(model, tokenizer, options.out or WEIGHTS)


def replies(options: argparse.Namespace) -> None:
    """Have the trunk answer prompts that it was not trained on."""
    tokens = trunk_replies(WEIGHTS, options.prompts, options.seed + 1000)
    REPLIES.parent.mkdir(exist_ok=True)
    np.savez(REPLIES, ids=tokens.ids, weights=tokens.weights, starts=tokens.starts)
    logger.info("%.2f M tokens of prompts and replies", len(tokens.ids) / 1e6)


def drafter(options: argparse.Namespace) -> None:
    """Train one head on the trunk's replies."""
    model = load_trunk(WEIGHTS)
    head = new_head(options.kind, model)
    with np.load(REPLIES) as saved:
        tokens = Tokens(saved["ids"], saved["weights"], saved["starts"])
    batches = Batches({"replies": tokens}, {"replies": 1.0}, options.seed, {DRAFT_WINDOW: 1.0})
    train(head, DraftLoss(head, model), batches, Schedule(60 * options.minutes, options.steps), 1)
    tensors = {f"{head.prefix}{name}": value for name, value in head.state_dict().items()}
    write_drafter(options.kind, tensors, options.out or TARGETS[options.kind])


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root.add_argument("--seed", type=int, default=0, help="of the data and the run (default: 0)")
    root.add_argument("--threads", type=int, default=2, help="(default: 2)")
    phases = root.add_subparsers(required=True)
    added = {}
    for phase in (trunk, replies, drafter):
        added[phase] = phases.add_parser(phase.__name__, help=phase.__doc__)
        added[phase].set_defaults(run=phase)
    added[trunk].add_argument("--dialogues", type=int, default=350_000, help="(default: 350000)")
    added[replies].add_argument("--prompts", type=int, default=45_056, help="(default: 45056)")
    added[drafter].add_argument("kind", choices=HEADS)
    for phase in (trunk, drafter):
        added[phase].add_argument("--minutes", type=float, default=100.0, help="duration (default: 100)")
        added[phase].add_argument("--steps", type=int, default=10**9, help="limit")
        added[phase].add_argument("--out", type=Path, help="folder (default: the shipped one)")
    return root


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    options.run(options)


if __name__ == "__main__":
    main()
