"""Rows of outputs in dataset repositories of the hub."""

import io

import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest

import raybatch
from raybatch_tables import hub as hub_module
from raybatch_tables import publish
from tests.tables.fake_datasets import fake_datasets
from tests.tables.support import NUM_ROWS, end_of, is_killed_at, make_job, publish_in_a_process

pytestmark = pytest.mark.usefixtures("locally")

NAME = "org/answers"
TABLE = f"hub:{NAME}"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with fake_datasets() as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        # the library reads its variables when it is imported
        for name, value in {
            "ENDPOINT": served.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": served.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "hf" / "hub"),
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield served


def files_of(hub) -> dict[str, bytes]:
    return {name: data for name, data in hub.files[NAME].items() if name.startswith("data/")}


def check_whole(hub, output):
    tables = [pq.read_table(io.BytesIO(data)) for data in files_of(hub).values()]
    found = pa.concat_tables(tables).sort_by("row_id").to_pylist()
    assert found == pads.dataset(output / "data").to_table().sort_by("row_id").to_pylist()
    verified = raybatch.verify(output, deep=True)
    assert (verified.problems, verified.notes) == ((), (f"the rows were added to {TABLE} once",))


def test_a_repository_has_all_rows_in_one_commit_and_a_card(hub, output, monkeypatch):
    assert publish(str(output), TABLE).num_added == NUM_ROWS
    check_whole(hub, output)
    assert hub.messages == [f"Add {NUM_ROWS} rows by raybatch"]
    card = hub.files[NAME]["README.md"].decode()
    assert "data_files: data/*.parquet" in card
    assert f"| rows | {NUM_ROWS} |" in card
    assert "| model | plain |" in card
    monkeypatch.setattr(hub_module, "_files", lambda *_: pytest.fail("the rows are written again"))
    assert not publish(str(output), TABLE).num_added
    assert len(hub.messages) == 1


def test_a_job_pushes_its_rows(hub, model, source, tmp_path):
    make_job(model, source, tmp_path / "out", publish=TABLE).run(progress=lambda *_: None)
    check_whole(hub, tmp_path / "out")


@pytest.mark.parametrize("point", ["before_table", "in_table", "after_table"])
def test_a_push_that_was_killed_is_completed(hub, output, point):
    is_killed_at(point, output, TABLE)
    publish(str(output), TABLE)
    check_whole(hub, output)
    assert len(hub.messages) == 1


def test_a_commit_whose_answer_was_lost_is_not_made_again(hub, output):
    hub.fails_after_commit = True
    publish(str(output), TABLE)
    check_whole(hub, output)
    assert len(hub.messages) == 1


def test_pushes_at_once_leave_rows_once(hub, output):
    for process in [publish_in_a_process(output, TABLE) for _ in range(3)]:
        end_of(process)
    check_whole(hub, output)


def test_rows_of_many_files_are_beside_those_of_another_job(
    hub, output, model, source, tmp_path, monkeypatch
):
    monkeypatch.setattr(hub_module, "_FILE_BYTES", 1)
    monkeypatch.setattr(hub_module, "_ROW_GROUP_ROWS", 10)
    publish(str(output), TABLE)
    num_files = len(files_of(hub))
    assert num_files > 1
    check_whole(hub, output)
    make_job(model, source, tmp_path / "other", "Why {text}?").run(progress=lambda *_: None)
    publish(str(tmp_path / "other"), TABLE)
    rows = [pq.read_table(io.BytesIO(data)).num_rows for data in files_of(hub).values()]
    assert sum(rows) == 2 * NUM_ROWS


def test_a_card_that_a_person_wrote_stays(hub, output):
    hub.files[NAME] = {"README.md": b"# Mine"}
    publish(str(output), TABLE)
    assert hub.files[NAME]["README.md"] == b"# Mine"
    check_whole(hub, output)


def test_rows_that_another_process_has_added_meanwhile_are_not_added(hub, output, monkeypatch):
    monkeypatch.setattr(hub_module, "_FILE_BYTES", 1)
    monkeypatch.setattr(hub_module, "_ROW_GROUP_ROWS", 10)
    commit, calls = hub_module.HubDataset._commit, []

    def commit_late(*args):
        calls.append(args)
        if len(calls) == 1:  # files of another size
            monkeypatch.setattr(hub_module, "_FILE_BYTES", 1 << 20)
            publish(str(output), TABLE)
        return commit(*args)

    monkeypatch.setattr(hub_module.HubDataset, "_commit", commit_late)
    publish(str(output), TABLE)
    assert len(calls) == 2
    check_whole(hub, output)
    assert len(hub.messages) == 1


def test_a_commit_for_an_older_version_is_made_again_for_the_newest(hub, output, monkeypatch):
    newest, versions = hub_module.HubDataset._newest, []

    def newest_later(self):
        versions.append(newest(self))
        if len(versions) == 3:  # somebody else commits
            hub.messages.append("another commit")
        return versions[-1]

    monkeypatch.setattr(hub_module.HubDataset, "_newest", newest_later)
    publish(str(output), TABLE)
    check_whole(hub, output)
    assert hub.messages == ["another commit", f"Add {NUM_ROWS} rows by raybatch"]
    assert len(versions) == 6  # two tries, and looks for the rows


def test_files_have_large_row_groups(hub, output):
    publish(str(output), TABLE)
    (data,) = files_of(hub).values()
    assert pq.ParquetFile(io.BytesIO(data)).num_row_groups == 1
