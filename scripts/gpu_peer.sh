#!/usr/bin/env bash
# Compares vLLM 0.26.0 with the native engine, on the same rows and shapes with random weights:
#
#   scripts/gpu_peer.sh SECONDS
#
# Run it on the host of scripts/gpu_call.sh; it writes peer.json to $OUT. Version 0.26.0 is built for
# torch 2.11 and CUDA 13. Its wheels (vllm, flashinfer-python and some sixty small ones) come from
# folders .vllm-whl*/, because one transfer may not have room for all of them:
#   python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
#     --platform manylinux_2_28_x86_64 -d .vllm-whl vllm==0.26.0
#   split -b 45M .vllm-whl/vllm-*.whl .vllm-whl/vllm.whl.part-    # and remove the whole wheel
# The script joins the parts. It does not change the host's torch, Triton and transformers.
set -euo pipefail
seconds=${1:?usage: gpu_peer.sh SECONDS}
[[ $seconds =~ ^[0-9]+$ ]] || { echo "usage: gpu_peer.sh SECONDS (510 fill ten minutes), got $seconds" >&2; exit 2; }
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
out=${OUT:-$root/gpu-call-out}
work=$(mktemp -d "${TMPDIR:-/tmp}/raybatch-gpu-peer-XXXXXX")
trap 'rm -rf "$work"' EXIT
mkdir -p "$out" "$work/whl"

for folder in "$root"/.vllm-whl*/; do
    [ -d "$folder" ] || continue
    find "$folder" -name '*.whl' -exec ln -s {} "$work/whl" \;
done
if compgen -G "$root/.vllm-whl*/vllm.whl.part-*" >/dev/null; then
    cat "$root"/.vllm-whl*/vllm.whl.part-* >"$work/whl/vllm-0.26.0-cp38-abi3-manylinux_2_28_x86_64.whl"
fi
if compgen -G "$work/whl/*.whl" >/dev/null; then
    "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$work/site" "$work"/whl/*.whl
fi
# the wheels come after the host's packages, also in processes that vLLM starts; PYTHONPATH would put
# them before
mkdir "$work/boot"
echo "import sys; sys.path.append('$work/site')" >"$work/boot/sitecustomize.py"
export PYTHONPATH="$root:$root/scripts:$work/boot${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export RAYBATCH_CACHE_DIR="$work/cache" TRITON_CACHE_DIR="$work/tc" VLLM_CACHE_ROOT="$work/vllm"
export VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
cd "$root"
"$python" -m gpu_call.peer --seconds "$((seconds - SECONDS))" --work "$work" --out "$out/peer.json"
