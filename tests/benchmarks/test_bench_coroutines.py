import argparse
import dataclasses
import json

import coroutine_report
import coroutine_settings
import coroutine_vllm
import coroutines
import gpu_forecast
import models
import pytest
import swap
from coroutine_settings import Setting, kv_bytes, settings_of
from workloads_e2e import Workload

CONDITIONS = {"commit": "abc", "cpu_model": "one"}


def setting(**changes):
    fields = {"model": "moe-8m", "workload": "random", "rows": 4, "device_rows": 2.0}
    return Setting(**{**fields, **changes})


def result_of(name_rows=4, **changes):
    """Return a setting as the file of results has it."""
    measured = setting(device_rows=name_rows)
    fields = {
        "key": measured.key,
        "setting": dataclasses.asdict(measured),
        "workload": dataclasses.asdict(measured.resolved()),
        "generated_tokens": 100,
        "runs": {},
        "median_cpu_s": {"swap": 2.0, "offload": 1.0},
        "forecast_s": {"swap": 2.2, "offload": 1.3},
    }
    return fields | changes


def test_the_grid_has_all_models_workloads_and_memories():
    grid = settings_of("grid")
    assert len({s.key for s in grid}) == len(grid) == 36
    assert {s.device_rows for s in grid} == {4, 8, 16, 64}
    assert {s.workload for s in grid} == {"random", "w4", "documents"}
    assert all(s.resolved().num_requests > s.device_rows for s in grid)


def test_held_out_shapes_are_none_of_the_grid():
    held_out = settings_of("held-out")
    used = {json.dumps(dataclasses.asdict(models.SHAPES[s.model])) for s in held_out}
    tuned = {json.dumps(dataclasses.asdict(models.SHAPES[s.model])) for s in settings_of("grid")}
    assert (len(held_out), len(used), used & tuned) == (12, 6, set())


def test_an_ablation_changes_the_rows_at_the_experts_alone():
    found = settings_of("ablation")
    assert {s.max_num_seqs for s in found} == {32, 64, 128, 256, 512}
    assert {s.device_rows for s in found} == {8}


@pytest.mark.parametrize("num_layers", [1, 4])
def test_a_device_holds_the_longest_row_also_as_a_window(num_layers):
    requests = swap.requests_of(setting(workload="w4", rows=64).resolved())
    short, need = kv_bytes(requests, 0.5, 8, num_layers)
    longest = max(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests)
    assert short // 8 >= longest
    # one of two buffers, each of a layer
    assert short * num_layers // 2 // 8 >= longest
    assert need >= short


@pytest.mark.parametrize(
    ("is_host", "taken", "regret"), [(True, "offload", 0.5), (False, "swap", 1.0)]
)
def test_regret_is_what_the_way_taken_costs_more_than_the_best(is_host, taken, regret):
    seconds = {"recompute": 2.0, "swap": 4.0, "offload": 3.0, "ample": 1.0}
    expected = {"recompute": 2.0, "swap": 5.0, "offload": 3.3, "ample": 1.0}
    found = coroutine_report.judge(seconds, expected, is_host=is_host)
    assert (found["taken"], found["regret"]) == (taken, regret)
    assert found["completion_error"] == {"offload": 0.1, "swap": 0.25}[taken]
    assert found["best_other / offload"] == 0.67
    assert found["ratio_error"] == round(5.0 / 3.3 / (4.0 / 3.0) - 1, 3)


def test_an_engine_that_chooses_is_compared_with_the_best_fixed_way():
    seconds = {"swap": 4.0, "offload": 2.0, "ample": 1.0, "auto": 2.5}
    found = coroutine_report.judge(seconds, seconds, is_host=True)
    assert (found["auto_regret"], found["regret"]) == (0.25, 0.0)
    assert coroutine_report.summary([result_of(**found)])[0] == (
        "engines that choose: 0 of 1, largest 25.0%"
    )


def test_a_way_that_was_not_measured_gets_no_verdict():
    found = coroutine_report.judge({"ample": 1.0}, {"ample": 1.1}, is_host=True)
    assert found == {"error": {"ample": 0.1}}


def test_a_summary_counts_the_settings_within_the_aims():
    settings = [
        result_of(4, regret=0.0, completion_error=-0.02),
        result_of(8, regret=0.3, completion_error=0.09),
        result_of(16, regret=0.05, completion_error=-0.4),
    ]
    assert coroutine_report.summary(settings) == [
        "regret at most 5% in 2 of 3 settings, largest 30.0% (moe-8m, random x 4, KV for 8)",
        "completion within 10% in 2 of 3 settings, worst -40.0% (moe-8m, random x 4, KV for 16)",
    ]


def test_a_table_has_forecast_and_measured_rates(capsys):
    peer = {"median_cpu_s": 4.0, "equal_rows": 3, "num_rows": 4}
    coroutine_report.show([result_of(regret=0.0, completion_error=0.3, taken="offload", vllm=peer)])
    cells = capsys.readouterr().out.splitlines()[2].strip("| ").split(" | ")
    assert cells[:2] == ["moe-8m, random x 4, KV for 4", "offload"]
    assert cells[2:] == ["45 / 50", "77 / 100", "+0.0%", "+30.0%", "25 (3/4)"]


def test_a_picture_has_a_point_for_each_way_and_a_ring_for_the_one_taken(tmp_path):
    coroutine_report.draw([result_of(taken="swap")], tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert text.count("<title>") == 2
    assert text.count('stroke-width="1.6"') == 1
    coroutine_report.picture([])


def test_tokens_per_expert_are_over_those_reached():
    # two rows that decode alone reach 4 * (1 - 0.5 ** 2) = 3 of 4 experts with 2 * 2 rows
    found = coroutines.expert_rows([(2, 0), (0, 100), (1, 99)], 4, 2)
    assert found["tokens_per_expert_decode"] == round(4 / 3, 1)
    assert found["tokens_per_expert"] == round(404 / 11, 1)
    assert coroutines.expert_rows([], 4, 2)["tokens_per_expert"] == 0


def test_a_cut_run_goes_on_with_the_settings_that_are_left(tmp_path, monkeypatch):
    settings, ran = [setting(device_rows=n) for n in (1.0, 2.0)], []

    class Fake:
        def run(self, one, args):
            ran.append(one.device_rows)
            return {"key": one.key}

    monkeypatch.setattr(
        coroutines, "benchmarks_of", lambda left, fresh: [(s, Fake()) for s in left]
    )
    args = argparse.Namespace(out=tmp_path / "out.json", fresh=False)
    coroutines.run_all(settings[:1], args)
    found = coroutines.run_all(settings, args)
    assert ran == [1.0, 2.0]
    assert [s["key"] for s in found["settings"]] == [s.key for s in settings]
    assert json.loads(args.out.read_text())["settings"] == found["settings"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_results_of_another_tree_are_not_gone_on_with():
    result = {"conditions": CONDITIONS, "settings": [{"key": "a"}]}
    assert coroutine_settings.known(result, CONDITIONS) == {"a": {"key": "a"}}
    with pytest.raises(SystemExit, match=r"commit 'abc', .* 'def'"):
        coroutine_settings.known(result, CONDITIONS | {"commit": "def"})


def test_the_peer_has_the_same_memory_and_holds_the_longest_row():
    workload = Workload(name="w", kind="random", num_requests=2, prompt_len=50, output_len=20)
    settings = coroutine_vllm.settings_of(workload, 1000)
    assert (settings.kv_tokens, settings.max_model_len) == (992, 96)
    assert coroutine_vllm.settings_of(workload, 10).kv_tokens == 128


def test_host_kv_pays_longer_over_a_faster_link():
    model = gpu_forecast.model_shape(gpu_forecast.PUBLISHED["Qwen3-30B-A3B"])
    slow, fast = (gpu_forecast.costs_of(s) for s in gpu_forecast.LINKS.values())
    few, many = (gpu_forecast.pays_until(model, costs) for costs in (slow, fast))
    assert 0 < few < many < gpu_forecast.HOST_ROWS
