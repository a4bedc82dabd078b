#!/usr/bin/env bash
# Builds the wheel with the given Python, installs it with the cpu extra into a new virtual
# environment, and uses it there as a user does: types, the demo, a job, all outside the tree. The
# wheel stays in dist/.
set -euo pipefail
python=$(cd "$(dirname "${1:?usage: check_wheel.sh PYTHON}")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# from a copy: what earlier builds left in the tree would end up in the wheel
mkdir "$work/src"
cp -r pyproject.toml README.md LICENSE raybatch "$work/src"
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$work/src"
wheel=$(echo "$work"/dist/raybatch-*.whl)
"$python" scripts/wheel_contents.py "$wheel"
mkdir -p dist
cp "$wheel" dist/

"$python" -m venv "$work/venv"
bin=$work/venv/bin
"$bin/python" -m pip install --quiet --no-deps "$wheel"
(cd "$work" && "$bin/python" -I -c 'import raybatch; print(raybatch.__version__, "imports alone")')
"$bin/python" scripts/install_torch.py "$work/constraints.txt"
"$bin/python" -m pip install --quiet -c "$work/constraints.txt" "$wheel[cpu]"

mkdir "$work/elsewhere"
cd "$work/elsewhere"
unset PYTHONPATH VIRTUAL_ENV
export PATH=$bin:$PATH RAY_ADDRESS=local RAYBATCH_CACHE_DIR=$work/cache

fail() {
    echo "wheel: $1" >&2
    exit 1
}

# an untyped package would be told as such, and its arguments would pass
echo 'import raybatch; raybatch.Sampling(temperature="hot")' >typed.py
"$python" -m mypy --strict --python-executable "$bin/python" typed.py >mypy.txt || true
grep -q 'arg-type' mypy.txt || fail "mypy does not see the types: $(cat mypy.txt)"

raybatch demo --rows 64 --replicas 1 >demo.txt 2>&1 || fail "the demo ended badly: $(cat demo.txt)"
grep -E '^(rows|exact match):' demo.txt
grep -q ' 0 lost$' demo.txt || fail "the demo lost rows"

raybatch run --input demo-out/prompts --output answers --replicas 1 --allow-error-rows \
    --prompt $'{document}\n\nQuestion: {question}' >run.txt 2>&1 ||
    fail "raybatch run ended badly: $(cat run.txt)"
grep -E '^rows:' run.txt
grep -q ' 0 lost$' run.txt || fail "raybatch run lost rows"
echo "the wheel builds, installs with its extra and runs"
