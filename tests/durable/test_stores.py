"""What every store promises, in a folder and in fsspec's memory."""

import errno
import os
import pickle
import threading
import uuid

import fsspec
import pytest
from botocore.exceptions import EndpointConnectionError, ReadTimeoutError

from raybatch.durable import storage
from raybatch.durable.storage import ObjectStore, Repeating, is_below, open_store, store_of
from raybatch.errors import ConfigError


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    if request.param == "local":
        return open_store(str(tmp_path / "out"))
    return open_store(f"memory://{uuid.uuid4().hex}/out")


def test_a_created_file_is_read_back(store):
    assert store.create("data/a", b"one")
    assert b"one" == store.read("data/a")


def test_a_file_is_created_once(store):
    store.create("data/a", b"one")
    assert not store.create("data/a", b"two")
    assert b"one" == store.read("data/a")


def test_a_store_tells_that_it_creates_exclusively(store):
    assert store.is_exclusive


def test_the_probe_leaves_no_file(store):
    assert store.is_exclusive
    store.create("data/a", b"one")
    assert [] == store.names("_raybatch")


def test_a_replaced_file_has_the_last_bytes(store):
    store.replace("report", b"one")
    store.replace("report", b"two")
    assert b"two" == store.read("report")


def test_a_missing_file_cannot_be_read(store):
    with pytest.raises(FileNotFoundError):
        store.read("data/a")
    with pytest.raises(FileNotFoundError):
        store.tail("data/a", 4)


@pytest.mark.parametrize(("num_bytes", "expected"), [(2, b"ef"), (6, b"abcdef"), (99, b"abcdef")])
def test_a_tail_is_the_end_of_a_file(store, num_bytes, expected):
    store.create("data/a", b"abcdef")
    assert expected == store.tail("data/a", num_bytes)


def test_a_size_is_that_of_a_file_alone(store):
    store.create("data/a", b"abc")
    assert [3, None, None] == [store.size(name) for name in ("data/a", "data", "data/b")]


def test_names_are_sorted_and_relative_to_the_root(store):
    for name in ("data/b", "data/a", "data/x=1/c", "other"):
        store.create(name, b"")
    assert ["data/a", "data/b", "data/x=1/c"] == store.names("data")


def test_a_missing_folder_holds_nothing(store):
    assert [] == store.names("data")


def test_a_removed_file_is_gone_and_a_missing_one_is_fine(store):
    store.create("data/a", b"")
    store.remove("data/a")
    store.remove("data/a")
    assert store.size("data/a") is None


@pytest.mark.parametrize(
    "name", ["", "/a", "a/", "a//b", "../a", "a/../../b", "./a", "a\0b", "a\\b"]
)
def test_a_name_that_could_leave_the_root_is_refused(store, name):
    with pytest.raises(ConfigError, match="the name"):
        store.create(name, b"")
    with pytest.raises(ConfigError, match="the name"):
        store.read(name)


def test_of_many_writers_at_once_one_wins(store):
    start = threading.Barrier(8)
    won = []

    def write(number):
        start.wait()
        if store.create("data/a", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.read("data/a").decode()] == [str(number) for number in won]


def test_a_store_goes_to_another_process(store):
    store.create("data/a", b"one")
    copy = pickle.loads(pickle.dumps(store))
    assert (store.uri, b"one") == (copy.uri, copy.read("data/a"))


def test_the_uri_opens_the_same_store(store):
    store.create("data/a", b"one")
    assert b"one" == open_store(store.uri).read("data/a")


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_without_links_a_file_is_moved_and_the_store_says_so(tmp_path, monkeypatch, refusal):
    def refuse(source, target):
        raise OSError(refusal, "no links here")

    monkeypatch.setattr(storage.os, "link", refuse)
    store = open_store(str(tmp_path))
    assert not store.is_exclusive
    assert [True, False] == [store.create("data/a", data) for data in (b"one", b"two")]
    assert b"one" == store.read("data/a")


def test_a_refused_write_leaves_nothing_staged(tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(storage.os, "link", refuse)
    store = open_store(str(tmp_path))
    with pytest.raises(OSError, match="full"):
        store.create("data/a", b"one")
    assert [] == store.names("_raybatch") + store.names("data")


def test_the_folder_of_a_lost_race_is_flushed(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.create("data/a", b"one")
    flushed = []
    monkeypatch.setattr(storage, "_flush_folder", flushed.append)
    store.create("data/a", b"two")
    assert [os.path.join(tmp_path, "data")] == flushed


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "data").write_text("")
    store = open_store(str(tmp_path))
    with pytest.raises(NotADirectoryError, match="a file is in the place of a folder; move it"):
        store.create("data/a", b"")
    with pytest.raises(NotADirectoryError, match="a file is in the place of a folder; move it"):
        store.names("data")


def test_a_link_to_nothing_in_the_place_of_a_folder_is_named(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match="a broken link is in the place of a folder"):
        open_store(str(tmp_path / "out")).create("data/a", b"")


def test_a_listing_is_not_taken_from_a_cache(tmp_path):
    uri = f"memory://{uuid.uuid4().hex}/out"
    first, second = open_store(uri), open_store(uri)
    first.create("data/a", b"")
    assert ["data/a"] == first.names("data")
    second.create("data/b", b"")
    assert ["data/a", "data/b"] == first.names("data")


class ForgetfulFileSystem(fsspec.get_filesystem_class("memory")):
    """Overwrites where it was asked to create."""

    protocol = "memory"

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        super().pipe_file(path, value)


def test_a_store_that_replaces_is_found_out(caplog):
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    store._fs = ForgetfulFileSystem(skip_instance_cache=True)
    assert not store.is_exclusive
    assert "run only one job at a time here" in caplog.text
    assert [True, False] == [store.create("a", data) for data in (b"one", b"two")]


class FailingFileSystem(fsspec.get_filesystem_class("memory")):
    """Raises the next of `errors` when it writes."""

    protocol = "memory"
    errors = ()

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        if self.errors:
            raise self.errors.pop()
        super().pipe_file(path, value, mode=mode)


def failing_store(*errors):
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    store._fs = FailingFileSystem(skip_instance_cache=True)
    store._fs.errors = list(errors)
    return store


@pytest.mark.parametrize(
    "error",
    [
        EndpointConnectionError(endpoint_url="http://x"),
        ReadTimeoutError(endpoint_url="http://x"),
        OSError(errno.EINVAL, "unknown"),
    ],
    ids=repr,
)
def test_a_probe_that_failed_says_nothing_of_a_store(error):
    store = failing_store(error)
    with pytest.raises(type(error)):
        _ = store.is_exclusive
    assert store.is_exclusive


def test_a_probe_goes_on_through_an_outage():
    errors = [ReadTimeoutError(endpoint_url="http://x"), ConnectionResetError()]
    assert Repeating(failing_store(*errors), sleep=lambda _: None).is_exclusive


def test_a_store_that_refuses_conditions_is_not_exclusive():
    assert not failing_store(NotImplementedError("conditions")).is_exclusive


class AddOnlyFileSystem(fsspec.get_filesystem_class("memory")):
    """Refuses to remove anything."""

    protocol = "memory"

    def rm_file(self, path):
        raise PermissionError("removing is not allowed")


def test_who_may_only_add_files_can_write():
    store = ObjectStore(f"memory://{uuid.uuid4().hex}")
    store._fs = AddOnlyFileSystem(skip_instance_cache=True)
    assert [True, False] == [store.create("a", data) for data in (b"one", b"two")]
    assert store.is_exclusive


def test_an_unknown_kind_of_store_is_not_trusted(tmp_path):
    store = ObjectStore(f"file://{tmp_path}")
    assert not store.is_exclusive
    assert [True, False] == [store.create("x/a", data) for data in (b"one", b"two")]


def test_a_home_folder_is_the_same_in_every_form(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert store_of("~/out").uri == open_store("~/out").uri == open_store(f"{tmp_path}/out").uri


def test_a_place_whose_driver_is_not_there_is_refused_by_name():
    with pytest.raises(ConfigError, match="'nowhere://a/b' cannot be reached"):
        open_store("nowhere://a/b")
    with pytest.raises(ConfigError, match="'nowhere://a' or '/b' cannot be reached"):
        is_below("nowhere://a", "/b")
