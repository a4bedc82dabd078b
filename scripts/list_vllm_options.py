"""Write `raybatch/backends/vllm_names.py` from the vLLM that is installed here.

Run it with the Python of an environment that has vLLM, when the version that raybatch is tested
with changes:

    make .venv-vllm/.installed
    .venv-vllm/bin/python scripts/list_vllm_options.py
"""

import dataclasses
import textwrap
from pathlib import Path

import vllm
from vllm.engine.arg_utils import EngineArgs

_TARGET = Path(__file__).parent.parent / "raybatch" / "backends" / "vllm_names.py"

_TEMPLATE = '''"""Names of the options of vLLM's engine; written by scripts/list_vllm_options.py."""

VERSION = "{version}"

_NAMES = """
{names}
"""

ENGINE_ARGS = frozenset(_NAMES.split())
'''


def main() -> None:
    names = sorted(f.name for f in dataclasses.fields(EngineArgs) if not f.name.startswith("_"))
    lines = textwrap.fill(
        " ".join(names), 96, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
    )
    version = vllm.__version__.partition("+")[0]
    _TARGET.write_text(_TEMPLATE.format(version=version, names=lines), encoding="utf-8")


if __name__ == "__main__":
    main()
