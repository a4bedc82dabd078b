"""A small task, its dataset and a model trained on it, for trying the library anywhere."""

from pathlib import Path

__all__ = ["CHECKPOINT_PATH"]

# the trained model, in Hugging Face format
CHECKPOINT_PATH = Path(__file__).with_name("checkpoint")
