"""Options with the stand-ins for pydantic: declared alike, and checked by `__post_init__` alone."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DECLARED = """
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from raybatch.config.option import documented, fields_of, from_mapping, is_default, options
from raybatch.errors import ConfigError

@options("part.")
@dataclass(frozen=True, kw_only=True, slots=True, config={})
class Part:
    rows: Annotated[Annotated[int, Ge(1)], "speed"] = 3
    where: Annotated[str, Field(examples=["here"])] = "here"
    graphs: Annotated[bool | str, BeforeValidator(lambda v: "auto" if v is None else v)] = "auto"
    more: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if self.rows == 13:
            raise ConfigError("part.rows must not be 13")

def refusal(make):
    try:
        make()
    except ConfigError as error:
        return str(error)
"""


def run(code):
    """Run code in a process that finds the stand-ins, and neither Ray nor compiled pydantic."""
    blocked = "import sys\nsys.modules.update(dict.fromkeys(('pydantic_core', 'ray')))\n"
    paths = map(str, (ROOT / "scripts/stand_ins", ROOT))
    done = subprocess.run(
        [sys.executable, "-c", blocked + code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr


def test_defaults_and_changes_are_those_of_a_dataclass():
    run(
        DECLARED + "part = replace(Part(graphs=None), rows=4)\n"
        "assert (4, 'here', 'auto', {}) == (part.rows, part.where, part.graphs, part.more)\n"
        "assert not is_default(part, 'rows')\n"
        "assert is_default(part, 'more')\n"
    )


def test_what_is_declared_is_known():
    run(
        DECLARED + "fields = fields_of(Part)\n"
        "assert ['rows', 'where', 'graphs', 'more'] == list(fields)\n"
        "assert (int, [Ge(1), 'speed']) == (fields['rows'].annotation, fields['rows'].metadata)\n"
        "assert ['here'] == fields['where'].examples\n"
    )


def test_options_of_an_engine_are_documented():
    run(
        "from raybatch.config import EngineConfig\n"
        "from raybatch.config.option import documented\n"
        "assert documented(EngineConfig)['block_size_tokens'] == 'Tokens per KV block.'\n"
    )


def test_what_goes_together_is_checked():
    run(
        DECLARED + "assert 'must not be 13' in refusal(lambda: Part(rows=13))\n"
        "assert 'unknown option \\'row\\'' in refusal(\n"
        "    lambda: from_mapping(Part, {'row': 1}, where='a file')\n"
        ")\n"
    )


def test_an_engine_and_its_bench_need_neither_pydantic_nor_ray():
    run(
        "import raybatch.bench.gpu, raybatch.bench.engine_run, raybatch.cli.app\n"
        "from raybatch.config import EngineConfig\n"
        "assert EngineConfig(cuda_graphs=None).cuda_graphs == 'auto'\n"
    )
