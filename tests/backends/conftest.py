"""Tiny checkpoints, as those of the engine's tests."""

from tests.engine.conftest import tiny_checkpoint  # noqa: F401
