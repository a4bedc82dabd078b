"""Which failures are repeated, and what a repeated operation answers."""

import errno

import pytest
from aiohttp.client_exceptions import ClientPayloadError, ServerDisconnectedError
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ReadTimeoutError,
)

from raybatch.durable.storage import (
    LocalStore,
    Repeating,
    is_repeatable,
    says_it_exists,
    says_unsupported,
)


def http(status, kind=OSError):
    """Return an error as s3fs raises it: the client's own is its cause."""
    error = kind("said no")
    error.__cause__ = RuntimeError("client error")
    error.__cause__.response = {"ResponseMetadata": {"HTTPStatusCode": status}}
    return error


class Failing:
    """Raises the next of `errors` before or after the effect of an operation."""

    def __init__(self, store, errors, *, is_effective=False):
        self.store, self.errors, self.is_effective = store, list(errors), is_effective

    def __getattr__(self, name):
        def call(*args):
            result = getattr(self.store, name)(*args) if self.is_effective else None
            if self.errors:
                raise self.errors.pop(0)
            return result if self.is_effective else getattr(self.store, name)(*args)

        return call

    uri = "test://"


@pytest.fixture
def local(tmp_path):
    return LocalStore(str(tmp_path))


REPEATED = [
    TimeoutError(),
    ConnectionResetError(),
    OSError(errno.EBUSY, "slow down"),
    OSError(errno.EIO, "internal error"),
    http(409),
    http(500),
    http(503),
    EndpointConnectionError(endpoint_url="http://x"),
    ConnectTimeoutError(endpoint_url="http://x"),
    ReadTimeoutError(endpoint_url="http://x"),
    ConnectionClosedError(endpoint_url="http://x"),
    ServerDisconnectedError(),
    ClientPayloadError("cut"),
]
RAISED = [
    FileNotFoundError(),
    PermissionError(),
    OSError(errno.ENOSPC, "full"),
    http(403),
    http(400),
    ValueError("bug"),
    NoCredentialsError(),
]


@pytest.mark.parametrize("error", REPEATED, ids=repr)
def test_a_failure_of_the_moment_is_repeatable(error):
    assert is_repeatable(error)


@pytest.mark.parametrize("error", RAISED, ids=repr)
def test_a_failure_that_stays_is_not(error):
    assert not is_repeatable(error)


@pytest.mark.parametrize("error", [FileExistsError(), http(412)], ids=repr)
def test_a_refused_create_is_known_in_every_spelling(error):
    assert says_it_exists(error)


UNSUPPORTED = [http(400), http(405), http(501), NotImplementedError(), TypeError("mode")]
# a store may return 400 for a timeout or unknown credentials as well
REFUSED = [http(400, TimeoutError), http(400, PermissionError), http(403), http(503), OSError()]


@pytest.mark.parametrize("error", UNSUPPORTED, ids=repr)
def test_what_a_store_can_never_do_is_known(error):
    assert says_unsupported(error)


@pytest.mark.parametrize("error", [*REFUSED, *REPEATED], ids=repr)
def test_other_failures_say_nothing_of_what_a_store_can_do(error):
    assert not says_unsupported(error)


def test_an_operation_is_repeated_until_it_succeeds(local):
    slept = []
    store = Repeating(Failing(local, [TimeoutError(), http(500)]), sleep=slept.append)
    assert store.create("a", b"one")
    assert [0.2, 0.4] == slept


def test_an_operation_gives_up_with_the_last_error(local):
    slept = []
    errors = [http(500), http(500), TimeoutError("the last")]
    store = Repeating(Failing(local, errors), num_tries=3, sleep=slept.append)
    with pytest.raises(TimeoutError, match="the last"):
        store.read("a")
    assert 2 == len(slept)


def test_an_error_that_stays_is_raised_at_once(local):
    slept = []
    store = Repeating(Failing(local, [PermissionError("no")]), sleep=slept.append)
    with pytest.raises(PermissionError):
        store.read("a")
    assert [] == slept


def test_a_create_whose_reply_was_lost_is_answered_by_false(local):
    store = Repeating(Failing(local, [TimeoutError()], is_effective=True), sleep=lambda s: None)
    assert not store.create("a", b"one")
    assert b"one" == store.read("a")


def test_a_create_that_always_conflicts_with_a_file_is_answered_by_false(local):
    local.create("a", b"one")
    store = Repeating(Failing(local, [http(409)] * 3), num_tries=3, sleep=lambda s: None)
    assert not store.create("a", b"two")


def test_a_create_that_always_conflicts_with_nothing_is_raised(local):
    store = Repeating(Failing(local, [http(409)] * 3), num_tries=3, sleep=lambda s: None)
    with pytest.raises(OSError, match="said no"):
        store.create("a", b"two")
