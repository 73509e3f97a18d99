"""Train the demo model's drafters, one phase after the other; see README.md beside this file.

    python deploy/demo-model/draft.py outputs
    python deploy/demo-model/draft.py train --head mtp --minutes 25
    python deploy/demo-model/draft.py train --head eagle3 --minutes 20
    python deploy/demo-model/draft.py export --head mtp      # and --head eagle3
    python deploy/demo-model/draft.py eval

`outputs` and `eval` need vLLM; working files go to .work/ beside this file, and both `outputs` and `train` go on where
they were when started again.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
from draft_folders import EAGLE3, MTP, WEIGHTS, write_head
from drafting import DraftLoss, load_trunk, new_head
from heads import HEADS
from outputs import load_shards, make_shards
from train import WORK, add_schedule, schedule_of
from trainer import Batches, Trainer, TrainSettings

OUTPUTS = WORK / "outputs"
# Nearly every document is shorter, and each length is one more compilation.
WINDOW = 512
TARGETS = {"mtp": MTP, "eagle3": EAGLE3}

logger = logging.getLogger("demo-model")


def checkpoint_of(kind: str) -> Path:
    return WORK / f"{kind}.pt"


def phase_outputs(options: argparse.Namespace) -> None:
    """Generate the trunk's replies to prompts of the training part."""
    for tokens in make_shards(WEIGHTS, OUTPUTS, options.shards, options.seed + 1000):
        logger.info("%.2f M tokens of prompts and replies", tokens / 1e6)


def phase_train(options: argparse.Namespace) -> None:
    """Train one head until --finish-by, --minutes or --steps, whichever comes first."""
    torch.manual_seed(options.seed)
    schedule, trunk = schedule_of(options), load_trunk(WEIGHTS)
    head = new_head(options.head, trunk)
    batches = Batches({"outputs": load_shards(OUTPUTS)}, {"outputs": 1.0}, options.seed, {WINDOW: 1.0})
    settings = TrainSettings(
        checkpoint_of(options.head), options.seed, options.threads, micro_batches=1, checkpoint_every_s=120.0
    )
    Trainer(head, DraftLoss(head, trunk), batches, schedule, settings).run_to_the_end()


def phase_export(options: argparse.Namespace) -> None:
    """Write the head of the last checkpoint as a folder for vLLM."""
    head = new_head(options.head, load_trunk(WEIGHTS))
    state = torch.load(checkpoint_of(options.head), weights_only=True)
    head.load_state_dict(state["model"])
    target = options.out or TARGETS[options.head]
    write_head(options.head, head.tensors(), target)
    logger.info("step %d exported to %s", state["step"], target)


def phase_eval(options: argparse.Namespace) -> None:
    """Measure in vLLM which share of the drafts the trunk accepts."""
    from acceptance import report

    for line in report(options.heads, options.prompts, options.lengths):
        print(line, flush=True)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root.add_argument("--seed", type=int, default=0, help="names the data and the run (default: 0)")
    root.add_argument("--threads", type=int, default=2, help="threads at most (default: 2)")
    phases = root.add_subparsers(dest="phase", required=True)

    outputs = phases.add_parser("outputs", help="let the trunk answer the prompts to learn from")
    outputs.add_argument("--shards", type=int, default=11, help="shards of 4096 prompts each (default: 11)")
    outputs.set_defaults(run=phase_outputs)

    train = phases.add_parser("train", help="train, or go on training, a head")
    train.add_argument("--head", choices=HEADS, required=True)
    add_schedule(train, minutes=25.0)
    train.set_defaults(run=phase_train)

    export = phases.add_parser("export", help="write the last checkpoint of a head")
    export.add_argument("--head", choices=HEADS, required=True)
    export.add_argument("--out", type=Path, help="the folder (default: weights-mtp/ or eagle3/)")
    export.set_defaults(run=phase_export)

    evaluated = phases.add_parser("eval", help="accepted lengths on held-out prompts, and equal outputs")
    evaluated.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS), help="which drafters")
    evaluated.add_argument("--prompts", type=int, default=64, help="prompts of each kind (default: 64)")
    evaluated.add_argument("--lengths", type=int, nargs="+", default=[1, 2, 3, 4], help="draft lengths")
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
