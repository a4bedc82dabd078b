"""The planned order of a peer's requests, made in its own process from their tokens alone.

Needs raybatch: only for its peers. Planning is part of what such a peer is measured on.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from workloads_e2e import TokenRequest

from raybatch.config import PlanConfig
from raybatch.prefix.block_keys import hash_blocks, start_offsets
from raybatch.prefix.plan import PlanRows, plan_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a plan says about requests.

    Args:
        rows: indices of the requests in planned order.
        group_ids: prefix group of each request, by index; None for one that is alone.
        prefix_lens: tokens that each request's group shares, by index.
        plan_s: seconds that planning took.
    """

    rows: list[int]
    group_ids: list[int | None]
    prefix_lens: list[int]
    plan_s: float


def plan_requests(requests: Sequence[TokenRequest], block_size: int, config: PlanConfig) -> Plan:
    """Plan requests as a job plans its rows.

    Every request is generated, identical ones too: the peers get no such help.
    """
    began = time.perf_counter()
    prompts = [np.asarray(request.prompt_ids, np.int32) for request in requests]
    offsets = start_offsets(np.array([len(prompt) for prompt in prompts], np.int64))
    rows = PlanRows(
        keys=hash_blocks(np.concatenate(prompts), offsets, block_size),
        expected_tokens=np.array([request.output_len for request in requests], float),
    )
    plan, _ = plan_rows(rows, config, dedup=False)
    return Plan(
        rows=plan.order.tolist(),
        group_ids=[group if group >= 0 else None for group in plan.group_id.tolist()],
        prefix_lens=plan.prefix_len.tolist(),
        plan_s=time.perf_counter() - began,
    )
