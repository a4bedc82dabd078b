import dataclasses

import pytest
from prefix_summary import summarize, verdicts
from prefix_tables import render

CELL = {"model": "m", "workload": "w"}
FACTS = {
    "kind": "facts",
    **CELL,
    "peer": "kv25",
    "kv_tokens": 512,
    "prompt_tokens": 1000,
    "shared_tokens": 200,
    "saveable_tokens": 600,
    "longest": 90,
}


def measure(peer, *, cpu_s=2.0, cached=600, digests=("a", "b"), kind="measure", **more):
    return {
        "kind": kind,
        **CELL,
        "peer": peer,
        "rows": [1, 0],
        "row_digests": list(digests),
        "rows_of_wrong_length": [],
        "cpu_s": cpu_s,
        "wall_s": 2 * cpu_s,
        "prompt_tokens": 1000,
        "output_tokens": 20,
        "num_requests": 2,
        "foreign_cores": 0.0,
        "counters": {} if cached is None else {"cached_tokens": cached},
        **more,
    }


REFERENCE = measure("transformers-reference", kind="reference")
PLANNED = measure("raybatch-plan/shuffled/kv25/x1", cpu_s=2.0)
RECORDS = [
    FACTS,
    REFERENCE,
    PLANNED,
    measure("raybatch/shuffled/kv25/x1", cpu_s=9.0, cached=100),
    measure("vllm-eager/sorted/kv25/x1", cpu_s=3.0),
    measure("vllm-eager/groups/kv25/x1", cpu_s=2.5),
    measure("vllm-eager/shuffled/kv25/x1", cpu_s=10.0, cached=100),
]


def test_computed_tokens_and_hits_are_counted_against_what_can_be_had():
    planned, unplanned, *_ = summarize(RECORDS)
    assert (planned.computed_tokens, planned.fewest_tokens, planned.hit_fraction) == (400, 400, 1.0)
    assert (unplanned.computed_tokens, unplanned.hit_fraction) == (900, pytest.approx(1 / 6))


def test_counts_that_a_peer_does_not_tell_stay_open():
    row = summarize([FACTS, REFERENCE, measure("vllm-eager/sorted/kv25/x1", cached=None)])[0]
    assert (row.computed_tokens, row.hit_fraction, row.preemptions) == (None, None, None)


def test_rows_are_compared_across_orders():
    other = measure("vllm-eager/sorted/kv25/x1", rows=[0, 1], digests=("b", "x"))
    rows = summarize([FACTS, REFERENCE, PLANNED, other])
    assert [row.equal_rows for row in rows] == [(2, 2), (1, 2)]


def test_a_wrong_token_of_raybatch_leaves_no_row_of_the_cell():
    wrong = measure("raybatch/shuffled/kv25/x1", digests=("a", "x"))
    assert summarize([*RECORDS, wrong]) == []


def test_the_plan_is_judged_against_the_best_of_each_kind():
    (verdict,) = verdicts(summarize(RECORDS))
    assert verdict.measure == "engine CPU s"
    assert verdict.planned == 2.0
    assert verdict.cheap == ("vllm-eager groups", 2.5)
    assert verdict.shuffled == ("vllm-eager shuffled", 10.0)
    assert verdict.unplanned == 9.0


def test_jobs_are_judged_by_engine_window_and_wall_time():
    records = [
        FACTS,
        REFERENCE,
        measure("raybatch-job-plan/shuffled/kv25/x1", window_s=1.0),
        measure("raydata-llm/shuffled/kv25/x1", window_s=6.0, cpu_s=20.0),
        # more replicas are another comparison
        measure("raydata-llm/sorted/kv25/x2", window_s=1.0),
    ]
    found = {v.measure: (v.planned, v.shuffled, v.cheap) for v in verdicts(summarize(records))}
    assert found == {
        "job window s": (1.0, ("raydata-llm shuffled", 6.0), None),
        "job wall s": (4.0, ("raydata-llm shuffled", 40.0), None),
    }


def test_tables_show_aims_then_counts_then_times():
    text = render(summarize(RECORDS), {}, ["m, w, x: died"])
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        "## With a plan, against the others",
        "## Computed prompt tokens",
        "## Engine time",
        "## Failed",
    ]
    assert "1.25 (vllm-eager groups, 2.50 s)" in text
    assert "25 % = 512" in text


def test_refused_speeds_are_named_and_not_shown():
    text = render([], {("m", "w"): "the tokens differ"}, [])
    assert text == "## Refused: no speed without equal outputs\n\n- m, w: the tokens differ\n"


def test_a_row_can_be_written_to_the_result_file():
    row = dataclasses.asdict(summarize(RECORDS)[0])
    assert row["contestant"] == {"side": "raybatch-plan", "order": "shuffled", "replicas": 1}
