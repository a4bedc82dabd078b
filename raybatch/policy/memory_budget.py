"""What weights, KV and steps may take of a device and of its host: one place for every byte.

Pure: bytes that are free come in. Which feed-forward blocks stay on the device is planned and not
fixed (BatchGen, arXiv:2606.21712, section 5.2): as many whole blocks stay as the budget holds next
to a ring of buffers, through which the weights of the others pass in every step.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

from raybatch.config import EngineConfig
from raybatch.errors import CapacityError, ConfigError

# of the device's memory that is free once weights are loaded, for its pool of KV
_CPU_FRACTION, GPU_FRACTION = 0.5, 0.9
# of what a host has free, for KV that an engine may keep there by its own choice
_HOST_FRACTION = 0.5
# buffers of a ring where nothing is said
USUAL_BUFFERS = 2
# where their KV fits beside all weights, nothing is streamed for more of them
_FEW_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSizes:
    """Bytes of a model's weights: feed-forward blocks by layer, and all that is always there.

    The latter are embeddings, head, attention, norms and routers.
    """

    other_bytes: int
    ffn_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.other_bytes + sum(self.ffn_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Residence:
    is_resident: tuple[bool, ...]  # by layer, whether its feed-forward block stays on the device
    num_buffers: int  # blocks of the ring; 0 where all are resident
    buffer_bytes: int  # of one of them: the largest block that passes through
    device_bytes: int  # that all of this takes on the device
    pass_bytes: int  # that one pass through the layers copies to the device

    @property
    def streamed(self) -> tuple[int, ...]:
        """Layers that pass through the ring, in order."""
        return tuple(idx for idx, stays in enumerate(self.is_resident) if not stays)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMemory:
    """Weights, and the memory that they have in common with KV and the largest step.

    KV takes `kv_bytes`; None takes `kv_share` of what weights leave, less the bytes of the step.
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

    def holds_all(self, row_bytes: int) -> bool:
        """Return whether all layers stay, as the KV of a few such rows fits beside them."""
        wanted = _FEW_ROWS * row_bytes if self.kv_bytes is None else 1
        return self.left_for_kv(self.sizes.total_bytes) >= wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """What KV may take of the device and of its host, by an engine's options; see `resolve`.

    Of `residence` None has all weights on the device. `may_take_bytes` of the host are what an
    engine could have for KV, and `host_kv_bytes` what its options give it.
    """

    config: EngineConfig
    is_gpu: bool
    device_kv_bytes: int
    host_kv_bytes: int
    may_take_bytes: int = 0
    residence: Residence | None = None
    # ways whose steps have taken the time that was forecast: see `EngineFacts`
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
        residence: Residence | None = None,
    ) -> Self:
        """Return the budget of one of the engines of a host; the only reader of "auto" for KV.

        An engine takes a share of what the host has free, and no more than `most_kv_bytes`, the KV
        of the most rows. Memory of a CPU's host is the device's, so there "auto" has none but where
        `kv_offload` asks for it.
        """
        share = _HOST_FRACTION * free_host_bytes / num_engines_on_host
        may_take = host_kv_bytes = int(min(most_kv_bytes, share))
        if config.host_kv_bytes != "auto":
            host_kv_bytes = config.given_host_kv_bytes
        elif config.kv_offload is False or not (is_gpu or config.kv_offload is True):
            host_kv_bytes = 0
        return cls(
            config=config,
            is_gpu=is_gpu,
            device_kv_bytes=device_kv_bytes,
            host_kv_bytes=host_kv_bytes,
            may_take_bytes=may_take,
            residence=residence,
        )

    @classmethod
    def before_weights(cls, config: EngineConfig, memory: "WeightMemory") -> Self:
        """Return the budget of a GPU whose weights are not there yet, and may lie on the host."""
        left = max(0, memory.host_bytes - memory.sizes.total_bytes)
        budget = cls.resolve(
            config, is_gpu=True, free_host_bytes=memory.host_bytes, most_kv_bytes=left
        )
        if config.host_kv_bytes == "auto" and budget.kv_offload is False:
            return replace(budget, host_kv_bytes=0)
        return budget

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
    def kv_offload(self) -> bool | None:
        """Return whether the options put KV into host memory; None where that is to be chosen."""
        if isinstance(self.config.kv_offload, bool):
            return self.config.kv_offload
        return False if self.needs_device else None

    @property
    def has_larger_steps(self) -> bool:
        """Return whether steps may have more tokens than usual, if layers were measured."""
        return self.is_gpu and self.config.max_batched_tokens == "auto"

    @property
    def may_choose(self) -> bool:
        """Return whether there is something to choose that measured layers decide."""
        if self.config.host_kv_dtype != "auto":
            return False  # measured times would decide whose KV is rounded
        if self.config.weights == "shared":
            return False  # nobody has all layers to measure
        has_places = self.kv_offload is None and bool(self.host_kv_bytes)
        return has_places or self.has_larger_steps

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

    def chosen(self, way: tuple[bool, int] | None) -> EngineConfig:
        """Return the options with a place of KV, by whether it is the host, and tokens of a step.

        Without a choice KV is on the device unless the options say otherwise.
        """
        config = self.config
        is_offloaded, step_tokens = way or (self.kv_offload is True, config.token_budget)
        keeps_host = is_offloaded or config.host_kv_bytes != "auto"
        is_usual = step_tokens == config.token_budget
        return replace(
            config,
            kv_offload=is_offloaded,
            host_kv_bytes=self.host_kv_bytes if keeps_host else None,
            # "auto" lets seconds size the steps
            max_batched_tokens=config.max_batched_tokens if is_usual else step_tokens,
        )


def residence_for(config: EngineConfig, sizes: WeightSizes) -> Residence:
    """Return the residence that the options give; "auto" keeps all, see `plan_residence`."""
    given_bytes = config.device_weight_bytes
    return plan_residence(
        sizes,
        device_weight_bytes=None if given_bytes == "auto" else given_bytes,
        weight_buffers=config.given_buffers or USUAL_BUFFERS,
    )


def plan_residence(
    sizes: WeightSizes, *, device_weight_bytes: int | None, weight_buffers: int
) -> Residence:
    """Return the residence with the most resident layers that the budget holds; None keeps all.

    Streamed layers are spread over the model, so that a copy has the time of the resident layers
    before it, and the last one is the last layer, so that the first has the time between steps.

    Raises:
        ConfigError: the budget does not hold the ring and what always stays.
    """
    tried = residences(sizes, weight_buffers)
    for residence in tried:
        if device_weight_bytes is None or residence.device_bytes <= device_weight_bytes:
            return residence
    least = min(residence.device_bytes for residence in tried)
    fewer = "take fewer buffers, " if weight_buffers > 1 else ""
    raise ConfigError(
        f"engine.device_weight_bytes is {device_weight_bytes}, but attention, embeddings and head "
        f"take {sizes.other_bytes} and a ring of {weight_buffers} feed-forward blocks "
        f"(engine.weight_buffers) up to {weight_buffers * max(sizes.ffn_bytes)}: {least} at least; "
        f"raise it, {fewer}"
        f"or leave it out to keep all {sizes.total_bytes} bytes of weights on the device"
    )


def residences(sizes: WeightSizes, weight_buffers: int) -> list[Residence]:
    """Return one residence for each number of resident layers, the most first."""
    counts = range(len(sizes.ffn_bytes), -1, -1)
    return [_residence(sizes, count, weight_buffers) for count in counts]


def _residence(sizes: WeightSizes, num_resident: int, weight_buffers: int) -> Residence:
    num_layers = len(sizes.ffn_bytes)
    num_streamed = num_layers - num_resident
    is_resident = tuple(
        (idx + 1) * num_streamed // num_layers == idx * num_streamed // num_layers
        for idx in range(num_layers)
    )
    by_layer = zip(sizes.ffn_bytes, is_resident, strict=True)
    passing = [size for size, stays in by_layer if not stays]
    num_buffers, buffer_bytes = min(weight_buffers, num_streamed), max(passing, default=0)
    return Residence(
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
    """Return how many blocks fit: into `kv_cache_bytes`, else into a share of the free memory.

    Blocks of no sequence are taken off. It is never more than `max_num_seqs` sequences of
    `max_model_len` tokens can use. `free_bytes` is what the device has once the weights are loaded,
    `reserved_bytes` what steps take of it beside the pool, and `host_bytes` the memory of a CPU
    host in all, which no pool may exceed (None: not known). Raises CapacityError: the memory does
    not hold a single block. Raises ConfigError: `kv_cache_bytes` asks for more than the host has.
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
            f"engine.kv_cache_bytes is {budget}, of which {config.max_num_seqs} sequences (engine."
            f"max_num_seqs) of {max_model_len} tokens can use {pool_bytes}, but this host has "
            f"{host_bytes} bytes of memory; lower it, or leave it out to take a share of the free "
            "memory"
        )
    return num_blocks


def num_host_blocks_for(
    config: EngineConfig, *, token_bytes: int, rounded_bytes: int
) -> tuple[int, int]:
    """Return how many exact blocks fit into `host_kv_bytes`, and how many of `host_kv_dtype`.

    Tokens take the first of these bytes in the pool's type and the second rounded. With
    `host_kv_dtype`, half is for exact ones. Raises ConfigError: the option is set, and holds not a
    single block.
    """
    # a block takes its bytes in each half
    num_halves = 1 if config.host_kv_dtype == "auto" else 2
    size, budget = config.block_size_tokens, config.given_host_kv_bytes
    block_bytes = num_halves * token_bytes * size
    if 0 < budget < block_bytes:
        raise ConfigError(
            f"engine.host_kv_bytes is {budget}, but one block of {size} tokens "
            f"needs {block_bytes}{', with host_kv_dtype' if num_halves > 1 else ''}; raise it, or "
            "leave it out to have no host memory for KV"
        )
    num_exact = budget // block_bytes
    if num_halves == 1:
        return num_exact, 0
    rest = budget - num_exact * size * token_bytes
    return num_exact, rest // (size * rounded_bytes)
