"""A loaded model without KV pool; a runner makes the pool, again for each execution mode."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Self

import torch

from raybatch.config import EngineConfig
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops, run_forms
from raybatch.engine.forward.step_graphs import max_decode_rows
from raybatch.engine.loading.loaded_model import (
    LoadedModel,
    ResolvedEngine,
    give_back_freed_memory,
    load_model,
    place_layers,
    resolve,
)
from raybatch.engine.memory.kv_cache import free_memory_bytes, host_memory_bytes
from raybatch.engine.memory.pinned import IndexUploads, current_device
from raybatch.engine.profile.host_times import timed_reads
from raybatch.engine.profile.module_profile import (
    ModuleProfile,
    load_profile,
    measured_profile,
    profile_layer,
    profile_options,
    profile_path,
)
from raybatch.engine.weights.layer_store import PlaceWeights
from raybatch.engine.weights.layout import tensors_of
from raybatch.errors import CapacityError, error_text
from raybatch.kernels.dispatch import Ops
from raybatch.models.config import read_model_spec
from raybatch.policy.choose_engine import EngineChoice, EngineInputs, choose_engine
from raybatch.policy.cost.cascade import UNTIMED, CascadeThresholds
from raybatch.policy.cost.layers import ModuleCosts, RowsAhead, RowShape
from raybatch.policy.memory_budget import (
    MemoryBudget,
    WeightPlacement,
    WeightSizes,
    weight_placement_for,
)

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class PreparedModel:
    """A loaded model with its layers and ops, without a KV pool; chooses execution modes.

    `budget` is the memory without a pool. `module_factor` and `link_factor` correct the measured
    times of modules and of copies by the drift that an engine observed.
    """

    model: LoadedModel
    config: EngineConfig
    ops: Ops
    decoder: Decoder
    budget: MemoryBudget
    num_engines_on_host: int = 1
    module_factor: float = field(default=1.0)
    link_factor: float = field(default=1.0)

    @classmethod
    def load(
        cls,
        source: str,
        config: EngineConfig,
        *,
        num_engines_on_host: int = 1,
        place: PlaceWeights | None = None,
    ) -> Self:
        """Load the model that `source` names, see `load_model`.

        Raises ConfigError: the model or an option is not supported, or the weights do not fit.
        Raises CapacityError: the memory does not hold one block of KV.
        """
        model = load_model(source, config, num_engines_on_host=num_engines_on_host, place=place)
        with current_device(model.device):
            return cls.of(model, config, num_engines_on_host)

    @classmethod
    def of(cls, model: LoadedModel, config: EngineConfig, num_engines_on_host: int = 1) -> Self:
        layers = place_layers(model)
        ops = pick_ops(
            model.spec,
            model.weights,
            block_size=config.block_size_tokens,
            may_compile=config.compiles_kernels,
            kv_dtype=model.resolved.kv_dtype,
        )
        if model.device.type == "cuda" and ops.is_fixed:
            run_forms(
                ops,
                model.spec,
                model.weights,
                block_size=config.block_size_tokens,
                kv_dtype=model.resolved.kv_dtype,
                max_tokens=config.token_budget,
                max_rows=max_decode_rows(config),
            )
            give_back_freed_memory(model.device)
        upload = IndexUploads(model.device).upload
        return cls(
            model=model,
            config=config,
            ops=ops,
            decoder=Decoder(model.spec, model.weights, layers=layers, ops=ops, upload=upload),
            # before the pool takes most of the free memory
            budget=_budget(
                config,
                model.resolved,
                free_bytes=free_memory_bytes(model.device),
                num_engines_on_host=num_engines_on_host,
                placement=model.placement,
            ),
            num_engines_on_host=num_engines_on_host,
        )

    def count_blocks(
        self, config: EngineConfig, *, num_scrap_blocks: int = 0, reserved_bytes: int = 0
    ) -> int:
        """Return the blocks that a pool on the device would have now, see `num_blocks_for`."""
        return self.model.resolved.count_blocks(
            config,
            free_bytes=free_memory_bytes(self.model.device),
            num_engines_on_host=self.num_engines_on_host,
            num_scrap_blocks=num_scrap_blocks,
            reserved_bytes=reserved_bytes,
            host_bytes=host_memory_bytes(),
        )

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the loaded weights."""
        return sum(x.nbytes for x in tensors_of(self.model.weights) if not x.is_meta)

    @cached_property
    def profile(self) -> ModuleProfile | None:
        """Measured layer times on this host; None, with a warning, if measuring fails."""
        try:
            return self.measured()[0]
        except (RuntimeError, MemoryError) as error:
            _logger.warning(
                "%s keeps KV on the device, since measuring the times of its layers failed: %s",
                self.model.name,
                error_text(error),
            )
            return None

    def measured(
        self, *, fresh: bool = False, tell: Callable[[str], None] = lambda _: None
    ) -> tuple[ModuleProfile, bool]:
        """Return (layer times, whether they came from the cache); see `measured_profile`."""
        profile, was_read = measured_profile(
            self.model.spec,
            self.model.weights,
            profile_options(self.config),
            fresh=fresh,
            tell=tell,
            measure=partial(profile_layer, ops=self.ops),
        )
        if not was_read:
            give_back_freed_memory(self.model.device)
        return profile, was_read

    def inputs(self, rows: RowsAhead) -> EngineInputs | None:
        """Return the inputs of `choose_engine`; None if layers cannot be measured."""
        profile = self.profile
        if profile is None:
            return None
        return EngineInputs.of(self.budget, profile.model, self._costs(), rows)

    def usual_rows(self) -> RowsAhead:
        return RowsAhead(shape=RowShape.within(self.model.resolved.max_model_len))

    def choose(self, rows: RowsAhead) -> EngineChoice | None:
        """Return the fastest execution mode for such rows; None if the options leave no choice."""
        inputs = self.inputs(rows) if self.budget.may_choose else None
        if inputs is None:
            return None
        try:
            return choose_engine(inputs)
        except CapacityError as error:
            # actual rows may be shorter than usual
            _logger.info("%s: %s", self.model.name, error_text(error))
            return None

    def chosen(self, choice: EngineChoice | None) -> EngineConfig:
        """Return the options with the choice applied, see `MemoryBudget.chosen`."""
        return self.budget.chosen(None if choice is None else choice.best.key)

    def cascade(self) -> CascadeThresholds:
        """Return the thresholds of cascade attention; measured on a CPU only."""
        if self.model.device.type != "cpu":
            return UNTIMED
        return timed_reads(
            self.ops,
            self.model.spec,
            block_size=self.config.block_size_tokens,
            dtype=self.model.dtype,
            kv_dtype=self.model.resolved.kv_dtype,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of KV of one block, in all layers."""
        return self.model.resolved.kv_token_bytes * self.config.block_size_tokens

    @cached_property
    def _fitted_costs(self) -> ModuleCosts:
        """Costs fitted to the profile; cached, as the fit takes as long as some steps."""
        assert self.profile is not None, "the layers were not measured"
        return self.profile.costs()

    def _costs(self) -> ModuleCosts:
        costs = self._fitted_costs
        prompts = None if costs.prompts is None else costs.prompts.times(self.module_factor)
        return replace(
            costs,
            attention=costs.attention.times(self.module_factor),
            prompts=prompts,
            ffn=costs.ffn.times(self.module_factor),
            to_device=costs.to_device.times(self.link_factor),
            to_host=costs.to_host.times(self.link_factor),
            cascade=costs.cascade.times(self.module_factor),
        )


def _budget(
    config: EngineConfig,
    resolved: ResolvedEngine,
    *,
    free_bytes: int,
    num_engines_on_host: int,
    placement: WeightPlacement | None,
) -> MemoryBudget:
    """Return the memory budget of an engine, given the free bytes of its device."""
    num_blocks = resolved.count_blocks(
        config,
        free_bytes=free_bytes,
        num_engines_on_host=num_engines_on_host,
        host_bytes=host_memory_bytes(),
    )
    return MemoryBudget.resolve(
        config,
        is_gpu=resolved.device.type == "cuda",
        device_kv_bytes=num_blocks * resolved.kv_token_bytes * config.block_size_tokens,
        free_host_bytes=free_memory_bytes(torch.device("cpu")),
        num_engines_on_host=num_engines_on_host,
        most_kv_bytes=config.max_num_seqs * resolved.max_model_len * resolved.kv_token_bytes,
        placement=placement,
    )


def known_budget(
    folder: Path, config: EngineConfig, *, num_engines_on_host: int = 1
) -> tuple[MemoryBudget, ModuleProfile | None]:
    """Return (estimated memory budget of an engine on this host, its layer times if cached).

    Reads the config in a model's folder and loads no weights. Raises ConfigError: no such device,
    or the model is not supported. Raises CapacityError: the memory does not hold one block of KV.
    """
    spec = read_model_spec(folder)
    resolved = resolve(config, spec)
    device, options = resolved.device, profile_options(config)
    profile = load_profile(profile_path(spec, resolved.dtype, device, options))
    free_bytes, placement = free_memory_bytes(device), None
    if profile is not None:
        model = profile.model
        attention_bytes = model.num_layers * model.layer.attention_bytes
        placement = weight_placement_for(
            config,
            WeightSizes(
                other_bytes=model.other_bytes + attention_bytes,
                ffn_bytes=(model.layer.ffn_bytes,) * model.num_layers,
            ),
        )
        # the weights are not loaded yet
        free_bytes = max(0, free_bytes - placement.device_bytes)
    budget = _budget(
        config,
        resolved,
        free_bytes=free_bytes,
        num_engines_on_host=num_engines_on_host,
        placement=placement,
    )
    return budget, profile
