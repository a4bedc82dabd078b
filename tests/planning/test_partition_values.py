"""Values that cannot name a partition folder are reported before any work."""

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.inputs.source import scan_source
from raybatch.planning.source_checks import check_partition_values
from tests.stages.support import write_parquet


def source_of(folder, *columns, name="url"):
    for number, column in enumerate(columns):
        write_parquet(
            folder / f"{number}.parquet", pa.table({name: column, "x": [0] * len(column)})
        )
    return scan_source(str(folder))


def test_values_that_can_be_folders_are_fine(tmp_path):
    source = source_of(tmp_path, pa.array(["a", None, "x" * 190, "a/b", ""]))
    check_partition_values(source, ["url", "x"])


def test_a_value_too_long_for_a_folder_is_told_with_file_and_row(tmp_path):
    fine, long = pa.array(["a"] * 3000), pa.array(["a"] * 2000 + ["x" * 200] + ["a"] * 5)
    with pytest.raises(ConfigError, match=r"1\.parquet:2000: the partition url=xxx.* is longer"):
        check_partition_values(source_of(tmp_path, fine, long), ["url"])


def test_the_text_that_stands_for_null_is_told_with_file_and_row(tmp_path):
    column = pa.array(["a", None, "__HIVE_DEFAULT_PARTITION__"])
    with pytest.raises(
        ConfigError, match=r"0\.parquet:2: the text __HIVE.*is the folder name for null"
    ):
        check_partition_values(source_of(tmp_path, column), ["url"])


def test_a_value_is_as_long_as_it_is_when_quoted(tmp_path):
    with pytest.raises(ConfigError, match=r"0\.parquet:1: the partition url=%2F"):
        check_partition_values(source_of(tmp_path, pa.array(["a", "/" * 70])), ["url"])


def test_values_of_dictionaries_are_looked_at(tmp_path):
    column = pa.array(["a", "x" * 200]).dictionary_encode()
    with pytest.raises(ConfigError, match=r"0\.parquet:1"):
        check_partition_values(source_of(tmp_path, column), ["url"])


def test_a_column_whose_name_is_too_long_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="partition yyy"):
        check_partition_values(source_of(tmp_path, pa.array([1]), name="y" * 199), ["y" * 199])


def test_text_that_is_not_utf8_is_told(tmp_path):
    column = pa.array([b"a", b"\xff"]).view(pa.string())
    with pytest.raises(ConfigError, match=r"0\.parquet:1: column 'url' has text that is not UTF"):
        check_partition_values(source_of(tmp_path, column), ["url"])
