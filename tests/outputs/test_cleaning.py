"""`clean` removes what runs leave behind, and never data."""

import os
import time
import uuid

import pytest

from raybatch.durable.journal import drop_journal_and_staging
from raybatch.durable.layout import attempt_name, fragment_name, part_name, probe_name, staging_name
from raybatch.durable.run_log import beat
from raybatch.durable.storage import open_store
from raybatch.errors import ConfigError
from raybatch.outputs.cleaning import clean, parse_age
from raybatch.outputs.verify import verify
from tests.outputs.support import contents, make_complete, make_sink, write_unit

STAGED, PROBE = staging_name("x"), probe_name("x")
DONE, OPEN = fragment_name(0, 0, 2, "a"), fragment_name(1, 0, 2, "a")
OTHER_PLAN = "_raybatch/plan/plan-b/units.arrow"
STRUCK, STRUCK_OPEN = attempt_name(0, 0), attempt_name(1, 0)
LEFT = {STAGED, PROBE, DONE, OPEN, STRUCK, STRUCK_OPEN, OTHER_PLAN}


@pytest.fixture
def sink(tmp_path):
    return str(tmp_path / "out")


def leave_behind(sink, *, age_s=0.0):
    """Put every kind of leftover below a sink, as if written `age_s` ago."""
    for name in LEFT:
        open_store(sink).create(name, b"12345")
        if "://" not in sink:
            then = time.time() - age_s
            os.utime(f"{sink}/{name}", (then, then))


def removed(sink, **options):
    return set(clean(sink, **options).names)


def test_of_an_open_output_old_leftovers_go_and_journals_of_open_units_stay(sink):
    write_unit(sink, make_sink(sink), 0)
    leave_behind(sink, age_s=8 * 24 * 3600)
    assert LEFT - {OPEN, STRUCK_OPEN} == removed(sink)


def test_of_an_open_output_what_a_run_may_need_stays(sink):
    write_unit(sink, make_sink(sink), 0)
    leave_behind(sink)
    found = clean(sink)
    assert ((DONE, STRUCK), 3) == (found.names, found.num_young)


def test_of_a_complete_output_everything_goes_but_young_plans(sink):
    make_complete(sink)
    leave_behind(sink)
    assert LEFT - {OTHER_PLAN} == removed(sink)


def test_an_age_of_nothing_takes_all(sink):
    make_complete(sink)
    leave_behind(sink)
    assert removed(sink, older_than_s=0.0) == LEFT


def test_what_a_run_at_work_may_need_stays_at_any_age(sink):
    write_unit(sink, make_sink(sink), 0)
    leave_behind(sink)
    beat(open_store(sink), "run-a", time.time())
    found = clean(sink, older_than_s=0.0)
    assert ((DONE, STRUCK), 3) == (found.names, found.num_young)
    assert "3 files that may be needed: run run-a" in str(found)


def test_everything_else_stays_as_it_was(sink, tmp_path):
    make_complete(sink)
    before = contents(tmp_path)
    leave_behind(sink)
    open_store(sink).create("data/foreign.txt", b"")
    clean(sink, older_than_s=0.0)
    open_store(sink).remove("data/foreign.txt")
    assert before == contents(tmp_path)
    assert verify(sink, deep=True).is_complete


def test_shards_stay_while_no_plan_says_which_holds(sink):
    make_sink(sink)
    open_store(sink).remove("_raybatch/plan.json")
    leave_behind(sink)
    names = removed(sink, older_than_s=0.0)
    assert {STAGED, PROBE} == names


def test_a_dry_run_names_and_removes_nothing(sink, tmp_path):
    make_complete(sink)
    leave_behind(sink)
    before = contents(tmp_path)
    found = clean(sink, is_dry_run=True)
    assert (6, 30) == (len(found.names), found.num_bytes)
    assert "would remove 6 files (30 bytes)" in str(found)
    assert before == contents(tmp_path)


def test_an_output_in_an_object_store_is_cleaned():
    sink = f"memory://{uuid.uuid4().hex}/out"
    make_complete(sink)
    leave_behind(sink)
    assert LEFT - {OTHER_PLAN} == removed(sink)


def test_a_folder_of_somebody_else_is_not_touched(tmp_path):
    (tmp_path / "_raybatch" / "staging").mkdir(parents=True)
    (tmp_path / "_raybatch" / "staging" / "x").write_text("x")
    with pytest.raises(ConfigError, match="nothing is removed"):
        clean(tmp_path, older_than_s=0.0)


@pytest.mark.parametrize(
    ("age", "seconds"), [("0s", 0), ("30m", 1800), ("1.5h", 5400), ("7d", 7 * 86400)]
)
def test_ages_are_read(age, seconds):
    assert seconds == parse_age(age)


@pytest.mark.parametrize("age", ["7", "d", "-1d", "1w", ""])
def test_an_age_without_a_unit_is_refused(age):
    with pytest.raises(ConfigError, match="must be a number with s, m, h or d"):
        parse_age(age)


def test_a_complete_run_drops_its_journal_and_staging(sink):
    make_complete(sink)
    leave_behind(sink)
    assert drop_journal_and_staging(open_store(sink)) == 5
    assert clean(sink, older_than_s=0.0).names == (PROBE, OTHER_PLAN)


@pytest.mark.parametrize("act", ["create", "replace"])
def test_a_file_whose_staged_form_another_run_has_removed_is_staged_again(sink, monkeypatch, act):
    store, publish = open_store(sink), {"create": "link", "replace": "replace"}[act]
    whole, calls = getattr(os, publish), []

    def after_tidying(staged, path):
        calls.append(path)
        if len(calls) == 1:
            drop_journal_and_staging(store)
        whole(staged, path)

    monkeypatch.setattr(os, publish, after_tidying)
    getattr(store, act)(part_name(0), b"rows")
    assert (2, b"rows") == (len(calls), store.read(part_name(0)))
