"""Settings and presets of `coroutines.py`: a setting is a model, rows and memory for their KV.

Slow models have few rows: the 36 settings of the grid take about half an hour of CPU time
(`--estimate` forecasts it). Nothing here runs an engine.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import models
import swap
import workloads_e2e

from raybatch.records.types import Request

BLOCK_SIZE = 16
WORKLOADS = {
    "random": workloads_e2e.Workload(
        name="random", kind="random", num_requests=512, prompt_len=128, output_len=64
    ),
    "w4": swap.WORKLOADS["w4"],
    # rows that read one of a few documents
    "documents": workloads_e2e.Workload(
        name="documents",
        kind="shared",
        num_requests=256,
        prompt_len=64,
        output_len=64,
        doc_len=960,
        queries_per_doc=16,
    ),
}
# execution modes; "ample" has memory for all rows, and is the bound; "auto" chooses the mode itself
WAYS = ("recompute", "swap", "offload", "ample", "auto")
_FIXED_WAYS = WAYS[:3]
_DEVICE_ROWS = (4, 8, 16, 64)
# rows of a setting by the rows that the device holds: most rows wait, and runs are short
_GRID_ROWS = {
    "moe-8m": {4: 96, 8: 128, 16: 192, 64: 384},
    "moe-100m": {4: 48, 8: 96, 16: 128, 64: 256},
    "dense-60m": {4: 24, 8: 48, 16: 64, 64: 128},
}
_HELD_OUT_ROWS = {4: 64, 16: 128}
GATES = (32, 64, 128, 256, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One model with memory on the device for the KV of a number of mean rows.

    `max_num_seqs` bounds the rows at the experts (B_moe); rows that attend together (B_attn) follow
    from `device_rows` alone.
    """

    model: str
    workload: str
    rows: int | None  # of the workload; None for its own number
    device_rows: float
    ways: tuple[str, ...] = WAYS[:4]
    max_num_seqs: int | None = None

    @property
    def key(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @property
    def name(self) -> str:
        rows = "" if self.rows is None else f" x {self.rows}"
        gate = "" if self.max_num_seqs is None else f", at most {self.max_num_seqs} at the experts"
        return f"{self.model}, {self.workload}{rows}, KV for {self.device_rows:g}{gate}"

    def resolved(self) -> workloads_e2e.Workload:
        workload = WORKLOADS[self.workload]
        return workload if self.rows is None else workloads_e2e.scaled(workload, self.rows)


def kv_bytes(
    requests: Sequence[Request], device_rows: float, token_bytes: int, num_layers: int
) -> tuple[int, int]:
    """Return bytes of KV for `device_rows` mean rows, and for all of them.

    A device always has room for the longest row: for all its layers, and for one of its layers in
    one of two buffers.
    """
    block_bytes = BLOCK_SIZE * token_bytes
    need = swap.need_blocks(requests, BLOCK_SIZE)
    lengths = [len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests]
    longest = -(-max(lengths) // BLOCK_SIZE) * max(1.0, 2 / num_layers)
    blocks = max(round(need * device_rows / len(requests)), round(longest) + 1)
    return blocks * block_bytes, max(need, blocks) * block_bytes


def settings_of(preset: str) -> list[Setting]:
    """Return the settings of a preset, quick ones first."""
    if preset == "held-out":
        return [
            Setting(model=model, workload="random", rows=rows, device_rows=n, ways=_FIXED_WAYS)
            for model in models.HELD_OUT
            for n, rows in _HELD_OUT_ROWS.items()
        ]
    if preset == "ablation":
        return [
            Setting(
                model=model,
                workload="random",
                rows=512,
                device_rows=8,
                ways=("offload",),
                max_num_seqs=gate,
            )
            for model in ("moe-8m", "moe-100m")
            for gate in GATES
        ]
    return [
        Setting(
            model=model,
            workload=workload,
            rows=rows[n],
            device_rows=n,
            ways=(*_FIXED_WAYS, "ample") if n == max(_DEVICE_ROWS) else _FIXED_WAYS,
        )
        for model, rows in _GRID_ROWS.items()
        for workload in WORKLOADS
        for n in _DEVICE_ROWS
    ]


PRESETS = ("grid", "held-out", "ablation")


def known(result: dict[str, Any], conditions: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of an earlier run by key, to resume it.

    Raises SystemExit if the earlier run had another commit or another processor.
    """
    before = result["conditions"]
    for name in ("commit", "cpu_model"):
        if before.get(name) != conditions.get(name):
            raise SystemExit(
                f"the result file has {name} {before.get(name)!r}, but this run has "
                f"{conditions.get(name)!r}: give --out another file, or remove the result file"
            )
    return {setting["key"]: setting for setting in result["settings"]}
