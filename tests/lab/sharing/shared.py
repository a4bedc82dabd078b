"""Costs and groups for simulations of shared weights."""

from dataclasses import dataclass

from raybatch.policy.cost.layers import LayerShape, ModelShape
from raybatch_extensions.sharing.decode_times import GpuRates
from raybatch_lab.sharing.pass_costs import PassCosts
from raybatch_lab.sharing.shared_weights import GroupLinks, SharedGroup


@dataclass(frozen=True)
class FixedCosts:
    """Modules with fixed seconds and seconds per row."""

    attention: float = 1.0
    ffn: float = 2.0
    row: float = 0.0
    rest: float = 0.5

    def attention_s(self, rows):
        return self.attention if rows else 0.0

    def ffn_s(self, rows, num_shards=1):
        return (self.ffn + self.row * rows) / num_shards if rows else 0.0

    def rest_s(self, rows):
        return self.rest


def group_of(ownership, **more):
    """Return a group whose layers have one byte per shard."""
    given = {
        "ownership": ownership,
        "num_slots": ownership.default_slots,
        "layer_bytes": float(ownership.num_shards),
        "links": GroupLinks(),
        "rows": (1,) * ownership.size,
        "num_passes": 3,
    }
    return SharedGroup(**{**given, **more})


# Llama-3.1-70B at TP=2, and Qwen3-32B at TP=1
LLAMA = ModelShape(
    layer=LayerShape(
        model_dim=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_dim=28_672, element_bytes=2
    ),
    num_layers=80,
    other_bytes=4_202_692_608,
    head_bytes=2_101_346_304,
)
QWEN3 = ModelShape(
    layer=LayerShape(
        model_dim=5120, num_heads=64, num_kv_heads=8, head_dim=128, ffn_dim=25_600, element_bytes=2
    ),
    num_layers=64,
    other_bytes=3_111_649_280,
    head_bytes=1_555_824_640,
)
# rates of kernels on an H20, as in `benchmarks/published_hosts.py`
H20 = GpuRates(bytes_per_s=3.2e12, flops=81.4e12, link_bytes_per_s=450e9)


def h20_costs(model, tp):
    return PassCosts.of(
        model, H20, tp=tp, cached_tokens=1024, module_s=20e-6, step_s=1e-3, shard_s=6e-6
    )
