"""Pipelines whose rounds are jobs on one warm pool: no row is answered twice, no engine restarts.

They run on the fake backend; tests/pipelines/test_pipelines.py runs them unchanged.
"""

import importlib
import random
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raybatch.demo.task import make_document, make_questions
from tests.stages.support import fake_stage

pytestmark = pytest.mark.usefixtures("locally")

PIPELINES = Path(__file__).parents[2] / "pipelines"
ROUNDS, CANDIDATES, AGGREGATED = 3, 4, 2


@pytest.fixture
def pipeline(monkeypatch):
    monkeypatch.syspath_prepend(str(PIPELINES))
    return importlib.import_module


@pytest.fixture
def stage_of(model, tmp_path):
    """Makes a stage that counts the starts of its engines, and the sequences that they finish."""

    def stage_of(**options):
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        fake = {"marks_dir": str(marks), "finished_log": str(tmp_path / "finished")}
        return fake_stage(model, id_column="id", replicas=1, fake=fake, **options)

    return stage_of


def num_starts(folder):
    return len(list((folder / "marks").iterdir()))


def num_finished(folder):
    return (folder / "finished").stat().st_size


def make_pairs():
    rng = random.Random(0)
    documents = [make_document(rng, 2) for _ in range(2)]
    return [(d.text, q) for d in documents for q in make_questions(d, rng, 1)]


@pytest.fixture
def aggregate(pipeline, stage_of, tmp_path):
    rsa = pipeline("rsa")

    def aggregate():
        sizes = {"rounds": ROUNDS, "candidates": CANDIDATES, "aggregated": AGGREGATED}
        stage = stage_of(prompt=rsa.PROMPT, sampling={"temperature": 1.0, "max_tokens": 4})
        return rsa.aggregate(stage, make_pairs(), tmp_path / "out", **sizes)

    return aggregate


def test_all_rounds_of_an_aggregation_run_on_engines_that_start_once(aggregate, tmp_path):
    answers, reports = aggregate()
    assert (2, ROUNDS) == (len(answers), len(reports))
    assert ROUNDS * 2 * CANDIDATES == num_finished(tmp_path)
    assert 1 == num_starts(tmp_path)


def test_prompts_of_a_round_hold_answers_of_the_one_before_to_the_same_question(
    aggregate, tmp_path
):
    aggregate()
    before, after = (
        pq.read_table(tmp_path / "out" / name / "answers" / "data").sort_by("id").to_pylist()
        for name in ("round-00", "round-01")
    )
    for row in after:
        first = row["id"] // CANDIDATES * CANDIDATES
        own = [one["generated_text"] for one in before[first : first + CANDIDATES]]
        shown = row["notes"].removeprefix("Earlier answers: ").removesuffix("\n\n")
        assert any(
            shown == f"{one}; {other}"
            for i, one in enumerate(own)
            for j, other in enumerate(own)
            if i != j
        )
    assert {""} == {row["notes"] for row in before}


def test_an_aggregation_that_is_started_again_answers_only_what_is_missing(aggregate, tmp_path):
    first, _ = aggregate()
    finished = num_finished(tmp_path)
    assert (first, finished) == (aggregate()[0], num_finished(tmp_path))
    shutil.rmtree(tmp_path / "out" / f"round-{ROUNDS - 1:02d}")
    assert first == aggregate()[0]
    assert finished + 2 * CANDIDATES == num_finished(tmp_path)


def test_samples_of_a_rollout_have_the_lengths_that_were_drawn(pipeline, stage_of, tmp_path):
    rollout = pipeline("rollout")
    stage = stage_of(
        prompt=rollout.PROMPT, overrides={"max_tokens": "tokens"}, engine={"block_size_tokens": 16}
    )
    lengths, reports = rollout.sample_rounds(
        stage, tmp_path / "out", rounds=2, prompts=2, samples=16
    )
    asked_for = [
        row["tokens"]
        for name in ("round-00", "round-01")
        for row in pq.read_table(tmp_path / "out" / name / "prompts").to_pylist()
    ]
    assert asked_for == lengths
    assert max(lengths) > 4 * sorted(lengths)[len(lengths) // 2]
    assert 1 == num_starts(tmp_path)
    # of 16 samples one computes the prompt, the others no more than a block
    for report in reports:
        computed = report.prompt_tokens - report.cached_tokens
        assert computed <= report.prompt_tokens / 16 + 32 * 16 + 2 * 16
