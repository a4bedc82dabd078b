"""What an engine chooses within: its options, the device, and both memories for KV."""

from dataclasses import dataclass

from raybatch.config import DEFAULT_STEP_TOKENS, EngineConfig
from raybatch.policy.choose_engine import LEAST_GAIN, UNPROVEN_GAIN, EngineFacts
from raybatch.policy.layer_plan import ModelShape, ModuleCosts, RowsAhead
from raybatch.policy.residence import Residence

# of steps on a GPU, beside the one that is usual
_LARGER_STEPS = (4096, 8192, 16384)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChoiceScope:
    """Options of an engine, and the bytes that KV may take; of residence None has all weights."""

    config: EngineConfig
    is_gpu: bool
    device_kv_bytes: int
    host_kv_bytes: int
    residence: Residence | None = None
    # ways whose steps have taken the time that was forecast: see `EngineFacts`
    proven: frozenset[tuple[bool, int]] = frozenset()

    @property
    def needs_device(self) -> tuple[str, ...]:
        """Return the options that are set and want KV on the device."""
        config = self.config
        wanted = {
            "speculative_tokens": bool(config.num_drafts),
            "cuda_graphs": config.cuda_graphs is True,
            "host_kv_dtype": config.host_kv_dtype != "auto",
        }
        return tuple(f"engine.{name}" for name, is_set in wanted.items() if is_set)

    @property
    def may_choose(self) -> bool:
        """Return whether there is something to choose that measured layers decide."""
        config = self.config
        if config.host_kv_dtype != "auto":
            return False  # measured times would decide whose KV is rounded
        if config.weights == "shared":
            return False  # nobody has all layers to measure
        has_places = bool(self.host_kv_bytes) and not self.needs_device
        may_offload = config.kv_offload == "auto" and has_places
        return may_offload or (self.is_gpu and config.max_batched_tokens == "auto")

    def plain_reason(self) -> str:
        """Return how rows run where nothing is chosen, and why."""
        config = self.config
        if config.kv_offload is True:
            return "KV in host memory, as engine.kv_offload says"
        why = "its layers could not be measured"
        if config.kv_offload is False:
            why = "engine.kv_offload says"
        elif config.weights == "shared":
            why = "weights are shared with other replicas"
        elif self.needs_device:
            needs = "needs" if len(self.needs_device) == 1 else "need"
            why = f"{' and '.join(self.needs_device)} {needs} it there"
        elif not self.host_kv_bytes:
            why = "there is no host memory for KV (engine.host_kv_bytes)"
        return f"KV on the device, as {why}; steps of up to {config.token_budget:,} tokens"

    def facts(self, model: ModelShape, costs: ModuleCosts, rows: RowsAhead) -> EngineFacts:
        """Return what a choice goes by."""
        config, layer = self.config, model.layer
        budgets: tuple[int, ...] = (config.token_budget,)
        if self.may_choose and self.is_gpu and config.max_batched_tokens == "auto":
            budgets = (DEFAULT_STEP_TOKENS, *_LARGER_STEPS)
        offload = False if self.needs_device else None
        if isinstance(config.kv_offload, bool):
            offload = config.kv_offload
        # hidden states, and what one run of a module makes on the way
        widest = max(layer.projected_dim, layer.top_k * (2 * layer.ffn_dim + layer.model_dim))
        activation_bytes = (2 * layer.model_dim + widest) * layer.element_bytes
        return EngineFacts(
            model=model,
            costs=costs,
            device_kv_bytes=self.device_kv_bytes,
            host_kv_bytes=self.host_kv_bytes,
            max_num_seqs=config.max_num_seqs,
            token_budgets=budgets,
            block_size=config.block_size_tokens,
            activation_bytes=activation_bytes if self.is_gpu else 0,
            rows=rows,
            residence=self.residence,
            kv_offload=offload,
            may_swap=config.host_kv_bytes != "auto",
            least_gain=UNPROVEN_GAIN if self.is_gpu else LEAST_GAIN,
            proven=self.proven,
            may_draft=config.speculative_tokens == "auto" and not self.is_gpu,
        )
