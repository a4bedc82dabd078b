"""Outputs whose input grows: new files become units of a further plan."""

import errno
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raybatch
from raybatch.durable import storage
from raybatch.errors import ConfigError
from raybatch.planning.store import read_plans
from raybatch.report import current_report as report_of
from tests.job.test_resume import EACH_PLAN, PLANS, parts_of, run_until
from tests.jobs import Hold, local_job
from tests.outputs.support import contents
from tests.stages.support import fake_stage, write_parquet

pytestmark = pytest.mark.usefixtures("locally", "cluster_where_marked")


def add_file(folder, name, rows):
    texts = [f"document {row % 3} " * 8 + f"question {row}" for row in rows]
    write_parquet(folder / "in" / name, pa.table({"text": texts, "number": list(rows)}))


def run(folder, model, plan=PLANS["small"], **options):
    return make_job(folder, model, plan, **options).run(progress=lambda *_: None)


def make_job(folder, model, plan=PLANS["small"], *, fake=None, **options):
    fake = {"max_num_seqs": 8, **(fake or {})}
    stage = fake_stage(model, prompt="{text}", replicas=1, fake=fake)
    return local_job(folder / "in", folder / "out", stage, plan=plan, **options)


def parts(folder):
    return {f"data/{name}": data for name, data in parts_of(folder / "out").items()}


@pytest.mark.parametrize("plan", EACH_PLAN)
def test_new_files_are_added_and_old_parts_stay(model, tmp_path, plan):
    add_file(tmp_path, "m.parquet", range(20))
    run(tmp_path, model, plan)
    before = parts(tmp_path)
    # names before and after that of the old file: its rows keep their place in the plan
    add_file(tmp_path, "a.parquet", range(20, 31))
    add_file(tmp_path, "z.parquet", range(31, 40))
    report = run(tmp_path, model, plan, extend=True)
    assert (40, 40, 0, 20) == (
        report.rows_in,
        report.rows_out,
        report.exit_code(),
        report.rows_resumed,
    )
    after = parts(tmp_path)
    assert before == {name: after[name] for name in before}
    rows = pq.read_table(tmp_path / "out")
    assert sorted(rows["number"].to_pylist()) == list(range(40))
    assert {"a.parquet:0", "m.parquet:0", "z.parquet:8"} < set(rows["row_id"].to_pylist())
    found = raybatch.verify(tmp_path / "out", deep=True)
    assert (True, 40) == (found.is_complete, found.written_rows)


@pytest.fixture
def grown(model, tmp_path):
    """A finished output to whose input a file has come."""
    return grow(tmp_path, model)


def grow(folder, model, **options):
    add_file(folder, "a.parquet", range(20))
    run(folder, model, **options)
    add_file(folder, "b.parquet", range(20, 220))
    return folder


def test_without_extend_a_new_file_is_refused_with_the_way_out(grown, model):
    with pytest.raises(ConfigError, match=r"b\.parquet is new.*set extend=True \(--extend"):
        run(grown, model)


def test_an_old_file_that_has_changed_is_refused_with_extend_too(grown, model):
    add_file(grown, "a.parquet", range(21))
    with pytest.raises(ConfigError, match=r"a\.parquet has changed"):
        run(grown, model, extend=True)


def test_an_extension_that_was_cut_off_goes_on_and_success_is_true_meanwhile(tmp_path, model):
    hold = Hold(tmp_path, 200 - 8)
    grown = grow(tmp_path, model, fake=hold.options)
    before, success = parts(grown), (grown / "out" / "_SUCCESS").read_bytes()
    run_until(
        make_job(grown, model, extend=True, fake=hold.options),
        lambda: len(parts(grown)) > len(before) + 1,
    )
    assert success == (grown / "out" / "_SUCCESS").read_bytes()
    found, report = raybatch.verify(grown / "out", deep=True), report_of(str(grown / "out"))
    assert (True, False) == (found.is_clean, found.is_complete)
    assert 220 - found.written_rows == found.rows_to_do == report.rows_todo > 0
    # the new file belongs to the output now
    hold.release()
    report = run(grown, model, fake=hold.options)
    assert (220, 220, 0) == (report.rows_in, report.rows_out, report.exit_code())
    assert raybatch.verify(grown / "out", deep=True).is_complete
    record = json.loads((grown / "out" / "_SUCCESS").read_text())
    assert (220, len(parts(grown))) == (record["rows"], len(record["files"]))


def test_a_complete_extension_is_not_done_again(grown, model):
    run(grown, model, extend=True)
    before = contents(grown / "out")
    run(grown, model, extend=True)
    run(grown, model)
    assert before == contents(grown / "out")
    assert [1, 2] == [stored.number for stored in read_plans(str(grown / "out"))]


def test_a_further_plan_that_never_repeats_is_refused_where_files_may_be_replaced(
    grown, model, monkeypatch
):
    def refuse(source, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(storage.os, "link", refuse)
    # a new run probes the store again
    storage._store_at.cache_clear()
    with pytest.raises(ConfigError, match=r"set plan\.lengths='auto', or choose a sink"):
        run(grown, model, {**PLANS["small"], "lengths": "probe"}, extend=True)
    assert [1] == [stored.number for stored in read_plans(str(grown / "out"))]


def test_overwrite_forgets_all_plans(grown, model):
    run(grown, model, extend=True)
    report = run(grown, model, overwrite=True)
    assert (220, 1) == (report.rows_out, len(read_plans(str(grown / "out"))))


def test_overwrite_and_extend_together_are_refused(tmp_path, model):
    with pytest.raises(ConfigError, match="set only one"):
        make_job(tmp_path, model, overwrite=True, extend=True)
