"""Fixtures of the whole suite: a seeded generator, and memory that is never clean by luck."""

import os
import signal
import sys
from types import ModuleType

import numpy as np
import pytest

# Ray's workers step back behind everything else on the machine, and a test would wait for ever
os.environ.setdefault("RAY_worker_niceness", "0")

# a suite that was started in the background of a shell ignores Ctrl-C, and so would what it starts
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let vLLM and what it imports warn: their warnings are not ours to mend."""
    for item in items:
        if item.get_closest_marker("vllm"):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


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


@pytest.fixture(scope="module")
def cluster():
    """A small Ray cluster; its pools end with the module."""
    from tests.stages.support import local_ray

    with local_ray():
        yield


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
