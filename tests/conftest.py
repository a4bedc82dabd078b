"""Fixtures of the whole suite: a seeded generator, and memory that is never clean by luck."""

import gc
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.environment import settle_environment

# for a GPU host without pydantic, which comes before it elsewhere
sys.path.append(str(Path(__file__).parents[1] / "scripts/stand_ins"))

# how many examples and products there are
pytest_plugins = ["tests.tiers"]

# before anything that reads them is loaded
settle_environment(os.environ)
sys.dont_write_bytecode = False  # was read when this process began

# a suite that was started in the background of a shell ignores Ctrl-C, and so would what it starts
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep all tests on a cluster, and tests that share a fixture, on one worker; let vLLM warn."""
    for item in items:
        group = None
        if item.get_closest_marker("ray"):
            # a second cluster makes neither faster, and its ports are in the way of `ray start`
            group = "ray"
        elif _shares_fixtures(item):
            group = item.path.stem
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


def pytest_collection_finish() -> None:
    """Let no garbage collection look at tests and modules again, which are a million objects."""
    gc.collect()
    gc.freeze()


def _shares_fixtures(item: pytest.Item) -> bool:
    """Return whether a test has a fixture that its module makes once."""
    found = getattr(item, "_fixtureinfo", None)
    made = found.name2fixturedefs.values() if found is not None else ()
    return any(fixtures[-1].scope == "module" for fixtures in made)


@pytest.fixture
def rng() -> np.random.Generator:
    """Random numbers that are the same in every run."""
    return np.random.Generator(np.random.PCG64(42))


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill float tensors that the package leaves uninitialised with NaN."""
    torch = sys.modules.get("torch")
    if torch is None:
        return

    def poisoning(make):
        def wrapped(*args, **kwargs):
            made = make(*args, **kwargs)
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller.startswith("raybatch.") and made.is_floating_point():
                made.fill_(float("nan"))
            return made

        return wrapped

    monkeypatch.setattr(torch, "empty", poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoning(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoning(torch.Tensor.new_empty))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model folder of the fake backend: a byte-level tokenizer without a chat template."""
    # slow to load, and most tests need no Ray
    from tests.stages.support import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("model") / "plain", has_chat_template=False)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the package that the test alone has."""
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shared_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that lasts as long as the run: what is compiled and measured once is there."""
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def _warm_process():
    from tests.warm_processes import WarmProcess

    process = WarmProcess()
    yield process
    process.end()


@pytest.fixture(scope="module")
def warm_processes(_warm_process):
    """Fork the processes of local engines from one that has loaded torch, on Linux."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            patch.setattr("raybatch.actors.executors.local_pools._spawn", _warm_process.start)
        yield


@pytest.fixture(scope="module")
def cluster():
    """The Ray cluster of this process; pools of the module end with it."""
    from tests.clusters import local_ray

    with local_ray():
        yield


@pytest.fixture(scope="session", autouse=True)
def _ended_ray():
    """End the Ray cluster that tests have shared."""
    yield
    if (clusters := sys.modules.get("tests.clusters")) is not None:
        clusters.end_ray()


@pytest.fixture(scope="module")
def locally():
    """For jobs without Ray; their pools end with the module."""
    yield
    from raybatch.actors.pool import release_pools

    release_pools()


@pytest.fixture
def cluster_where_marked(request: pytest.FixtureRequest):
    """A small Ray cluster for the tests of a module that are marked so."""
    if request.node.get_closest_marker("ray") is not None:
        request.getfixturevalue("cluster")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Tell beside a failure what the Ray cluster of the test had free, and who waited for it."""
    report = yield
    if report.failed and (ray := sys.modules.get("ray")) is not None and ray.is_initialized():
        report.sections.append(("Ray cluster", _cluster_text(ray)))
    return report


def _cluster_text(ray: ModuleType) -> str:
    from ray.autoscaler.v2.sdk import get_cluster_status

    try:
        status = get_cluster_status(ray.get_runtime_context().gcs_address)
        groups = ray.util.placement_group_table()
    except Exception as error:
        # the cluster itself may have failed
        return f"no answer: {error!r}"
    return "\n".join(
        [
            f"usage: {status.cluster_resource_usage}",
            f"waiting: {status.resource_demands}",
            f"groups: {[(g['name'], g['state'], g['bundles']) for g in groups.values()]}",
            f"actors: {ray.util.list_named_actors(all_namespaces=True)}",
        ]
    )
