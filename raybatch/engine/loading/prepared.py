"""A model in place whose pools are made once, or anew where rows are better run another way."""

import logging
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Self

import torch

from raybatch.config import DEFAULT_STEP_TOKENS, EngineConfig
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.forward.ops_choice import pick_ops
from raybatch.engine.loading.loaded_model import (
    LoadedModel,
    give_back_freed_memory,
    load_model,
    place_layers,
)
from raybatch.engine.memory.kv_cache import (
    free_memory_bytes,
    host_memory_bytes,
    kv_bytes_per_token,
    num_blocks_for,
)
from raybatch.engine.memory.pinned import IndexUploads, current_device
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.module_profile import ModuleProfile, measured_profile, profile_layer
from raybatch.engine.profile.shared_read_times import timed_reads
from raybatch.errors import CapacityError, error_text
from raybatch.kernels.dispatch import Ops
from raybatch.policy.batches.layer_plan import ModuleCosts
from raybatch.policy.batches.row_shape import RowShape
from raybatch.policy.choose_engine import EngineChoice, EngineFacts, RowsAhead, choose_engine
from raybatch.policy.shared_reads import UNTIMED, SharedReads

# of steps on a GPU, beside the one that is usual
_LARGER_STEPS = (4096, 8192, 16384)
# of what a host has free, for KV that an engine may keep there by its own choice
_HOST_FRACTION = 0.5

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class PreparedModel:
    """A loaded model with its layers where they stay, and ops; everything but the KV pool.

    `device_blocks` are those of a pool on the device, before there is one, and `host_kv_bytes` what
    KV may take of the host. Of the costs, those of modules and of links are multiplied by what an
    engine has found them to be off.
    """

    model: LoadedModel
    config: EngineConfig
    ops: Ops
    decoder: Decoder
    device_blocks: int
    host_kv_bytes: int
    num_engines_on_host: int = 1
    module_factor: float = field(default=1.0)
    link_factor: float = field(default=1.0)

    @classmethod
    def load(cls, source: str, config: EngineConfig, *, num_engines_on_host: int = 1) -> Self:
        """Load the model that `source` names, see `load_model`.

        Raises ConfigError: the model or an option cannot be run, as weights that do not fit. Raises
        CapacityError: the memory does not hold a block of KV.
        """
        model = load_model(source, config, num_engines_on_host=num_engines_on_host)
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
        upload = IndexUploads(model.device).upload
        prepared = cls(
            model=model,
            config=config,
            ops=ops,
            decoder=Decoder(model.spec, model.weights, layers=layers, ops=ops, upload=upload),
            device_blocks=0,
            host_kv_bytes=0,
            num_engines_on_host=num_engines_on_host,
        )
        # both before the pool, which takes most of what is free
        prepared.device_blocks = prepared.count_blocks(config)
        prepared.host_kv_bytes = prepared._host_kv_bytes()
        return prepared

    def count_blocks(
        self, config: EngineConfig, *, num_scrap_blocks: int = 0, reserved_bytes: int = 0
    ) -> int:
        """Return how many blocks a pool on the device has now, see `num_blocks_for`."""
        return num_blocks_for(
            config,
            self.model.spec,
            dtype=self.model.resolved.kv_dtype,
            device=self.model.device,
            free_bytes=free_memory_bytes(self.model.device),
            num_engines_on_host=self.num_engines_on_host,
            num_scrap_blocks=num_scrap_blocks,
            reserved_bytes=reserved_bytes,
            host_bytes=host_memory_bytes(),
        )

    def _host_kv_bytes(self) -> int:
        """Return what the option says, or what an engine may take by itself.

        Memory of a CPU's host is the device's, so there "auto" has none but where `kv_offload` asks
        for it.
        """
        config, spec = self.config, self.model.spec
        if config.host_kv_bytes != "auto":
            return config.given_host_kv_bytes
        if config.kv_offload is False or (
            self.model.device.type == "cpu" and config.kv_offload is not True
        ):
            return 0
        token_bytes = kv_bytes_per_token(spec, self.model.resolved.kv_dtype)
        most = config.max_num_seqs * self.model.resolved.max_model_len * token_bytes
        share = _HOST_FRACTION * free_memory_bytes(torch.device("cpu"))
        return int(min(most, share / self.num_engines_on_host))

    @property
    def needs_device(self) -> bool:
        """Return whether an option that is set wants KV on the device."""
        config, is_rounded = self.config, self.config.host_kv_dtype != "auto"
        return bool(config.num_drafts) or config.cuda_graphs is True or is_rounded

    @cached_property
    def profile(self) -> ModuleProfile | None:
        """What layers cost on this host; None, with a warning, if they cannot be measured."""
        model = self.model
        try:
            profile, was_read = measured_profile(
                model.spec,
                model.weights,
                profile_options(self.config),
                measure=partial(profile_layer, ops=self.ops),
            )
        except (RuntimeError, MemoryError) as error:
            _logger.warning(
                "%s keeps KV on the device, as its layers could not be measured: %s",
                model.name,
                error_text(error),
            )
            return None
        if not was_read:
            give_back_freed_memory(model.device)
        return profile

    @property
    def may_choose(self) -> bool:
        """Return whether there is something to choose that measured layers decide."""
        config, is_gpu = self.config, self.model.device.type == "cuda"
        has_places = bool(self.host_kv_bytes) and not self.needs_device
        may_offload = config.kv_offload == "auto" and has_places
        return may_offload or (is_gpu and config.max_batched_tokens == "auto")

    def facts(self, rows: RowsAhead) -> EngineFacts | None:
        """Return what a choice goes by; None where layers cannot be measured."""
        profile, config = self.profile, self.config
        if profile is None:
            return None
        shape, is_gpu = profile.model, self.model.device.type == "cuda"
        layer = shape.layer
        budgets: tuple[int, ...] = (config.token_budget,)
        if is_gpu and config.max_batched_tokens == "auto":
            budgets = (DEFAULT_STEP_TOKENS, *_LARGER_STEPS)
        offload = config.kv_offload if isinstance(config.kv_offload, bool) else None
        if offload is None and (self.needs_device or not self.host_kv_bytes):
            offload = False
        # hidden states, and what one run of a module makes on the way
        widest = max(layer.projected_dim, layer.top_k * (2 * layer.ffn_dim + layer.model_dim))
        return EngineFacts(
            model=shape,
            costs=self._costs(profile),
            device_kv_bytes=self.device_blocks * self._block_bytes(),
            host_kv_bytes=self.host_kv_bytes,
            max_num_seqs=config.max_num_seqs,
            token_budgets=budgets,
            block_size=config.block_size_tokens,
            activation_bytes=(2 * layer.model_dim + widest) * layer.element_bytes if is_gpu else 0,
            rows=rows,
            residence=self.model.residence,
            kv_offload=offload,
            may_draft=config.speculative_tokens == "auto" and not is_gpu,
        )

    def usual_rows(self) -> RowsAhead:
        return RowsAhead(shape=RowShape.within(self.model.resolved.max_model_len))

    def choose(self, rows: RowsAhead) -> EngineChoice | None:
        """Return how such rows run best; None where nothing is to be chosen, or can be."""
        facts = self.facts(rows) if self.may_choose else None
        if facts is None:
            return None
        try:
            return choose_engine(facts)
        except CapacityError as error:
            # a shorter row may fit
            _logger.info("%s keeps KV on the device: %s", self.model.name, error_text(error))
            return None

    def plain_reason(self) -> str:
        """Return how rows run where nothing is chosen, and why."""
        config = self.config
        if config.kv_offload is True:
            return "KV in host memory, as engine.kv_offload says"
        why = "its layers could not be measured"
        if config.kv_offload is False:
            why = "engine.kv_offload says"
        elif self.needs_device:
            why = "engine.speculative_tokens or engine.cuda_graphs needs it there"
        elif not self.host_kv_bytes:
            why = "there is no host memory for KV (engine.host_kv_bytes)"
        return f"KV on the device, as {why}; steps of up to {config.token_budget:,} tokens"

    def chosen(self, choice: EngineChoice | None) -> EngineConfig:
        """Return the options with what was chosen; without a choice KV is on the device."""
        config, best = self.config, None if choice is None else choice.best
        is_offloaded = config.kv_offload is True if best is None else best.kv_offload
        keeps_host = is_offloaded or config.host_kv_bytes != "auto"
        return replace(
            config,
            kv_offload=is_offloaded,
            host_kv_bytes=self.host_kv_bytes if keeps_host else None,
            max_batched_tokens=config.token_budget if best is None else best.max_batched_tokens,
        )

    def shared_reads(self) -> SharedReads:
        """Return from when on rows read a shared run together; timed on a CPU alone."""
        if self.model.device.type != "cpu":
            return UNTIMED
        return timed_reads(
            self.ops,
            self.model.spec,
            block_size=self.config.block_size_tokens,
            dtype=self.model.dtype,
            kv_dtype=self.model.resolved.kv_dtype,
        )

    def _block_bytes(self) -> int:
        dtype = self.model.resolved.kv_dtype
        return kv_bytes_per_token(self.model.spec, dtype) * self.config.block_size_tokens

    def _costs(self, profile: ModuleProfile) -> ModuleCosts:
        costs = profile.costs()
        prompts = None if costs.prompts is None else costs.prompts.times(self.module_factor)
        return replace(
            costs,
            attention=costs.attention.times(self.module_factor),
            prompts=prompts,
            ffn=costs.ffn.times(self.module_factor),
            to_device=costs.to_device.times(self.link_factor),
            to_host=costs.to_host.times(self.link_factor),
        )


def log_choice(name: str, choice: EngineChoice, rows: RowsAhead, *, when: str) -> None:
    """Tell what was chosen, and why."""
    shape = rows.shape
    _logger.info(
        "%s runs with %s; %s (%s: %d prompt and %d output tokens a row)",
        name,
        choice.reason,
        "; ".join(choice.notes()),
        when,
        shape.prompt_tokens,
        shape.output_tokens,
    )
