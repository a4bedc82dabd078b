"""A job by its plan, from files to files; large plans on a small Ray cluster."""

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from raybatch.config import PlanConfig
from raybatch.errors import ConfigError
from raybatch.job.job import Job
from raybatch.planning import large
from raybatch.planning.store import read_plan
from raybatch.stages.feeder import LLMStage
from tests.job.test_job import demo_rows
from tests.jobs import LARGE, local_job
from tests.stages.support import fake_stage, make_tokenizer

NUM_DOCUMENTS, QUESTIONS = 30, 8
NUM_ROWS = NUM_DOCUMENTS * QUESTIONS + 2

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def document_table():
    """Questions about documents in turn, with a copy of the first one and a null."""
    texts = [
        f"{d:02d}" + f" document {d}" * 6 + f" question {q}"
        for q in range(QUESTIONS)
        for d in range(NUM_DOCUMENTS)
    ]
    others = demo_rows(NUM_ROWS).drop_columns(["text"])
    return others.add_column(0, "text", pa.array([*texts, texts[0], None]))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("source"))


def write_documents(folder):
    table = document_table()
    for start in range(0, NUM_ROWS, 100):
        pq.write_table(table.slice(start, 100), folder / f"{start:04d}.parquet")
    return folder


def run(source, sink, model, plan, **options):
    stage = fake_stage(model, prompt="{text}", engine={"block_size_tokens": 8}, **options)
    return local_job(source, sink, stage, plan=plan).run(progress=lambda stats, num_rows: None)


def output(sink):
    table = pq.read_table(sink)
    return table.sort_by("row_id")


SMALL = {"unit_rows": 32, "max_unit_rows": 64}
ON_RAY = pytest.param(1, marks=pytest.mark.ray)


@pytest.fixture(scope="module")
def sinks(source, model, tmp_path_factory):
    """The same job without a plan, and planned by the driver."""
    folder = tmp_path_factory.mktemp("sinks")
    for name, plan in (("off", "off"), ("small", SMALL)):
        run(source, folder / name, model, plan)
    return folder


@pytest.fixture(scope="module")
def large_sink(cluster, source, model, tmp_path_factory):
    """The same job planned by tasks in parts."""
    sink = tmp_path_factory.mktemp("large") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large, "ROWS_PER_PART", 100)
        patch.setattr(large, "ROWS_PER_STRETCH", 20)
        run(source, sink, model, {**SMALL, **LARGE})
    return sink


@pytest.fixture(params=["small", pytest.param("large", marks=pytest.mark.ray)])
def planned(request, sinks):
    """The output of a job by its plan."""
    if request.param == "large":
        return request.getfixturevalue("large_sink")
    return sinks / "small"


def test_a_planned_job_writes_the_rows_of_an_unplanned_one(sinks, planned):
    counted = ["num_cached_tokens", "group_id", "attempts"]
    expected = output(sinks / "off").drop_columns(counted)
    assert expected.equals(output(planned).drop_columns(counted))


def test_rows_of_a_document_have_one_group_in_the_output(planned):
    table = output(planned)
    table = table.filter(pc.is_valid(table.column("text")))
    documents = [text[:2] for text in table.column("text").to_pylist()]
    groups = table.column("group_id").to_pylist()
    assert NUM_DOCUMENTS == len(set(zip(documents, groups, strict=True))) == len(set(groups))


def test_the_plan_lies_below_the_sink_and_speaks_of_every_row(planned):
    stored = read_plan(str(planned))
    assert (NUM_ROWS, NUM_DOCUMENTS) == (stored.num_rows, stored.num_groups)
    files = [(path.name, pq.read_metadata(path).num_rows) for path in planned.glob("data/p*")]
    assert sum(rows for _, rows in files) == NUM_ROWS
    assert [("0000.parquet", 100), ("0100.parquet", 100), ("0200.parquet", 42)] == [
        (name, rows) for name, rows, _ in stored.files
    ]


def test_a_copy_is_generated_once_and_counts_as_cached(sinks):
    table = output(sinks / "small")
    rows = table.filter(pc.equal(table.column("text"), document_table().column("text")[0]))
    first, second = (rows.column("generated_tokens")[i].as_py() for i in range(2))
    cached = rows.column("num_cached_tokens").to_pylist()
    assert first == second
    assert rows.column("num_input_tokens")[0].as_py() in cached


def test_the_same_input_makes_the_same_plan(sinks, source, model, tmp_path):
    run(source, tmp_path / "again", model, SMALL, replicas=1)
    assert read_plan(str(sinks / "small")).hash == read_plan(str(tmp_path / "again")).hash


@pytest.mark.parametrize("max_driver_bytes", [ON_RAY, 1 << 20])
@pytest.mark.parametrize("is_reordered", [True, False])
def test_each_prompt_is_rendered_once(tmp_path, max_driver_bytes, is_reordered):
    model, calls = make_tokenizer(tmp_path / "chat", has_chat_template=True), tmp_path / "calls"
    texts = document_table().column("text").to_pylist()[:160] if is_reordered else range(160)
    (tmp_path / "in").mkdir()
    for i in range(2):
        part = [str(text) for text in texts[80 * i : 80 * (i + 1)]]
        pq.write_table(pa.table({"text": part}), tmp_path / "in" / f"{i}.parquet")

    def messages(row):
        with calls.open("a") as file:
            file.write(f"{row['text']}\n")
        return [{"role": "user", "content": row["text"]}]

    plan = {**SMALL, "max_driver_bytes": max_driver_bytes, "min_saved_fraction": 0.5}
    stage = fake_stage(model, messages=messages, engine={"block_size_tokens": 8})
    local_job(tmp_path / "in", tmp_path / "out", stage, plan=plan).run()
    assert read_plan(str(tmp_path / "out")).is_reordered is is_reordered
    answered = pq.read_table(tmp_path / "out").column("text").to_pylist()
    assert sorted(map(str, texts)) == sorted(calls.read_text().splitlines()) == sorted(answered)


def test_nothing_shared_keeps_the_order_of_the_input(model, tmp_path):
    rows = pa.table({"text": [f"{i} shares nothing" for i in range(40)]})
    (tmp_path / "in").mkdir()
    pq.write_table(rows, tmp_path / "in" / "a.parquet")
    run(tmp_path / "in", tmp_path / "out", model, None)
    assert not read_plan(str(tmp_path / "out")).is_reordered
    assert rows.column("text").equals(pq.read_table(tmp_path / "out").column("text"))


@pytest.mark.parametrize("max_driver_bytes", [ON_RAY, 1 << 20])
def test_the_results_of_a_probe_are_kept(source, model, tmp_path, max_driver_bytes):
    plan = {"lengths": "probe", "probe_fraction": 0.1, "max_driver_bytes": max_driver_bytes}
    report = run(source, tmp_path / "out", model, {**SMALL, **plan})
    assert (NUM_ROWS, 0, 0) == (report.rows_out, report.rows_lost, report.rows_duplicated)
    attempts = output(tmp_path / "out").column("attempts").to_pylist()
    assert {0, 1} == set(attempts)


@pytest.mark.parametrize("max_driver_bytes", [ON_RAY, 1 << 20])
@pytest.mark.parametrize(("prompt", "is_told"), [("{label}{text}", True), ("{text}", False)])
def test_a_run_that_shares_too_little_names_explain_where_fields_could_move(
    model, tmp_path, caplog, max_driver_bytes, prompt, is_told
):
    caplog.set_level("INFO", logger="raybatch")
    pq.write_table(
        pa.table({"text": ["x"] * 20, "label": [f"{i} and more" for i in range(20)]}),
        tmp_path / "in.parquet",
    )
    options = {"max_driver_bytes": max_driver_bytes, "min_saved_fraction": 1.0}
    stage = fake_stage(model, prompt=prompt, engine={"block_size_tokens": 8}, dedup=False)
    local_job(tmp_path / "in.parquet", tmp_path / "out", stage, plan=options).run(
        progress=lambda stats, num_rows: None
    )
    assert is_told == ("`raybatch explain` checks whether another order" in caplog.text)


def test_overwriting_removes_the_earlier_plan(source, model, tmp_path):
    run(source, tmp_path / "out", model, SMALL)
    stage = fake_stage(model, prompt="{text} again", engine={"block_size_tokens": 8})
    local_job(source, tmp_path / "out", stage, plan=SMALL, overwrite=True).run()
    stored = read_plan(str(tmp_path / "out"))
    shards = (tmp_path / "out" / "_raybatch" / "plan").glob("*/*")
    assert {stored.hash} == {path.parent.name for path in shards}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"order": "ration"}, "did you mean 'ratio'"),
        (
            {"order": "dual_scan"},
            "one of auto, ratio, got 'dual_scan', which was removed: .* leave",
        ),
        ({"unit_row": 3}, "did you mean 'unit_rows'"),
        ({"max_unit_rows": 10}, "max_unit_rows=10 .*unit_rows=1024; raise max_unit_rows or"),
        ({"probe_fraction": 0}, "above 0 and at most 1"),
        ({"lengths": "probe", "expected_tokens_column": "n"}, "leave one of them out"),
        (3, "must be 'auto', 'off' or options of the plan"),
    ],
)
def test_wrong_options_of_a_plan_are_refused(plan, message):
    with pytest.raises(ConfigError, match=message):
        Job("in", "out", LLMStage("m", prompt="{x}"), plan=plan)


@pytest.mark.parametrize("plan", ["off", False, {"mode": "off"}, {"mode": False}])
def test_a_plan_can_be_switched_off(plan):
    job = Job("in", "out", LLMStage("m", prompt="{x}"), plan=plan)
    assert PlanConfig(mode="off") == job.config.plan


def test_options_that_a_plan_that_is_off_ignores_are_named(source, model, caplog):
    options = {"mode": "off", "order": "ratio", "lengths": "probe", "unit_rows": 8}
    local_job(source, "out", fake_stage(model, prompt="{text}"), plan=options).explain(
        measure=False
    )
    note = "plan.order, plan.lengths has no effect with plan.mode=off"
    assert any(note in message for message in caplog.messages)


def test_a_template_without_a_column_is_named(source, model, caplog):
    local_job(source, "out", fake_stage(model, prompt="text")).explain(measure=False)
    assert "prompt template 'text' references no column" in caplog.text


def test_a_plan_that_is_only_off_is_not_spoken_of(source, model, caplog):
    job = local_job(source, "out", fake_stage(model, prompt="{text}"), plan={"mode": "off"})
    job.explain(measure=False)
    assert "the plan is off" not in caplog.text


def test_a_job_file_holds_the_options_of_the_plan(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "source: in\nsink: out\nplan: {order: ratio}\nstage: {model: m, prompt: '{x}'}\n"
    )
    assert "ratio" == Job.from_yaml(tmp_path / "job.yaml").config.plan.order
