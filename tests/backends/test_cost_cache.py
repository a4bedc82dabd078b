"""Cost models on disk: measured once, and again when something changed or broke."""

import json
import logging
import shutil
from dataclasses import replace

import pytest

from raybatch.backends.cost_cache import cost_model_path, load_cost_model, load_or_measure
from raybatch.config import BackendConfig, EngineConfig
from raybatch.errors import MeasureError
from tests.backends.test_calibrate import FAST
from tests.backends.timed_backend import TimedBackend

NATIVE, ENGINE = BackendConfig(kind="native"), EngineConfig(device="cpu")


# of a backend of the factory below
START_S = 2.5


class Factory:
    """Makes timed backends, each of which takes a while to start, and counts them."""

    def __init__(self, **options):
        self.made = []
        self._options = options

    def __call__(self, model, backend, engine, *, num_engines_on_host):
        self.made.append(TimedBackend(FAST, **self._options))
        return self.made[-1]

    def clock(self):
        """Return a clock that begins at 0 with the next backend."""
        num_before = len(self.made)
        return lambda: START_S + self.made[-1].now if len(self.made) > num_before else 0.0


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 300}')
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


@pytest.fixture
def measure(tmp_path, checkpoint):
    def call(factory, cpu_share=1.0):
        clock = factory.clock()
        return load_or_measure(
            str(checkpoint),
            NATIVE,
            ENGINE,
            folder=tmp_path / "cache",
            clock=clock,
            cpu_clock=lambda: cpu_share * clock(),
            create=factory,
        )

    return call


def path_of(model, backend=NATIVE, engine=ENGINE, **options):
    return cost_model_path(str(model), backend, engine, **options).name


def test_options_that_change_speed_have_files_of_their_own_and_others_have_none(model):
    known = path_of(model)
    for other in ({"quantization": "int8"}, {"kv_cache_dtype": "int8"}):
        assert path_of(model, engine=replace(ENGINE, **other)) != known
    assert path_of(model, engine=replace(ENGINE, speculative_tokens=4)) == known


def test_a_cost_model_knows_how_long_an_engine_takes_to_start(measure):
    factory = Factory()
    assert START_S == measure(factory).start_s
    assert START_S == measure(factory).start_s


def test_the_second_use_reads_what_the_first_measured(measure):
    factory = Factory()
    first = measure(factory)
    assert first == measure(factory)
    assert 1 == len(factory.made)


def test_a_message_says_that_it_measures(measure, caplog):
    with caplog.at_level(logging.INFO, "raybatch"):
        measure(Factory())
    assert "measuring step costs" in caplog.text
    assert "measured in" in caplog.text


def test_the_engine_is_closed(measure):
    factory = Factory()
    measure(factory)
    assert factory.made[0].is_closed


def test_what_a_busy_host_measured_is_used_once_with_a_warning(measure, caplog):
    factory = Factory()
    measure(factory, cpu_share=0.5)
    assert "50 % of a CPU" in caplog.text
    measure(factory)
    measure(factory)
    assert 2 == len(factory.made)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"step_s": 1}', '{"limits": {"kv": 1}}'])
def test_a_broken_file_is_measured_again_with_a_warning(measure, tmp_path, caplog, text):
    factory = Factory()
    first = measure(factory)
    (path,) = (tmp_path / "cache").iterdir()
    path.write_text(text)
    assert first == measure(factory)
    assert 2 == len(factory.made)
    assert "measuring again" in caplog.text
    assert load_cost_model(path) == first


def test_a_value_out_of_range_is_a_broken_file(measure, tmp_path):
    measure(Factory())
    (path,) = (tmp_path / "cache").iterdir()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"row_s": -1.0}))
    assert load_cost_model(path) is None


def test_nothing_but_the_model_is_left_in_the_folder(measure, tmp_path):
    measure(Factory())
    assert [".json"] == [path.suffix for path in (tmp_path / "cache").iterdir()]


def test_a_folder_that_cannot_be_written_costs_only_the_memory(tmp_path, checkpoint, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    factory = Factory()
    clock = factory.clock()
    clocks = {"clock": clock, "cpu_clock": clock}
    options = {"folder": blocked / "cache", "create": factory} | clocks
    assert load_or_measure(str(checkpoint), NATIVE, ENGINE, **options).step_s > 0
    assert "could not cache" in caplog.text


def test_a_file_that_cannot_be_put_in_place_leaves_nothing_behind(measure, tmp_path, checkpoint):
    # a folder where the file should be
    path = cost_model_path(str(checkpoint), NATIVE, ENGINE, folder=tmp_path / "cache")
    (path / "something").mkdir(parents=True)
    measure(Factory())
    assert [path.name] == [found.name for found in (tmp_path / "cache").iterdir()]


def test_a_backend_that_cannot_be_measured_is_closed(measure):
    factory = Factory(error="no memory")
    with pytest.raises(MeasureError):
        measure(factory)
    assert factory.made[0].is_closed


def test_a_backend_that_does_not_start_is_one_clear_error(checkpoint, tmp_path):
    def create(*args, **options):
        raise RuntimeError("no memory")

    with pytest.raises(MeasureError, match="could not be measured: RuntimeError: no memory"):
        load_or_measure(str(checkpoint), NATIVE, ENGINE, folder=tmp_path, create=create)


def test_a_copy_of_a_checkpoint_is_the_same_model(checkpoint, tmp_path):
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert path_of(checkpoint) == path_of(copy)


def test_other_weights_are_another_model(checkpoint):
    before = path_of(checkpoint)
    (checkpoint / "model.safetensors").write_bytes(bytes(101))
    assert before != path_of(checkpoint)


def test_hub_ids_stand_for_themselves():
    assert path_of("a/b") != path_of("a/c")


@pytest.mark.parametrize("change", [{"num_threads": 2}, {"dtype": "bfloat16"}])
def test_other_engine_options_are_measured_for_themselves(checkpoint, change):
    assert path_of(checkpoint) != path_of(checkpoint, engine=replace(ENGINE, **change))


def test_other_backends_are_measured_for_themselves(checkpoint):
    assert path_of(checkpoint) != path_of(checkpoint, backend=BackendConfig(kind="fake"))


def test_engines_that_share_a_host_are_measured_for_themselves(checkpoint):
    assert path_of(checkpoint) != path_of(checkpoint, num_engines_on_host=4)


def test_engines_with_memory_of_their_own_are_alike_however_many_there_are(checkpoint):
    engine = replace(ENGINE, kv_cache_bytes=1 << 20)
    assert path_of(checkpoint, engine=engine) == path_of(
        checkpoint, engine=engine, num_engines_on_host=4
    )


def test_what_was_measured_for_one_engine_is_not_read_for_four(tmp_path, checkpoint):
    factory = Factory()
    for num_engines in (1, 4):
        clock = factory.clock()
        load_or_measure(
            str(checkpoint),
            NATIVE,
            ENGINE,
            num_engines_on_host=num_engines,
            folder=tmp_path / "cache",
            clock=clock,
            cpu_clock=clock,
            create=factory,
        )
    assert 2 == len(factory.made)
