"""Results that benchmarks write, with the conditions of the run."""

import json
import re

import conditions
import pytest


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_result_goes_to_a_file_or_gets_a_name_in_a_folder(is_folder, tmp_path):
    path = tmp_path if is_folder else tmp_path / "mine.json"
    conditions.write_result(path, "some_script.py", figures=[1, 2])
    (found,) = tmp_path.iterdir()
    pattern = r"\d{4}-\d\d-\d\d-some-script-\d+core(-avx512|-avx2)?\.json"
    assert re.fullmatch(pattern if is_folder else r"mine\.json", found.name)
    written = json.loads(found.read_text())
    assert [1, 2] == written["figures"]
    assert written["conditions"]["command"].startswith("python benchmarks/some_script.py")


def test_nothing_is_written_where_nobody_asked_for_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    conditions.write_result(None, "some_script.py")
    assert not list(tmp_path.iterdir())
