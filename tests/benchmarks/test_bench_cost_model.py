from dataclasses import replace

import pytest
from cost_model import CLOCKS, SHARED, TIGHT, prepare, run
from workloads_e2e import scaled

from raybatch.backends.fake import FakeBackend, FakeOptions


def test_a_plan_computes_each_document_once():
    prompts = prepare(scaled(SHARED, 32), seed=0, first_id=0)
    assert 2 * 1024 + 32 * 32 == prompts.work.computed_tokens
    assert 2 == len({request.group_id for request in prompts.requests})


def test_rows_without_documents_are_in_no_group():
    prompts = prepare(scaled(TIGHT, 4), seed=0, first_id=0)
    assert {None} == {request.group_id for request in prompts.requests}
    assert 4 * 128 == prompts.work.computed_tokens


def test_a_run_counts_nothing_of_the_runs_before():
    backend = FakeBackend(FakeOptions())
    workload = replace(scaled(TIGHT, 4), output_len=5)
    for first_id in (0, 100):
        prompts = prepare(workload, seed=first_id, first_id=first_id)
        stats = run(backend, prompts.requests, CLOCKS["cpu"])
        assert (5, 20) == (stats.num_steps, stats.generated_tokens)


@pytest.mark.parametrize("seed", [1, 2])
def test_prompts_differ_from_run_to_run(seed):
    first, other = (prepare(scaled(TIGHT, 1), seed=s, first_id=0) for s in (0, seed))
    one, two = first.requests[0].prompt_token_ids, other.requests[0].prompt_token_ids
    assert one.tolist() != two.tolist()
