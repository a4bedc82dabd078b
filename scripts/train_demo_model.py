"""Train the demo model and write `raybatch/demo/checkpoint`: one command, one CPU thread.

Run from the repository's root: `python scripts/train_demo_model.py`.
"""

import argparse
import logging
import math
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from demo_training.batches import Batch, BatchShape, make_batch
from demo_training.model import DemoModel, ModelShape
from demo_training.tokenizer import train_tokenizer
from torch.nn import functional as F

logger = logging.getLogger("train_demo_model")

CHECKPOINT = Path(__file__).parents[1] / "raybatch" / "demo" / "checkpoint"
@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    num_steps: int
    shapes: tuple[BatchShape, ...]

SHORT = BatchShape(num_rows=24, num_blocks=4, doc_len=64, min_facts=3, max_facts=4)
MIDDLE = BatchShape(num_rows=12, num_blocks=6, doc_len=144, min_facts=7, max_facts=10)
LONG = (
    BatchShape(num_rows=9, num_blocks=8, doc_len=224, min_facts=13, max_facts=17),
    BatchShape(num_rows=8, num_blocks=8, doc_len=304, min_facts=18, max_facts=24),
    BatchShape(num_rows=7, num_blocks=8, doc_len=400, min_facts=25, max_facts=32),
)


def make_optimizers(model, lr, muon):
    hidden = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and not n.endswith("mlp.gate.weight")]
    ids = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in ids]
    if muon:
        return [torch.optim.Muon(hidden, lr=lr, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
                torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    return [torch.optim.AdamW([{"params": hidden, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}], lr=lr, betas=(0.9, 0.98), fused=True)]


def score(logits, batch):
    right = logits.argmax(-1) == batch.labels
    ok = torch.ones(len(batch.kinds), dtype=torch.bool)
    ok[batch.pair_ids[~right]] = False
    return Counter(batch.kinds), Counter(k for k, o in zip(batch.kinds, ok.tolist()) if o)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--muon", type=int, default=1)
    ap.add_argument("--steps", type=int, nargs=3, default=(300, 0, 0))
    ap.add_argument("--compile", type=int, default=1)
    ap.add_argument("--out", default="")
    ap.add_argument("--init", default="")
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tok = train_tokenizer(2048, 0)
    model = DemoModel(ModelShape(vocab_size=1920))
    model.init_embeddings(tok)
    if args.init: model.load_state_dict(torch.load(args.init))
    opts = make_optimizers(model, args.lr, args.muon)
    rng = random.Random(1)
    stages = [(SHORT,)] * args.steps[0] + [(MIDDLE,)] * args.steps[1] + [LONG] * args.steps[2]
    if args.compile:
        for l in model.layers:
            l.attend = torch.compile(l.attend, dynamic=False)
    total, right = Counter(), Counter()
    t0 = time.time(); losses = []; td = 0
    for step, shapes in enumerate(stages):
        t = time.time()
        b = make_batch(tok, rng, shapes[step % len(shapes)])
        td += time.time() - t
        frac = step / len(stages)
        f = min(1, (step + 1) / 40) * (1 if frac < 0.4 else 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (frac - 0.4) / 0.6)))
        for o in opts:
            for g in o.param_groups: g["lr"] = args.lr * f
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, bal = model(b.ids, b.positions, b.masks, b.chosen)
        loss = F.cross_entropy(logits.float(), b.labels)
        (loss + 0.01 * bal).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in opts: o.step(); o.zero_grad()
        losses.append(loss.item())
        n, r = score(logits, b); total += n; right += r
        if (step + 1) % 25 == 0:
            acc = " ".join(f"{k[:5]}={100 * right[k] / total[k]:.0f}" for k in sorted(total))
            print(f"{step + 1} t={time.time() - t0:.0f} data={td:.0f} tok={b.ids.numel()} loss={sum(losses) / len(losses):.3f} bal={bal.item():.2f} acc={100 * right.total() / total.total():.1f} {acc}", flush=True)
            total.clear(); right.clear(); losses = []
        if args.out and (step + 1) % 200 == 0: torch.save({k.replace("._orig_mod", ""): v for k, v in model.state_dict().items()}, args.out)
    if args.out: torch.save({k.replace("._orig_mod", ""): v for k, v in model.state_dict().items()}, args.out)

main()
