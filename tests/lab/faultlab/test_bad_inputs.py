"""The corpus of bad inputs, and which results count as handled."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest

from faultlab.bad_files import MARKER
from faultlab.bad_inputs import CORPUS
from faultlab.figures import FaultFigures, FaultOptions
from faultlab.input_runs import InputResult, run_input, try_inputs
from tests.clusters import local_ray

CASES = {case.name: case for case in CORPUS}
REFUSED = [name for name, case in CASES.items() if case.refusal]
# the others cost engines, and `raybatch bench faults` runs them
RUN = ["null and empty prompts", "text that is not UTF-8", "values of partitions that climb"]


@pytest.fixture(scope="module")
def cluster():
    with local_ray():
        yield


def test_the_corpus_has_many_cases_of_different_names():
    assert len(CORPUS) == len(CASES) >= 40


@pytest.mark.ray
@pytest.mark.parametrize(
    "name", [*REFUSED, *(pytest.param(n, marks=pytest.mark.slow) for n in RUN)]
)
def test_bad_input_is_handled(cluster, tmp_path, name):
    found = run_input(CASES[name], tmp_path)
    assert found.is_handled, found


@pytest.mark.ray
def test_a_refusal_in_other_words_is_not_handled(cluster, tmp_path):
    found = run_input(replace(CASES["an empty file"], refusal="another message"), tmp_path)
    assert ("refused", False) == (found.outcome, found.is_handled)


@pytest.mark.ray
@pytest.mark.slow
def test_rows_of_another_status_are_not_handled(cluster, tmp_path):
    found = run_input(replace(CASES[RUN[0]], bad={"crashed": 2}), tmp_path)
    assert ("rows", False) == (found.outcome, found.is_handled)


def test_an_error_that_is_not_ours_is_a_crash(tmp_path):
    def job_in(folder):
        raise pa.ArrowInvalid("deep inside")

    case = SimpleNamespace(name="x", write=lambda folder: None, refusal="", job_in=job_in)
    found = run_input(case, tmp_path)
    assert ("crashed", False) == (found.outcome, found.is_handled)
    assert found.message == "ArrowInvalid: deep inside"


@pytest.mark.ray
def test_a_refusal_after_a_payload_has_run_is_not_handled(cluster, tmp_path):
    case = CASES["an empty file"]

    def write(folder):
        case.write(folder)
        (folder / MARKER).mkdir()

    found = run_input(replace(case, write=write), tmp_path)
    assert ("refused", False) == (found.outcome, found.is_handled)


@pytest.mark.slow
def test_a_case_that_ends_or_holds_up_its_process_costs_no_other_case(tmp_path):
    found = try_inputs(tmp_path, hang_s=4.0, module="tests.lab.faultlab.dying_inputs")
    assert [result.name for result in found] == [case.name for case in CORPUS]
    assert ["refused", "crashed", "hung", "refused"] == [result.outcome for result in found[:4]]
    assert Counter(crashed=1, hung=1, refused=len(CORPUS) - 2) == Counter(
        result.outcome for result in found
    )
    assert "the second case" in found[1].message


def result(outcome, *, is_handled):
    return InputResult(
        name="null ids", outcome=outcome, is_handled=is_handled, message="words", seconds=0.1
    )


@pytest.mark.parametrize(
    ("results", "reported", "is_right"),
    [
        ([result("rows", is_handled=True)] * 2, "tried 2, handled 2, crashes 0, hangs 0", True),
        ([result("rows", is_handled=False)], "tried 1, handled 0, crashes 0, hangs 0", False),
        ([result("crashed", is_handled=False)], "tried 1, handled 0, crashes 1, hangs 0", False),
        ([result("hung", is_handled=False)], "problem: null ids: hung: words", False),
    ],
)
def test_the_table_counts_bad_inputs(results, reported, is_right):
    options = FaultOptions(seed=0, schedules=0, rounds=0, moto_python="python")
    figures = FaultFigures(options=options, conditions={}, inputs=tuple(results))
    assert reported in figures.to_text()
    assert is_right == figures.is_right
