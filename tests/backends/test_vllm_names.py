"""Names and signatures of vLLM that the adapters use, against those of its versions; needs none."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from raybatch.backends.vllm.args import VERSION
from raybatch.backends.vllm.versions import ADAPTERS

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("vllm_names", ROOT / "scripts" / "vllm_names.py")
script = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(script)
STORED = json.loads(script.NAMES.read_text(encoding="utf-8"))
NEWEST = list(ADAPTERS.values())[-1]

MODULES = {
    "vllm/one.py": """
from vllm.two import Base, helper as helped
if True:
    from .three import *
class Engine(Base):
    def step(self, *, now): ...
class Fields(Base):
    __slots__ = ()
    more: int = 2
""",
    "vllm/two/__init__.py": """
from .inner import Base
def helper(a, /, b, **others): ...
""",
    "vllm/two/inner.py": """
class Base:
    size: int
    kind: ClassVar[str] = ""
    def add(self, request_id, prompt): ...
""",
    "vllm/v1/core.py": """
class Core:
    def __init__(self):
        self.running = []
""",
    "vllm/model_executor/model_loader/__init__.py": """
_LOAD_FORMAT_TO_MODEL_LOADER = {"auto": 1, "pt": 2}
""",
}
NAMES = {"engine": {"Engine": "vllm.one:Engine", "helper": "vllm.one:helped", "two": "vllm.two"}}
ARGUMENTS = {
    "Engine": "size",
    "Engine.add": "request_id prompt",
    "Engine.step": "now",
    "helper": "b whatever",
    "two.helper": "a",
}
FITS = replace(
    NEWEST,
    names=NAMES,
    arguments=ARGUMENTS,
    load_formats="auto",
    **{name: "core.running" for name in vars(NEWEST) if name.startswith("read")},
)
SOURCES = script.Sources(
    [*MODULES, "vllm/v1/names.py"], {**MODULES, "vllm/v1/names.py": "core = 1"}.get
)


def gone(adapter):
    return script.gone(adapter, script.names_of(SOURCES, script.used_of(adapter)))


def test_every_version_has_an_adapter_and_names():
    assert [version.rpartition(".")[0] for version in STORED] == list(ADAPTERS)
    assert list(STORED)[-1] == VERSION


@pytest.mark.parametrize("version", STORED)
def test_nothing_is_gone_of_what_the_adapter_of_a_version_uses(version):
    assert script.gone(script.adapter_for(version), STORED[version]) == []


def test_an_adapter_of_another_version_lacks_what_that_one_has_not():
    names = STORED["0.31.0"]
    assert script.gone(ADAPTERS["0.32"], names) == [
        "no vllm.renderers.chat_utils:get_tool_call_id_type",
        "no class has an attribute set_prompt_token_ids",
    ]


def test_names_are_found_behind_imports_and_bases():
    assert gone(FITS) == []


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"names": {"engine": {"Gone": "vllm.one:Gone"}}, "arguments": {}}, "no vllm.one:Gone"),
        ({"names": {"engine": {"gone": "vllm.gone"}}, "arguments": {}}, "no vllm.gone"),
        ({"arguments": {"Engine.stop": ""}}, "no vllm.one:Engine.stop"),
        ({"arguments": {"Engine.step": "then"}}, "vllm.one:Engine.step takes no then"),
        ({"arguments": {"Engine": "kind"}}, "vllm.one:Engine takes no kind"),
        ({"arguments": {"two.gone": ""}}, "no vllm.two.gone"),
        ({"read_here": "core.waiting"}, "no class has an attribute waiting"),
        ({"load_formats": "auto npcache"}, "no load_format npcache"),
    ],
)
def test_what_is_gone_is_named(changed, message):
    assert gone(replace(FITS, **changed)) == [message]


def test_a_version_that_nobody_knows_is_compared_with_the_newest_adapter():
    assert script.adapter_for("0.99.1") is NEWEST
    assert script.adapter_for("0.31.2") is ADAPTERS["0.31"]


def test_the_fields_of_a_class_are_what_it_takes():
    found = SOURCES.find("vllm.one:Fields")
    assert SOURCES.arguments(found) == ["size", "more"]
