"""Build Baton's demo model, one phase after the other; see README.md beside this file.

    python deploy/demo-model/train.py tokenizer
    python deploy/demo-model/train.py train --minutes 100
    python deploy/demo-model/train.py export
    python deploy/demo-model/train.py eval

Working files go to .work/ beside this file; `train` goes on from its last checkpoint whenever it is started again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import time
from pathlib import Path

import torch
from chat import rendered
from corpus import DOMAIN_SHARES, DOMAINS, Tokens, dialogue_tokens, library_texts, text_tokens
from dialogues import stream
from evaluate import report
from model import NextToken, export, new_model
from schedule import Schedule, next_time_of_day
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from trainer import Batches, Trainer, TrainSettings
from transformers import Qwen2ForCausalLM

HERE = Path(__file__).resolve().parent
WORK = HERE / ".work"
TOKENIZER = WORK / "tokenizer"
CHECKPOINT = WORK / "checkpoint.pt"
WEIGHTS = HERE / "weights"

logger = logging.getLogger("demo-model")


def load_tokenizer() -> Tokenizer:
    path = TOKENIZER / "tokenizer.json"
    if not path.exists():
        sys.exit(f"{path} is missing; run `train.py tokenizer` first")
    return Tokenizer.from_file(str(path))


def phase_tokenizer(options: argparse.Namespace) -> None:
    """Learn the vocabulary from as much text of the dialogues as of the library."""
    dialogues = (rendered(d) for _, d in itertools.islice(stream(options.seed), 30_000))
    code = itertools.islice(library_texts("code", held_out=False), 250)
    prose = itertools.islice(library_texts("prose", held_out=False), 3_000)
    save_tokenizer(train_tokenizer(itertools.chain(dialogues, code, prose)), TOKENIZER)
    logger.info("tokenizer saved to %s", TOKENIZER)


def cached_tokens(tokenizer: Tokenizer, count: int, seed: int) -> dict[str, Tokens]:
    """Return the training part of every domain, encoded once and then read from .work/."""
    tokens = {}
    for domain in DOMAINS:
        path = WORK / f"{domain}.npz"
        if not path.exists():
            if domain == "dialogues":
                dialogue_tokens(tokenizer, count, seed, held_out=False).save(path)
            else:
                text_tokens(tokenizer, domain, held_out=False).save(path)
        tokens[domain] = Tokens.load(path)
        logger.info("%s: %.2f M tokens", domain, len(tokens[domain].ids) / 1e6)
    return tokens


def schedule_of(options: argparse.Namespace) -> Schedule:
    """Return a schedule from now until --finish-by, --minutes or --steps, whichever comes first."""
    now = time.time()
    finish = next_time_of_day(options.finish_by, now) if options.finish_by else now + 60 * options.minutes
    return Schedule(began_at=now, finish_at=finish, steps=options.steps, decay_share=options.decay_share)


def phase_train(options: argparse.Namespace) -> None:
    """Train until --finish-by, --minutes or --steps, whichever comes first."""
    torch.manual_seed(options.seed)
    tokenizer, schedule = load_tokenizer(), schedule_of(options)
    tokens = cached_tokens(tokenizer, options.dialogues, options.seed)
    settings = TrainSettings(CHECKPOINT, options.seed, options.threads)
    model = new_model(tokenizer)
    batches = Batches(tokens, DOMAIN_SHARES, options.seed)
    Trainer(model, NextToken(model), batches, schedule, settings).run_to_the_end()


def load_model(tokenizer: Tokenizer) -> Qwen2ForCausalLM:
    """Load the model of the last checkpoint, or make a new one."""
    model = new_model(tokenizer)
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(state["model"])
        logger.info("checkpoint of step %d, %.1f M tokens", state["step"], state["tokens"] / 1e6)
    return model


def phase_export(options: argparse.Namespace) -> None:
    """Write the last checkpoint as a model folder."""
    export(load_model(load_tokenizer()), TOKENIZER, options.out)
    logger.info("exported to %s", options.out)


def phase_eval(options: argparse.Namespace) -> None:
    """Score a model folder on the held-out parts."""
    print(report(options.out, options.questions))


def add_schedule(train: argparse.ArgumentParser, minutes: float) -> None:
    """Add the options that `schedule_of` uses."""
    train.add_argument(
        "--minutes", type=float, default=minutes, help=f"how long to train (default: {minutes:g})"
    )
    train.add_argument("--finish-by", metavar="HH:MM", help="when to end, in UTC; instead of --minutes")
    train.add_argument("--steps", type=int, default=10**9, help="how many steps to train at most")
    train.add_argument(
        "--decay-share",
        type=float,
        default=0.35,
        help="last part of the run, in which the learning rate falls to zero (default: 0.35)",
    )


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root.add_argument("--seed", type=int, default=0, help="names the data and the run (default: 0)")
    root.add_argument(
        "--threads", type=int, default=2, help="threads at most; training leaves cores to others (default: 2)"
    )
    phases = root.add_subparsers(dest="phase", required=True)
    phases.add_parser("tokenizer", help="train the tokenizer").set_defaults(run=phase_tokenizer)

    train = phases.add_parser("train", help="train, or go on training, the model")
    add_schedule(train, minutes=100.0)
    train.add_argument(
        "--dialogues", type=int, default=350_000, help="dialogues to generate, once (default: 350000)"
    )
    train.set_defaults(run=phase_train)

    exported = phases.add_parser("export", help="write the last checkpoint as a model folder")
    exported.add_argument("--out", type=Path, default=WEIGHTS, help="the folder (default: weights/)")
    exported.set_defaults(run=phase_export)

    evaluated = phases.add_parser(
        "eval", help="held-out perplexity, exact answers and samples of a model folder"
    )
    evaluated.add_argument("--out", type=Path, default=WEIGHTS, help="the folder (default: weights/)")
    evaluated.add_argument(
        "--questions", type=int, default=200, help="questions for each domain (default: 200)"
    )
    evaluated.set_defaults(run=phase_eval)
    return root


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    options = parser().parse_args()
    torch.set_num_threads(options.threads)
    WORK.mkdir(exist_ok=True)
    options.run(options)


if __name__ == "__main__":
    main()
