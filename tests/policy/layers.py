"""A small sparse layer, and costs like those of a processor, for tests of plans."""

from raybatch.policy.batches.layer_plan import LayerShape, ModelShape, ModuleCosts
from raybatch.policy.cost.roofline import Roofline, link

SPARSE = LayerShape(
    model_dim=512, num_heads=8, num_kv_heads=4, head_dim=64, ffn_dim=384, num_experts=64, top_k=4
)
MODEL = ModelShape(layer=SPARSE, num_layers=12, other_bytes=10_000_000, num_pieces=4)


def costs(*, link_bytes_per_s=1e10, copies_overlap=True, **changes):
    """A device of 10 TFLOP/s and 1 TB/s."""
    module = Roofline(fixed_s=2e-6, operation_s=1e-13, byte_s=1e-12)
    copy = link(link_bytes_per_s, fixed_s=1e-6)
    parts = {"attention": module, "ffn": module, "to_device": copy, "to_host": copy}
    return ModuleCosts(**{**parts, **changes}, copies_overlap=copies_overlap)
