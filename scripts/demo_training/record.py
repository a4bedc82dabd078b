"""Writes the record of a training run: command, hardware, versions and accuracy."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from demo_training.export import Accuracy

_CPUINFO = Path("/proc/cpuinfo")
_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Settings and results of one run of the training script."""

    arguments: tuple[str, ...]
    seconds: float
    num_tokens: int
    num_parameters: int
    seed: int
    test_seed: int
    accuracy: Accuracy


def write_record(path: Path, record: TrainingRecord) -> None:
    """Write the record as Markdown."""
    asked, right = record.accuracy.asked, record.accuracy.right
    lines = [
        "# Training record of the demo model",
        "",
        f"- Command: `{' '.join(('python scripts/train_demo_model.py', *record.arguments))}`",
        f"- Time: {record.seconds:.0f} s from tokenizer to checkpoint",
        f"- Hardware: {_cpu_name()}, {os.cpu_count()} logical cores shared with other work, "
        f"{torch.get_num_threads()} thread used; CPU features: {_cpu_features()}",
        f"- Software: Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        f"- Tokens seen: {record.num_tokens:,}; parameters: {record.num_parameters:,}",
        f"- Seed: {record.seed}; every training batch is made of fresh documents",
        f"- Accuracy: {100 * record.accuracy.fraction:.2f} % of {sum(asked.values()):,} questions "
        f"over unseen documents (seed {record.test_seed})",
        "",
        "Exact match of greedy decoding to the end token, through transformers `generate` in",
        "float32 from the saved bf16 checkpoint; documents state 18 to 32 facts.",
        "",
        "| kind of question | asked | right | % |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {kind} | {num} | {right[kind]} | {100 * right[kind] / num:.1f} |"
        for kind, num in sorted(asked.items())
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _cpu_name() -> str:
    fields = (line.partition(":") for line in _cpuinfo())
    names = [value.strip() for key, _, value in fields if key.strip() == "model name"]
    return names[0] if names else platform.machine()


def _cpu_features() -> str:
    flags = next((line for line in _cpuinfo() if line.startswith("flags")), "").split()
    return ", ".join(feature for feature in _FEATURES if feature in flags) or "unknown"


def _cpuinfo() -> list[str]:
    return _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
