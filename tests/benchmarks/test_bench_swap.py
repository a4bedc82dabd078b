import swap


def test_the_need_counts_all_tokens_but_the_last_of_each_row():
    workload = swap.workloads_e2e.Workload(
        name="few", kind="random", num_requests=3, prompt_len=60, output_len=5
    )
    requests = swap.requests_of(workload)
    assert swap.need_blocks(requests, 64) == 3
    assert swap.need_blocks(requests, 16) == 12
    assert swap.need_blocks(requests, 63) == 6


def test_ratios_are_those_of_medians():
    runs = {
        "recompute": [{"cpu_s": s} for s in (9.0, 3.0, 4.0)],
        "swap": [{"cpu_s": s} for s in (2.0, 1.0, 7.0)],
    }
    assert swap.summary(runs) == {
        "median_cpu_s": {"recompute": 4.0, "swap": 2.0},
        "ratios": {"recompute / swap": 2.0},
    }


def test_w4_has_the_size_of_its_definition():
    requests = swap.requests_of(swap.WORKLOADS["w4"])
    assert (len(requests), {len(r.prompt_token_ids) for r in requests}) == (512, {32})
    lengths = sorted(r.sampling.max_tokens for r in requests)
    assert 5 <= lengths[256] <= 7


def test_changes_are_told_by_place_and_by_row():
    exact = [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert swap.changes(exact, exact) == {"changed_tokens": 0.0, "changed_rows": 0}
    changed = swap.changes([[1, 2, 9, 9], [5, 6, 7, 8]], exact)
    assert changed == {"changed_tokens": 0.25, "changed_rows": 1}
