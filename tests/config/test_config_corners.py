"""Options and variables at the values where a rule begins to hold."""

from pathlib import Path

import pytest

from raybatch.config import BackendConfig, EngineConfig, LimitConfig
from raybatch.config.environment import cache_dir
from raybatch.errors import ConfigError
from raybatch.rows.options import StageConfig


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "home/.cache/raybatch"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/raybatch"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/raybatch"),
        ({"XDG_CACHE_HOME": "xdg", "RAYBATCH_CACHE_DIR": "own"}, "own"),
        ({"RAYBATCH_CACHE_DIR": "~/own"}, "home/own"),
    ],
    ids=["none", "xdg", "empty", "own", "home"],
)
def test_the_nearest_variable_names_the_cache(monkeypatch, variables, folder):
    monkeypatch.setenv("HOME", "home")
    for name in ("XDG_CACHE_HOME", "RAYBATCH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Path(folder) == cache_dir()


@pytest.mark.parametrize(
    ("options", "is_compiled"),
    [
        ({"num_threads": 1}, True),
        ({"num_threads": 2}, False),
        ({"num_threads": 1, "compile_kernels": False}, False),
        ({"num_threads": 2, "compile_kernels": False}, False),
    ],
)
def test_kernels_are_compiled_where_that_is_wanted_for_one_thread(options, is_compiled):
    assert is_compiled == EngineConfig(**options).compiles_kernels


@pytest.mark.parametrize("name", ["max_wall_s", "max_tokens", "max_engine_hours", "max_error_rate"])
def test_a_limit_may_be_nothing_at_all_and_not_less(name):
    assert 0 == getattr(LimitConfig(**{name: 0}), name)
    with pytest.raises(ConfigError, match=rf"limits\.{name} must be .*0.*, got -1"):
        LimitConfig(**{name: -1})


def test_a_system_prompt_beside_query_and_document_is_refused():
    pair = {"query": "{q}", "document": "{d}", "backend": BackendConfig(kind="fake", task="score")}
    assert StageConfig(model="m", **pair).query == "{q}"
    with pytest.raises(ConfigError, match="system has no effect on query and document"):
        StageConfig(model="m", **pair, system="be brief")
