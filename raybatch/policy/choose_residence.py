"""Chooses how many layers stay on the device where not all fit, by the rows that this leaves.

Pure. A streamed layer is copied once in a step for all its rows, so streaming wants many rows; a
resident one is never copied, and takes the memory of KV. `choose_engine` forecasts each number.
"""

from dataclasses import dataclass, replace

from raybatch.errors import CapacityError, ConfigError
from raybatch.policy.batches.layer_plan import ModelShape
from raybatch.policy.batches.step_plan import RowShape
from raybatch.policy.choose_engine import EngineFacts, EngineWay, choose_engine
from raybatch.policy.residence import Residence, WeightSizes, residences

# where their KV fits beside all weights, nothing is streamed for more of them
_FEW_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMemory:
    """Weights, and the memory of device and host that they have in common with KV and steps.

    `step_bytes` are those of the largest step. KV takes `kv_bytes`; None takes `kv_share` of what
    weights leave, less those of the step.
    """

    sizes: WeightSizes
    weight_buffers: int
    device_bytes: int
    host_bytes: int
    step_bytes: int
    kv_share: float
    kv_bytes: int | None = None

    def left_for_kv(self, weight_bytes: int) -> int:
        """Return the bytes of KV on the device beside weights; 0 where they do not fit."""
        free = self.device_bytes - weight_bytes
        if self.kv_bytes is None:
            return max(0, int(self.kv_share * free) - self.step_bytes)
        return self.kv_bytes if self.kv_bytes + self.step_bytes <= free else 0

    def holds_all(self, model: ModelShape, row: RowShape) -> bool:
        """Return whether all layers stay, as the KV of a few rows fits beside them."""
        row_bytes = model.layer.kv_bytes_per_token * model.num_layers
        row_bytes *= row.prompt_tokens + row.output_tokens
        wanted = _FEW_ROWS * row_bytes if self.kv_bytes is None else 1
        return self.left_for_kv(self.sizes.total_bytes) >= wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidenceChoice:
    """The residence that is taken, how rows run with it, and why, as a sentence."""

    residence: Residence
    way: EngineWay
    reason: str


def choose_residence(
    facts: EngineFacts, memory: WeightMemory, *, needs_offload: bool = False
) -> ResidenceChoice:
    """Return the residence with the most output tokens per second, of equal ones the most layers.

    `facts` say all but where weights are and what they leave for KV on the device; `needs_offload`
    keeps KV in host memory.

    Raises:
        ConfigError: a row fits with no residence.
    """
    tried = residences(memory.sizes, memory.weight_buffers)
    if memory.holds_all(facts.model, facts.row):
        tried = tried[:1]
    pairs = [(each, _way(facts, memory, each, needs_offload)) for each in tried]
    found = [(each, way) for each, way in pairs if way is not None]
    if not found:
        least = min(each.device_bytes for each in tried)
        raise ConfigError(
            f"weights take {memory.sizes.total_bytes} bytes, {least} where layers are streamed, "
            f"and a step {memory.step_bytes}: KV of a row of {facts.row.prompt_tokens} prompt and "
            f"{facts.row.output_tokens} output tokens does not fit beside them in "
            f"{memory.device_bytes} bytes of the device, with layers (and engine.host_kv_bytes) in "
            f"{memory.host_bytes} of the host; set engine.quantization or lower "
            "engine.max_batched_tokens"
        )
    residence, way = max(found, key=lambda pair: pair[1].tokens_per_s)
    reason = f"{_text(residence, way)}: {way.tokens_per_s:,.0f} output tokens/s are forecast"
    if residence is not found[0][0]:
        most = f"{_text(*found[0])}, the most that fit"
        reason += f", and {found[0][1].tokens_per_s:,.0f} with {most}"
    return ResidenceChoice(residence=residence, way=way, reason=reason)


def _way(
    facts: EngineFacts, memory: WeightMemory, residence: Residence, needs_offload: bool
) -> EngineWay | None:
    """Return how rows run best with a residence; None where none does."""
    kv_bytes = memory.left_for_kv(residence.device_bytes)
    if not kv_bytes or residence.pass_bytes + facts.host_kv_bytes > memory.host_bytes:
        return None
    try:
        choice = choose_engine(replace(facts, device_kv_bytes=kv_bytes, residence=residence))
    except CapacityError:
        return None
    ways = [way for way in (choice.best, choice.runner_up) if way is not None]
    return next((way for way in ways if way.kv_offload or not needs_offload), None)


def _text(residence: Residence, way: EngineWay) -> str:
    num_resident = sum(residence.is_resident)
    return f"{num_resident} of {len(residence.is_resident)} layers on the device, {way.to_text()}"
