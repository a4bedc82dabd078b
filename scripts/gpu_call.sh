#!/usr/bin/env bash
# Checks and measures the native engine on one GPU within SECONDS (510 fit into ten minutes):
#
#   scripts/gpu_call.sh SECONDS [--device cpu]
#
# Each stage is a process with a separate time limit; a stage that fails does not stop the others. The
# script writes at most 8 files to $OUT (default: gpu-call-out), each below 16 MiB, and prints a table of
# at most 40 lines at the end. With --device cpu all stages run with small shapes in Triton's interpreter.
#
# Needs Python with its headers, a C compiler (for Triton), 10 GB in $TMPDIR, and the packages of
# requirements/gpu-image.txt, which gpu_call/needs.py looks for. PYTHON names another interpreter. A host
# without network gets missing packages from a folder .whl next to the sources, which is filled elsewhere:
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
#     --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d .whl PACKAGE==VERSION ...
# Kernels that an earlier call compiled come from a folder .aot: the unpacked tc.tar.gz of that call.
set -euo pipefail
seconds=${1:?usage: gpu_call.sh SECONDS [--device cpu]}
shift
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$root/gpu-call-out}
work=$(mktemp -d "${TMPDIR:-/tmp}/raybatch-gpu-call-XXXXXX")
trap 'rm -rf "$work"' EXIT

if compgen -G "$root/.whl/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$root"/.whl/*.whl || {
        echo "gpu_call.sh: pip of $python could not install the wheels in .whl" >&2
        exit 2
    }
fi
export PYTHONPATH="$root:$root/scripts:$work/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export TRITON_CACHE_DIR="$work/tc" RAYBATCH_CACHE_DIR="$work/cache"
# keep only binaries, which are carried to the next call
export TRITON_STORE_BINARY_ONLY=1
if ! "$python" -c 'import pydantic' 2>/dev/null; then
    PYTHONPATH="$PYTHONPATH:$root/scripts/stand_ins"
fi
mkdir -p "$TRITON_CACHE_DIR"
if [ -d "$root/.aot" ]; then
    cp -r "$root/.aot/." "$TRITON_CACHE_DIR"
fi
cd "$root"
"$python" -m gpu_call "$seconds" "$@" --out "$out" --work "$work/stages"
