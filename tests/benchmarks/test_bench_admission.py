import admission
import pytest


def runs(*cpu_s, steps=10):
    return [
        {"cpu_s": s, "mean_completion_s": s / 2, "mean_completion_steps": 5, "num_steps": steps}
        for s in cpu_s
    ]


@pytest.mark.parametrize(("case", "would_run"), [("uniform-16", True), ("mixed", False)])
def test_ratios_are_those_of_the_quickest_runs(case, would_run):
    found = {"fcfs": runs(9, 4, 5, 8, 8), "static": runs(3, 2, 7, 8, 9, steps=12)}
    told = admission.summary(found, admission.requests_of(admission.CASES[case].workload))
    assert told["over_fcfs"]["static"] == {
        "cpu_s": 0.5,
        "mean_completion_s": 0.5,
        "mean_completion_steps": 1.0,
        "num_steps": 1.2,
    }
    assert told["would_run_static"] is would_run


def test_few_runs_choose_nothing():
    requests = admission.requests_of(admission.CASES["uniform-16"].workload)
    told = admission.summary({"fcfs": runs(2), "static": runs(1)}, requests)
    assert "would_run_static" not in told


def test_rows_short_of_memory_are_three_times_what_it_holds():
    case = admission.CASES["uniform-short"]
    # dense-4m: keys and values of 4 layers and 4 heads of 64, float32
    kv_tokens = (case.kv_mib << 20) // (2 * 4 * 4 * 64 * 4)
    row_tokens = case.workload.prompt_len + case.workload.output_len
    assert kv_tokens // row_tokens == 22
    assert case.batch > 2.5 * (kv_tokens // row_tokens)
