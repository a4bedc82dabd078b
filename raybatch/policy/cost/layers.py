"""Work of a model's layers, and step times from the costs of their modules.

The costs are fitted to one measured layer; they forecast steps with KV or weights in host memory.
"""

from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec
from raybatch.policy.cost.cascade import UNTIMED, CascadeThresholds
from raybatch.policy.cost.roofline import Roofline, Work
from raybatch.policy.cost.work import output_sample
from raybatch.policy.memory_budget import WeightPlacement
from raybatch.records.arrays import Floats

_Amount = TypeVar("_Amount", float, Floats)

# device buffers of one layer's KV, with KV in host memory
KV_SLOTS = 2
# sampled lengths that represent all outputs
_NUM_LENGTHS = 64
# overhead of scheduling, batching and sampling, per step and per sampled row (AMD EPYC, 8M model)
_STEP_S, _ROW_S = 1.1e-3, 1.2e-5
# overhead on a CPU per part of a step, and per part and layer: batches, copy indices
_PART_S, _PART_LAYER_S = 2e-4, 4e-5
# tokens computed in the time of reading the weights once; 140 to 300 on GPUs; if it is less in
# truth, admission waits less often than optimal
WEIGHT_READ_TOKENS = 180
# minimum of a part in a layer on a GPU, whose 9 to 19 launches are not in a graph
_LAUNCHES_S = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Shape of the sequences of a forward pass, assumed to be equal.

    Decode is one token per sequence over a long context, prefill many tokens without context.
    """

    tokens_per_sequence: int = 1
    cached_tokens: int = 0

    def num_sequences(self, tokens: int) -> int:
        """Return the sequences in a batch of `tokens`, rounded up."""
        return -(-tokens // self.tokens_per_sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Sizes of one layer; a dense layer has one expert, used by every token."""

    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    num_experts: int = 1
    top_k: int = 1
    element_bytes: int = 4
    # bytes of one weight of a linear or expert; None: `element_bytes`
    weight_bytes: int | None = None
    # bytes of the keys or values of a token and KV head; None: unquantized
    kv_row_bytes: int | None = None

    def __post_init__(self) -> None:
        known = [n for n in self.__dataclass_fields__ if getattr(self, n) is not None]
        for name in known:
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k must be within 1..{self.num_experts} (num_experts), got {self.top_k}"
            )

    @property
    def projected_dim(self) -> int:
        """Return the total width of queries, keys and values of one token."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def _num_attention_weights(self) -> int:
        return (self.projected_dim + self.num_heads * self.head_dim) * self.model_dim

    @property
    def attention_bytes(self) -> int:
        return self._num_attention_weights * (self.weight_bytes or self.element_bytes)

    @property
    def ffn_bytes(self) -> int:
        num_weights = 3 * self.num_experts * self.ffn_dim * self.model_dim
        return num_weights * (self.weight_bytes or self.element_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        row_bytes = self.kv_row_bytes or self.head_dim * self.element_bytes
        return 2 * self.num_kv_heads * row_bytes

    def attention_work(self, tokens: int, workload: Workload) -> Work:
        """Return the work of one layer's attention on `tokens`, with its linear projections."""
        seen = tokens * (workload.cached_tokens + (workload.tokens_per_sequence + 1) / 2)
        read_kv = workload.num_sequences(tokens) * workload.cached_tokens + tokens
        operations, moved = self.attention_counts(float(tokens), seen, float(read_kv))
        return Work(operations=operations, moved_bytes=self.attention_bytes + moved)

    def attention_counts(
        self, tokens: _Amount, seen: _Amount, read_kv: _Amount
    ) -> tuple[_Amount, _Amount]:
        """Return (operations, bytes moved) of one layer's attention on `tokens`.

        The tokens attend to `seen` positions in total. The bytes are those of activations and of
        the KV of `read_kv` positions, without weights.
        """
        scores = 4 * seen * self.num_heads * self.head_dim
        activations = 2 * tokens * (self.model_dim + self.projected_dim) * self.element_bytes
        return (
            2 * tokens * self._num_attention_weights + scores,
            read_kv * self.kv_bytes_per_token + activations,
        )

    def ffn_work(self, tokens: int) -> Work:
        """Return the work of one layer's experts, or of its dense block, on `tokens`."""
        operations, moved = self.ffn_counts(float(tokens))
        return Work(operations=operations, moved_bytes=moved)

    def ffn_counts(self, tokens: _Amount) -> tuple[_Amount, _Amount]:
        """Return (operations, bytes moved) of one layer's experts on `tokens`, with weights.

        Assumes uniform routing: a batch reads E * (1 - (1 - K / E)^T) experts on average.
        """
        rows = tokens * self.top_k
        share = 1.0 - (1.0 - self.top_k / self.num_experts) ** tokens
        activations = (2 * tokens + 2 * rows) * self.model_dim + 2 * rows * self.ffn_dim
        return (
            6 * rows * self.ffn_dim * self.model_dim,
            share * self.ffn_bytes + activations * self.element_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a model; its layers are taken to be equal."""

    layer: LayerShape
    num_layers: int
    other_bytes: int = 0
    head_bytes: int = 0  # of `other_bytes`, those of the LM head

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        element_bytes: int,
        weight_bytes: int | None = None,
        kv_row_bytes: int | None = None,
    ) -> Self:
        """Return the shape of a model: all layers sparse if any is, else dense.

        For a model with both kinds this overestimates memory. Scales of quantized weights are not
        counted.
        """
        moe = spec.moe if spec.moe is not None and any(spec.moe.is_sparse) else None
        layer = LayerShape(
            model_dim=spec.model_dim,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            ffn_dim=moe.ffn_dim if moe else spec.ffn_dim,
            num_experts=moe.num_experts if moe else 1,
            top_k=moe.top_k if moe else 1,
            element_bytes=element_bytes,
            weight_bytes=weight_bytes,
            kv_row_bytes=kv_row_bytes,
        )
        table_bytes = spec.vocab_size * spec.model_dim * element_bytes
        return cls(
            layer=layer,
            num_layers=spec.num_layers,
            other_bytes=(1 if spec.is_tied else 2) * table_bytes,
            head_bytes=table_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleCosts:
    """Measured costs of the modules of a layer; `ffn` is a run of the experts or the dense block.

    `attention` is that of decodes, and of prompts if `prompts` were not measured. `to_device` and
    `to_host` are copies between host and device.

    `copies_overlap` is true if copies run during computation, false on a CPU with one thread.
    `cascade` has the savings of cascade attention. `steps_overlap` is true if the host plans a
    step while the device computes the previous one.
    """

    attention: Roofline
    ffn: Roofline
    to_device: Roofline
    to_host: Roofline
    copies_overlap: bool = True
    steps_overlap: bool = False
    prompts: Roofline | None = None
    cascade: CascadeThresholds = UNTIMED

    def without_links(self) -> "ModuleCosts":
        """Return the same costs, but with free copies between host and device."""
        return replace(self, to_device=self.to_device.times(0.0), to_host=self.to_host.times(0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """Mean lengths of the rows of a job; prompt tokens are those to compute."""

    prompt_tokens: int = 512
    output_tokens: int = 128

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a row must be at least 1, got {getattr(self, name)}")

    @classmethod
    def within(cls, max_model_len: int) -> "RowShape":
        """Return the default shape, shortened to `max_model_len`."""
        usual = cls()
        output_tokens = max(1, min(usual.output_tokens, max_model_len // 5))
        prompt_tokens = max(1, min(usual.prompt_tokens, max_model_len - output_tokens))
        return cls(prompt_tokens=prompt_tokens, output_tokens=output_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsAhead:
    """Shape and number of the coming rows; `num_rows` of None means an endless supply.

    `output_lengths` sample the distribution if lengths differ; `longest_tokens` are the tokens of
    the longest row, 0 if unknown. Prompt tokens are the computed ones, each attending to
    `prompt_reads` positions on average; 0 means prompts of equal length. A row also reads
    `shared_tokens` that its group of `group_rows` computes once.
    """

    shape: RowShape
    num_rows: int | None = None
    output_lengths: tuple[float, ...] = ()
    longest_tokens: int = 0
    prompt_reads: float = 0.0
    shared_tokens: float = 0.0
    group_rows: float = 1.0

    @classmethod
    def of(
        cls,
        prompt_tokens: float,
        outputs: Floats,
        output_tokens: float,
        **others: Any,  # noqa: ANN401
    ) -> Self:
        """Return rows with these lengths.

        Args:
            prompt_tokens, output_tokens: mean lengths.
            outputs: a sample of output lengths.
            **others: further fields.
        """
        lengths = output_sample(np.maximum(1.0, outputs), _NUM_LENGTHS)
        shape = RowShape(
            prompt_tokens=max(1, round(prompt_tokens)), output_tokens=max(1, round(output_tokens))
        )
        is_spread = lengths[0] < lengths[-1]
        return cls(shape=shape, output_lengths=lengths if is_spread else (), **others)

    @property
    def prefix_tokens(self) -> float:
        """Return the length of the prefix that the rows of a group share."""
        if self.group_rows <= 1:
            return self.shared_tokens
        prefix_tokens = self.shared_tokens / (1 - 1 / self.group_rows)
        return min(prefix_tokens, self.shared_tokens + self.shape.prompt_tokens)

    @property
    def own_tokens(self) -> float:
        """Return how many prompt tokens a row does not share with its group."""
        return max(0.0, self.shape.prompt_tokens + self.shared_tokens - self.prefix_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """Rows and prompt tokens of each of S steps, float64 [S], and mean lengths of their rows."""

    decode_rows: Floats
    prefill_tokens: Floats
    prompt_tokens: float  # computed tokens of a prompt
    prompt_reads: float  # positions that one of these attends to
    context_tokens: float  # unshared KV of a decode row
    shared_tokens: float = 0.0  # KV that it shares with its group
    group_rows: float = 1.0

    @classmethod
    def of(cls, rows: RowsAhead, decode_rows: Floats, prefill_tokens: Floats) -> Self:
        lengths = np.array(rows.output_lengths or (rows.shape.output_tokens,), float)
        prompt, prefix = rows.shape.prompt_tokens, rows.prefix_tokens
        # one row of a group computes the shared prefix
        own, first = rows.own_tokens, prompt - rows.own_tokens
        pairs = own * (prefix + (own + 1) / 2) + first * (prefix + 1) / 2
        return cls(
            decode_rows=decode_rows,
            prefill_tokens=prefill_tokens,
            prompt_tokens=prompt,
            prompt_reads=rows.prompt_reads or pairs / prompt,
            # long rows take part in more steps
            context_tokens=own + float((lengths**2).sum() / (2 * lengths.sum())),
            shared_tokens=prefix,
            group_rows=rows.group_rows,
        )

    @property
    def readers(self) -> Floats:
        """Return how many rows of a group decode together in each step: float64 [S]."""
        return np.clip(self.decode_rows, 1.0, self.group_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBuffer:
    """Buffers on the device for KV in host memory: each holds one layer's KV of `num_tokens`.

    Copies move whole blocks of `block_size` tokens.
    """

    num_tokens: int
    num_buffers: int
    block_size: int = 1


def step_seconds(
    model: ModelShape,
    costs: ModuleCosts,
    steps: StepCounts,
    buffer: KVBuffer | None = None,
    placement: WeightPlacement | None = None,
) -> Floats:
    """Return the seconds of each step, float64 [S].

    `buffer` of None has all KV on the device, `placement` of None all weights. With KV in host
    memory, attention runs in parts that fit a buffer. Overlapping copies run during attention of
    earlier rows and, given enough buffers, the feed-forward block; others are added. Host overhead
    is added unless steps overlap.

    Source: Algorithm 1 of BatchGen (arXiv:2606.21712), section 5.1, in closed form.
    """
    layer, rows, prompts = model.layer, steps.decode_rows, steps.prefill_tokens
    tokens = rows + prompts
    parts, read_kv = np.ones(len(tokens)), rows * steps.context_tokens
    if buffer is not None:
        # the last block of a row is half full; a shared prefix counts once, and again if a part
        # boundary splits its group
        read_kv = rows * (steps.context_tokens + (buffer.block_size - 1) / 2)
        again = steps.shared_tokens if steps.group_rows > 1 else 0.0
        read_kv += rows / steps.readers * steps.shared_tokens - again * (rows > 0)
        room = max(1.0, buffer.num_tokens - again)
        parts = np.maximum(1.0, np.ceil((read_kv + tokens) / room))
        read_kv += parts * again * (rows > 0)
    attention_s = _attention_s(model, costs, steps, parts)
    ffn_s = costs.ffn.run_seconds(*layer.ffn_counts(tokens))
    layer_s, restore_s = attention_s + ffn_s, np.zeros(len(tokens))
    if buffer is not None:
        restored = read_kv * layer.kv_bytes_per_token
        saved = tokens * layer.kv_bytes_per_token
        restore_s = costs.to_device.run_seconds(0.0, restored, runs=parts) * (restored > 0)
        save_s = costs.to_host.run_seconds(0.0, saved, runs=parts)
        if costs.copies_overlap:
            early_s = np.minimum(ffn_s, restore_s * np.minimum(1.0, buffer.num_buffers / parts))
            layer_s = ffn_s + np.maximum(attention_s, np.maximum(restore_s - early_s, save_s))
            layer_s = np.maximum(layer_s, parts * _LAUNCHES_S)
        else:
            layer_s = layer_s + restore_s + save_s
    sampled = rows + prompts / max(1.0, steps.prompt_tokens)
    head_s = np.zeros(len(tokens))
    if model.head_bytes:
        # two operations for each weight
        operations = 2.0 * sampled * model.head_bytes / layer.element_bytes
        head_s = costs.ffn.run_seconds(operations, model.head_bytes)
    layers_s = model.num_layers * layer_s
    if placement is not None:
        layers_s = pass_seconds(placement, layers_s, costs, model.num_layers * restore_s)
    beside_s = _STEP_S + _ROW_S * sampled
    if buffer is not None and not costs.copies_overlap:
        beside_s = beside_s + parts * (_PART_S + model.num_layers * _PART_LAYER_S)
    device_s = layers_s + head_s
    # with KV in host memory, the host drives the layers during computation
    if costs.steps_overlap and buffer is None:
        longer: Floats = np.maximum(device_s, beside_s)
        return longer
    return device_s + beside_s


def pass_seconds(
    placement: WeightPlacement, layers_s: Floats, costs: ModuleCosts, link_s: Floats | float = 0.0
) -> Floats:
    """Return the steady-state seconds of passes [S] through all layers.

    `layers_s`, [S], are the seconds of computation of all layers. On a GPU copies overlap: a layer
    waits for its copy, a copy for the layer that used its buffer, and for other copies, which
    occupy the link for `link_s`. On a CPU copies and computations alternate.
    """
    num_streamed = len(placement.streamed)
    if not num_streamed:
        return layers_s
    copies_s = num_streamed * costs.to_device.copy_s(placement.pass_bytes / num_streamed)
    if not costs.copies_overlap:
        return layers_s + copies_s
    share = num_streamed / len(placement.is_resident)
    # each buffer alternates between copy and use
    buffer_s = (copies_s + share * layers_s) / placement.num_buffers
    seconds: Floats = np.maximum(np.maximum(layers_s, buffer_s), copies_s + link_s)
    return seconds


def _attention_s(model: ModelShape, costs: ModuleCosts, steps: StepCounts, parts: Floats) -> Floats:
    """Return the seconds of attention in a layer; each part reads the weights of its linears.

    If prompts have separate costs, these are added to those of decodes, and weights count once.
    """
    layer, rows, prompts = model.layer, steps.decode_rows, steps.prefill_tokens
    shared, cost = steps.shared_tokens, costs.cascade.cost(steps.readers, steps.shared_tokens)
    beside_s = rows * shared * cost.beside_s
    of_rows = layer.attention_counts(
        rows,
        rows * (steps.context_tokens + shared * cost.computed + 1),
        rows * (steps.context_tokens + shared * cost.read + 1),
    )
    of_prompts = layer.attention_counts(prompts, prompts * steps.prompt_reads, prompts)
    weights = parts * layer.attention_bytes
    if costs.prompts is None:
        operations, moved = (a + b for a, b in zip(of_rows, of_prompts, strict=True))
        return beside_s + costs.attention.run_seconds(operations, moved + weights, runs=parts)
    operations, moved = of_rows
    rows_s = beside_s + costs.attention.run_seconds(operations, moved + weights, runs=parts)
    is_alone = rows <= 0
    operations, moved = of_prompts
    prompts_s = costs.prompts.run_seconds(operations, moved + is_alone * weights)
    seconds: Floats = np.where(is_alone, 0.0, rows_s) + np.where(prompts > 0, prompts_s, 0.0)
    return seconds


def full_step_tokens(*, weight_bytes: int, kv_bytes: int, used_fraction: float = 1.0) -> float:
    """Return the number of tokens from which a step is compute bound.

    A step of fewer tokens takes as long as reading the weights and a full KV cache: recomputed
    tokens cost nothing, while a waiting row costs a further step.

    Args:
        weight_bytes: bytes of the weights that a step reads.
        kv_bytes: bytes of a full KV cache.
        used_fraction: active share of the weights per token; below 1 with experts.

    Example:
        >>> full_step_tokens(weight_bytes=16, kv_bytes=4)
        225.0
    """
    return WEIGHT_READ_TOKENS * (1 + kv_bytes / weight_bytes) / used_fraction
