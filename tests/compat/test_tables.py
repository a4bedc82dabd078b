"""The tables of how-to/move-from-ray-data-llm.md name what ray.data.llm and raybatch.llm have."""

import dataclasses
import inspect
import re
from functools import partial
from pathlib import Path

import pytest

from raybatch import llm
from raybatch.records.types import Sampling
from raybatch.rows.row_options import _NO_EFFECT, _REFUSED

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own imports warn

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "move-from-ray-data-llm.md").read_text()
WORDS = {"same", "better", "different", "not there"}
STAGES = {
    "ChatTemplateStageConfig",
    "DetokenizeStageConfig",
    "PrepareMultimodalStageConfig",
    "TokenizerStageConfig",
}


def rows_of(heading):
    """Return name to word of the first table below a heading."""
    body = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.search(r"\| \w+ \| \| here \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", body)[1]
    rows = {}
    for names, word in re.findall(r"^\| (.*?) \| (.*?) \|", table, re.MULTILINE):
        rows |= dict.fromkeys(re.findall(r"`(\w+)`", names), word)
    return rows


TABLES = [
    "Options of vLLMEngineProcessorConfig",
    "Stage configs",
    "build_processor",
    "Input columns",
    "Output columns",
    "sampling_params",
]


def fields(cls):
    return {field.name for field in dataclasses.fields(cls)}


@pytest.fixture(scope="module")
def ray_llm():
    pytest.importorskip("pydantic", reason="ray.data.llm needs pydantic")
    return pytest.importorskip("ray.data.llm")


@pytest.mark.parametrize("heading", TABLES)
def test_every_row_says_how_it_compares(heading):
    assert set(rows_of(heading).values()) <= WORDS


def test_the_table_of_options_is_that_of_ray(ray_llm):
    theirs = set(ray_llm.vLLMEngineProcessorConfig.model_fields)
    assert set(rows_of("Options of vLLMEngineProcessorConfig")) == theirs


def test_the_tables_of_options_are_ours():
    ours = re.search(r"Options that only raybatch has:\n\n.*\n\|---\|---\|\n((?:\|.*\n)+)", PAGE)[1]
    table = set(rows_of("Options of vLLMEngineProcessorConfig"))
    alone = set(re.findall(r"^\| `(\w+)`", ours, re.MULTILINE))
    assert (table | alone, table & alone) == (fields(llm.ProcessorConfig), set())


def test_options_of_stages_are_rays_and_in_the_table(ray_llm):
    named = set()
    for name in STAGES:
        theirs = set(getattr(ray_llm, name).model_fields)
        assert fields(getattr(llm, name)) == theirs
        named |= theirs
    assert set(rows_of("Stage configs")) == named


def test_raybatch_llm_has_the_names_of_ray_data_llm(ray_llm):
    assert set(llm.__all__) == set(ray_llm.__all__)


def test_arguments_of_build_processor_are_rays_in_its_order(ray_llm):
    theirs = list(inspect.signature(ray_llm.build_processor).parameters)
    assert list(inspect.signature(llm.build_processor).parameters) == [*theirs, "plan"]
    assert list(rows_of("build_processor")) == theirs


def engine_stage():
    pytest.importorskip("torch")
    return pytest.importorskip("ray.llm._internal.batch.stages.vllm_engine_stage")


def test_the_table_of_input_columns_is_that_of_rays_engine(ray_llm):
    stage = partial(engine_stage().vLLMEngineStage, map_batches_kwargs={})
    names = {"messages"}
    for task in ("generate", "embed"):
        made = stage(fn_constructor_kwargs={"task_type": task})
        names |= set(made.get_required_input_keys()) | set(made.get_optional_input_keys())
    assert set(rows_of("Input columns")) == names


def test_the_table_of_output_columns_is_that_of_rays_engine(ray_llm):
    module = engine_stage()
    source = inspect.getsource(module.vLLMEngineStageUDF._generate_with_error_handling)
    added = set(re.findall(r'^ +"(\w+)": ', source, re.MULTILINE))
    assert set(rows_of("Output columns")) == {*module.vLLMOutputData.model_fields, *added}


def test_the_table_of_sampling_options_is_ours():
    rows = rows_of("sampling_params")
    assert {n for n, word in rows.items() if word == "not there"} == set(_REFUSED)
    assert set(rows) == fields(Sampling) | _NO_EFFECT | set(_REFUSED)


@pytest.mark.vllm
def test_the_table_of_sampling_options_is_that_of_vllm():
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed here")
    names = set(vllm.SamplingParams.__struct_fields__)
    assert set(rows_of("sampling_params")) == {n for n in names if not n.startswith("_")}


def lines_of_what_differs():
    body = PAGE.split("\n## What differs\n")[1].split("\n## ")[0]
    table = re.search(r"\| there \| here \| test \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", body)[1]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_every_line_of_what_differs_names_its_tests():
    for there, here, tests in lines_of_what_differs():
        assert there and here  # noqa: PT018 - two cells of a line
        assert re.fullmatch(r"`test_\w+`(, `test_\w+`)*", tests), there


@pytest.mark.parametrize("heading", TABLES)
def test_every_row_that_is_different_is_a_line_of_what_differs(heading):
    listed = {name for cells in lines_of_what_differs() for name in re.findall(r"`(\w+)", cells[0])}
    listed |= set(re.findall(r"`(\w+)=", " ".join(cells[1] for cells in lines_of_what_differs())))
    different = {name for name, word in rows_of(heading).items() if word == "different"}
    assert different <= listed


def test_every_test_that_the_page_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    written = {
        name
        for folder in ("backends", "compat")
        for path in (Path(__file__).parents[1] / folder).glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert named <= written
    assert named
