import pytest
from summary import Spread, differing_rows, failures, refusals, spread, summarize
from tables import render


def record(kind, peer, digests, *, rows=None, cpu_s=2.0, wall_s=4.0, tokens=100, **more):
    return {
        "kind": kind,
        "model": "m",
        "workload": "w",
        "peer": peer,
        "rows": rows,
        "row_digests": digests,
        "rows_of_wrong_length": [],
        "cpu_s": cpu_s,
        "wall_s": wall_s,
        "output_tokens": tokens,
        "prompt_tokens": 200,
        "num_requests": len(digests),
        "foreign_cores": 0.0,
        "counters": {},
        **more,
    }


REFERENCE = record("reference", "transformers-reference", ["a", "c"], rows=[0, 2])
OURS = record("measure", "raybatch", ["a", "b", "c"])
THEIRS = record("measure", "vllm-eager", ["a", "b", "x"], cpu_s=3.0, wall_s=2.0)


def test_spread_is_median_and_range():
    assert spread([3.0, 1.0, 2.0]) == Spread(median=2.0, low=1.0, high=3.0)
    assert spread([4.0, 1.0]) == Spread(median=2.5, low=1.0, high=4.0)


def test_only_rows_that_both_ran_are_compared():
    assert differing_rows(REFERENCE, OURS) == []
    assert differing_rows(REFERENCE, record("measure", "raybatch", ["a", "b", "y"])) == [2]
    assert differing_rows(REFERENCE, record("measure", "raybatch", ["a"], rows=[0])) == []


def test_equal_tokens_are_not_refused():
    assert refusals([REFERENCE, OURS, THEIRS]) == {}


@pytest.mark.parametrize("kind", ["warm_up", "measure"])
def test_one_different_row_refuses_the_speeds_of_every_peer(kind):
    wrong = record(kind, "raybatch", ["a", "b", "y"])
    records = [REFERENCE, wrong, OURS, THEIRS]
    assert "raybatch differ from transformers' in row 2 of 2" in refusals(records)["m", "w"]
    assert summarize(records) == []
    text = render(summarize(records), refusals(records), [])
    assert "vllm" not in text
    assert "Refused" in text


def test_a_job_of_raybatch_must_match_as_well():
    job = record("measure", "raybatch-job-2", ["a", "b", "y"])
    assert "raybatch-job-2" in refusals([REFERENCE, OURS, job])["m", "w"]


def test_raybatch_without_a_reference_is_refused():
    assert "not compared" in refusals([OURS])["m", "w"]


def test_a_peer_that_differs_is_shown_with_its_equal_rows():
    theirs = summarize([REFERENCE, OURS, THEIRS])[1]
    assert theirs.equal_rows == (2, 3)


def test_an_output_of_the_wrong_length_is_refused():
    short = record("measure", "vllm-eager", ["a", "b", "c"], rows_of_wrong_length=[1])
    message = refusals([REFERENCE, OURS, short])["m", "w"]
    assert "vllm-eager" in message
    assert "row 1" in message


def test_ratios_are_rates_of_raybatch_over_the_peer():
    ours, theirs = summarize([REFERENCE, OURS, THEIRS])
    assert (ours.ratio_cpu, ours.ratio_wall) == (1.0, 1.0)
    assert theirs.ratio_cpu == pytest.approx(1.5)
    assert theirs.ratio_wall == pytest.approx(0.5)


def test_a_peer_that_ran_fewer_rows_is_compared_by_rate():
    fewer = record("measure", "transformers-static", ["a"], rows=[0], cpu_s=2.0, tokens=50)
    row = summarize([REFERENCE, OURS, fewer])[1]
    assert (row.num_requests, row.ratio_cpu, row.equal_rows) == (1, 2.0, (1, 1))


def test_repetitions_are_summarized_and_the_noisiest_counts():
    runs = [
        record("measure", "raybatch", ["a", "b", "c"], cpu_s=cpu_s, foreign_cores=load)
        for cpu_s, load in ((1.0, 0.0), (5.0, 0.4), (2.0, 0.0))
    ]
    row = summarize([REFERENCE, *runs])[0]
    assert row.cpu_s == Spread(median=2.0, low=1.0, high=5.0)
    assert (row.num_repetitions, row.foreign_cores) == (3, 0.4)
    assert "0.40 noisy" in render([row], {}, [])


def test_losses_are_printed_like_wins():
    faster = record("measure", "vllm-eager", ["a", "b", "c"], cpu_s=1.0, wall_s=1.0)
    text = render(summarize([REFERENCE, OURS, faster]), {}, [])
    line = next(line for line in text.splitlines() if "vllm-eager" in line)
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[8:12] == ["100", "0.50", "0.25", "3/3"]


def test_jobs_have_a_table_of_their_own():
    job = record("measure", "raybatch-job", ["a", "b", "c"], window_s=None)
    other = record("measure", "raydata-llm", ["a", "b", "c"], wall_s=40.0, window_s=1.5)
    text = render(summarize([REFERENCE, OURS, job, other]), {}, [])
    engine, jobs = text.split("## Whole-job time")
    assert "raydata-llm" not in engine
    assert "1.50 (1.50-1.50)" in jobs
    assert next(line for line in jobs.splitlines() if "raydata-llm" in line).count("10.00") == 1


def test_a_job_of_two_replicas_is_compared_with_ours_of_two():
    ours = record("measure", "raybatch-job", ["a", "b", "c"], wall_s=10.0)
    ours_of_two = record("measure", "raybatch-job-2", ["a", "b", "c"], wall_s=8.0)
    theirs_of_two = record("measure", "raydata-llm-2", ["a", "b", "c"], wall_s=40.0)
    rows = summarize([REFERENCE, ours, ours_of_two, theirs_of_two])
    assert [row.ratio_wall for row in rows] == [1.0, 1.0, 5.0]


def test_a_run_with_other_requests_than_the_reference_is_refused():
    reference = {**REFERENCE, "workload_digest": "one"}
    other = {**OURS, "workload_digest": "two"}
    assert "other requests" in refusals([reference, other])["m", "w"]
    assert refusals([reference, {**OURS, "workload_digest": "one"}]) == {}


def test_pools_show_speed_up_and_the_memory_of_all_their_engines():
    engine = {"rss": 300 << 20, "pss": 200 << 20, "weights_rss": 100 << 20}
    engine |= {"weights_pss": 50 << 20, "weights_file": 100 << 20}
    one = record("measure", "raybatch-pool", ["a", "b", "c"], wall_s=6.0, engines=[engine])
    two = record("measure", "raybatch-pool-2", ["a", "b", "c"], wall_s=4.0, engines=[engine] * 2)
    text = render(summarize([REFERENCE, one, two]), {}, [])
    assert "Engine time" not in text
    line = next(line for line in text.splitlines() if "raybatch-pool-2" in line)
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[4] == "2"
    assert cells[9:15] == ["1.50", "600", "400", "200", "100", "100"]


def test_a_failure_is_told_until_the_peer_has_a_result():
    failure = {"kind": "failure", "model": "m", "workload": "w", "peer": "raybatch", "why": "died"}
    assert failures([failure]) == ["m, w, raybatch: died"]
    assert failures([failure, OURS]) == []
