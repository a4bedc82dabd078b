import pickle

import pytest

from raybatch.errors import CapacityError, ReplicaError, RowError, did_you_mean, error_text


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("too long", needed_tokens=9, available_tokens=8),
        ReplicaError(1, "out of memory"),
        RowError("row 'a': x"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_the_way_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_the_nearest_name_is_suggested():
    assert " (did you mean 'temperature'?)" == did_you_mean("temprature", ["top_p", "temperature"])


@pytest.mark.parametrize("name", ["PROMPT", "Prompt", "PROPMT"])
def test_a_name_that_differs_in_case_is_suggested(name):
    assert did_you_mean(name, ["prompt", "source"]) == " (did you mean 'prompt'?)"


def test_a_suggestion_has_the_case_of_the_known_name():
    assert did_you_mean("questionid", ["QuestionId"]) == " (did you mean 'QuestionId'?)"


def test_a_name_near_nothing_gets_no_suggestion():
    assert did_you_mean("xyz", ["temperature"]) == ""


def test_an_error_is_told_by_class_and_message():
    assert "ValueError: x" == error_text(ValueError("x"))


def test_an_error_with_a_lone_surrogate_can_be_stored():
    assert "ValueError: \\ud800" == error_text(ValueError("\ud800"))
