"""What a plan gives the engines to do, in the totals that a cost model takes."""

import numpy as np

from raybatch.policy.cost.work import WorkTotals, work_totals
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.load import Floats
from raybatch.prefix.plan import Arrangement


def planned_work(
    keys: BlockKeys, expected_tokens: Floats, found: Arrangement, *, is_grouped: bool
) -> WorkTotals:
    """Return the work of rows whose shared prefixes run once each; copies are no work.

    Args:
        keys: of the rows.
        expected_tokens: float64 [R], outputs to expect.
        found: what the rows share.
        is_grouped: rows run in groups; else each computes its whole prompt.
    """
    groups = found.groups
    rows = np.flatnonzero(groups.representative == np.arange(keys.num_rows))
    num_tokens, outputs = keys.num_tokens[rows], expected_tokens[rows]
    if not is_grouped:
        return work_totals(num_tokens, outputs)
    group = groups.group_id[rows]
    shared = np.minimum(groups.prefix_tokens[rows].astype(np.int64), num_tokens - 1)
    members = np.bincount(group[group >= 0], minlength=groups.num_groups)
    is_first = np.zeros(len(rows), np.bool_)
    is_first[np.unique(group, return_index=True)[1]] = True
    num_members = np.ones(len(rows), np.int64)
    num_members[group >= 0] = members[group[group >= 0]]
    return work_totals(
        num_tokens,
        outputs,
        cached_tokens=np.where(is_first | (group < 0), 0, shared),
        shared_tokens=shared,
        num_members=num_members,
    )
