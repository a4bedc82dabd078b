"""Time of a decode pass by batch size: saturation point, and batch size that hides weight fetch.

`PassCosts` computes the curve from a model's sizes and a GPU's rates; `DecodeCurve.fit` fits
measured points. Source: SiDP, sections 1, 3.1 and 4.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import LayerShape, ModelShape, Workload
from raybatch.policy.cost.roofline import Roofline, Work, solve_nonnegative

# share of a pass that is proportional to rows at saturation
_SATURATED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCurve:
    """Seconds of a decode pass by batch size, linear between points and beyond the last.

    Args:
        rows: batch sizes of one replica, ascending, at least two.
        seconds: seconds of a pass with each of these batch sizes.

    Raises ConfigError: fewer than two sizes, not ascending, or seconds that are not above 0.
    """

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds) or not ascending:
            raise ConfigError(
                "a decode curve needs seconds for two or more ascending batch sizes, got sizes "
                f"{self.rows} and seconds {self.seconds}"
            )
        if self.rows[0] <= 0 or min(self.seconds) <= 0:
            raise ConfigError("batch sizes and seconds of a decode curve must be above 0")

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Return the convex, non-decreasing curve closest to measured (rows, seconds of a pass).

        Errors are relative. A pass has constant time until the hardware is saturated and then
        grows with its rows, so deviations from convexity are measurement noise.
        """
        rows = sorted({size for size, _ in points})
        if len(rows) < 2 or min(seconds for _, seconds in points) <= 0:
            raise ConfigError("a decode curve needs seconds above 0 for two or more batch sizes")
        sizes, seconds = np.array(points, float).T
        least = np.array(rows[:-1])
        hinges = [np.ones(len(sizes)), *np.maximum(0.0, sizes - least[:, None])]
        weighted = np.column_stack(hinges) / seconds[:, None]
        base, *slopes = solve_nonnegative(weighted, np.ones(len(sizes))).tolist()
        at = np.array(rows)
        fitted = base + np.maximum(0.0, at[:, None] - least) @ np.array(slopes)
        return cls(rows=tuple(rows), seconds=tuple(fitted.tolist()))

    def at(self, rows: float) -> float:
        """Return the seconds of a pass of `rows` rows; constant below the first batch size."""
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.seconds))
        (r0, r1), (s0, s1) = self.rows[-2:], self.seconds[-2:]
        return s1 + (rows - r1) * (s1 - s0) / (r1 - r0)

    def saturation_rows(self) -> float | None:
        """Return the batch size from which at least half of a pass is proportional to rows (B_e).

        It is the corner of a curve that is flat and then a line through 0, and `a / b` of the line
        `a + b * rows`. None if there is no such size. Requires a convex curve.
        """
        spans = zip(self.rows, self.rows[1:], self.seconds, self.seconds[1:], strict=False)
        for r0, r1, s0, s1 in spans:
            slope = (s1 - s0) / (r1 - r0)
            fixed = s0 - slope * r0
            if slope * r0 >= _SATURATED * s0:
                return r0
            if slope * r1 >= _SATURATED * s1:
                return fixed / slope * _SATURATED / (1 - _SATURATED)
        return None

    def hiding_rows(self, fetch_s: float) -> int | None:
        """Return the smallest batch whose pass takes at least `fetch_s`, its weight fetch (B_th).

        None if no size of the curve does. Requires a non-decreasing curve.
        """
        if self.seconds[0] >= fetch_s:
            return max(1, math.ceil(self.rows[0]))
        spans = zip(self.rows, self.rows[1:], self.seconds, self.seconds[1:], strict=False)
        for r0, r1, s0, s1 in spans:
            if s1 >= fetch_s:
                return math.ceil(r0 + (fetch_s - s0) * (r1 - r0) / (s1 - s0) - 1e-9)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRates:
    """Rates that one GPU achieves, below those of its data sheet.

    Args:
        bytes_per_s: bandwidth of its memory.
        flops: FLOP/s of dense matrix products in the weights' dtype.
        link_bytes_per_s: bandwidth of reading from another GPU of its host, one direction.
    """

    bytes_per_s: float
    flops: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} of a GPU must be a number above 0, got {getattr(self, name)}"
                )

    @property
    def roofline(self) -> Roofline:
        return Roofline(fixed_s=0.0, operation_s=1 / self.flops, byte_s=1 / self.bytes_per_s)


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
        roofline = replace(rates.roofline, fixed_s=module_s + (reduce_s if tp > 1 else 0.0))
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
