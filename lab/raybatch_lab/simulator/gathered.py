"""Ranks that gather whole layers together, as fully sharded training does."""

from collections.abc import Sequence

from raybatch_extensions.sharing.ownership import Ownership
from raybatch_lab.sharing.shared_weights import GroupLinks, ModuleSeconds


def gathered_pass_s(
    costs: ModuleSeconds,
    ownership: Ownership,
    rows: Sequence[int],
    *,
    layer_bytes: float,
    links: GroupLinks,
) -> float:
    """Return the seconds of a pass in which all ranks gather the weights of each layer first.

    As in fully sharded data parallelism: ranks without rows take part too, each receives the
    shards of the layer that it does not own, and none is fetched ahead.

    Args:
        rows: rows of each rank.
        layer_bytes: bytes of the weights of a layer.
    """
    lacking = layer_bytes * (ownership.size - 1) / ownership.size
    gather_s = links.latency_s + lacking / links.bytes_per_s
    slowest_s = max(costs.attention_s(num or 1) + costs.ffn_s(num or 1) for num in rows)
    rest_s = max(costs.rest_s(num or 1) for num in rows)
    return ownership.num_layers * (slowest_s + gather_s) + rest_s
