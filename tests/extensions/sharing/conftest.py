"""Models and meeting places of tests of rounds."""

import time

import pytest

from tests.engine.tiny_models import build
from tests.extensions.sharing.models import NUM_LAYERS
from tests.extensions.sharing.ranks import ThreadStore


@pytest.fixture(scope="module")
def store():
    return ThreadStore()


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def get(variant, num_layers=NUM_LAYERS):
        if (variant, num_layers) not in made:
            folder = tmp_path_factory.mktemp(variant)
            build(variant, num_hidden_layers=num_layers).save_pretrained(folder)
            made[variant, num_layers] = folder
        return made[variant, num_layers]

    return get


@pytest.fixture(autouse=True)
def _shared_cache(shared_cache):
    pass


@pytest.fixture(autouse=True)
def _waits_asleep(monkeypatch):
    """Ranks are threads here: one that yields its core would keep the interpreter."""
    monkeypatch.setattr("os.sched_yield", lambda: time.sleep(2e-5), raising=False)


@pytest.fixture(scope="package")
def share_model(tmp_path_factory):
    """The folder of the model whose feed-forward weights groups of replicas share."""
    folder = tmp_path_factory.mktemp("shared")
    build("qwen3", num_hidden_layers=5).save_pretrained(folder)
    return folder
