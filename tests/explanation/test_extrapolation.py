"""What a few rows tell of all rows."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.actors.wire.records import PoolSpec
from raybatch.config import BackendConfig, EngineConfig, PoolConfig
from raybatch.explanation import outlook
from raybatch.explanation.outlook import extrapolate
from raybatch.explanation.query import JobQuery
from raybatch.policy.cost.estimate import estimate
from raybatch.policy.cost.work import work_totals
from tests.explanation.inputs import plan_prompts
from tests.policy.test_estimate import MODEL

COSTS = replace(MODEL, token_s=(0.001,), limits=replace(MODEL.limits, max_num_seqs=64))


@pytest.fixture(autouse=True)
def costs(monkeypatch):
    """Engines with a known speed, until a test takes it away."""
    found = [(COSTS, "")]
    monkeypatch.setattr(outlook, "cost_model_of", lambda _: found[-1])
    return found


def query(kind="native", **options):
    pool = PoolConfig(replicas=2)
    backend = BackendConfig(kind=kind)
    spec = PoolSpec(model="m", backend=backend, engine=EngineConfig(), pool=pool)
    return JobQuery(job=None, spec=spec, name="in", measure=False, is_local=True, **options)


def extrapolated(prompts, outputs, *, num_rows, cost=0.0, busy_s=3.0, **options):
    planned = plan_prompts([np.arange(i * 100, i * 100 + n) for i, n in enumerate(prompts)])
    return extrapolate(
        query(**options),
        planned,
        prompt_tokens=np.array(prompts, float),
        generated_tokens=np.array(outputs, float),
        busy_s=busy_s,
        cost=cost,
        num_rows=num_rows,
    )


def test_tokens_grow_with_the_rows_and_the_range_holds_what_rows_differ_by():
    found = extrapolated([10, 20, 30, 40], [5, 5, 5, 5], num_rows=400)
    assert (found.prompt_tokens.expected, found.generated_tokens.expected) == (10_000, 2000)
    spread = np.std([10, 20, 30, 40], ddof=1) / 2 * np.sqrt(396 / 399)
    assert found.prompt_tokens.high == pytest.approx(400 * (25 + 2 * spread))
    assert found.generated_tokens.low == found.generated_tokens.high == 2000


def test_a_sample_of_all_rows_leaves_nothing_open():
    found = extrapolated([10, 40], [1, 9], num_rows=2)
    assert found.prompt_tokens.low == found.prompt_tokens.high == 50


def test_one_row_says_little():
    found = extrapolated([10], [4], num_rows=100)
    assert (found.prompt_tokens.low, found.prompt_tokens.high) == (0, 2000)


def test_time_is_that_of_all_rows_on_all_replicas():
    found = extrapolated([40] * 4, [5] * 4, num_rows=400, price_per_engine_hour=3600.0)
    whole = estimate(COSTS, work_totals(np.full(400, 40), np.full(400, 5)), 2)
    assert found.time.wall_s == pytest.approx(whole.wall_s, rel=0.01)
    assert found.time.low_s == pytest.approx(whole.low_s, rel=0.01)
    assert found.money.expected == pytest.approx(2 * found.time.wall_s)
    assert found.slowest_s is None


def test_rows_that_differ_widen_the_range_of_time():
    alike = extrapolated([40] * 4, [5] * 4, num_rows=400).time
    unlike = extrapolated([40] * 4, [1, 1, 9, 9], num_rows=400).time
    assert unlike.high_s > alike.high_s
    assert unlike.low_s < alike.low_s


def test_what_rows_share_is_not_computed_for_each():
    found = extrapolate(
        query(),
        plan_prompts([np.r_[np.arange(64), 100 + i] for i in range(4)]),
        prompt_tokens=np.full(4, 65.0),
        generated_tokens=np.ones(4),
        busy_s=1.0,
        cost=0.0,
        num_rows=4000,
    )
    shared = found.time.wall_s
    alone = extrapolated([65] * 4, [1] * 4, num_rows=4000).time.wall_s
    assert shared < alone


def test_without_a_known_speed_the_sample_is_the_slowest(costs):
    costs.append((None, "not measured"))
    found = extrapolated([10] * 4, [5] * 4, num_rows=400, price_per_engine_hour=1.0)
    assert (found.time, found.no_time, found.money) == (None, "not measured", None)
    assert found.slowest_s == pytest.approx(3.0 * 100 / 2)
    assert (found.sampled_tokens, found.sampled_s) == (60.0, 3.0)


def test_answers_with_prices_cost_what_the_sample_has_cost(costs):
    costs.append((None, "an endpoint"))
    found = extrapolated([10, 30], [5, 5], num_rows=200, cost=0.5, kind="openai")
    assert found.money.expected == pytest.approx(50.0)
    assert found.money.low < 50 < found.money.high
    assert (found.slowest_s, found.sampled_s) == (None, 0.0)
