"""What is sent along with a job: the job file, and of a folder neither data nor secrets."""

import os
from zipfile import ZipFile

import pytest

from raybatch.errors import ConfigError
from raybatch_submit.bundle import write_bundle

ZIP = "x.zip"


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "work"
    for name in (
        *("job.yaml", "notes.txt", "code/rules.py", "prompts/a.parquet", "prompts/.hidden"),
        *("other/b.parquet", "models/model.safetensors", ".env", ".git/config", ".venv/x.py"),
        *("keys/id_rsa", "keys/server.pem", "code/__pycache__/rules.pyc", "credentials"),
        *("answers/_raybatch/report.json", "answers/data.json", "sink/part.json"),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def send(tmp_path, **options):
    return write_bundle(tmp_path / ZIP, job_name="job.yaml", job_text="source: a\n", **options)


def test_without_a_folder_the_job_file_is_all(tmp_path):
    assert send(tmp_path) == ("job.yaml",)


def test_job_file_is_the_one_that_was_checked(tmp_path, folder):
    send(tmp_path, working_dir=folder)
    with ZipFile(tmp_path / ZIP) as archive:
        assert archive.read("job.yaml") == b"source: a\n"


def test_data_models_secrets_hidden_files_and_outputs_stay(tmp_path, folder):
    sent = send(tmp_path, working_dir=folder, left_out=(folder / "sink",))
    assert sent == ("job.yaml", "code/rules.py", "notes.txt")


def test_source_in_the_folder_is_sent(tmp_path, folder):
    sent = send(tmp_path, working_dir=folder, kept=(folder / "prompts",))
    assert "prompts/a.parquet" in sent


def test_data_beside_the_source_is_not_sent(tmp_path, folder):
    sent = send(tmp_path, working_dir=folder, kept=(folder / "prompts",))
    assert "other/b.parquet" not in sent


def test_link_out_of_the_folder_is_not_sent(tmp_path, folder):
    (tmp_path / "private.txt").write_text("private")
    (folder / "link.txt").symlink_to(tmp_path / "private.txt")
    assert "link.txt" not in send(tmp_path, working_dir=folder)


def test_equal_content_is_equal_bytes(tmp_path, folder):
    send(tmp_path, working_dir=folder)
    first = (tmp_path / ZIP).read_bytes()
    os.utime(folder / "notes.txt", (0, 0))
    send(tmp_path, working_dir=folder)
    assert (tmp_path / ZIP).read_bytes() == first


def test_too_large_folder_names_its_largest_files(tmp_path, folder):
    with (folder / "big.csv").open("wb") as file:
        file.truncate(101 << 20)
    with pytest.raises(ConfigError, match=r"101 MiB is above .* are big\.csv \(101 MiB\), "):
        send(tmp_path, working_dir=folder)


def test_missing_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match="folder not found"):
        send(tmp_path, working_dir=tmp_path / "none")
