"""Time of a decode pass by batch size, from a model's sizes and a GPU's rates.

Source: SiDP, sections 1, 3.1 and 4.3.
"""

from dataclasses import dataclass, replace
from typing import Self

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import LayerShape, ModelShape, Workload
from raybatch.policy.cost.roofline import Roofline, Work
from raybatch_extensions.sharing.decode_times import DecodeCurve, GpuRates


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCosts:
    """Costs of a decode pass of one replica, on each of its `tp` GPUs.

    Args:
        shape: sizes of one GPU's part of the model.
        attention, ffn: costs of one run of the module; fixed seconds include launches and the
            latency of the all-reduce.
        cached_tokens: KV tokens that each row attends to.
        step_s: fixed seconds of a pass outside layers and LM head.
        shard_s: fixed seconds of each further shard of a feed-forward block.
        row_s: seconds of the all-reduce of one row after a module.
    """

    shape: ModelShape
    attention: Roofline
    ffn: Roofline
    cached_tokens: int
    step_s: float
    shard_s: float = 0.0
    row_s: float = 0.0

    @classmethod
    def of(
        cls,
        model: ModelShape,
        rates: GpuRates,
        *,
        tp: int = 1,
        cached_tokens: int,
        module_s: float,
        step_s: float,
        shard_s: float = 0.0,
        reduce_s: float = 0.0,
    ) -> Self:
        """Return the costs of a model split over `tp` GPUs with these rates.

        Args:
            module_s: fixed seconds per module, for launches.
            reduce_s: latency of the all-reduce after a module, without the transferred bytes.
        """
        roofline = Roofline(
            fixed_s=module_s + (reduce_s if tp > 1 else 0.0),
            operation_s=1 / rates.flops,
            byte_s=1 / rates.bytes_per_s,
        )
        # ring all-reduce: reduce-scatter, then all-gather
        row_bytes = 2 * (tp - 1) / tp * model.layer.model_dim * model.layer.element_bytes
        return cls(
            shape=split(model, tp),
            attention=roofline,
            ffn=roofline,
            cached_tokens=cached_tokens,
            step_s=step_s,
            shard_s=shard_s,
            row_s=row_bytes / rates.link_bytes_per_s,
        )

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    def attention_s(self, rows: int) -> float:
        """Return the seconds of one layer's attention; 0 without rows."""
        if not rows:
            return 0.0
        workload = Workload(cached_tokens=self.cached_tokens)
        work = self.shape.layer.attention_work(rows, workload)
        return self.attention.seconds(work) + rows * self.row_s

    def ffn_s(self, rows: int, num_shards: int = 1) -> float:
        """Return the seconds of one of `num_shards` feed-forward shards; 0 without rows."""
        if not rows:
            return 0.0
        whole_s = self.ffn.seconds(self.shape.layer.ffn_work(rows)) + rows * self.row_s
        return (whole_s + (num_shards - 1) * self.shard_s) / num_shards

    def rest_s(self, rows: int) -> float:
        """Return the seconds of a pass outside its layers: `step_s` and the LM head."""
        head, element_bytes = self.shape.head_bytes, self.shape.layer.element_bytes
        work = Work(operations=2 * rows * head / element_bytes, moved_bytes=head)
        return self.step_s + replace(self.ffn, fixed_s=0.0).seconds(work)

    def pass_s(self, rows: int, num_shards: int = 1) -> float:
        """Return the seconds of a pass of `rows` rows that does not wait for fetched weights."""
        layer_s = self.attention_s(rows) + num_shards * self.ffn_s(rows, num_shards)
        return self.num_layers * layer_s + self.rest_s(rows)

    def curve(self, most_rows: int = 1024) -> DecodeCurve:
        """Return the curve up to `most_rows`, at powers of two and at 1.5 times these."""
        sizes = {1, most_rows}
        size = 2
        while size < most_rows:
            sizes |= {size, min(most_rows, size + size // 2)}
            size *= 2
        rows = sorted(sizes)
        if len(rows) < 2:
            rows = [1, 2]
        return DecodeCurve(rows=tuple(map(float, rows)), seconds=tuple(map(self.pass_s, rows)))


def check_split(tp: int, *, num_heads: int, num_kv_heads: int, ffn_dim: int) -> None:
    """Raise ConfigError if a replica cannot be split over `tp` GPUs."""
    is_even = tp >= 1 and not num_heads % tp and not ffn_dim % tp
    if not is_even or (num_kv_heads % tp and tp % num_kv_heads):
        raise ConfigError(
            f"tp must divide the {num_heads} heads and the feed-forward width of {ffn_dim}, and "
            f"divide the {num_kv_heads} KV heads or be a multiple of them; got {tp}"
        )


def split(model: ModelShape, tp: int) -> ModelShape:
    """Return the part of a model on each of `tp` GPUs; KV heads may be replicated.

    Raises ConfigError: heads or the feed-forward block cannot be split.
    """
    layer = model.layer
    check_split(
        tp, num_heads=layer.num_heads, num_kv_heads=layer.num_kv_heads, ffn_dim=layer.ffn_dim
    )
    part: LayerShape = replace(
        layer,
        num_heads=layer.num_heads // tp,
        num_kv_heads=max(1, layer.num_kv_heads // tp),
        ffn_dim=layer.ffn_dim // tp,
    )
    return replace(
        model, layer=part, other_bytes=model.other_bytes // tp, head_bytes=model.head_bytes // tp
    )
