"""Every run follows the one plan that was created first."""

import sys
import uuid

import pytest

from raybatch.durable.commit import open_plan
from raybatch.durable.storage import open_store
from raybatch.errors import CommitError, MissingDependency


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4().hex}/out")


def test_a_plan_is_made_where_there_is_none(store):
    assert b"mine" == open_plan(store, lambda: b"mine")
    assert b"mine" == store.read("_raybatch/plan.json")


def test_a_stored_plan_is_taken_and_none_is_made(store):
    open_plan(store, lambda: b"first")

    def refuse():
        raise AssertionError("made again")

    assert b"first" == open_plan(store, refuse)


def test_who_comes_second_with_a_plan_follows_the_first(store):
    def make():
        open_plan(store, lambda: b"first")
        return b"second"

    assert b"first" == open_plan(store, make)


def test_parts_without_a_plan_are_somebody_elses(store):
    store.create("data/part-000000.parquet", b"")
    with pytest.raises(CommitError, match=r"has 1 files, such as data/part-000000\.parquet"):
        open_plan(store, lambda: b"mine")
    assert store.size("_raybatch/plan.json") is None


class LateStore:
    """Another run makes its plan and a part between the first look and the listing."""

    def __init__(self, store):
        self.store = store

    def __getattr__(self, name):
        return getattr(self.store, name)

    def names(self, folder):
        self.store.create("_raybatch/plan.json", b"theirs")
        self.store.create("data/part-000000.parquet", b"")
        return self.store.names(folder)


def test_parts_of_a_run_that_began_meanwhile_are_no_reason_to_refuse(store):
    assert b"theirs" == open_plan(LateStore(store), lambda: b"mine")


def test_a_store_whose_package_is_missing_says_what_installs_it(monkeypatch):
    for protocol in ("s3", "gs"):  # as if no test had opened a store of the kind before
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingDependency, match=r"s3://bucket/out.*s3fs.*pip install .*\[s3\]"):
        open_store("s3://bucket/out")
    with pytest.raises(MissingDependency, match=r"install gcsfs.*pip install .*\[gcs\]"):
        open_store("gs://bucket/out")
