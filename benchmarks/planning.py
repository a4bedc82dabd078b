"""Plans the order of a peer's requests in the peer's process, from their tokens alone.

It imports raybatch, so only raybatch's peers use it. Their measured time includes planning.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from workloads_e2e import TokenRequest

from raybatch.config import PlanConfig
from raybatch.prefix.block_keys import hash_blocks, start_offsets
from raybatch.prefix.plan import RowFeatures, plan_rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The order and the groups that a plan gives to requests.

    Args:
        rows: indices of the requests in planned order.
        group_ids: prefix group of each request, by index; None for a request without a group.
        prefix_lens: tokens that each request's group shares, by index.
        plan_s: seconds that planning took.
    """

    rows: list[int]
    group_ids: list[int | None]
    prefix_lens: list[int]
    plan_s: float


def plan_requests(requests: Sequence[TokenRequest], block_size: int, config: PlanConfig) -> Plan:
    """Plan requests as a job plans its rows.

    Identical requests are all generated, because the other peers do not deduplicate either.
    """
    began = time.perf_counter()
    prompts = [np.asarray(request.prompt_ids, np.int32) for request in requests]
    offsets = start_offsets(np.array([len(prompt) for prompt in prompts], np.int64))
    rows = RowFeatures(
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
