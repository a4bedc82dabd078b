"""Write `raybatch/backends/vllm/names.json` from the vLLM that is installed here.

Run it with the Python of an environment that has vLLM, when the version that raybatch is tested
with changes:

    make .venv-vllm/.installed
    .venv-vllm/bin/python scripts/list_vllm_options.py
"""

import dataclasses
import json
from pathlib import Path

import vllm
from vllm.engine.arg_utils import EngineArgs
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

_TARGET = Path(__file__).parent.parent / "raybatch" / "backends" / "vllm" / "names.json"


def main() -> None:
    names = {
        "version": vllm.__version__.partition("+")[0],
        "engine_args": sorted(
            f.name for f in dataclasses.fields(EngineArgs) if not f.name.startswith("_")
        ),
        "reasoning_parsers": sorted(ReasoningParserManager.list_registered()),
        "tool_parsers": sorted(ToolParserManager.list_registered()),
    }
    _TARGET.write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
