"""Options without pydantic: declared alike, and checked by `__post_init__` alone."""

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

import pytest

from raybatch.config import unchecked
from raybatch.config.option import documented, fields_of, from_mapping, is_default, options
from raybatch.config.unchecked import BeforeValidator, Field, Ge
from raybatch.errors import ConfigError

Rows = Annotated[int, Ge(1)]


@options("part.")
@unchecked.dataclass(frozen=True, kw_only=True, slots=True, config={})
class Part:
    rows: Annotated[Rows, "speed"] = 3
    """Rows at once."""
    where: Annotated[str, Field(examples=["here"])] = "here"
    """A place."""
    graphs: Annotated[bool | str, BeforeValidator(lambda v: "auto" if v is None else v)] = "auto"
    """Whether there are any."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """What else there is."""

    def __post_init__(self) -> None:
        if self.rows == 13:
            raise ConfigError("part.rows must not be 13")


def test_defaults_and_changes_are_those_of_a_dataclass():
    part = replace(Part(graphs=None), rows=4)
    assert (4, "here", "auto", {}) == (part.rows, part.where, part.graphs, part.more)
    assert not is_default(part, "rows")
    assert is_default(part, "more")


def test_what_is_declared_is_known():
    fields = fields_of(Part)
    assert ["rows", "where", "graphs", "more"] == list(fields)
    assert (int, [Ge(1), "speed"]) == (fields["rows"].annotation, fields["rows"].metadata)
    assert ["here"] == fields["where"].examples
    assert "Rows at once." == documented(Part)["rows"]


def test_what_goes_together_is_checked():
    with pytest.raises(ConfigError, match="must not be 13"):
        Part(rows=13)
    with pytest.raises(ConfigError, match="unknown option 'row'"):
        from_mapping(Part, {"row": 1}, where="a file")


def test_an_engine_and_its_bench_need_neither_pydantic_nor_ray():
    code = (
        "import sys\n"
        "names = 'pydantic', 'pydantic_core', 'annotated_types', 'ray'\n"
        "sys.modules.update(dict.fromkeys(names))\n"
        "import raybatch.bench.gpu, raybatch.bench.engine_run, raybatch.cli.app\n"
        "from raybatch.config import EngineConfig\n"
        "assert EngineConfig(cuda_graphs=None).cuda_graphs == 'auto'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
