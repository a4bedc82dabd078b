#!/usr/bin/env bash
# Builds the wheel with the given Python and imports it from an empty virtual environment.
# The import needs no dependency at all, because the public names are resolved lazily.
set -euo pipefail
python=${1:?usage: check_wheel.sh PYTHON}
work=$(mktemp -d)
# leftovers of an earlier build would end up in the wheel
rm -rf build
trap 'rm -rf "$work" "$PWD/build"' EXIT

"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" .
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --no-deps "$work"/dist/raybatch-*.whl
"$work/venv/bin/python" -I - <<'PYTHON'
from importlib import resources

import raybatch

package = resources.files("raybatch")
for name in ("py.typed", "demo/checkpoint/config.json", "demo/checkpoint/model.safetensors"):
    if not package.joinpath(name).is_file():
        raise SystemExit(f"the wheel has no {name}")
print(f"wheel of raybatch {raybatch.__version__} imports")
PYTHON
