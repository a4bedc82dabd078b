import itertools

import pytest
from prefix import percents, versions
from prefix_orders import rows_in_order
from prefix_sides import SIDES, Contestant, parse
from prefix_suites import SUITES, W1, chosen, w1
from runlog import RunLog
from suites import rows_to_run


def test_a_name_says_all_of_a_contestant():
    contestants = [
        Contestant(side=side, order=order, replicas=replicas)
        for side, order, replicas in itertools.product(SIDES, ("shuffled", "groups"), (1, 4))
    ]
    assert [parse(c.name(150)) for c in contestants] == [(c, 150) for c in contestants]
    assert len({c.name(25) for c in contestants}) == len(contestants)


def test_orders_of_one_engine_share_its_process_and_kv_sizes_do_not():
    first, second = (Contestant(side="vllm-eager", order=o) for o in ("shuffled", "sorted"))
    assert first.peer(25).process_name == second.peer(25).process_name
    assert first.peer(25).process_name != first.peer(50).process_name


def test_every_side_on_vllm_has_blocks_that_its_attention_takes():
    for name, side in SIDES.items():
        peer = Contestant(side=name).peer(25)
        assert (peer.block_size == 32) == (side.venv == "vllm" or "-32-" in name), name


def test_jobs_and_pools_have_processes_of_their_own():
    names = {
        Contestant(side=side, order=order, replicas=replicas).peer(25).process_name
        for side in ("raybatch-job", "raybatch-pool")
        for order in ("shuffled", "sorted")
        for replicas in (1, 2)
    }
    assert len(names) == 8


def test_a_peer_runs_all_rows_in_its_order():
    peer = Contestant(side="vllm-eager", order="sorted").peer(25)
    assert rows_to_run(W1, peer) == list(rows_in_order(W1, "sorted"))


@pytest.mark.parametrize("suite", SUITES)
def test_every_workload_and_kv_size_of_a_suite_has_a_planned_run(suite):
    cells = {(t.workload.name, t.kv_percent) for t in SUITES[suite]}
    planned = {
        (t.workload.name, t.kv_percent)
        for t in SUITES[suite]
        if any(c.side.endswith("-plan") for c in t.contestants)
    }
    assert planned == cells


def test_a_cell_measures_nothing_twice():
    for suite, trials in SUITES.items():
        names = [(t.workload.name, c.name(t.kv_percent)) for t in trials for c in t.contestants]
        assert len(names) == len(set(names)), suite


def test_a_suite_is_narrowed_to_what_is_named():
    trials = chosen("default", workloads=["W1 x16"], kv_percents=[25], sides=["vllm-compiled"])
    names = [(t.kv_percent, c.order) for t in trials for c in t.contestants]
    assert names == [(25, "shuffled"), (25, "sorted"), (25, "groups")]


def test_a_workload_that_the_suite_lacks_takes_its_first_contestants():
    (trial,) = chosen("default", workloads=["W1 x64"])
    assert trial.workload == w1(64)
    assert trial.contestants == SUITES["default"][0].contestants


def test_a_kv_size_that_the_suite_lacks_is_added():
    trials = chosen("default", workloads=["W2"], kv_percents=[25, 75], repetitions=1)
    assert [(t.kv_percent, t.repetitions) for t in trials] == [(25, 1), (75, 1)]


def test_every_model_runs_every_trial():
    models = [t.model for t in chosen("smoke", models=["dense-60m", "moe-8m"])]
    assert models == ["dense-60m"] * 2 + ["moe-8m"] * 2


def test_kv_sizes_are_percentages():
    assert percents("25,150") == [25, 150]
    assert percents(None) == []


@pytest.mark.parametrize("value", ["x", "-5", "0", "2.5"])
def test_wrong_kv_sizes_are_refused(value):
    with pytest.raises(SystemExit, match="--kv takes whole percentages"):
        percents(value)


def test_versions_are_told_by_environment(tmp_path):
    log = RunLog(tmp_path / "log.jsonl", {})
    log.add("load", "m", "", "vllm-eager-kv25", {"versions": {"vllm": "1"}})
    log.add("measure", "m", "w", "raydata-llm/sorted/kv25/x1", {"versions": {"ray": "2"}})
    log.add("load", "m", "", "raybatch-plan-kv25", {"versions": {"torch": "3"}})
    assert versions(log) == {"vllm": "vllm 1 ray 2", "raybatch": "torch 3"}
