"""Write `raybatch/backends/vllm/names.py` from the vLLM that is installed here.

Run it with the Python of an environment that has vLLM, when the version that raybatch is tested
with changes:

    make .venv-vllm/.installed
    .venv-vllm/bin/python scripts/list_vllm_options.py
"""

import dataclasses
import textwrap
from collections.abc import Iterable
from pathlib import Path

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

_TARGET = Path(__file__).parent.parent / "raybatch" / "backends" / "vllm" / "names.py"

_TEMPLATE = '''"""Names of vLLM's options and parsers; written by scripts/list_vllm_options.py."""

VERSION = "{version}"

_NAMES = """
{names}
"""
_REASONING = """
{reasoning}
"""
_TOOLS = """
{tools}
"""

ENGINE_ARGS = frozenset(_NAMES.split())
REASONING_PARSERS = frozenset(_REASONING.split())
TOOL_PARSERS = frozenset(_TOOLS.split())
'''


def main() -> None:
    options = [f.name for f in dataclasses.fields(EngineArgs) if not f.name.startswith("_")]
    text = _TEMPLATE.format(
        version=vllm.__version__.partition("+")[0],
        names=_lines(options),
        reasoning=_lines(ReasoningParserManager.list_registered()),
        tools=_lines(ToolParserManager.list_registered()),
    )
    _TARGET.write_text(text, encoding="utf-8")


def _lines(names: Iterable[str]) -> str:
    return textwrap.fill(
        " ".join(sorted(names)),
        96,
        initial_indent="    ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )


if __name__ == "__main__":
    main()
