"""A kind of backend is one record: what is asked of it by name, and that one can be added."""

import dataclasses

import numpy as np
import pytest

from raybatch.backends import registry
from raybatch.backends.base import BackendType
from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.cost_cache import cost_model_path
from raybatch.backends.fake import FakeBackend, FakeOptions
from raybatch.backends.registry import BACKENDS, create_backend, type_of
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import ConfigError, MissingDependency
from raybatch.planning.fingerprint import backend_kind, fingerprint
from raybatch.records.types import Request, Sampling
from raybatch.rows.options import build_stage_config

FACTS = [
    field.name for field in dataclasses.fields(BackendType) if str(field.type).startswith("bool")
]


def test_a_kind_that_is_not_decided_promises_nothing_that_one_of_its_candidates_lacks():
    undecided, native, vllm = (type_of(BackendConfig(kind=k)) for k in ("auto", "native", "vllm"))
    for name in FACTS:
        assert getattr(undecided, name) <= min(getattr(native, name), getattr(vllm, name))


def test_an_unknown_kind_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"must be one of .*, got 'vlm' \(did you mean 'vllm'\?\)"
    ):
        build_stage_config("demo", {"backend": "vlm"}, where="stage")


@pytest.fixture
def echo(monkeypatch):
    """A backend that somebody has added; its engines have two GPUs and parse calls."""

    def check(backend, engine):
        if set(backend.options) - {"voice"}:
            raise ConfigError("echo takes voice alone")

    added = BackendType(
        kind="echo",
        create=lambda start: FakeBackend(FakeOptions(), start.backend.task),
        max_model_len=lambda *_: 512,
        check=check,
        answering=lambda options, model: {"voice": options.get("voice"), "model": model},
        parsed_columns=lambda *_: ("tool_calls",),
        num_gpus=lambda *_: 2,
        has_weights=False,
        refuses_native_options=True,
    )
    monkeypatch.setattr(registry, "BACKENDS", {**BACKENDS, "echo": added})
    return BackendConfig(kind="echo", options={"voice": "low"})


def test_a_backend_is_added_by_one_record(echo):
    stage = build_stage_config("demo", {"backend": echo, "prompt": "{text}"}, where="stage")
    assert "tool_calls" in [field.name for field in stage.output.arrow()]
    found = fingerprint(stage, stage.output.arrow())
    assert found["backend"] == '{"kind": "echo", "options": {"model": "demo", "voice": "low"}}'
    assert backend_kind(found) == "echo"
    assert gpus_of_engine(echo, EngineConfig()) == 2
    assert type_of(echo).max_model_len(echo, EngineConfig(), None) == 512
    backend = create_backend("demo", echo, EngineConfig())
    prompt = np.array([1, 2, 3], np.int32)
    request = Request(request_id=0, row_id="a", prompt_token_ids=prompt, sampling=Sampling())
    backend.submit([request])
    assert backend.num_unfinished() == 1
    assert cost_model_path("demo", echo, EngineConfig()) != cost_model_path(
        "demo", BackendConfig(kind="native"), EngineConfig()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": {"kind": "echo", "options": {"pitch": 1}}}, "echo takes voice alone"),
        ({"backend": "echo", "engine": {"speculative_tokens": 4}}, "not of the echo backend"),
        ({"backend": "echo", "task": "embed"}, "the echo backend generates text; task 'embed'"),
        ({"backend": "echo", "images": "column"}, "the echo backend only reads text"),
    ],
)
def test_what_an_added_backend_lacks_is_refused_by_its_name(echo, options, message):
    with pytest.raises(ConfigError, match=message):
        build_stage_config("demo", {"prompt": "{text}", **options}, where="stage")


def test_a_backend_without_its_package_says_how_to_get_it(echo, monkeypatch):
    added = dataclasses.replace(
        type_of(echo), package="echo_engine", missing=lambda: "pip install echo"
    )
    monkeypatch.setattr(registry, "BACKENDS", {**BACKENDS, "echo": added})
    with pytest.raises(MissingDependency, match="pip install echo"):
        create_backend("demo", echo, EngineConfig())
