"""This version resumes an output that an earlier version of raybatch began.

tests/data/begun_by_0_1_0 is an interrupted run of the embedded demo model on one host: a plan, one
part, rows of another unit in the journal. A change that cannot resume it has to refuse it
(`raybatch.planning.fingerprint.PROTOCOL`), and this test has to expect that.
"""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raybatch.errors import ConfigError
from raybatch.job.job import Job

BEGUN = Path(__file__).parents[1] / "data" / "begun_by_0_1_0"
OPTIONS = {
    "model": "demo",
    "prompt": "{text}",
    "id_column": "id",
    "sampling": {"max_tokens": 48, "ignore_eos": True},
    "engine": {"max_num_seqs": 3},
    "pool": {"replicas": 1},
}

pytestmark = pytest.mark.usefixtures("locally", "warm_processes")


def run(sink: Path, **stage: object):
    job = Job.from_mapping(
        {
            "source": str(BEGUN / "in"),
            "sink": str(sink),
            "executor": "local",
            "plan": {"unit_rows": 16, "max_unit_rows": 16},
            "stage": {**OPTIONS, **stage},
        }
    )
    return job.run(progress=lambda *_: None)


def test_an_output_begun_by_an_earlier_tree_is_finished(tmp_path):
    sink = tmp_path / "out"
    shutil.copytree(BEGUN / "out", sink)
    (part,) = sink.glob("data/*.parquet")
    before = part.read_bytes()
    num_before = pq.read_metadata(part).num_rows
    # rows of units that have no part; the second number of a name says how many
    kept = [path for path in sink.glob("_raybatch/frag/*/*.arrow") if int(path.parent.name) > 0]
    num_kept = sum(int(path.name.split("-")[1]) for path in kept)
    assert kept, "the journal is part of what is gone on with"
    report = run(sink)
    assert (64, 64, 0, 0) == (
        report.rows_in,
        report.rows_out,
        report.rows_lost,
        report.rows_duplicated,
    )
    last = report.history.runs[-1]
    assert 64 - num_before - num_kept == last.samples[-1].rows, "what was done is not done again"
    assert before == part.read_bytes()
    run(tmp_path / "anew")
    answers = ["id", "generated_text"]
    expected, actual = (
        pq.read_table(folder, columns=answers).sort_by("id") for folder in (tmp_path / "anew", sink)
    )
    assert expected == actual


def test_it_is_refused_in_one_line_where_answers_would_differ(tmp_path):
    sink = tmp_path / "out"
    shutil.copytree(BEGUN / "out", sink)
    with pytest.raises(ConfigError, match=r"max_tokens is 47 and was 48.*choose another folder"):
        run(sink, sampling={"max_tokens": 47, "ignore_eos": True})
