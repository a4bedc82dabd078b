#!/usr/bin/env bash
# What one GPU shows of the native engine, in so many seconds (510 leave room in ten minutes):
#
#   scripts/gpu_call.sh SECONDS [--device cpu]
#
# Each stage is a process with a time limit of its own; one that fails stops no other. At most 8 files
# are written to $OUT (default: gpu-call-out), each below 16 MiB, and a table of at most 40 lines is
# printed at the end. With --device cpu all stages run with small shapes, and Triton interprets.
#
# Needs Python with its headers, a C compiler (for Triton), 10 GB in $TMPDIR, and the packages of
# requirements/gpu-image.txt, which gpu_call/needs.py looks for. PYTHON names another interpreter. What
# a host lacks and cannot fetch comes from a folder .whl beside the sources, which is filled elsewhere by
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
#     --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 -d .whl PACKAGE==VERSION ...
# Kernels that were compiled before come from a folder .aot: tc.tar.gz of an earlier call, unpacked.
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
# binaries alone are kept, as those are what is carried to the next call
export TRITON_STORE_BINARY_ONLY=1
mkdir -p "$TRITON_CACHE_DIR"
if [ -d "$root/.aot" ]; then
    cp -r "$root/.aot/." "$TRITON_CACHE_DIR"
fi
cd "$root"
"$python" -m gpu_call "$seconds" "$@" --out "$out" --work "$work/stages"
