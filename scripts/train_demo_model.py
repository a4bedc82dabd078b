"""Train the demo model on one CPU thread and write `raybatch/demo/checkpoint`.

Run from the repository's root, with the package importable: `python scripts/train_demo_model.py`.
"""

import argparse
import logging
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from demo_training.batches import Batch, BatchShape, make_batch
from demo_training.export import measure_accuracy, read_weights, write_checkpoint
from demo_training.model import DemoModel, ModelShape
from demo_training.record import TrainingRecord, write_record
from demo_training.tokenizer import train_tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

logger = logging.getLogger("train_demo_model")

CHECKPOINT = Path(__file__).parents[1] / "raybatch" / "demo" / "checkpoint"
PEAK_LR = 2e-3
WARMUP_STEPS = 40
# share of the run at the peak rate; the rest is a cosine to nearly zero
FLAT_FRACTION = 0.5
BALANCE_WEIGHT = 0.01
LOG_EVERY = 25
SAVE_EVERY = 100
TOKENIZER_SEED = 0
TEST_DOCUMENTS = 110
TEST_SEED = 1_000_003

SHORT = BatchShape(num_rows=16, num_blocks=4, doc_len=64, min_facts=3, max_facts=4)
# few kinds, many keys: the kind of a fact alone does not identify it
PAIRED = replace(SHORT, num_kinds=2)
FOCUSED = BatchShape(num_rows=8, num_blocks=6, doc_len=128, min_facts=6, max_facts=8, num_kinds=2)
LONG = (
    BatchShape(num_rows=5, num_blocks=12, doc_len=224, min_facts=13, max_facts=17),
    BatchShape(num_rows=4, num_blocks=12, doc_len=304, min_facts=18, max_facts=24),
    BatchShape(num_rows=4, num_blocks=12, doc_len=400, min_facts=25, max_facts=32),
)
# the model learns copying on short documents, and choosing by key on focused ones
CURRICULUM = ((SHORT,), (PAIRED, FOCUSED), LONG)
DEFAULT_STEPS = (300, 450, 800)


class Trainer:
    """Updates the model by its optimizers: Muon for matrices, AdamW for the other parameters."""

    def __init__(self, model: DemoModel, num_steps: int) -> None:
        self.model = model
        self.num_steps = num_steps
        named = list(model.named_parameters())
        matrices = [p for name, p in named if _is_matrix(name, p)]
        others = [p for name, p in named if not _is_matrix(name, p)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=PEAK_LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]

    def step(self, batch: Batch, step: int) -> tuple[float, Tensor]:
        """Run one update.

        Args:
            batch: Documents the model has not seen.
            step: Index of the step, from 0.

        Returns:
            The loss, and which labels were right before the update.
        """
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, balance = self.model(batch.ids, batch.positions, batch.masks, batch.chosen)
        loss = F.cross_entropy(logits.float(), batch.labels)
        (loss + BALANCE_WEIGHT * balance).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LR * _schedule(step, self.num_steps)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item(), logits.detach().argmax(-1) == batch.labels


class Progress:
    """Logs loss and accuracy by kind; batches are fresh, so both are on unseen documents."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._start = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._num_pairs: Counter[str] = Counter()
        self._right: Counter[str] = Counter()

    def add(self, batch: Batch, loss: float, is_right: Tensor) -> None:
        """Count one step; an answer is right when all its tokens are."""
        self.num_tokens += batch.ids.numel()
        self._losses.append(loss)
        wrong_pairs = set(batch.pair_ids[~is_right].tolist())
        self._num_pairs.update(batch.kinds)
        self._right.update(k for i, k in enumerate(batch.kinds) if i not in wrong_pairs)

    def log(self, step: int) -> None:
        """Report the steps since the last call."""
        kinds = " ".join(
            f"{kind}={100 * self._right[kind] / num:.1f}"
            for kind, num in sorted(self._num_pairs.items())
        )
        seconds = time.monotonic() - self._start
        loss = sum(self._losses) / len(self._losses)
        accuracy = 100 * self._right.total() / self._num_pairs.total()
        logger.info(
            "step %d, %.0f s: loss %.4f, right %.1f %%: %s", step, seconds, loss, accuracy, kinds
        )
        self._clear()


def train(
    model: DemoModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    steps: Sequence[int],
    out: Path,
) -> int:
    """Train the model in place through the curriculum, saving the checkpoint at intervals.

    Returns:
        The number of tokens seen.
    """
    rng = random.Random(seed)
    plan = [
        shapes[i % len(shapes)]
        for shapes, num_steps in zip(CURRICULUM, steps, strict=True)
        for i in range(num_steps)
    ]
    trainer, progress = Trainer(model, len(plan)), Progress()
    for layer in model.layers:
        layer.attend = torch.compile(layer.attend, dynamic=False)
    for step, shape in enumerate(plan):
        batch = make_batch(tokenizer, rng, shape)
        progress.add(batch, *trainer.step(batch, step))
        if (step + 1) % LOG_EVERY == 0 or step + 1 == len(plan):
            progress.log(step + 1)
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == len(plan):
            write_checkpoint(model, tokenizer, out)
    return progress.num_tokens


def main() -> None:
    """Train, export, measure, and write the record."""
    args = _parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    start = time.monotonic()
    shape = ModelShape()
    tokenizer = train_tokenizer(shape.max_position_embeddings, TOKENIZER_SEED)
    model = DemoModel(shape)
    model.init_embeddings(tokenizer)
    if args.start:
        read_weights(model, args.start)
    num_tokens = train(model, tokenizer, seed=args.seed, steps=args.steps, out=args.out)
    seconds = time.monotonic() - start
    logger.info("trained in %.0f s; measuring", seconds)
    accuracy = measure_accuracy(args.out, num_documents=TEST_DOCUMENTS, seed=TEST_SEED)
    record = TrainingRecord(
        arguments=tuple(sys.argv[1:]),
        seconds=seconds,
        num_tokens=num_tokens,
        num_parameters=sum(p.numel() for p in model.parameters()),
        seed=args.seed,
        test_seed=TEST_SEED,
        accuracy=accuracy,
    )
    write_record(args.out / "TRAINING.md", record)
    logger.info("right: %.2f %%", 100 * accuracy.fraction)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=CHECKPOINT, help="folder of the checkpoint")
    parser.add_argument("--start", type=Path, help="checkpoint to start from")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=3,
        default=DEFAULT_STEPS,
        metavar=("SHORT", "FOCUSED", "LONG"),
        help="steps on documents of each kind",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and documents")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Return whether Muon trains a parameter: not embeddings, norms and routers."""
    is_router = name.endswith("mlp.gate.weight")
    return parameter.dim() == 2 and not is_router and "embed_tokens" not in name


def _schedule(step: int, num_steps: int) -> float:
    """Compute the learning rate as a share of its peak: warm-up, flat, cosine."""
    done = max(0.0, step / num_steps - FLAT_FRACTION) / (1 - FLAT_FRACTION)
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))
    return min(1.0, (step + 1) / WARMUP_STEPS) * cosine


if __name__ == "__main__":
    main()
