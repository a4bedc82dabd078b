"""Ray datasets in the order of a plan, compared with the same datasets without one."""

import logging
import random
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
from ray import cloudpickle

import raybatch
from raybatch.config import PlanConfig
from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from raybatch.llm import ProcessorConfig, build_processor
from raybatch.planning import ray_source
from raybatch.planning.planned import RunSpec
from raybatch.planning.run import gather, plan_gathered
from raybatch.rows.plan_columns import _MARK
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.planned import planned_dataset
from tests.clusters import local_ray
from tests.stages.support import fake_stage as some_stage
from tests.tiers import some

pytestmark = pytest.mark.ray

NUM_DOCUMENTS, NUM_QUESTIONS = 12, 10
NUM_ROWS = NUM_DOCUMENTS * NUM_QUESTIONS


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with local_ray():
        yield


def document_rows(*, seed: int = 0) -> pa.Table:
    """Return shuffled rows: several questions about each of several documents."""
    pairs = [(d, q) for d in range(NUM_DOCUMENTS) for q in range(NUM_QUESTIONS)]
    random.Random(seed).shuffle(pairs)
    return pa.table(
        {
            "id": range(NUM_ROWS),
            "document": [f"document {d:02}: " + f"{d * 7919} " * 40 for d, _ in pairs],
            "question": [f"question {q}" for _, q in pairs],
        }
    )


def blocks_of(table: pa.Table, size: int = 25) -> Any:
    return ray.data.from_arrow([table.slice(i, size) for i in range(0, table.num_rows, size)])


@pytest.fixture(scope="module")
def stage(model):
    return fake_stage(model, prompt="{document}\n{question}", id_column="id")


def fake_stage(model, **options: Any) -> type[StageFeeder]:
    return some_stage(model, replicas=1, **options)


def run(dataset: Any) -> pa.Table:
    return pa.concat_tables(ray.get(dataset.to_arrow_refs()))


def answers(rows: pa.Table, column: str = "generated_text") -> dict[Any, Any]:
    found = dict(zip(rows.column("id").to_pylist(), rows.column(column).to_pylist(), strict=True))
    assert len(found) == rows.num_rows, "a row is there twice"
    return found


def runs_of(values: list[Any]) -> int:
    return sum(a != b for a, b in pairwise(values)) + 1


@pytest.fixture(scope="module")
def unplanned(stage) -> pa.Table:
    return run(stage.apply(blocks_of(document_rows()), plan=False))


@pytest.fixture(scope="module")
def planned(stage) -> pa.Table:
    return run(stage.apply(blocks_of(document_rows()), plan=True))


def test_every_row_has_the_answer_that_it_has_without_a_plan(planned, unplanned):
    assert answers(unplanned) == answers(planned)
    assert NUM_ROWS == planned.num_rows
    # without a plan the pool names groups itself, and writes no column for them
    assert planned.schema.names == unplanned.schema.names
    assert planned.schema.types == unplanned.schema.types
    assert [n for n in planned.column_names if n.startswith(_MARK)] == []


def test_rows_of_a_document_follow_each_other(stage):
    rows = run(raybatch.plan(blocks_of(document_rows()), stage))
    assert NUM_DOCUMENTS == runs_of(rows.column("document").to_pylist())
    assert document_rows().sort_by("id") == rows.select(document_rows().column_names).sort_by("id")
    groups = rows.column(f"{_MARK}group").to_pylist()
    assert NUM_DOCUMENTS == len(set(groups)) == runs_of(groups)
    assert min(rows.column(f"{_MARK}prefix_len").to_pylist()) >= 64


def test_the_order_is_that_of_the_plan_of_a_job(stage, tmp_path):
    table = document_rows()
    pq.write_table(table, tmp_path / "rows.parquet")
    job = RunSpec(
        source=scan_source(str(tmp_path)),
        config=stage.config,
        plan=PlanConfig(),
        sink=str(tmp_path / "out"),
        row_id_column=None,
    )
    of_job = plan_gathered(gather(job), job.config, job.plan).whole
    rows = run(raybatch.plan(blocks_of(table), stage))
    ids = rows.column("id").to_numpy()
    assert of_job.order.tolist() == ids.tolist()
    assert of_job.prefix_len[ids].tolist() == rows.column(f"{_MARK}prefix_len").to_pylist()
    pairs = zip(
        of_job.group_id[ids].tolist(), rows.column(f"{_MARK}group").to_pylist(), strict=True
    )
    assert NUM_DOCUMENTS == len(set(pairs))


def test_large_inputs_are_planned_in_parts_and_blocks(stage, monkeypatch):
    monkeypatch.setattr("raybatch.planning.large.ROWS_PER_PART", 50)
    monkeypatch.setattr("raybatch.planning.ray_source._ROWS_PER_BLOCK", 40)
    monkeypatch.setattr("raybatch.planning.ray_source._ROWS_PER_PIECE", 7)
    plan = PlanConfig(unit_rows=10, max_unit_rows=10)
    monkeypatch.setattr("raybatch.planning.ray_source.fit_units_to", lambda *_: plan)
    dataset = raybatch.plan(blocks_of(document_rows()), stage)
    sizes = [
        entry.metadata.num_rows
        for bundle in dataset.iter_internal_ref_bundles()
        for entry in bundle.blocks
    ]
    assert 3 == len(sizes)
    rows = run(dataset)
    assert set(range(NUM_ROWS)) == set(rows.column("id").to_pylist())
    # a part may cut a document that is large compared with a small sample
    assert runs_of(rows.column("document").to_pylist()) <= 3 * NUM_DOCUMENTS


@pytest.fixture
def num_plans(monkeypatch) -> list[int]:
    """Return a list that gets an element whenever a dataset is planned."""
    plans, original = [], ray_source.plan_pieces

    def counted(*args: Any) -> Any:
        plans.append(1)
        return original(*args)

    monkeypatch.setattr(ray_source, "plan_pieces", counted)
    return plans


def test_nothing_is_planned_before_a_dataset_runs(stage, num_plans, capsys):
    dataset = stage.apply(blocks_of(document_rows()), plan=True)
    repr(dataset)
    dataset.explain()
    assert dataset.schema(fetch_if_missing=False) is None
    assert [] == num_plans
    assert "ReadRaybatchPlan" in capsys.readouterr().out


def test_each_execution_plans_once(stage, num_plans, unplanned):
    dataset = stage.apply(blocks_of(document_rows()), plan=True)
    assert answers(unplanned) == answers(run(dataset.map_batches(lambda table: table)))
    assert 1 == len(num_plans)
    materialized = dataset.materialize()
    assert NUM_ROWS == materialized.count() == len(materialized.take_all())
    assert 2 == len(num_plans)


def test_a_part_of_the_rows_can_be_taken(stage, unplanned):
    dataset, wanted = stage.apply(blocks_of(document_rows()), plan=True), answers(unplanned)
    five = dataset.take(5)
    assert [wanted[row["id"]] for row in five] == [row["generated_text"] for row in five]
    assert 5 == len({row["id"] for row in five})
    assert 7 == dataset.limit(7).count()
    assert 3 == len(raybatch.plan(blocks_of(document_rows()), stage).limit(3).take_all())


def test_rows_count_and_have_the_schema_of_a_plain_dataset(stage, unplanned):
    dataset = stage.apply(blocks_of(document_rows()), plan=True)
    assert NUM_ROWS == dataset.count()
    schema = dataset.schema()
    assert (unplanned.schema.names, unplanned.schema.types) == (schema.names, schema.types)


@pytest.mark.parametrize("equal", some([True, False]))
def test_consumers_of_a_split_get_every_row_once(stage, unplanned, equal):
    dataset = stage.apply(blocks_of(document_rows()), plan=True)
    splits = dataset.streaming_split(2, equal=equal)

    @ray.remote(num_cpus=0)
    def consume(split: Any) -> list[pa.Table]:
        return list(split.iter_batches(batch_size=None, batch_format="pyarrow"))

    tables = ray.get([consume.remote(split) for split in splits])
    assert answers(unplanned) == answers(pa.concat_tables([*tables[0], *tables[1]]))
    if equal:
        assert {NUM_ROWS // 2} == {sum(t.num_rows for t in some) for some in tables}


def test_rows_are_written_once(stage, tmp_path, unplanned):
    stage.apply(blocks_of(document_rows()), plan=True).write_parquet(str(tmp_path / "out"))
    written = pq.read_table(tmp_path / "out")
    assert answers(unplanned) == answers(written)


def test_a_parquet_source_is_planned(stage, tmp_path, unplanned):
    for i in range(4):
        pq.write_table(document_rows().slice(i * 30, 30), tmp_path / f"{i}.parquet")
    rows = run(stage.apply(ray.data.read_parquet(str(tmp_path)), plan=True))
    assert answers(unplanned) == answers(rows)


@pytest.mark.parametrize("num_rows", some([0, 1]))
def test_datasets_of_no_row_and_of_one(stage, num_rows):
    table = document_rows().slice(0, num_rows)
    rows = stage.apply(ray.data.from_arrow(table), plan=True).take_all()
    assert num_rows == len(rows)
    assert ["" for _ in rows] == [row["__inference_error__"] for row in rows]


def test_rows_without_anything_in_common_keep_their_order(stage):
    table = pa.table({"id": range(40), "document": [f"{i:03}" * 40 for i in range(40)]})
    table = table.append_column("question", pa.array([""] * 40))
    rows = run(raybatch.plan(blocks_of(table, 10), stage))
    assert list(range(40)) == sorted(rows.column("id").to_pylist())
    assert {None} == set(rows.column(f"{_MARK}group").to_pylist())
    assert 40 == run(stage.apply(blocks_of(table, 10), plan=True)).num_rows


def test_error_rows_stay_and_say_what_is_wrong(model):
    table = document_rows()
    texts = table.column("document").to_pylist()
    texts = [None if i % 10 == 3 else text for i, text in enumerate(texts)]
    table = table.set_column(1, "document", pa.array(texts))
    stage = fake_stage(model, prompt="{document}\n{question}", id_column="id")
    of_plan, plain = (run(stage.apply(blocks_of(table), plan=plan)) for plan in (True, False))
    errors = answers(plain, "__inference_error__")
    assert NUM_ROWS // 10 == sum(map(bool, errors.values()))
    assert errors == answers(of_plan, "__inference_error__")
    assert answers(plain) == answers(of_plan)


def test_a_dataset_of_error_rows_alone(model):
    table = pa.table({"id": range(30), "text": pa.nulls(30, pa.string())})
    stage = fake_stage(model, prompt="{text}", id_column="id")
    rows = run(stage.apply(blocks_of(table, 10), plan=True))
    assert 30 == len(answers(rows, "__inference_error__"))
    assert all(rows.column("__inference_error__").to_pylist())


def test_a_stage_that_raises_ends_the_dataset(model):
    table = document_rows().append_column("text", pa.array([None, *["x"] * (NUM_ROWS - 1)]))
    stage = fake_stage(model, prompt="{document}{text}", id_column="id", on_error="raise")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"RowError: row '0'"):
        run(stage.apply(blocks_of(table), plan=True))


@pytest.mark.parametrize("plan", [True, False])
def test_an_upstream_error_is_raised_as_ray_raises_it(stage, plan):
    def fail(table: pa.Table) -> pa.Table:
        raise ZeroDivisionError("of the user")

    dataset = blocks_of(document_rows()).map_batches(fail, batch_format="pyarrow")
    with pytest.raises(ray.exceptions.RayTaskError, match="ZeroDivisionError: of the user"):
        run(stage.apply(dataset, plan=plan))


@pytest.mark.parametrize("plan", [True, False])
def test_a_column_that_is_not_there_is_a_config_error(model, plan):
    stage = fake_stage(model, prompt="{documents}", id_column="id")
    with pytest.raises((ConfigError, ray.exceptions.RayTaskError), match="documents"):
        run(stage.apply(blocks_of(document_rows()), plan=plan))


def test_columns_of_a_plan_are_not_taken_from_the_user(stage):
    table = document_rows().append_column(f"{_MARK}group", pa.array(range(NUM_ROWS)))
    with pytest.raises(ConfigError, match="__rb_plan_"):
        run(stage.apply(blocks_of(table), plan=True))


def test_ids_of_content_do_not_depend_on_the_order(model):
    stage = fake_stage(model, prompt="{document}\n{question}")
    of_plan, plain = (
        run(stage.apply(blocks_of(document_rows()), plan=plan)) for plan in (True, False)
    )
    assert answers(plain, "row_id") == answers(of_plan, "row_id")


@pytest.mark.slow
def test_the_second_of_two_stages_is_planned_as_well(model):
    first = fake_stage(model, prompt="{document}\n{question}", id_column="id", output_prefix="a_")
    second = fake_stage(model, prompt="{document}\n{a_generated_text}", id_column="id")
    tables = [
        run(second.apply(first.apply(blocks_of(document_rows()), plan=plan), plan=plan))
        for plan in (True, False)
    ]
    assert answers(tables[1]) == answers(tables[0])
    assert answers(tables[1], "a_generated_text") == answers(tables[0], "a_generated_text")


def test_messages_and_bytes_travel_with_their_rows(chat_model):
    table = document_rows()
    messages = [
        [{"role": "user", "content": text}] for text in table.column("document").to_pylist()
    ]
    blobs = [str(i).encode() for i in range(NUM_ROWS)]
    table = table.append_column("messages", pa.array(messages))
    table = table.append_column("blob", pa.array(blobs))
    stage = fake_stage(chat_model, messages="messages", id_column="id")
    rows = run(stage.apply(blocks_of(table), plan=True))
    assert answers(run(stage.apply(blocks_of(table), plan=False))) == answers(rows)
    assert dict(enumerate(blobs)) == answers(rows, "blob")
    assert dict(enumerate(messages)) == answers(rows, "messages")


def test_types_of_ray_data_travel_with_their_rows(stage):
    rows = [
        {"id": i, "document": "a document " * 20, "question": f"{i}", "box": np.full((i % 3, 2), i)}
        for i in range(30)
    ]
    out = stage.apply(ray.data.from_items(rows, override_num_blocks=4), plan=True).take_all()
    assert 30 == len(out)
    assert all((row["box"] == row["id"]).all() for row in out)
    assert all(row["box"].shape == (row["id"] % 3, 2) for row in out)


def test_blocks_of_other_schemas_are_planned_together(stage):
    table = document_rows()
    more = table.slice(60).append_column("more", pa.array(["here"] * 60))
    rows = run(stage.apply(ray.data.from_arrow([table.slice(0, 60), more]), plan=True))
    found = answers(rows, "more")
    assert [None] * 60 + ["here"] * 60 == [found[i] for i in range(NUM_ROWS)]


def test_equal_prompts_and_samples(model):
    table = pa.concat_tables([document_rows(), document_rows()])
    table = table.set_column(0, "id", pa.array(range(2 * NUM_ROWS)))
    sampling = {"n": 2, "temperature": 1.0, "max_tokens": 4}
    stage = fake_stage(
        model, prompt="{document}\n{question}", id_column="id", dedup=True, sampling=sampling
    )
    tables = [run(stage.apply(blocks_of(table), plan=plan)) for plan in (True, False)]
    assert answers(tables[1]) == answers(tables[0])
    assert {2} == {len(texts) for texts in answers(tables[0]).values()}


def test_expected_lengths_of_a_column_travel_with_the_rows(stage):
    table = document_rows().append_column("likely", pa.array([1, None, 3] * (NUM_ROWS // 3)))
    dataset = raybatch.plan(blocks_of(table), stage, expected_tokens_column="likely")
    found = answers(run(dataset), f"{_MARK}expected")
    # at most the longest output
    assert {0: 1, 1: 4, 2: 3} == {i: found[i] for i in range(3)}


@pytest.mark.parametrize("plan", [True, False])
def test_a_processor_answers_alike_with_and_without_a_plan(model, plan):
    config = ProcessorConfig(
        model_source=str(model), concurrency=1, backend={"kind": "fake", "options": {}}
    )
    sampling = {"max_tokens": 3, "temperature": 0.0}
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "prompt": row["document"] + row["question"] if row["id"] else None,
            "sampling_params": sampling,
        },
        postprocess=lambda row: {"id": row["id"], "text": row["generated_text"]},
        plan=plan,
    )
    rows = processor(blocks_of(document_rows())).take_all()
    assert set(range(NUM_ROWS)) == {row["id"] for row in rows}
    by_id = {row["id"]: row for row in rows}
    assert by_id[0]["__inference_error__"]
    assert [i for i in range(1, NUM_ROWS) if not by_id[i].get("text")] == []


def decided(stage, dataset, caplog, *, waiting_rows=8) -> tuple[bool, str]:
    caplog.clear()
    stage = type("Waiting", (stage,), {"waiting_rows": classmethod(lambda _: waiting_rows)})
    with caplog.at_level(logging.INFO, logger="raybatch.stages.planned"):
        result = planned_dataset(dataset, stage, "auto")
    return result is not dataset, caplog.text


def test_auto_plans_shuffled_rows_and_says_what_it_saves(stage, caplog, monkeypatch):
    # tokens of the fake backend cost what they cost on a slow engine
    monkeypatch.setattr("raybatch.stages.planned._TOKENS_PER_S", 10)
    is_planned, text = decided(stage, blocks_of(document_rows()), caplog)
    assert is_planned
    assert "planning the dataset: from its first 120 of 120 rows" in text


@pytest.mark.parametrize(
    ("make", "waiting_rows", "reason"),
    [
        (lambda ds: ds, NUM_ROWS, "its 120 rows are grouped while they wait"),
        (lambda ds: ds.map(lambda row: row), 8, "sampling would run"),
        (lambda ds: ds.random_shuffle(), 8, "sampling would run"),
        (lambda ds: ds.sort("document").materialize(), 8, "already adjacent"),
    ],
    ids=["few rows", "user function", "shuffle", "sorted"],
)
def test_auto_plans_nothing_where_it_does_not_pay(
    stage, caplog, monkeypatch, make, waiting_rows, reason
):
    monkeypatch.setattr("raybatch.stages.planned._TOKENS_PER_S", 10)
    dataset = make(blocks_of(document_rows()))
    is_planned, text = decided(stage, dataset, caplog, waiting_rows=waiting_rows)
    assert not is_planned
    assert reason in text
    assert "override with plan=True" in text


def test_stages_and_processors_plan_where_it_pays(stage, model, caplog, monkeypatch):
    monkeypatch.setattr("raybatch.stages.planned._TOKENS_PER_S", 10)
    config = ProcessorConfig(model_source=str(model), backend={"kind": "fake", "options": {}})
    processor = build_processor(config, lambda row: {"prompt": row["document"]})
    for made, apply in ((stage, stage.apply), (processor.stage, processor)):
        monkeypatch.setattr(made, "waiting_rows", classmethod(lambda _: 8))
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="raybatch.stages.planned"):
            apply(blocks_of(document_rows()))
        assert "planning the dataset" in caplog.text


def test_auto_waits_for_no_long_plan(stage, caplog, monkeypatch):
    monkeypatch.setattr("raybatch.stages.planned._TOKENS_PER_S", 10)
    monkeypatch.setattr("raybatch.stages.planned._MAX_WAIT_S", 0.0)
    is_planned, text = decided(stage, blocks_of(document_rows()), caplog)
    assert not is_planned
    assert '"auto" allows 0 s' in text


def test_a_sample_that_fails_is_no_error_before_the_dataset_runs(stage, caplog):
    def before(table):
        raise ValueError("of the user")

    made = type("Waiting", (stage,), {"waiting_rows": classmethod(lambda _: 8)})
    with caplog.at_level(logging.INFO, logger="raybatch.stages.planned"):
        planned_dataset(blocks_of(document_rows()), made, "auto", before=before)
    assert "fails with" in caplog.text
    assert "of the user" in caplog.text


def test_a_slow_function_before_the_prompts_is_sampled_for_a_while(stage, monkeypatch):
    monkeypatch.setattr(ray_source, "SAMPLE_S", -1.0)
    options = cloudpickle.dumps((stage.settled().config, PlanConfig()))
    as_it_is = cloudpickle.dumps(lambda table: table)
    keys, seconds = ray_source.sample_keys(options, as_it_is, document_rows(), document_rows())
    assert keys.num_rows == 64 < NUM_ROWS
    assert seconds > 0


def test_auto_samples_parquet_files(stage, caplog, tmp_path):
    pq.write_table(document_rows(), tmp_path / "a.parquet")
    dataset = ray.data.read_parquet(str(tmp_path)).select_columns(["id", "document", "question"])
    _, text = decided(stage, dataset, caplog)
    assert "from its first 120 of 120 rows" in text


def test_auto_reads_no_whole_files_to_count_their_rows(stage, caplog, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"document": "a", "question": "b"}\n' * 20)
    is_planned, text = decided(stage, ray.data.read_json(str(tmp_path)), caplog)
    assert not is_planned
    assert "sampling would run" in text


def test_auto_keeps_a_requested_order(stage, caplog):
    dataset = blocks_of(document_rows()).map(lambda row: row)
    dataset.context.execution_options.preserve_order = True
    assert (False, True) == (
        (found := decided(stage, dataset, caplog))[0],
        "preserve_order is set" in found[1],
    )


def test_a_mode_that_does_not_exist_is_a_config_error(stage):
    with pytest.raises(ConfigError, match="plan must be"):
        stage.apply(blocks_of(document_rows()), plan="yes")


def test_two_plans_name_no_group_alike(stage):
    tables = [run(raybatch.plan(blocks_of(document_rows(seed=s)), stage)) for s in (0, 1)]
    groups = [set(table.column(f"{_MARK}group").to_pylist()) for table in tables]
    assert not groups[0] & groups[1]


def test_rows_that_were_planned_for_another_stage_are_refused(stage, model):
    other = fake_stage(model, prompt="{question}", id_column="id")
    dataset = raybatch.plan(blocks_of(document_rows()), other)
    with pytest.raises(ray.exceptions.RayTaskError, match="plan and prompts of another stage"):
        run(dataset.map_batches(stage, **stage.map_options()))


def test_rows_of_adapters_stay_apart(model, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text('{"r": 8}')
    table = document_rows()
    table = table.append_column("adapter", pa.array(["a", "b"] * (NUM_ROWS // 2)))
    adapters = {"lora_column": "adapter", "lora_path": str(tmp_path)}
    stage = fake_stage(model, prompt="{document}\n{question}", id_column="id", **adapters)
    rows = run(raybatch.plan(blocks_of(table), stage))
    of_group = defaultdict(set)
    pairs = zip(*(rows.column(n).to_pylist() for n in (f"{_MARK}group", "adapter")), strict=True)
    for group, adapter in pairs:
        of_group[group].add(adapter)
    of_group.pop(None, None)
    assert {1} == {len(adapters) for adapters in of_group.values()}
    assert 2 == runs_of(rows.column("adapter").to_pylist())
