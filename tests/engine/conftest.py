"""Tiny models of every supported architecture, each written once."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.tiny_models import build


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of checkpoints by the name of their variant; read only."""
    root = tmp_path_factory.mktemp("tiny-models")

    @functools.cache
    def path_of(variant: str) -> Path:
        build(variant).save_pretrained(root / variant)
        return root / variant

    return path_of
