"""The door for mechanisms of an engine: who loads which, and what is left without them."""

import json
import subprocess
import sys

import pytest

from raybatch.backends.native import create, extensions_of, placement_of
from raybatch.config import EngineConfig
from raybatch.errors import MissingDependency
from raybatch.records.share import ShareLink, ShareRank
from tests.backends.test_native_backend import run

OPTIONS = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": 1 << 20, "kv_offload": False}
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7]]

HIDING = """
import importlib, json, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("raybatch_extensions"):
            raise ImportError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
import raybatch.engine
for module in pkgutil.walk_packages(raybatch.engine.__path__, "raybatch.engine."):
    importlib.import_module(module.name)
from tests.engine.test_extensions import tokens_of
print(json.dumps(tokens_of(sys.argv[1])))
print(*(name for name in sys.modules if name.startswith("raybatch_extensions")))
"""


def tokens_of(folder, **options):
    """Return the tokens of an engine, greedily."""
    backend = create(str(folder), EngineConfig(**OPTIONS), **options)
    made = run(backend, PROMPTS, temperature=0.0, ignore_eos=True)
    backend.close()
    return [made[i, 0].token_ids.tolist() for i in range(len(PROMPTS))]


@pytest.mark.usefixtures("shared_cache")
def test_an_engine_that_is_asked_for_no_extension_runs_without_raybatch_extensions(tiny_checkpoint):
    folder = tiny_checkpoint("llama")
    done = subprocess.run(
        [sys.executable, "-c", HIDING, str(folder)], capture_output=True, text=True, timeout=100
    )
    assert "" == done.stderr.partition("Traceback")[2]
    tokens, loaded = done.stdout.splitlines()
    assert "" == loaded
    assert tokens_of(folder, may_form_tp_groups=True) == json.loads(tokens)


def test_options_decide_which_extensions_an_engine_has(tiny_checkpoint):
    for shares in (False, True):
        assert shares == len(extensions_of(shares_weights=shares, may_form_tp_groups=False))
        assert 1 + shares == len(extensions_of(shares_weights=shares, may_form_tp_groups=True))
    link, folder = ShareLink(ShareRank(0, 2), lambda text: [text]), tiny_checkpoint("llama")
    assert placement_of(None, folder, EngineConfig()) is None
    assert placement_of(link, folder, EngineConfig()) is not None


def test_without_raybatch_extensions_no_tp_group_forms_and_shared_weights_are_refused(
    tiny_checkpoint, monkeypatch
):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: ())
    assert () == extensions_of(shares_weights=False, may_form_tp_groups=True)
    link, folder = ShareLink(ShareRank(0, 2), lambda text: [text]), tiny_checkpoint("llama")
    with pytest.raises(MissingDependency, match=r"raybatch-extensions.*\./raybatch-extensions"):
        placement_of(link, folder, EngineConfig())


def test_an_engine_tells_which_tp_groups_it_may_be_in_where_it_may(tiny_checkpoint):
    config, folder = EngineConfig(**OPTIONS), str(tiny_checkpoint("llama"))
    alone, one_of_some = create(folder, config), create(folder, config, may_form_tp_groups=True)
    assert {} == alone.extensions
    assert ["tp_groups"] == list(one_of_some.extensions)
    assert () == alone.capacity().tp_sizes
    assert 2 in one_of_some.capacity().tp_sizes
