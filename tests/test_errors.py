import pickle
import shlex

import pytest

from raybatch.errors import (
    CapacityError,
    ConfigError,
    EndpointError,
    EndpointUnreachable,
    MissingDependency,
    ReplicaError,
    RowError,
    UnreachableError,
    did_you_mean,
    error_text,
    is_permanent,
    one_line,
    shell_path,
)


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


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no such option"),
        MissingDependency("pip install"),
        ModuleNotFoundError("no module"),
        EndpointError("the key is refused"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_stays_as_it_is_fails_again(error):
    assert is_permanent(error)


@pytest.mark.parametrize(
    "error",
    [
        UnreachableError("the bucket is away"),
        EndpointUnreachable("the server is away"),
        CapacityError("no block", needed_tokens=9, available_tokens=8),
        MemoryError(),
        RuntimeError("CUDA out of memory"),
        OSError("no space left"),
        TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_worth_another_try(error):
    assert not is_permanent(error)


def test_a_text_is_told_on_one_line_and_not_without_end():
    assert one_line("size\n  mismatch\tfor x") == "size mismatch for x"
    assert one_line("abcdef", 4) == "abcd ..."


@pytest.mark.parametrize(
    "path",
    ["out", "my answers", "it's", 'a"b', "$HOME/x", "s3://bucket/a b", "-rf", "", "a\nb", "*"],
)
def test_a_path_in_a_message_is_one_word_of_a_shell(path):
    assert shlex.split(f"ls -- {shell_path(path)}") == ["ls", "--", path]


def test_a_file_of_this_host_is_told_by_its_path():
    assert shell_path("file:///data/a b") == "'/data/a b'"
    assert shell_path("s3://bucket/a") == "s3://bucket/a"
