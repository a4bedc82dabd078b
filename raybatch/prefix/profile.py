"""What an input is made of, in sums: profiles of its parts add up to that of the whole."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.histogram import Histogram
from raybatch.prefix.load import Floats
from raybatch.prefix.plan import Arrangement
from raybatch.prefix.tree.enlarge import multi_level, num_computed_tokens
from raybatch.prefix.tree.prefix_tree import TreeStats


@dataclass(frozen=True, kw_only=True, slots=True)
class InputProfile:
    """Rows, tokens, sharing and groups of an input or of a part of it.

    Parts that no prefix group reaches across add up exactly; else a group counts in each.

    Args:
        computed_tokens: prompt tokens that the plan computes when each prefix runs once.
        bound_tokens: those that a plan must compute: every shared prefix once, at all depths.
        num_generated: rows that are generated; the others are identical to one of them.
    """

    num_rows: int
    unasked: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: Histogram
    output_tokens: Histogram
    limit_tokens: int
    tree: TreeStats
    computed_tokens: int
    bound_tokens: int
    num_generated: int
    group_rows: Histogram
    group_prefix: Histogram
    num_units: int

    @classmethod
    def merge(cls, parts: Sequence["InputProfile"]) -> "InputProfile":
        """Return the profile of all parts together; of no parts, that of no rows."""
        unasked: Counter[str] = Counter()
        for part in parts:
            unasked.update(part.unasked)
        return cls(
            num_rows=sum(part.num_rows for part in parts),
            unasked=dict(unasked),
            prompt_tokens=Histogram.merge([part.prompt_tokens for part in parts]),
            output_tokens=Histogram.merge([part.output_tokens for part in parts]),
            limit_tokens=sum(part.limit_tokens for part in parts),
            tree=merge_stats([part.tree for part in parts]),
            computed_tokens=sum(part.computed_tokens for part in parts),
            bound_tokens=sum(part.bound_tokens for part in parts),
            num_generated=sum(part.num_generated for part in parts),
            group_rows=Histogram.merge([part.group_rows for part in parts]),
            group_prefix=Histogram.merge([part.group_prefix for part in parts]),
            num_units=sum(part.num_units for part in parts),
        )

    @property
    def num_asked(self) -> int:
        """Rows that engines see, those that are identical to others included."""
        return self.prompt_tokens.num_values

    @property
    def num_groups(self) -> int:
        """Prefix groups; rows that are alone belong to none."""
        return self.group_rows.num_values


def profile_rows(
    keys: BlockKeys,
    expected_tokens: Floats,
    arrangement: Arrangement,
    *,
    num_rows: int,
    unasked: Mapping[str, int],
    limit_tokens: int,
    num_units: int,
) -> InputProfile:
    """Sum up planned rows; arguments without a description are those of `InputProfile`."""
    tree, representative = arrangement.tree, arrangement.groups.representative
    return InputProfile(
        num_rows=num_rows,
        unasked=dict(unasked),
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
    rows = np.array([part.num_rows for part in parts])
    logical, saved, physical = (
        sum(getattr(part, name) for part in parts)
        for name in ("logical_tokens", "saved_tokens", "physical_tokens")
    )
    distinct = np.array([part.mean_distinct_len for part in parts]) * rows
    # tokens of all nodes: what is computed once, less what rows compute for themselves
    in_tree = np.array([part.physical_tokens for part in parts]) - distinct
    shared = np.array([part.mean_sharing_degree for part in parts]) * in_tree
    prefix = np.array([part.mean_prefix_len for part in parts]) * rows
    num_rows = int(rows.sum())
    return TreeStats(
        num_rows=num_rows,
        num_nodes=sum(part.num_nodes for part in parts),
        num_duplicates=sum(part.num_duplicates for part in parts),
        logical_tokens=logical,
        saved_tokens=saved,
        physical_tokens=physical,
        mean_sharing_degree=float(shared.sum() / max(1.0, in_tree.sum())),
        mean_prefix_len=float(prefix.sum() / max(1, num_rows)),
        mean_distinct_len=float(distinct.sum() / max(1, num_rows)),
    )
