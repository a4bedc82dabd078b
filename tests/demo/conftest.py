"""Makes the training code of `scripts/` importable, and loads the demo checkpoint once."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raybatch.demo import CHECKPOINT_PATH

sys.path.append(str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT_PATH, padding_side="left")


@pytest.fixture(scope="session")
def model():
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT_PATH, dtype=torch.float32).eval()
