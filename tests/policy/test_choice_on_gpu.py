"""What an engine chooses on a GPU, with costs of an H100: nothing that a forecast alone wants."""

from dataclasses import replace

import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward import library_ops
from raybatch.engine.profile.module_profile import replays
from raybatch.policy.choose_engine import LEAST_GAIN, UNPROVEN_GAIN, EngineInputs, choose_engine
from raybatch.policy.cost.layers import LayerShape, ModelShape, ModuleCosts, RowsAhead, RowShape
from raybatch.policy.cost.roofline import Roofline, link
from raybatch.policy.memory_budget import MemoryBudget
from tests.engine.forward.recorded_graphs import RecordedGraphs

DENSE = LayerShape(model_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_dim=12288)
SPARSE = LayerShape(
    model_dim=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    ffn_dim=768,
    num_experts=128,
    top_k=8,
)
MODELS = {
    # layers, and bytes that weights leave of 80 GB
    "8B": (ModelShape(layer=DENSE, num_layers=36), 55e9),
    "30B-A3B": (ModelShape(layer=SPARSE, num_layers=48), 11e9),
}
ROWS = [
    RowShape(prompt_tokens=1024, output_tokens=256),
    RowShape(prompt_tokens=2000, output_tokens=100),
    RowShape(prompt_tokens=128, output_tokens=2048),
]


def costs_of(launch_s, bytes_per_s):
    module = Roofline(fixed_s=launch_s, operation_s=1 / 6e14, byte_s=1 / 2.8e12)
    return ModuleCosts(
        attention=module,
        ffn=module,
        to_device=link(bytes_per_s),
        to_host=link(bytes_per_s),
        copies_overlap=True,
    )


def budget(device_bytes, **changes):
    return MemoryBudget(
        config=EngineConfig(**changes),
        is_gpu=True,
        device_kv_bytes=int(device_bytes),
        host_kv_bytes=int(200e9),
    )


# graphs, and launches that Python makes
@pytest.mark.parametrize("launch_s", [5e-6, 1.5e-4])
@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows.prompt_tokens))
@pytest.mark.parametrize("name", MODELS)
def test_kv_of_a_model_that_fits_stays_on_an_h100(name, rows, launch_s):
    model, device_bytes = MODELS[name]
    rows_ahead = RowsAhead(shape=rows)
    inputs = EngineInputs.of(budget(device_bytes), model, costs_of(launch_s, 5e10), rows_ahead)
    assert not choose_engine(inputs).best.kv_offload


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows.prompt_tokens))
def test_a_way_that_has_not_run_must_be_a_fifth_better(rows):
    model, device_bytes = MODELS["8B"]
    costs, ahead = costs_of(5e-6, 5e10), RowsAhead(shape=rows)
    unproven = budget(device_bytes)
    usual = (False, 2048)
    for proven in (frozenset(), frozenset({usual})):
        found = choose_engine(
            EngineInputs.of(replace(unproven, proven=proven), model, costs, ahead)
        )
        first = next(mode for mode in found.candidates if mode.key == usual)
        assert found.best is first or first.seconds >= (1 + UNPROVEN_GAIN) * found.best.seconds
    candidates = {mode.key: mode for mode in found.candidates}
    quicker = [
        mode for mode in candidates.values() if first.seconds > (1 + LEAST_GAIN) * mode.seconds
    ]
    for mode in quicker:
        known = replace(unproven, proven=frozenset({usual, mode.key}))
        assert choose_engine(EngineInputs.of(known, model, costs, ahead)).best.key != usual
    on_cpu = EngineInputs.of(replace(unproven, is_gpu=False), model, costs, ahead)
    assert {LEAST_GAIN} == {on_cpu.least_gain_of(mode) for mode in found.candidates}


def test_modules_are_timed_by_graphs():
    made, calls = torch.zeros(3), []

    def run(turn):
        calls.append(turn)
        made[turn] += 1

    repeated = replays(RecordedGraphs(), run, 3)
    num_calls, before = len(calls), made.clone()
    for turn in (0, 1, 4):
        repeated(turn)
    assert len(calls) == num_calls
    assert (made - before).tolist() == [1, 2, 0]


def test_modules_that_cannot_be_captured_are_timed_with_their_launches(caplog):
    def run(turn):
        return torch.ones(1).item() + turn

    with caplog.at_level("INFO"):
        assert replays(RecordedGraphs(), run, 2) is run
    assert "times include kernel launches" in caplog.text


def test_experts_are_timed_by_graphs():
    made, num_calls = torch.zeros(1), 0

    def run():
        nonlocal num_calls
        num_calls += 1
        made.add_(1)

    # a second of every call that Python makes
    seconds = library_ops.replayed_s(
        torch.device("cpu"), run, graphs=RecordedGraphs(), clock=lambda: float(num_calls)
    )
    assert seconds == 0
    # which are fewer than what was run
    assert made.item() > num_calls > 0
