"""Attention that reads the prefix of a group once, against plain attention of every sequence."""

import pytest
import torch

from raybatch.kernels.attention import attend, prepare_attention, store_kv
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from tests import tolerances
from tests.tiers import pairs

BLOCK_SIZE, NUM_MEMBERS = 64, 4


class Members:
    """Members of groups, each with `num_queries` new tokens after its prefix and suffix."""

    def __init__(self, *, prefix, suffix, num_queries, heads, head_dim, group_size):
        torch.manual_seed(0)
        num_heads, num_kv_heads = heads
        prefix_blocks = prefix // BLOCK_SIZE
        own_blocks = -(-(suffix + num_queries) // BLOCK_SIZE)
        num_groups = NUM_MEMBERS // group_size
        free = torch.randperm(num_groups * prefix_blocks + NUM_MEMBERS * own_blocks)
        prefixes = free[: num_groups * prefix_blocks].view(num_groups, -1)
        own = free[num_groups * prefix_blocks :].view(NUM_MEMBERS, -1)
        self.tables = [torch.cat((prefixes[i // group_size], own[i])) for i in range(NUM_MEMBERS)]
        shape = (len(free), num_kv_heads, BLOCK_SIZE, head_dim)
        self.k_pool, self.v_pool = torch.randn(shape), torch.randn(shape)
        rows = NUM_MEMBERS * num_queries
        self.q = torch.randn(rows, num_heads, head_dim)
        self.k, self.v = (torch.randn(rows, num_kv_heads, head_dim) for _ in range(2))
        self.num_queries, self.cached = num_queries, prefix + suffix
        segments = []
        for g in range(num_groups):
            first = g * group_size * num_queries
            segments.append(
                PrefixSegment(
                    query_idx=torch.arange(first, first + group_size * num_queries),
                    block_ids=prefixes[g],
                    num_tokens=prefix,
                )
            )
        self.plan = self._decode(own, prefix, segments) if num_queries == 1 else None
        if self.plan is None:
            self.plan = self._prefill(own, prefix, suffix, segments)

    def _decode(self, own, prefix, segments):
        blocks, owners = own.flatten(), torch.arange(NUM_MEMBERS).repeat_interleave(own.shape[1])
        first = prefix + torch.arange(own.shape[1]).repeat(NUM_MEMBERS) * BLOCK_SIZE
        order = blocks.argsort()
        part = DecodePart(
            block_ids=blocks[order],
            owners=owners[order],
            num_valid=(self.cached + 1 - first).clamp(max=BLOCK_SIZE)[order],
            is_contiguous=False,
            first_positions=first[order],
        )
        return AttentionPlan(
            num_decode=NUM_MEMBERS, decode=part, prefill=None, segments=tuple(segments)
        )

    def _prefill(self, own, prefix, suffix, segments):
        starts = tuple(range(0, len(self.q), self.num_queries))
        for start, blocks in zip(starts, own, strict=True):
            if suffix:
                segments.append(
                    PrefixSegment(
                        query_idx=torch.arange(start, start + self.num_queries),
                        block_ids=blocks[: -(-suffix // BLOCK_SIZE)],
                        num_tokens=suffix,
                        first_position=prefix,
                    )
                )
        prefill = PrefillPart(starts=starts, lens=(self.num_queries,) * NUM_MEMBERS)
        return AttentionPlan(num_decode=0, decode=None, prefill=prefill, segments=tuple(segments))

    def run(self):
        positions = torch.arange(self.cached, self.cached + self.num_queries)
        slots = [t[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % 64 for t in self.tables]
        prepared = prepare_attention(
            self.plan,
            positions=positions.repeat(NUM_MEMBERS),
            slot_mapping=torch.cat(slots),
            pool=self.k_pool,
            windows=(None,),
        )
        store_kv(self.k, self.v, self.k_pool, self.v_pool, prepared)
        return attend(self.q, self.k, self.v, self.k_pool, self.v_pool, prepared, None)

    def expected(self):
        num_keys = self.cached + self.num_queries
        hidden = torch.ones(self.num_queries, num_keys).triu(self.cached + 1).bool()
        outputs = []
        for i, table in enumerate(self.tables):
            keys, values = (
                pool[table].transpose(1, 2).flatten(0, 1)[:num_keys].double()
                for pool in (self.k_pool, self.v_pool)
            )
            q = self.q[i * self.num_queries : (i + 1) * self.num_queries].double()
            q = q.unflatten(1, (keys.shape[1], -1))
            scores = torch.einsum("qgnd,kgd->gnqk", q, keys) / q.shape[-1] ** 0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            outputs.append(torch.einsum("gnqk,kgd->qgnd", weights, values).flatten(1))
        return torch.cat(outputs).float()


@pytest.mark.parametrize(
    ("heads", "head_dim", "num_queries", "group_size"),
    pairs([(4, 4), (8, 2), (16, 2)], [128, 192, 256], [1, 32], [2, NUM_MEMBERS]),
)
def test_shared_prefixes_change_no_output(heads, head_dim, num_queries, group_size):
    for prefix in (64, 128, 256):
        for suffix in (0, 64, 128):
            members = Members(
                prefix=prefix,
                suffix=suffix,
                num_queries=num_queries,
                heads=heads,
                head_dim=head_dim,
                group_size=group_size,
            )
            actual = members.run()
            tolerance = tolerances.of_sums(torch.float32, head_dim + prefix + suffix + num_queries)
            tolerances.assert_close(actual, members.expected(), tolerance)
