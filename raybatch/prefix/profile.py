"""Profiles an input in sums and histograms: profiles of parts add up to that of the whole."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.groups import multi_level, num_computed_tokens
from raybatch.prefix.histogram import Histogram
from raybatch.prefix.plan import Arrangement
from raybatch.prefix.tree import TreeStats
from raybatch.records.arrays import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class InputProfile:
    """Rows, tokens, sharing and groups of an input or of a part of it.

    Profiles of parts add up exactly if no prefix group spans two parts; a group that does counts
    in each.
    """

    num_rows: int
    skipped: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: Histogram
    output_tokens: Histogram
    limit_tokens: int
    tree: TreeStats
    computed_tokens: int  # prompt tokens that the plan computes when each prefix runs once
    bound_tokens: int  # prompt tokens if every shared prefix is computed once, at all depths
    num_generated: int  # rows that are generated; the others are identical to one of them
    group_rows: Histogram
    group_prefix: Histogram
    num_units: int

    @classmethod
    def merge(cls, parts: Sequence["InputProfile"]) -> "InputProfile":
        """Return the profile of all parts together; without parts, a profile of no rows."""
        merged: dict[str, Any] = {}
        for one in fields(cls):
            values = [getattr(part, one.name) for part in parts]
            if one.type in (int, Histogram):
                merged[one.name] = sum(values) if one.type is int else Histogram.merge(values)
        skipped = sum((Counter(part.skipped) for part in parts), Counter())
        tree = merge_stats([part.tree for part in parts])
        return cls(**merged, skipped=dict(skipped), tree=tree)

    @property
    def num_requested(self) -> int:
        """Rows that engines see, including rows that are identical to others."""
        return self.prompt_tokens.num_values

    @property
    def num_groups(self) -> int:
        return self.group_rows.num_values


def profile_rows(
    keys: BlockKeys,
    expected_tokens: Floats,
    arrangement: Arrangement,
    *,
    num_rows: int,
    skipped: Mapping[str, int],
    limit_tokens: int,
    num_units: int,
) -> InputProfile:
    """Return totals over the planned rows; the arguments are fields of `InputProfile`."""
    tree, representative = arrangement.tree, arrangement.groups.representative
    return InputProfile(
        num_rows=num_rows,
        skipped=dict(skipped),
        prompt_tokens=Histogram.of(keys.num_tokens),
        output_tokens=Histogram.of(expected_tokens),
        limit_tokens=limit_tokens,
        tree=arrangement.stats,
        computed_tokens=arrangement.computed_tokens,
        bound_tokens=num_computed_tokens(
            tree, keys, multi_level(tree), True, representative=representative
        ),
        num_generated=int(np.count_nonzero(representative == np.arange(len(representative)))),
        group_rows=Histogram.of(arrangement.groups.num_rows),
        group_prefix=Histogram.of(arrangement.groups.prefix_len),
        num_units=num_units,
    )


def merge_stats(parts: Sequence[TreeStats]) -> TreeStats:
    """Return the statistics of trees that have no prefix in common."""
    counts = [one.name for one in fields(TreeStats) if one.type is int]
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in counts}
    rows, physical, degree, prefix, distinct = (
        np.array([getattr(part, name) for part in parts], float)
        for name in (
            "num_rows",
            "physical_tokens",
            "mean_sharing_degree",
            "mean_prefix_len",
            "mean_distinct_len",
        )
    )
    # tokens of all nodes: tokens computed once, less those that rows compute for themselves
    in_tree = physical - distinct * rows
    return TreeStats(
        **sums,
        mean_sharing_degree=float((degree * in_tree).sum() / max(1.0, in_tree.sum())),
        mean_prefix_len=float((prefix * rows).sum() / max(1.0, rows.sum())),
        mean_distinct_len=float((distinct * rows).sum() / max(1.0, rows.sum())),
    )
