import logging
from threading import Thread

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.loading import loaded_model
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.profile.host_times import shapes_for_torch
from raybatch.kernels.native.linears import compiled_linears

SLOW, FAST, SMALL = (512, 256), (256, 512), (64, 32)


@pytest.fixture
def ops():
    found = compiled_linears()
    if found is None:
        pytest.skip("no C compiler here")
    return found


def table(ratios, measured):
    def measure(shape, ops):
        measured.append(shape)
        return ratios[shape]

    return measure


def test_shapes_that_torch_computes_faster_are_returned_and_logged(ops, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    measure = table({SLOW: (0.5, 0.9, 1.6, 1.6), FAST: (2.0, 0.5, 0.5, 0.5)}, [])
    found = shapes_for_torch([SLOW, FAST], ops, folder=tmp_path, measure=measure)
    assert found == (SLOW,)
    assert "(512, 256)" in caplog.text
    assert "(256, 512)" not in caplog.text


def test_a_shape_is_timed_once_and_small_ones_never(ops, tmp_path):
    measured = []
    measure = table({SLOW: (2.0,), FAST: (0.5,)}, measured)
    shapes_for_torch([SLOW, SLOW, SMALL], ops, folder=tmp_path, measure=measure)
    found = shapes_for_torch([FAST, SLOW, SMALL], ops, folder=tmp_path, measure=measure)
    assert found == (SLOW,)
    assert measured == [SLOW, FAST]


def test_a_damaged_file_is_rewritten(ops, tmp_path, caplog):
    shapes_for_torch([SLOW], ops, folder=tmp_path, measure=table({SLOW: (2.0,)}, []))
    (file,) = tmp_path.glob("*.json")
    file.write_text("{")
    found = shapes_for_torch([SLOW], ops, folder=tmp_path, measure=table({SLOW: (0.5,)}, []))
    assert found == ()
    assert "measuring again" in caplog.text


def test_a_folder_that_cannot_be_written_only_costs_time(ops, tmp_path):
    folder = tmp_path / "file"
    folder.write_text("")
    found = shapes_for_torch([SLOW], ops, folder=folder, measure=table({SLOW: (2.0,)}, []))
    assert found == (SLOW,)


def test_an_engine_that_waits_for_another_one_uses_its_times(ops, tmp_path):
    measured = []

    def slow(shape, ops):
        # while this one times, another starts
        if not measured:
            measured.append(shape)
            other = Thread(
                target=shapes_for_torch,
                args=([SLOW], ops),
                kwargs={"folder": tmp_path, "measure": table({SLOW: (0.5,)}, measured)},
            )
            other.start()
            others.append(other)
        return (2.0,)

    others = []
    assert shapes_for_torch([SLOW], ops, folder=tmp_path, measure=slow) == (SLOW,)
    others[0].join()
    assert measured == [SLOW]


def test_both_forms_are_timed(ops, tmp_path, monkeypatch):
    rows = []
    real = type(ops).linear
    monkeypatch.setattr(
        type(ops), "linear", lambda self, x, layer: rows.append(len(x)) or real(self, x, layer)
    )
    shapes_for_torch([SLOW], ops, folder=tmp_path)
    assert set(rows) == {1, 8, 64, 256}


def test_weights_have_the_chosen_layout(ops, tiny_checkpoint, monkeypatch):
    path, config = tiny_checkpoint("qwen3"), EngineConfig(device="cpu", dtype="float32")
    panelled = load_model(str(path), config)
    o = panelled.weights.layers[0].attention.o
    shape = panelled.spec.model_dim, panelled.spec.num_heads * panelled.spec.head_dim
    monkeypatch.setattr(loaded_model, "shapes_for_torch", lambda shapes, ops: (shape,))
    plain = load_model(str(path), config).weights.layers[0].attention
    assert (o.is_panelled, plain.o.is_panelled, plain.qkv.is_panelled) == (True, False, True)
    x = torch.randn(3, shape[1])
    torch.testing.assert_close(ops.linear(x, o), ops.linear(x, plain.o))
