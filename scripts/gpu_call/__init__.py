"""Checks and measures the native engine on one GPU within minutes, one process per stage.

`scripts/gpu_call.sh` starts it; `docs/start/on-gpus.md` explains its table.
"""
