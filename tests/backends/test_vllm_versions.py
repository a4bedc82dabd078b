"""The vLLM versions that raybatch works with, and errors for other ones; needs no vLLM."""

import ast
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import raybatch
import raybatch_extensions
from raybatch.actors.pool import PoolHandle
from raybatch.actors.wire.records import PoolSpec
from raybatch.backends.registry import create_backend
from raybatch.backends.vllm.versions import ADAPTERS, WORKING, adapter, why_unusable
from raybatch.config import BackendConfig, EngineConfig, PlanConfig, PoolConfig
from raybatch.errors import ConfigError
from raybatch.explanation.explain import explain_source
from raybatch.explanation.query import JobQuery

HOUSE = Path(raybatch.__file__).parent
EXTENSIONS = Path(raybatch_extensions.__file__).parent
INSIDE_VLLM = re.compile(r"vllm(\.\w+)+(:\w+)?")
NEWEST = list(ADAPTERS.values())[-1]


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a vLLM of some version that raises if it is imported."""

    def install(version):
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
        about = tmp_path / f"vllm-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def names_of_vllm(tree):
    """Return the names of vLLM's modules that a file imports or contains as strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "vllm")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield str(node.module)
        elif isinstance(node, ast.Constant) and INSIDE_VLLM.fullmatch(str(node.value)):
            yield node.value


def test_only_adapters_contain_import_paths_of_vllm():
    found = {
        "/".join(path.parts[-3:]): names
        for path in [*HOUSE.rglob("*.py"), *EXTENSIONS.rglob("*.py")]
        if (names := sorted(names_of_vllm(ast.parse(path.read_text(encoding="utf-8")))))
    }
    assert list(found) == ["backends/vllm/versions.py"]


def test_the_range_is_that_of_the_package_and_of_the_adapters():
    project = tomllib.loads((HOUSE.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["optional-dependencies"]["vllm"] == [WORKING]
    low, high = re.findall(r"0\.(\d+)", WORKING)
    assert list(ADAPTERS) == [f"0.{minor}" for minor in range(int(low), int(high))]


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "0.3", "1.0.0+cu130"])
def test_another_version_is_refused_before_it_is_imported(installed, version):
    installed(version)
    message = re.escape(f"vLLM {version} is installed here, and raybatch works with {WORKING}")
    with pytest.raises(ConfigError, match=message):
        create_backend("demo", BackendConfig(kind="vllm"), EngineConfig())
    with pytest.raises(ConfigError, match=message):
        adapter()


@pytest.fixture
def spec():
    return PoolSpec(
        model="demo",
        backend=BackendConfig(kind="vllm"),
        engine=EngineConfig(),
        pool=PoolConfig(replicas=1),
    )


def test_a_pool_of_this_host_refuses_it_before_any_work(installed, spec):
    handle = PoolHandle(spec, is_local=True)
    handle.settled()
    installed("0.30.2")
    with pytest.raises(ConfigError, match=r"vLLM 0\.30\.2 is installed here"):
        handle.settled()


def test_an_explanation_warns_of_it(installed, spec, caplog):
    installed("0.30.2")
    no_rows = SimpleNamespace(source=SimpleNamespace(num_rows=0), plan=PlanConfig())
    explain_source(JobQuery(job=no_rows, spec=spec, name="a"))
    assert "vLLM 0.30.2 is installed here, and raybatch works with" in caplog.text


@pytest.mark.parametrize("version", ["0.32.0", "0.33.7+cu129", "0.31.0rc1"])
def test_versions_of_a_known_minor_have_its_adapter(installed, version):
    installed(version)
    assert why_unusable() is None
    assert adapter() is ADAPTERS[version[:4]]


def mutated(part, **names):
    return replace(NEWEST, names={part: names})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (mutated("engine", a="json.nowhere:x"), "No module named 'json.nowhere'"),
        (mutated("engine", a="json:nothing"), "module 'json' has no attribute 'nothing'"),
        (
            replace(mutated("engine", dump="ast:dump"), arguments={"dump": "node speed"}),
            "dump takes no argument speed",
        ),
        (
            replace(
                mutated("engine", JSONDecoder="json:JSONDecoder"),
                arguments={"JSONDecoder.encode": "o"},
            ),
            "there is no JSONDecoder.encode",
        ),
    ],
    ids=["module", "name", "argument", "method"],
)
def test_a_missing_name_of_vllm_is_an_error_that_names_the_adapter(broken, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        broken.load("engine")
    assert "raybatch/backends/vllm/versions.py" in str(raised.value)


def test_a_missing_attribute_is_named_with_its_path():
    engine = SimpleNamespace(core=SimpleNamespace(requests={}))
    NEWEST.check(engine, "core.requests", "its engine")
    message = r"versions\.py\): its engine has no core\.running; install"
    with pytest.raises(ConfigError, match=message):
        NEWEST.check(engine, "core.requests core.running", "its engine")
