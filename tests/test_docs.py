"""The documents agree with the code: options, defaults, links, job files."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import yaml

from raybatch.backends.openai.options import OpenAIOptions
from raybatch.config import (
    BackendConfig,
    EngineConfig,
    LimitConfig,
    PlanConfig,
    PoolConfig,
    WaveConfig,
)
from raybatch.job.config import JobConfig
from raybatch.job.job import Job
from raybatch.records.types import Sampling
from raybatch.rows.options import StageConfig
from raybatch.stages.llm_stage import LLMStage

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
SECTIONS = {
    "Job": JobConfig,
    "LimitConfig": LimitConfig,
    "WaveConfig": WaveConfig,
    "PlanConfig": PlanConfig,
    "LLMStage": StageConfig,
    "Sampling": Sampling,
    "EngineConfig": EngineConfig,
    "PoolConfig": PoolConfig,
    "BackendConfig": BackendConfig,
    "OpenAIOptions": OpenAIOptions,
}
# an empty default is written as "none", one that is a config of its own as nothing or by its gist
WRITTEN = {"None": "none", "()": "none", "{}": "none", "True": "true", "False": "false"}


def option_rows(section):
    """Return option to default of the first table below a heading of docs/options.md."""
    text = (ROOT / "docs" / "options.md").read_text()
    body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    table = body.split("| option | default | meaning |\n")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE))


def code_blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_is_documented(section):
    names = {field.name for field in dataclasses.fields(SECTIONS[section])}
    if section == "LLMStage":
        names = set(inspect.signature(LLMStage).parameters) - {"unknown"}
    assert set(option_rows(section)) == names


@pytest.mark.parametrize("section", SECTIONS)
def test_documented_defaults_are_those_of_the_code(section):
    rows = option_rows(section)
    for field in dataclasses.fields(SECTIONS[section]):
        default = field.default
        if field.default_factory is dict:
            default = {}
        if default is dataclasses.MISSING or field.name not in rows:
            continue
        text = f'"{default}"' if isinstance(default, str) else str(default)
        assert (field.name, rows[field.name]) == (field.name, WRITTEN.get(text, text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", ["README.md", "docs/options.md"])
def test_job_files_in_the_documents_are_valid(page):
    (text,) = code_blocks(page, "yaml")
    assert Job.from_mapping(yaml.safe_load(text)).config.stage.model == "Qwen/Qwen3-8B"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_in_the_documents_compiles(page):
    for block in code_blocks(page, "python"):
        compile(block, page.name, "exec")
