"""Profiles on disk: measured once, and again when something changed or broke."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.profile.module_profile import (
    ProfileOptions,
    load_profile,
    measured_profile,
    profile_layer,
    profile_options,
    profile_path,
)
from raybatch.engine.weights.layout import WeightForm
from raybatch.engine.weights.loading import load_weights
from raybatch.models.config import read_model_spec
from tests.engine.tiny_models import build

CPU = torch.device("cpu")
OPTIONS = ProfileOptions(attention_tokens=(1, 4), ffn_tokens=(1, 4), num_repeats=1, block_size=16)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYBATCH_CACHE_DIR", str(folder / "cache"))
        build("qwen3-moe").save_pretrained(folder)
        spec = read_model_spec(folder)
        return spec, load_weights(folder, spec, WeightForm(torch.float32), device=CPU)


@pytest.fixture(scope="module")
def profile(model):
    return profile_layer(*model, OPTIONS)


class Measure:
    """Gives a profile that was measured before, and counts."""

    def __init__(self, profile):
        self.times = 0
        self._profile = profile

    def __call__(self, *args, **options):
        self.times += 1
        return self._profile


@pytest.fixture
def measure(profile):
    return Measure(profile)


def get(model, folder, measure, options=OPTIONS, **others):
    return measured_profile(*model, options, folder=folder, measure=measure, **others)


def test_a_profile_is_measured_once_and_then_read_as_it_was(model, tmp_path, measure):
    first, was_read = get(model, tmp_path, measure)
    assert not was_read
    assert (first, True) == get(model, tmp_path, measure)
    assert 1 == measure.times
    # no unfinished file stays beside it
    assert 1 == len(list(tmp_path.iterdir()))


def test_fresh_measures_again_and_replaces_the_file(model, tmp_path, measure):
    get(model, tmp_path, measure)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"copies_overlap": false', '"copies_overlap": true'))
    assert get(model, tmp_path, measure)[0].copies_overlap
    found, was_read = get(model, tmp_path, measure, fresh=True)
    assert (False, False, 2) == (was_read, found.copies_overlap, measure.times)
    assert not load_profile(path).copies_overlap


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: text.replace('"seconds"', '"second"'),
        lambda text: text.replace('"num_experts": 8', '"num_experts": 0'),
        lambda text: json.dumps({**json.loads(text), "attention": []}),
    ],
    ids=["cut", "empty", "list", "unknown-field", "impossible-shape", "nothing-measured"],
)
def test_a_damaged_profile_is_measured_again_with_a_warning(
    model, tmp_path, measure, damage, caplog
):
    first, _ = get(model, tmp_path, measure)
    (path,) = tmp_path.iterdir()
    path.write_text(damage(path.read_text()))
    with caplog.at_level(logging.WARNING):
        found, was_read = get(model, tmp_path, measure)
    assert (False, 2, first.model) == (was_read, measure.times, found.model)
    assert "measuring again" in caplog.text
    assert found == load_profile(path)


def test_a_folder_that_cannot_be_written_costs_only_time(model, tmp_path, measure, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    with caplog.at_level(logging.WARNING):
        assert not get(model, blocked, measure)[1]
        assert not get(model, blocked, measure)[1]
    assert "could not cache the profile" in caplog.text


def test_what_an_engine_keeps_as_bytes_is_measured_as_bytes():
    options = profile_options(EngineConfig(quantization="int8", kv_cache_dtype="fp8"))
    assert ("int8", "fp8") == (options.quantization, options.kv_cache_dtype)
    assert 3 == profile_options(EngineConfig(num_threads=3)).num_threads


def test_what_decides_the_speed_of_a_layer_has_a_file_of_its_own(model, tmp_path):
    spec, _ = model

    def name(spec=spec, dtype=torch.float32, options=OPTIONS):
        return profile_path(spec, dtype, CPU, options, folder=tmp_path).name

    others = [
        name(spec=replace(spec, moe=replace(spec.moe, top_k=2))),
        name(spec=replace(spec, num_layers=4)),
        name(dtype=torch.bfloat16),
        name(options=replace(OPTIONS, num_repeats=2)),
        name(options=replace(OPTIONS, quantization="int8")),
        name(options=replace(OPTIONS, num_threads=2)),
    ]
    assert len(others) + 1 == len({name(), *others})
    assert name() == name()


def test_profiles_lie_below_the_cache_folder(model, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path))
    path = profile_path(model[0], torch.float32, CPU, OPTIONS)
    assert tmp_path / "batch-plans" == path.parent
