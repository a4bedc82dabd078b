"""Ranks that gather whole layers together, as fully sharded training does."""

from collections.abc import Sequence

from raybatch.policy.ownership import Ownership
from raybatch_lab.sharing.shared_weights import GroupLinks, ModuleSeconds


def gathered_pass_s(
    costs: ModuleSeconds,
    ownership: Ownership,
    rows: Sequence[int],
    *,
    layer_bytes: float,
    links: GroupLinks,
) -> float:
    """Return the seconds of a pass whose ranks gather each layer's weights before they use them.

    As in fully sharded data parallelism: all ranks take part, also those without rows, and each
    receives what it lacks of the layer; nothing is fetched ahead.
    """
    lacking = layer_bytes * (ownership.size - 1) / ownership.size
    gather_s = links.latency_s + lacking / links.bytes_per_s
    slowest_s = max(costs.attention_s(num or 1) + costs.ffn_s(num or 1) for num in rows)
    rest_s = max(costs.rest_s(num or 1) for num in rows)
    return ownership.num_layers * (slowest_s + gather_s) + rest_s
