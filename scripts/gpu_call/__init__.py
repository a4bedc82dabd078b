"""What one GPU shows of the native engine within minutes: one process per stage, see `plan`.

`scripts/gpu_call.sh` starts it; `docs/start/on-gpus.md` says what its table means.
"""
