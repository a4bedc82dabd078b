"""Tokenizer folders for the tests of the stages."""

from pathlib import Path

import pytest

from tests.clusters import make_data_context
from tests.stages.support import make_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a chat template."""
    return make_tokenizer(tmp_path_factory.mktemp("model") / "plain", has_chat_template=False)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template."""
    return make_tokenizer(tmp_path_factory.mktemp("model") / "chat")


@pytest.fixture(scope="session")
def bos_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that puts a token before every text."""
    folder = tmp_path_factory.mktemp("model") / "bos"
    return make_tokenizer(folder, has_chat_template=False, has_bos=True)


@pytest.fixture(scope="session", autouse=True)
def _data_context() -> None:
    make_data_context()
