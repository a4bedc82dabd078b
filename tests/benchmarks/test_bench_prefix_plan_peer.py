"""The planned form of raybatch's peers."""

from itertools import groupby

import pytest
from peer_raybatch import native_requests, plan_config
from planning import plan_requests
from prefix_orders import rows_in_order
from prefix_suites import W2, W10, ZERO, w1
from workloads_e2e import build

from raybatch.config import PlanConfig

WORKLOADS = [w1(16, 128), W2, W10, ZERO]


def shuffled(workload):
    requests = build(workload)
    return [requests[row] for row in rows_in_order(workload, "shuffled")]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_a_plan_runs_every_request_once(workload):
    plan = plan_requests(shuffled(workload), 16, PlanConfig())
    assert sorted(plan.rows) == list(range(workload.num_requests))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_members_of_a_group_follow_each_other_and_share_its_prefix(workload):
    requests = shuffled(workload)
    plan = plan_requests(requests, 16, PlanConfig())
    runs = [list(run) for _, run in groupby(plan.rows, key=lambda row: plan.group_ids[row])]
    grouped = [run for run in runs if plan.group_ids[run[0]] is not None]
    assert len(grouped) == len({plan.group_ids[run[0]] for run in grouped})
    for run in grouped:
        (prefix_len,) = {plan.prefix_lens[row] for row in run}
        assert len({requests[row].prompt_ids[:prefix_len] for row in run}) == 1


def test_w1_is_planned_as_its_groups():
    plan = plan_requests(shuffled(w1(16, 128)), 32, PlanConfig())
    assert len(set(plan.group_ids)) == 8
    assert set(plan.prefix_lens) == {256}


def test_groups_with_much_output_for_little_prefill_run_first():
    requests = shuffled(W2)
    plan = plan_requests(requests, 16, PlanConfig())
    lengths = [len(requests[row].prompt_ids) for row in plan.rows]
    assert lengths == sorted(lengths)


def test_nothing_shared_is_planned_without_groups():
    plan = plan_requests(shuffled(ZERO), 16, PlanConfig())
    assert set(plan.group_ids) == {None}
    assert set(plan.prefix_lens) == {0}


def test_requests_carry_their_own_index_whatever_the_order():
    requests = shuffled(w1(16, 128))
    plan = plan_requests(requests, 16, PlanConfig())
    native = native_requests(requests, plan)
    assert [request.request_id for request in native] == plan.rows
    for request in native:
        assert tuple(request.prompt_token_ids) == requests[request.request_id].prompt_ids
        assert request.group_id == plan.group_ids[request.request_id]
        assert request.prefix_len == 256


def test_requests_without_a_plan_stay_in_order_and_alone():
    native = native_requests(build(w1(16, 128)), None)
    assert [request.request_id for request in native] == list(range(128))
    assert {request.group_id for request in native} == {None}


def test_variants_name_their_plan():
    assert plan_config("engine") is None
    assert plan_config("job-plan") == PlanConfig()
    assert plan_config("pool-plan-multi") == PlanConfig(sharing="multi_level")
