"""A staged file that another run removed is staged again; other missing files are reported."""

import os
import shutil

import pytest

from raybatch.durable.storage import LocalStore


@pytest.fixture
def lose(tmp_path, monkeypatch):
    """Let folders vanish just before the first file gets its name, which fails."""

    def arm(*folders):
        link = os.link

        def fail_once(staged, path):
            monkeypatch.setattr(os, "link", link)
            for folder in folders:
                shutil.rmtree(tmp_path / folder)
            raise FileNotFoundError(path)

        monkeypatch.setattr(os, "link", fail_once)

    return arm


def test_a_staged_file_that_was_tidied_up_is_staged_again(tmp_path, lose):
    lose("_raybatch/staging")
    assert LocalStore(str(tmp_path)).create("data/a", b"x")
    assert b"x" == (tmp_path / "data" / "a").read_bytes()


@pytest.mark.parametrize(
    "folders", [(), ("data",), ("data", "_raybatch/staging")], ids=["nothing", "folder", "both"]
)
def test_what_tidying_up_does_not_explain_is_told(tmp_path, lose, folders):
    lose(*folders)
    with pytest.raises(FileNotFoundError):
        LocalStore(str(tmp_path)).create("data/a", b"x")
    assert not (tmp_path / "data" / "a").exists()
