"""A small sparse layer for tests of plans."""

from raybatch.policy.cost.layers import LayerShape

SPARSE = LayerShape(
    model_dim=512, num_heads=8, num_kv_heads=4, head_dim=64, ffn_dim=384, num_experts=64, top_k=4
)
