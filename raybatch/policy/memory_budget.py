"""Memory budgets of weights, KV and steps on a device and its host.

Pure: takes free bytes. Weight placement is planned (BatchGen, arXiv:2606.21712, section 5.2): as
many whole feed-forward blocks are resident as fit next to a pool of buffers, through which the
others are streamed in every step.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from raybatch.config import EngineConfig
from raybatch.errors import CapacityError, ConfigError

# share of the device memory for KV that is free after loading the weights
_CPU_FRACTION, GPU_FRACTION = 0.5, 0.9
# share of free host memory for KV that an engine may use by "auto"
_HOST_FRACTION = 0.5
# default number of weight buffers
USUAL_BUFFERS = 2
# rows whose KV must fit next to all weights, or layers are streamed
_FEW_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights: feed-forward blocks by layer, and `other_bytes`.

    The latter are embeddings, head, attention, norms and routers, which are always resident.
    """

    other_bytes: int
    ffn_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + sum(self.ffn_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPlacement:
    is_resident: tuple[bool, ...]  # by layer, whether its feed-forward block is resident
    num_buffers: int  # buffers for streamed blocks; 0 if all are resident
    buffer_bytes: int  # of one buffer: the largest streamed block
    device_bytes: int  # total on the device
    pass_bytes: int  # bytes copied to the device per forward pass

    @property
    def streamed(self) -> tuple[int, ...]:
        """Numbers of the streamed layers, ascending."""
        return tuple(idx for idx, stays in enumerate(self.is_resident) if not stays)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMemory:
    """Divides the memory of a device between weights, KV and the largest step.

    KV takes `kv_bytes`; None takes `kv_share` of the rest after weights, minus the step's bytes.
    """

    sizes: WeightSizes
    weight_buffers: int
    device_bytes: int
    host_bytes: int
    step_bytes: int
    kv_share: float
    kv_bytes: int | None = None

    def left_for_kv(self, weight_bytes: int) -> int:
        """Return the KV bytes on the device next to the weights; 0 if these do not fit."""
        free = self.device_bytes - weight_bytes
        if self.kv_bytes is None:
            return max(0, int(self.kv_share * free) - self.step_bytes)
        return self.kv_bytes if self.kv_bytes + self.step_bytes <= free else 0

    def holds_all(self, row_bytes: int) -> bool:
        """Return whether all layers can stay: KV of a few rows of `row_bytes` fits next to them."""
        wanted = _FEW_ROWS * row_bytes if self.kv_bytes is None else 1
        return self.left_for_kv(self.sizes.total_bytes) >= wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Memory for KV on the device and its host, by an engine's options; make it by `resolve`.

    `placement` of None has all weights on the device. `may_take_bytes` is the host memory that an
    engine could use for KV, `host_kv_bytes` what its options grant.
    """

    config: EngineConfig
    is_gpu: bool
    device_kv_bytes: int
    host_kv_bytes: int
    may_take_bytes: int = 0
    placement: WeightPlacement | None = None
    # execution modes whose forecast was confirmed by measured steps: see `EngineInputs`
    proven: frozenset[tuple[bool, int]] = frozenset()

    @classmethod
    def resolve(
        cls,
        config: EngineConfig,
        *,
        is_gpu: bool,
        device_kv_bytes: int = 0,
        free_host_bytes: int = 0,
        num_engines_on_host: int = 1,
        most_kv_bytes: float = math.inf,
        placement: WeightPlacement | None = None,
    ) -> Self:
        """Return the budget of one engine of a host; the only place that resolves "auto" for KV.

        An engine takes a share of the host's free memory, but at most `most_kv_bytes`, the KV of as
        many rows as may run. On a CPU host memory is device memory, so "auto" grants none
        unless `kv_offload` is set.
        """
        share = _HOST_FRACTION * free_host_bytes / num_engines_on_host
        may_take = host_kv_bytes = int(min(most_kv_bytes, share))
        if config.host_kv_bytes != "auto":
            host_kv_bytes = config.explicit_host_kv_bytes
        elif config.kv_offload is False or not (is_gpu or config.kv_offload is True):
            host_kv_bytes = 0
        return cls(
            config=config,
            is_gpu=is_gpu,
            device_kv_bytes=device_kv_bytes,
            host_kv_bytes=host_kv_bytes,
            may_take_bytes=may_take,
            placement=placement,
        )

    @classmethod
    def before_weights(cls, config: EngineConfig, memory: "WeightMemory") -> Self:
        """Return the budget of a GPU before loading weights, some of which may be streamed."""
        left = max(0, memory.host_bytes - memory.sizes.total_bytes)
        budget = cls.resolve(
            config, is_gpu=True, free_host_bytes=memory.host_bytes, most_kv_bytes=left
        )
        if config.host_kv_bytes == "auto" and budget.kv_offload is False:
            return replace(budget, host_kv_bytes=0)
        return budget

    @property
    def needs_device(self) -> tuple[str, ...]:
        """Return the options in use that need KV on the device."""
        config = self.config
        wanted = {
            "speculative_tokens": bool(config.num_drafts),
            "cuda_graphs": config.cuda_graphs is True,
            "host_kv_dtype": config.host_kv_dtype != "auto",
        }
        return tuple(f"engine.{name}" for name, is_set in wanted.items() if is_set)

    @property
    def kv_offload(self) -> bool | None:
        """Return whether the options put KV into host memory; None if that is chosen later."""
        if isinstance(self.config.kv_offload, bool):
            return self.config.kv_offload
        return False if self.needs_device else None

    @property
    def has_larger_steps(self) -> bool:
        """Return whether, once layers are measured, steps larger than usual may be chosen."""
        return self.is_gpu and self.config.max_batched_tokens == "auto"

    @property
    def may_choose(self) -> bool:
        """Return whether location of KV or step size are open, and measured layers decide them."""
        if self.config.host_kv_dtype != "auto":
            return False  # measured times must not decide which KV is rounded
        if self.config.weights == "shared":
            return False  # no replica has all layers to measure
        has_places = self.kv_offload is None and bool(self.host_kv_bytes)
        return has_places or self.has_larger_steps

    def plain_reason(self) -> str:
        """Return a text: the execution mode if none is chosen by measured layers, and why."""
        config = self.config
        if config.kv_offload is True:
            return "KV in host memory: engine.kv_offload is set"
        why = "measuring the layers failed"
        if config.kv_offload is False:
            why = "engine.kv_offload says"
        elif config.weights == "shared":
            why = "weights are shared with other replicas"
        elif self.needs_device:
            needs = "needs" if len(self.needs_device) == 1 else "need"
            why = f"{' and '.join(self.needs_device)} {needs} it there"
        elif not self.host_kv_bytes:
            why = "engine.host_kv_bytes is 0"
        return f"KV on device: {why}; steps of up to {config.token_budget:,} tokens"

    def chosen(self, mode: tuple[bool, int] | None) -> EngineConfig:
        """Return the engine options with a chosen mode, (KV is on the host, most tokens of a step).

        `mode` of None leaves KV on the device, unless the options say otherwise.
        """
        config = self.config
        is_offloaded, step_tokens = mode or (self.kv_offload is True, config.token_budget)
        keeps_host = is_offloaded or config.host_kv_bytes != "auto"
        is_usual = step_tokens == config.token_budget
        return replace(
            config,
            kv_offload=is_offloaded,
            host_kv_bytes=self.host_kv_bytes if keeps_host else None,
            # keep "auto", which sizes steps by time
            max_batched_tokens=config.max_batched_tokens if is_usual else step_tokens,
        )


def weight_placement_for(config: EngineConfig, sizes: WeightSizes) -> WeightPlacement:
    """Return the placement by `device_weight_bytes`; "auto" keeps all layers on the device."""
    explicit_bytes = config.device_weight_bytes
    return plan_weight_placement(
        sizes,
        device_weight_bytes=None if explicit_bytes == "auto" else explicit_bytes,
        weight_buffers=config.explicit_buffers or USUAL_BUFFERS,
    )


def plan_weight_placement(
    sizes: WeightSizes, *, device_weight_bytes: int | None, weight_buffers: int
) -> WeightPlacement:
    """Return the placement with the most resident layers in `device_weight_bytes`; None: all.

    Streamed layers are spread over the model, so that a copy overlaps with the resident layers
    before it. The last layer is streamed, so that the copy for the next step has the time between
    steps.

    Raises:
        ConfigError: the budget does not hold the buffers and the weights that are always resident.
    """
    tried = weight_placements(sizes, weight_buffers)
    for placement in tried:
        if device_weight_bytes is None or placement.device_bytes <= device_weight_bytes:
            return placement
    least = min(placement.device_bytes for placement in tried)
    fewer = "use fewer buffers, " if weight_buffers > 1 else ""
    raise ConfigError(
        f"engine.device_weight_bytes is {device_weight_bytes}, but must be at least {least}: "
        f"attention, embeddings and head need {sizes.other_bytes} bytes, and {weight_buffers} "
        "buffers for streamed layers (engine.weight_buffers) up to "
        f"{weight_buffers * max(sizes.ffn_bytes)} bytes; raise it, {fewer}or leave it out to keep "
        f"all {sizes.total_bytes} bytes of weights on the device"
    )


def weight_placements(sizes: WeightSizes, weight_buffers: int) -> list[WeightPlacement]:
    """Return one placement per number of resident layers, most first."""
    counts = range(len(sizes.ffn_bytes), -1, -1)
    return [_placement(sizes, count, weight_buffers) for count in counts]


def _placement(sizes: WeightSizes, num_resident: int, weight_buffers: int) -> WeightPlacement:
    num_layers = len(sizes.ffn_bytes)
    num_streamed = num_layers - num_resident
    is_resident = tuple(
        (idx + 1) * num_streamed // num_layers == idx * num_streamed // num_layers
        for idx in range(num_layers)
    )
    by_layer = zip(sizes.ffn_bytes, is_resident, strict=True)
    passing = [size for size, stays in by_layer if not stays]
    num_buffers, buffer_bytes = min(weight_buffers, num_streamed), max(passing, default=0)
    return WeightPlacement(
        is_resident=is_resident,
        num_buffers=num_buffers,
        buffer_bytes=buffer_bytes,
        device_bytes=sizes.total_bytes - sum(passing) + num_buffers * buffer_bytes,
        pass_bytes=sum(passing),
    )


def num_blocks_for(
    config: EngineConfig,
    *,
    token_bytes: int,
    max_model_len: int,
    is_cpu: bool,
    free_bytes: int,
    num_engines_on_host: int = 1,
    num_scrap_blocks: int = 0,
    reserved_bytes: int = 0,
    host_bytes: int | None = None,
) -> int:
    """Return how many blocks fit into `kv_cache_bytes`, else into a share of the free memory.

    Scrap blocks, which CUDA graphs write to for padding, are subtracted. The result never exceeds
    what `max_num_seqs` sequences of `max_model_len` tokens can use. `free_bytes` is the free device
    memory after loading the weights, `reserved_bytes` the memory of steps, and `host_bytes` the
    total memory of a CPU host, which the KV cache must not exceed (None: unknown). Raises
    CapacityError: the memory does not hold one block. Raises ConfigError: `kv_cache_bytes` exceeds
    the memory of the host.
    """
    block_bytes = token_bytes * config.block_size_tokens
    share = free_bytes * (_CPU_FRACTION / num_engines_on_host if is_cpu else GPU_FRACTION)
    budget = config.kv_cache_bytes
    if budget is None:
        budget = max(0, int(share) - reserved_bytes)
    blocks_per_seq = -(-max_model_len // config.block_size_tokens)
    num_fitting = budget // block_bytes - num_scrap_blocks
    num_blocks = min(num_fitting, config.max_num_seqs * blocks_per_seq)
    if num_blocks < 1:
        raise CapacityError(
            f"the KV cache has {budget} bytes, but one block of {config.block_size_tokens} tokens "
            f"needs {block_bytes}; raise engine.kv_cache_bytes or run fewer engines on this host",
            needed_tokens=config.block_size_tokens,
            available_tokens=budget // token_bytes,
        )
    pool_bytes = num_blocks * block_bytes
    if is_cpu and host_bytes is not None and pool_bytes > host_bytes:
        raise ConfigError(
            f"engine.kv_cache_bytes is {budget}, of which {config.max_num_seqs} sequences "
            f"(engine.max_num_seqs) of {max_model_len} tokens can use {pool_bytes}, but this host "
            f"has only {host_bytes} bytes of memory; lower engine.kv_cache_bytes, or leave it out "
            "to take a share of the free memory"
        )
    return num_blocks


def num_host_blocks_for(
    config: EngineConfig, *, token_bytes: int, rounded_bytes: int
) -> tuple[int, int]:
    """Return (exact blocks, blocks rounded to 8 bits) that fit into `host_kv_bytes`.

    A token needs `token_bytes` in an exact block and `rounded_bytes` in a rounded one. If
    `host_kv_dtype` is set, half of the memory is for exact blocks, else all of it. Raises
    ConfigError: `host_kv_bytes` is set, but does not hold one block.
    """
    # each half must hold a block
    num_halves = 1 if config.host_kv_dtype == "auto" else 2
    size, budget = config.block_size_tokens, config.explicit_host_kv_bytes
    block_bytes = num_halves * token_bytes * size
    if 0 < budget < block_bytes:
        raise ConfigError(
            f"engine.host_kv_bytes is {budget}, but one block of {size} tokens "
            f"needs {block_bytes}{' with host_kv_dtype' if num_halves > 1 else ''}; raise it, or "
            "leave it out to use no host memory for KV"
        )
    num_exact = budget // block_bytes
    if num_halves == 1:
        return num_exact, 0
    rest = budget - num_exact * size * token_bytes
    return num_exact, rest // (size * rounded_bytes)
