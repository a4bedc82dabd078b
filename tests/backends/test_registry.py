"""A kind of backend is one record: what is asked of it by name, and that one can be added."""

import dataclasses
import tomllib
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest

from raybatch.backends import registry
from raybatch.backends.base import BackendType
from raybatch.backends.choice import gpus_of_engine
from raybatch.backends.cost_cache import cost_model_path
from raybatch.backends.fake import FakeBackend, FakeOptions
from raybatch.backends.registry import BACKENDS, create_backend, known_backends, type_of
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


def _check(backend, engine):
    if set(backend.options) - {"voice"}:
        raise ConfigError("echo takes voice alone")


# of another distribution; its engines have two GPUs and parse calls
ECHO = BackendType(
    kind="echo",
    create=lambda start: FakeBackend(FakeOptions(), start.backend.task),
    max_model_len=lambda *_: 512,
    check=_check,
    answering=lambda options, model: {"voice": options.get("voice"), "model": model},
    parsed_columns=lambda *_: ("tool_calls",),
    num_gpus=lambda *_: 2,
    has_weights=False,
    refuses_native_options=True,
)
ECHO_POINT = f"{__name__}:ECHO"


@pytest.fixture
def install(monkeypatch):
    """Return a function that makes these the backends of other distributions, by kind."""

    def add(**points):
        made = [EntryPoint(kind, place, "raybatch.backends") for kind, place in points.items()]
        monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: EntryPoints(made))

    registry._added_type.cache_clear()
    yield add
    registry._added_type.cache_clear()


@pytest.fixture
def echo(install):
    install(echo=ECHO_POINT)
    return BackendConfig(kind="echo", options={"voice": "low"})


def test_a_backend_of_another_distribution_is_loaded_when_it_is_asked_for(install, caplog):
    install(echo=ECHO_POINT, broken="no_such_package:BACKEND")
    assert type_of(BackendConfig(kind="native")) is registry.NATIVE
    assert type_of(BackendConfig(kind="echo")) is ECHO
    assert not caplog.records
    with pytest.raises(ConfigError) as refused:
        type_of(BackendConfig(kind="ecko"))
    assert str(refused.value) == (
        "backend.kind must be one of auto, native, vllm, transformers, openai, echo, fake, got "
        "'ecko' (did you mean 'echo'?)"
    )
    assert "cannot load the extension no_such_package:BACKEND" in caplog.text


def test_a_backend_of_another_distribution_replaces_none_of_the_core(install):
    install(native=ECHO_POINT)
    assert type_of(BackendConfig(kind="native")) is registry.NATIVE
    assert known_backends()["native"] is registry.NATIVE


@pytest.mark.parametrize("points", [{}, {"openai": "no_such_package:OPENAI"}], ids=["no", "broken"])
def test_a_backend_whose_distribution_is_missing_says_what_to_install(install, points, caplog):
    install(**points)
    backend = BackendConfig(kind="openai", options={"base_url": "http://localhost/v1"})
    expected = (
        "the backend 'openai' needs raybatch-openai, which is not part of the raybatch wheel; in a "
        "clone of raybatch run: pip install -e ./raybatch-openai"
    )
    with pytest.raises(MissingDependency) as on_driver:
        build_stage_config("m", {"backend": backend, "prompt": "{text}"}, where="stage")
    with pytest.raises(MissingDependency) as on_worker:
        create_backend("m", backend, EngineConfig())
    assert [str(on_driver.value), str(on_worker.value)] == [expected] * 2
    assert ("no_such_package" in caplog.text) == bool(points)
    # the next call after an installation finds it
    install(openai="raybatch_openai.endpoint:OPENAI")
    assert type_of(backend).kind == "openai"


def test_the_entry_point_of_a_backend_has_the_name_of_its_kind(install):
    path = Path(__file__).parents[2] / "raybatch-openai/pyproject.toml"
    points = tomllib.loads(path.read_text())["project"]["entry-points"]["raybatch.backends"]
    install(**points)
    assert {kind: type_of(BackendConfig(kind=kind)).kind for kind in points} == {"openai": "openai"}


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
