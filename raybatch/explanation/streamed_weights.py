"""What it costs a model that some of its layers do not stay on the device."""

from collections.abc import Mapping
from dataclasses import dataclass

from raybatch.pictures.wording import count, full, percent
from raybatch.policy.batches.layer_plan import ModuleCosts
from raybatch.policy.batches.step_plan import Phase
from raybatch.policy.cost.roofline import Work
from raybatch.policy.residence import Residence, WeightSizes, pass_time


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedWeights:
    """Where layers are, and how long a pass through them takes for that.

    Args:
        residence: of the layers.
        total_bytes: of all weights.
        plain_s: of a pass that copies nothing, by phase.
        pass_s: of a pass, by phase.
    """

    residence: Residence
    total_bytes: int
    plain_s: Mapping[Phase, float]
    pass_s: Mapping[Phase, float]

    def told(self) -> str:
        """Return a line for people."""
        residence = self.residence
        buffers = count(residence.num_buffers, "buffer")
        stays = f"{full(sum(residence.is_resident))} of {full(len(residence.is_resident))} layers"
        longer = ", ".join(
            f"{phase} {1e3 * (self.pass_s[phase] - plain_s):.3g} ms "
            f"({percent(self.pass_s[phase] / plain_s - 1, 0)})"
            for phase, plain_s in self.plain_s.items()
        )
        return (
            f"{stays} stay on the device; a pass copies {residence.pass_bytes / 1e6:,.1f} of "
            f"{self.total_bytes / 1e6:,.1f} MB through {buffers}, and "
            f"takes longer for that: {longer}"
        )


def streamed_weights(
    residence: Residence, sizes: WeightSizes, costs: ModuleCosts, layer_s: Mapping[Phase, float]
) -> StreamedWeights | None:
    """Return what streaming costs; None where all layers stay.

    Args:
        residence: of the layers.
        sizes: of their weights.
        costs: that were measured.
        layer_s: seconds that one layer computes, by phase; above 0.
    """
    if not residence.streamed:
        return None
    num_layers = len(sizes.layer_bytes)
    copy = Work(operations=0.0, moved_bytes=residence.buffer_bytes)
    bytes_per_s = residence.buffer_bytes / max(costs.to_device.seconds(copy), 1e-12)
    return StreamedWeights(
        residence=residence,
        total_bytes=sizes.total_bytes,
        plain_s={phase: num_layers * seconds for phase, seconds in layer_s.items()},
        pass_s={
            phase: pass_time(
                residence,
                sizes,
                layer_s=[seconds] * num_layers,
                bytes_per_s=bytes_per_s,
                copies_overlap=costs.copies_overlap,
            )
            for phase, seconds in layer_s.items()
        },
    )
