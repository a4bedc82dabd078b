"""The examples in the docstrings of ray.data.llm, run as they are written there.

Only what needs another machine is replaced: the model, sizes, and where an engine runs. With
another module in place of `ray.data.llm` the same text runs here, which is what the page on moving
promises.
"""

import inspect
import re
import textwrap
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

__all__ = ["adapted", "blocks_of", "run_example"]

# metrics of vLLM in Ray need packages of Ray Serve there
_PLACED = (
    'placement_group_config={"bundles": [{"CPU": 1}]}, runtime_env=ENVIRONMENT, '
    "log_engine_metrics=False"
)


def blocks_of(thing: Any) -> list[str]:
    """Return the Python examples in a docstring."""
    lines = inspect.getdoc(thing).splitlines()
    blocks = []
    for number, line in enumerate(lines):
        if line.strip() == ".. testcode::":
            body = takewhile(lambda other, of=line: _is_inside(other, of), lines[number + 1 :])
            code = [other for other in body if other.strip() != ":skipif: True"]
            blocks.append(textwrap.dedent("\n".join(code)))
    return blocks


def _is_inside(line: str, directive: str) -> bool:
    return not line.strip() or _indent(line) > _indent(directive)


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def adapted(block: str, *, module: str) -> str:
    """Return an example for a small model on a CPU.

    Args:
        block: as it is documented.
        module: in place of `ray.data.llm`.
    """
    options = f"model_source=MODEL, {_PLACED}"
    if "engine_kwargs" not in block:
        options += ", engine_kwargs=dict(ENGINE)"
    changes = [
        (r"ray\.data\.llm", module),
        (r'model_source="[^"]*"', options),
        (r"engine_kwargs=dict\((?!ENGINE)", "engine_kwargs=dict(**ENGINE, "),
        (r"temperature=[\d.]+", "temperature=0.0"),
        (r"ray\.data\.range\(\d+\)", "DATASET"),
        (r"print\(row\)", "ROWS.append(row)"),
    ]
    for pattern, text in changes:
        block = re.sub(pattern, text, block)
    return block


def run_example(block: str, *, module: str, names: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run an example and return the rows that it would have printed."""
    rows: list[dict[str, Any]] = []
    exec(adapted(block, module=module), {**names, "ROWS": rows})
    return rows
