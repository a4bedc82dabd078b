#!/usr/bin/env bash
# Builds the wheels of raybatch and of raybatch-extensions, -openai, -submit and -tables with the given
# Python, installs them with the cpu extra into a new virtual environment, and uses them there as a
# user does, outside the tree: types, the demo, a job, a batch file. The wheels stay in dist/.
set -euo pipefail
python=$(cd "$(dirname "${1:?usage: check_wheel.sh PYTHON}")" && pwd)/$(basename "$1")
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# build from a copy, because leftovers of earlier builds in the tree would end up in the wheel
mkdir "$work/src"
cp -r pyproject.toml README.md LICENSE raybatch "$work/src"
for name in extensions openai submit tables; do
    cp -r "raybatch-$name" "$work/$name"
    rm -rf "$work/$name"/{build,*.egg-info}
done
"$python" -m pip wheel --quiet --no-deps --wheel-dir "$work/dist" "$work"/{src,extensions,openai,submit,tables}
wheel=$(echo "$work"/dist/raybatch-*.whl)
"$python" scripts/wheel_contents.py "$wheel"
mkdir -p dist
cp "$work"/dist/*.whl dist/

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

# if the wheel had no type information, mypy would accept the wrong argument
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

# serving HTTP needs more packages and is not tested here
raybatch serve --folder served --no-key >serve.txt 2>&1 && fail "raybatch serve ran without raybatch-openai"
grep -q 'pip install -e ./raybatch-openai$' serve.txt || fail "raybatch serve: $(cat serve.txt)"
printf 'source: /data/in\nsink: /data/out\nstage: {model: demo, prompt: "{a}"}\n' >job.yaml
raybatch manifest ray job.yaml >job.sh 2>manifest.txt && fail "raybatch manifest ran without raybatch-submit"
grep -q 'pip install -e ./raybatch-submit$' manifest.txt || fail "raybatch manifest: $(cat manifest.txt)"
to_endpoint=(raybatch explain --input demo-out/prompts --model m --prompt '{document}' --set backend=openai)
"${to_endpoint[@]}" >endpoint.txt 2>&1 && fail "the backend openai is there without raybatch-openai"
grep -q 'pip install -e ./raybatch-openai$' endpoint.txt || fail "the backend openai: $(cat endpoint.txt)"
shared=(--set engine.weights=shared --set pool.share_group=2 --set pool.replicas=2)
raybatch explain --input demo-out/prompts --prompt '{document}' "${shared[@]}" >shared.txt 2>&1 &&
    fail "weights are shared without raybatch-extensions"
grep -q 'pip install -e ./raybatch-extensions$' shared.txt || fail "shared weights: $(cat shared.txt)"
"$bin/python" -m pip install --quiet --no-deps "$work"/dist/raybatch_{extensions,openai,submit,tables}-*.whl
"$bin/python" - <<'END'
from importlib.metadata import entry_points

groups = ("backends", "engine_extensions", "pool_extensions", "sharing")
found = [point.load() for group in groups for point in entry_points(group=f"raybatch.{group}")]
print(len(found), "parts of other distributions load")
END
raybatch publish answers delta:table >publish.txt 2>&1 && fail "raybatch publish ran without deltalake"
grep -q "pip install -e './raybatch-tables\[delta\]'$" publish.txt || fail "raybatch publish: $(cat publish.txt)"
raybatch manifest ray job.yaml >job.sh 2>manifest.txt || fail "raybatch manifest: $(cat manifest.txt)"
grep -q '^ray job submit ' job.sh || fail "raybatch manifest printed no script: $(cat job.sh)"
raybatch openai to-batch demo-out/prompts -o in.jsonl --model demo \
    --prompt $'{document}\n\nQuestion: {question}' >to-batch.txt 2>&1 || [ $? = 2 ] ||
    fail "raybatch openai to-batch ended badly: $(cat to-batch.txt)"
raybatch run in.jsonl --openai -o out.jsonl --replicas 1 --allow-error-rows >batch.txt 2>&1 ||
    fail "raybatch run --openai ended badly: $(cat batch.txt)"
grep ' requests: ' batch.txt
"${to_endpoint[@]}" >endpoint.txt 2>&1 && fail "the backend openai works without an address"
grep -q 'base_url is missing' endpoint.txt || fail "the backend openai: $(cat endpoint.txt)"
[ -s out.jsonl ] || fail "raybatch run --openai wrote no answers"
echo "the wheels build, install and run"
