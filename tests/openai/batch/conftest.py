"""A model folder of the fake backend with a chat template."""

from pathlib import Path

import pytest

from tests.stages.support import make_tokenizer


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model") / "chat")
