"""Jobs that explain themselves without running."""

from dataclasses import replace

import pyarrow as pa
import pytest

from raybatch.config import PlanConfig
from raybatch.errors import ConfigError
from raybatch.explanation.explain import explain_planned, explain_run
from raybatch.explanation.outcome import RunActual
from raybatch.explanation.query import JobQuery
from raybatch.explanation.record import Explanation
from raybatch.inputs.source import scan_source
from raybatch.job.job import Job
from raybatch.job.run import run_spec
from raybatch.planning.large import plan_large
from raybatch.planning.planned import RunSpec
from tests.clusters import local_ray
from tests.explanation.inputs import keep_costs, plan_prompts
from tests.stages.support import fake_stage, make_tokenizer, write_parquet


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("model") / "plain", has_chat_template=False)


@pytest.fixture
def job_of(model, tmp_path):
    """Makes a job of some texts, with options of the plan."""

    def job_of(texts, *, caching=True, on_error="row", **plan):
        table = pa.table({"text": pa.array(texts, pa.string()), "n": list(range(len(texts)))})
        write_parquet(tmp_path / "in" / "a.parquet", table)
        engine = {"block_size_tokens": 8, "enable_prefix_caching": caching}
        stage = fake_stage(model, prompt="{text}", engine=engine, on_error=on_error)
        return Job(tmp_path / "in", tmp_path / "out", stage, plan=PlanConfig(**plan))

    return job_of


@pytest.fixture
def explain(job_of):
    """Explains a source of some texts, with options of the plan."""

    def explain(texts, kv_tokens=400, **plan):
        return job_of(texts, **plan).explain(measure=False, kv_tokens=kv_tokens)

    return explain


TEXTS = ["a text that all rows have in common"] * 20


def test_a_source_without_rows_is_explained(explain):
    found = explain([])
    assert (0, (), None) == (found.profile.num_rows, found.orders, found.time)
    assert "0 in the source, 0 for the engines" in str(found)
    assert found.to_html()
    assert found == Explanation.from_mapping(found.to_mapping(), where="file")


def test_a_negative_price_is_refused_before_any_work(job_of):
    with pytest.raises(
        ConfigError, match="price_per_engine_hour must be a number of at least 0, got -1"
    ):
        job_of(TEXTS).explain(measure=False, price_per_engine_hour=-1)


@pytest.mark.parametrize("kv_tokens", [-5, 0, 2.5])
def test_a_kv_cache_that_cannot_be_is_refused_before_any_work(job_of, kv_tokens):
    with pytest.raises(ConfigError, match=f"kv_tokens must be a whole .* got {kv_tokens}; leave"):
        job_of(TEXTS).explain(measure=False, kv_tokens=kv_tokens)


def test_a_probe_that_has_not_run_tells_no_lengths(explain):
    assert "max_tokens" == explain(TEXTS, lengths="probe").lengths_from


def test_rows_that_no_engine_sees_are_in_units_as_well(explain):
    found = explain([*TEXTS, *[None] * 5], unit_rows=10, max_unit_rows=10)
    assert 2 + 1 == found.profile.num_units


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Keeps a cost model for a job, of which only computed prompt tokens cost time."""
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))

    def measured(job):
        keep_costs(job._stage.pool.spec, token_s=(1.0,))
        return job

    return measured


def texts_with_common_beginnings():
    return [f"document {i % 2} that many rows have in common, row {i}" for i in range(40)]


@pytest.mark.parametrize("caching", [True, False])
def test_the_time_of_a_run_without_a_plan_counts_what_its_cache_finds(job_of, measured, caching):
    job = measured(job_of(texts_with_common_beginnings(), mode="off", caching=caching))
    found = job.explain(measure=False)
    generated = found.profile.output_tokens.total - found.profile.num_rows
    computed = found.profile.prompt_tokens.total - found.saved_tokens
    assert (found.saved_tokens > 0) == caching
    assert found.time.engine_s == pytest.approx(generated + computed, rel=0.02)


@pytest.mark.parametrize(("mode", "shares"), [("auto", True), ("off", False)])
@pytest.mark.parametrize("kv_tokens", [400, None])
def test_without_a_prefix_cache_only_a_plan_saves(explain, mode, shares, kv_tokens):
    texts = texts_with_common_beginnings()
    found = explain(texts, kv_tokens=kv_tokens, caching=False, mode=mode)
    assert shares == (found.hit_rate > 0)


def test_where_nothing_is_shared_that_is_said(explain):
    message = "nothing is shared: prefix caching is off"
    texts = texts_with_common_beginnings()
    assert message in str(explain(texts, kv_tokens=None, caching=False, mode="off"))
    assert message not in str(explain(texts, kv_tokens=None, caching=False))


def test_where_the_plan_is_off_the_order_of_the_input_is_what_will_run(explain):
    found = explain(texts_with_common_beginnings(), mode="off")
    assert found.hit_rate == found.forecast("input").hit_rate
    assert "will run: input order, prefix cache only" in str(found)
    assert "prefixes pinned for their groups" not in str(found)


def test_a_run_that_an_error_row_ends_is_said_to_end(explain):
    ends = "the run ends at the first row that fails"
    assert ends in str(explain([*TEXTS, None], on_error="raise"))
    assert ends not in str(explain([*TEXTS, None]))
    assert ends not in str(explain(TEXTS, on_error="raise"))


def question_of(job):
    return JobQuery(
        job=run_spec(job.config, scan_source(job.config.source)),
        spec=job._stage.pool.spec,
        name="in",
        measured_kv_tokens=400,
        measure=False,
        lint=False,
    )


@pytest.mark.ray
def test_parts_of_a_large_source_add_up_to_the_whole(explain):
    texts = [*TEXTS, "a text of many words " * 100, *[None] * 5]
    units = {"unit_rows": 10, "max_unit_rows": 10}
    with local_ray():
        large, small = (explain(texts, max_driver_bytes=size, **units) for size in (0, 1 << 20))
    assert small.profile.num_units == large.profile.num_units
    message = "1 row too large for this cache"
    assert (True, True) == (message in str(small), message in str(large))


@pytest.mark.ray
def test_orders_of_a_large_source_of_few_rows_are_those_of_a_small_one(explain):
    texts = [f"document {i % 3} that several rows have in common, {i}" for i in range(40)]
    with local_ray():
        large, small = (explain(texts, max_driver_bytes=size) for size in (0, 1 << 20))
    assert large.orders == small.orders


@pytest.mark.ray
def test_after_a_run_of_a_large_plan_its_cache_is_known(job_of):
    query = question_of(job_of(TEXTS, max_driver_bytes=0))
    with local_ray():
        planned = plan_large(query.job)
        found = explain_planned(query, replace(planned, tables=(), rows=(), arranged=()))
    assert 400 == found.kv.tokens
    assert "so orders are not compared" in str(found)


@pytest.mark.ray
def test_a_large_source_is_explained_with_lengths_and_where_they_come_from(explain):
    with local_ray():
        probed = explain(TEXTS, lengths="probe", max_driver_bytes=0)
        explained = explain(TEXTS, expected_tokens_column="n", max_driver_bytes=0)
    assert ("max_tokens", "column 'n'") == (probed.lengths_from, explained.lengths_from)
    assert explained.lengths.tokens[0] < 2 < probed.lengths.tokens[0]


def test_a_run_whose_plan_cannot_be_explained_is_reported_without_it(model, tmp_path, caplog):
    stage = fake_stage(model, prompt="{text}")
    job = RunSpec(
        source=None,
        # the checkpoint went away while rows were generated
        config=replace(stage.config, model=str(tmp_path / "gone")),
        plan=PlanConfig(),
        sink="",
        row_id_column=None,
    )
    query = JobQuery(job=job, spec=stage.pool.spec, name="in", measure=False, lint=False)
    actual = RunActual(prompt_tokens=9, computed_tokens=9)
    assert explain_run(query, plan_prompts([[1] * 9]), actual) is None
    assert "the report lacks the plan" in caplog.text
