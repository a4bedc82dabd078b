"""What a store promises, on S3, and through errors of the service."""

import pickle
import threading

import pytest

from faultlab.s3_proxy import HttpFault, s3_proxy
from raybatch.durable.storage import ObjectStore, Repeating, open_store
from tests.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

FAULTS = [
    HttpFault(status=status, is_after=is_after, hang_s=2.0 if status is None else 0.0)
    for status in (500, 503, 409, None)
    for is_after in (False, True)
]
# longer than the client waits; a connection that is closed at once makes it ask again by itself
NO_ANSWER = HttpFault(status=None, hang_s=2.0)
# the client gives up soon and leaves the repeating to the store
OPTIONS = {
    "config_kwargs": {"read_timeout": 0.5, "connect_timeout": 5, "retries": {"max_attempts": 0}}
}


@pytest.fixture(autouse=True)
def _client_that_does_not_repeat(monkeypatch):
    # it would send a request again that was not answered, and hide whether the store does
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


@pytest.fixture
def store(bucket):
    return open_store(f"s3://{bucket}/some/out")


def test_of_sixteen_writers_at_once_one_wins(store):
    assert store.is_exclusive
    start = threading.Barrier(16)
    won = []

    def write(number):
        start.wait()
        if store.create("data/a", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.read("data/a").decode()] == [str(number) for number in won]


def test_the_probe_leaves_no_object(store):
    assert store.is_exclusive
    assert [] == store.names("_raybatch")


@pytest.mark.parametrize(("num_bytes", "expected"), [(2, b"ef"), (6, b"abcdef"), (99, b"abcdef")])
def test_a_tail_is_the_end_of_an_object(store, num_bytes, expected):
    store.create("data/a", b"abcdef")
    assert expected == store.tail("data/a", num_bytes)


def test_a_size_is_that_of_an_object_alone(store):
    store.create("data/a", b"abc")
    assert [3, None, None] == [store.size(name) for name in ("data/a", "data", "data/b")]


def test_a_missing_object_cannot_be_read(store):
    with pytest.raises(FileNotFoundError):
        store.read("data/a")
    with pytest.raises(FileNotFoundError):
        store.tail("data/a", 4)


def test_names_are_never_those_of_an_earlier_listing(store, bucket):
    other = open_store(f"s3://{bucket}/some/out")
    assert [] == store.names("data")
    other.create("data/b", b"")
    other.create("data/x=1/a", b"")
    assert ["data/b", "data/x=1/a"] == store.names("data")
    other.remove("data/b")
    assert ["data/x=1/a"] == store.names("data")


def test_a_replaced_object_has_the_last_bytes(store):
    store.replace("report", b"one")
    store.replace("report", b"two")
    assert b"two" == store.read("report")


def test_a_removed_object_is_gone_and_a_missing_one_is_fine(store):
    store.create("data/a", b"")
    store.remove("data/a")
    store.remove("data/a")
    assert store.size("data/a") is None


def test_what_a_probe_found_goes_to_another_process(bucket, s3_endpoint):
    methods = []

    def count(request):
        methods.append(request.method)

    with s3_proxy(s3_endpoint, count) as proxy:
        store = ObjectStore(f"s3://{bucket}/out", options={"endpoint_url": proxy.endpoint})
        assert store.is_exclusive
        copy = pickle.loads(pickle.dumps(store))
        methods.clear()
        assert copy.create("data/a", b"one")
    assert ["PUT"] == methods


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_an_object_is_created_once_through_an_error(bucket, s3_endpoint, fault):
    is_armed = [False]

    def once(request):
        hits = is_armed[0] and request.method == "PUT"
        is_armed[0] &= not hits
        return fault if hits else None

    with s3_proxy(s3_endpoint, once) as proxy:
        inner = ObjectStore(
            f"s3://{bucket}/out", options={**OPTIONS, "endpoint_url": proxy.endpoint}
        )
        store = Repeating(inner, sleep=lambda _: None)
        assert store.is_exclusive
        is_armed[0] = True
        # an effect whose answer was lost is taken for somebody else's
        assert store.create("data/a", b"one") is not fault.is_after
        assert not store.create("data/a", b"two")
        assert b"one" == store.read("data/a")
    assert {fault.name: 1} == proxy.faults


def test_a_probe_without_an_answer_is_repeated(bucket, s3_endpoint):
    faults = iter([NO_ANSWER])

    def first(request):
        return next(faults, None) if request.method == "PUT" else None

    with s3_proxy(s3_endpoint, first) as proxy:
        inner = ObjectStore(
            f"s3://{bucket}/out", options={**OPTIONS, "endpoint_url": proxy.endpoint}
        )
        assert Repeating(inner, sleep=lambda _: None).is_exclusive
    assert 1 == sum(proxy.faults.values())


@pytest.mark.parametrize("operation", ["read", "tail", "size", "names", "remove"])
def test_every_operation_is_repeated(bucket, s3_endpoint, operation):
    faults = iter([HttpFault(status=500), HttpFault(status=503), NO_ANSWER])
    is_armed = [False]

    def some(request):
        return next(faults, None) if is_armed[0] else None

    with s3_proxy(s3_endpoint, some) as proxy:
        inner = ObjectStore(
            f"s3://{bucket}/out", options={**OPTIONS, "endpoint_url": proxy.endpoint}
        )
        store = Repeating(inner, sleep=lambda _: None)
        store.create("data/a", b"abc")
        is_armed[0] = True
        arguments = {"tail": ("data/a", 2), "names": ("data",)}.get(operation, ("data/a",))
        expected = {"read": b"abc", "tail": b"bc", "size": 3, "names": ["data/a"], "remove": None}
        assert expected[operation] == getattr(store, operation)(*arguments)
    assert 3 == sum(proxy.faults.values())
