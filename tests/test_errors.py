import pickle

import pytest

from raybatch.errors import CapacityError, ReplicaError, did_you_mean


@pytest.mark.parametrize(
    "error",
    [
        CapacityError("too long", needed_tokens=9, available_tokens=4),
        ReplicaError(3, "out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_keep_their_fields_between_processes(error):
    copy = pickle.loads(pickle.dumps(error))
    assert (type(error), str(error), vars(error)) == (type(copy), str(copy), vars(copy))


def test_the_nearest_name_is_suggested():
    assert " (did you mean 'temperature'?)" == did_you_mean("temprature", ["top_p", "temperature"])


def test_a_name_near_nothing_gets_no_suggestion():
    assert did_you_mean("xyz", ["temperature"]) == ""
