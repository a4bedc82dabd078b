"""How long a decode pass takes by its rows: its knee, and from which batch on copies hide in it.

`PassCosts` builds such a curve from a model's sizes and rates of a GPU; `DecodeCurve.fit` takes a
measured one. Source: SiDP, sections 1, 3.1 and 4.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.cost.layers import LayerShape, ModelShape, Workload
from raybatch.policy.cost.roofline import Roofline, Work, solve_nonnegative

# of a step's seconds, the part that grows with rows once it is saturated
_SATURATED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCurve:
    """Seconds of a decode pass at some batch sizes, linear between them and beyond the last.

    Args:
        rows: of one replica, ascending, at least two of them.
        seconds: of a pass with so many rows.

    Raises ConfigError: fewer than two sizes, not ascending, or seconds that are not above 0.
    """

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds) or not ascending:
            raise ConfigError(
                f"a decode curve needs seconds for two or more ascending batch sizes, got sizes "
                f"{self.rows} and seconds {self.seconds}"
            )
        if self.rows[0] <= 0 or min(self.seconds) <= 0:
            raise ConfigError("batch sizes and seconds of a decode curve are above 0")

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Return the convex curve that never falls and is closest to measured (rows, seconds).

        Errors are relative. A pass costs the same until its hardware is full and then grows with
        its rows, so what is not convex is noise of the measurement.
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
        """Return the seconds of a pass; fewer rows than the first size take what that takes."""
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.seconds))
        (r0, r1), (s0, s1) = self.rows[-2:], self.seconds[-2:]
        return s1 + (rows - r1) * (s1 - s0) / (r1 - r0)

    def saturation_rows(self) -> float | None:
        """Return the batch from which on seconds grow in step with rows (B_e), None where none is.

        There half of a pass is in proportion to its rows: of a curve that is flat and then a line
        through 0 it is the corner, of `a + b * rows` it is `a / b`. Only of a convex curve.
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

    def hiding_rows(self, copies_s: float) -> int | None:
        """Return the least batch whose pass takes as long as its copies (B_th).

        None where no size of the curve does. Only of a curve that never falls.
        """
        if self.seconds[0] >= copies_s:
            return max(1, math.ceil(self.rows[0]))
        spans = zip(self.rows, self.rows[1:], self.seconds, self.seconds[1:], strict=False)
        for r0, r1, s0, s1 in spans:
            if s1 >= copies_s:
                return math.ceil(r0 + (copies_s - s0) * (r1 - r0) / (s1 - s0) - 1e-9)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRates:
    """What one GPU reaches of its memory, products and links; not what its data sheet says.

    Args:
        flops: of dense products of the weights' type, a second.
        link_bytes_per_s: that it reads from another GPU of its host, one way.
    """

    bytes_per_s: float
    flops: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} of a GPU is {getattr(self, name)}; it must be a number above 0"
                )

    @property
    def roofline(self) -> Roofline:
        return Roofline(fixed_s=0.0, operation_s=1 / self.flops, byte_s=1 / self.bytes_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassCosts:
    """What a decode pass of one replica takes, on each of its `tp` GPUs.

    Args:
        shape: of one GPU's part.
        attention, ffn: of a run of the module; their fixed seconds hold launches and reductions.
        step_s: of a pass beside its layers and head.
        tile_s: of each tile of a feed-forward block after its first one, beside bytes and products.
        row_s: of each row of a module, its sum over the GPUs.
    """

    shape: ModelShape
    attention: Roofline
    ffn: Roofline
    cached_tokens: int
    step_s: float
    tile_s: float = 0.0
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
        tile_s: float = 0.0,
        reduce_s: float = 0.0,
    ) -> Self:
        """Return the costs of a model split over `tp` GPUs of such rates.

        Args:
            module_s: of a module, whatever its size: launches.
            reduce_s: of its sum over several GPUs, beside the bytes that this moves.
        """
        roofline = replace(rates.roofline, fixed_s=module_s + (reduce_s if tp > 1 else 0.0))
        # a ring sends parts of a row, and then their sums
        row_bytes = 2 * (tp - 1) / tp * model.layer.model_dim * model.layer.element_bytes
        return cls(
            shape=split(model, tp),
            attention=roofline,
            ffn=roofline,
            cached_tokens=cached_tokens,
            step_s=step_s,
            tile_s=tile_s,
            row_s=row_bytes / rates.link_bytes_per_s,
        )

    @property
    def num_layers(self) -> int:
        return self.shape.num_layers

    def attention_s(self, rows: int) -> float:
        """Return the seconds of one layer's attention; no rows take none."""
        if not rows:
            return 0.0
        workload = Workload(cached_tokens=self.cached_tokens)
        work = self.shape.layer.attention_work(rows, workload)
        return self.attention.seconds(work) + rows * self.row_s

    def ffn_s(self, rows: int, num_tiles: int = 1) -> float:
        """Return the seconds of one of so many tiles of a feed-forward block; no rows take none."""
        if not rows:
            return 0.0
        whole_s = self.ffn.seconds(self.shape.layer.ffn_work(rows)) + rows * self.row_s
        return (whole_s + (num_tiles - 1) * self.tile_s) / num_tiles

    def rest_s(self, rows: int) -> float:
        """Return the seconds of head and step."""
        head, element_bytes = self.shape.head_bytes, self.shape.layer.element_bytes
        work = Work(operations=2 * rows * head / element_bytes, moved_bytes=head)
        return self.step_s + replace(self.ffn, fixed_s=0.0).seconds(work)

    def pass_s(self, rows: int, num_tiles: int = 1) -> float:
        """Return the seconds of a pass without waits for weights."""
        layer_s = self.attention_s(rows) + num_tiles * self.ffn_s(rows, num_tiles)
        return self.num_layers * layer_s + self.rest_s(rows)

    def curve(self, most_rows: int = 1024) -> DecodeCurve:
        """Return the seconds of passes at powers of two, and at one and a half times them."""
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
    """Raise ConfigError where a replica cannot be split over so many GPUs."""
    is_even = tp >= 1 and not num_heads % tp and not ffn_dim % tp
    if not is_even or (num_kv_heads % tp and tp % num_kv_heads):
        raise ConfigError(
            f"tp is {tp}; it must divide the {num_heads} heads and the feed-forward width of "
            f"{ffn_dim}, and divide the {num_kv_heads} KV heads or be a multiple of them"
        )


def split(model: ModelShape, tp: int) -> ModelShape:
    """Return the part of a model that each of `tp` GPUs has; KV heads beyond one are not split.

    Raises ConfigError: heads or the feed-forward block cannot be split so.
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
