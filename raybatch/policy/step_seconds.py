"""Seconds of an engine's steps, by what they compute, what layers cost and where KV lives."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from raybatch.policy.cost.roofline import Roofline
from raybatch.policy.layer_plan import ModelShape, ModuleCosts, RowsAhead
from raybatch.policy.memory_budget import Residence
from raybatch.records.arrays import Floats

# what a step costs beside its layers and the head: scheduling, batches and sampling; of a step, and
# of a row that gets a token (AMD EPYC, a model of 8M)
_STEP_S, _ROW_S = 1.1e-3, 1.2e-5
# of each part of a step on a CPU, and of it in each layer: batches, indices of copies
_PART_S, _PART_LAYER_S = 2e-4, 4e-5
# tokens that a device computes in the time in which it reads the weights once; 140 to 300 on GPUs,
# and where it is less, rows only wait more seldom than would pay
WEIGHT_READ_TOKENS = 180
# least of a part in a layer on a GPU, where no graph repeats its 9 to 19 launches
_LAUNCHES_S = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCounts:
    """What steps compute: float64 [S] each, and the mean lengths of their rows."""

    decode_rows: Floats
    prefill_tokens: Floats
    prompt_tokens: float  # of a prompt, as far as it is computed
    prompt_reads: float  # positions that one of these attends to
    context_tokens: float  # KV of a row that decodes, its own
    shared_tokens: float = 0.0  # that it reads as well, and others of its group
    group_rows: float = 1.0

    @classmethod
    def of(cls, rows: RowsAhead, decode_rows: Floats, prefill_tokens: Floats) -> Self:
        lengths = np.array(rows.output_lengths or (rows.shape.output_tokens,), float)
        prompt, prefix = rows.shape.prompt_tokens, rows.prefix_tokens
        # of a group one row computes what all read
        own, first = rows.own_tokens, prompt - rows.own_tokens
        pairs = own * (prefix + (own + 1) / 2) + first * (prefix + 1) / 2
        return cls(
            decode_rows=decode_rows,
            prefill_tokens=prefill_tokens,
            prompt_tokens=prompt,
            prompt_reads=rows.prompt_reads or pairs / prompt,
            # long rows are in more of the steps
            context_tokens=own + float((lengths**2).sum() / (2 * lengths.sum())),
            shared_tokens=prefix,
            group_rows=rows.group_rows,
        )

    @property
    def readers(self) -> Floats:
        """Return the rows of a group that decode in a step."""
        return np.clip(self.decode_rows, 1.0, self.group_rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVBuffer:
    """KV lives in host memory; the tokens whose KV of one layer is on the device at once.

    Blocks of `block_size` tokens are copied whole.
    """

    num_tokens: int
    num_buffers: int
    block_size: int = 1


def step_seconds(
    model: ModelShape,
    costs: ModuleCosts,
    steps: StepCounts,
    buffer: KVBuffer | None = None,
    residence: Residence | None = None,
) -> Floats:
    """Return the seconds of each step, float64 [S]; None has all KV, or weights, on the device.

    With KV in host memory attention runs in parts whose KV fits a buffer. Copies that overlap run
    while earlier rows attend and, as far as there are buffers, during the feed-forward block;
    others are added. So is what the host does beside layers, but where steps overlap.

    Source: Algorithm 1 of BatchGen (arXiv:2606.21712), section 5.1, in closed form.
    """
    layer, rows, prompts = model.layer, steps.decode_rows, steps.prefill_tokens
    tokens = rows + prompts
    parts, read_kv = np.ones(len(tokens)), rows * steps.context_tokens
    if buffer is not None:
        # the last block of a row is half full; what a group shares is there once, and again where
        # a part ends within it
        read_kv = rows * (steps.context_tokens + (buffer.block_size - 1) / 2)
        again = steps.shared_tokens if steps.group_rows > 1 else 0.0
        read_kv += rows / steps.readers * steps.shared_tokens - again * (rows > 0)
        room = max(1.0, buffer.num_tokens - again)
        parts = np.maximum(1.0, np.ceil((read_kv + tokens) / room))
        read_kv += parts * again * (rows > 0)
    attention_s = _attention_s(model, costs, steps, parts)
    share = 1.0 - (1.0 - layer.top_k / layer.num_experts) ** tokens
    routed = tokens * layer.top_k
    activations = (2 * tokens + 2 * routed) * layer.model_dim + 2 * routed * layer.ffn_dim
    ffn_s = _seconds(
        costs.ffn,
        6.0 * routed * layer.ffn_dim * layer.model_dim,
        share * layer.ffn_bytes + activations * layer.element_bytes,
    )
    layer_s, restore_s = attention_s + ffn_s, np.zeros(len(tokens))
    if buffer is not None:
        restored = read_kv * layer.kv_bytes_per_token
        saved = tokens * layer.kv_bytes_per_token
        restore_s = _seconds(costs.to_device, np.zeros(len(tokens)), restored, runs=parts)
        restore_s *= restored > 0
        save_s = _seconds(costs.to_host, np.zeros(len(tokens)), saved, runs=parts)
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
        head_s = _seconds(costs.ffn, operations, np.full(len(tokens), float(model.head_bytes)))
    layers_s = model.num_layers * layer_s
    if residence is not None:
        layers_s = pass_seconds(residence, layers_s, costs, model.num_layers * restore_s)
    beside_s = _STEP_S + _ROW_S * sampled
    if buffer is not None and not costs.copies_overlap:
        beside_s = beside_s + parts * (_PART_S + model.num_layers * _PART_LAYER_S)
    device_s = layers_s + head_s
    # with KV in host memory, the host hands over layers while the device computes
    if costs.steps_overlap and buffer is None:
        longer: Floats = np.maximum(device_s, beside_s)
        return longer
    return device_s + beside_s


def pass_seconds(
    residence: Residence, layers_s: Floats, costs: ModuleCosts, link_s: Floats | float = 0.0
) -> Floats:
    """Return the seconds of passes [S] through all layers, once passes follow each other.

    `layers_s` are those of their computations. Copies overlap with them on a GPU: a layer waits for
    its copy, a copy for the layer that had its buffer, and for other copies, which keep the link
    busy for `link_s`. On a CPU they take turns.
    """
    num_streamed = len(residence.streamed)
    if not num_streamed:
        return layers_s
    copies_s = num_streamed * costs.to_device.copy_s(residence.pass_bytes / num_streamed)
    if not costs.copies_overlap:
        return layers_s + copies_s
    share = num_streamed / len(residence.is_resident)
    # a buffer is filled and then used, again and again
    ring_s = (copies_s + share * layers_s) / residence.num_buffers
    seconds: Floats = np.maximum(np.maximum(layers_s, ring_s), copies_s + link_s)
    return seconds


def _attention_s(model: ModelShape, costs: ModuleCosts, steps: StepCounts, parts: Floats) -> Floats:
    """Return the seconds of attention in a layer; each part reads the weights of its linears.

    Where the attention of prompts has costs of its own, it is added to that of rows that decode,
    and the weights count once.
    """
    layer, rows, prompts = model.layer, steps.decode_rows, steps.prefill_tokens
    num_weights = layer.attention_bytes / (layer.weight_bytes or layer.element_bytes)

    def work(tokens: Floats, seen: Floats, read_kv: Floats) -> tuple[Floats, Floats]:
        operations = 2.0 * tokens * num_weights + 4.0 * seen * layer.num_heads * layer.head_dim
        activations = 2.0 * tokens * (layer.model_dim + layer.projected_dim) * layer.element_bytes
        return operations, read_kv * layer.kv_bytes_per_token + activations

    shared, cost = steps.shared_tokens, costs.shared_reads.cost(steps.readers, steps.shared_tokens)
    beside_s = rows * shared * cost.beside_s
    of_rows = work(
        rows,
        rows * (steps.context_tokens + shared * cost.computed + 1),
        rows * (steps.context_tokens + shared * cost.read + 1),
    )
    of_prompts = work(prompts, prompts * steps.prompt_reads, prompts)
    weights = parts * layer.attention_bytes
    if costs.prompts is None:
        both = [a + b for a, b in zip(of_rows, of_prompts, strict=True)]
        return beside_s + _seconds(costs.attention, both[0], both[1] + weights, runs=parts)
    rows_s = beside_s + _seconds(costs.attention, of_rows[0], of_rows[1] + weights, runs=parts)
    is_alone = rows <= 0
    prompts_s = _seconds(costs.prompts, of_prompts[0], of_prompts[1] + is_alone * weights)
    seconds: Floats = np.where(is_alone, 0.0, rows_s) + np.where(prompts > 0, prompts_s, 0.0)
    return seconds


def _seconds(
    cost: Roofline, operations: Floats, moved_bytes: Floats, *, runs: Floats | float = 1.0
) -> Floats:
    """Return the seconds of so many runs that do this together."""
    sides = cost.operation_s * operations, cost.byte_s * moved_bytes
    longer, shorter = np.maximum(*sides), np.minimum(*sides)
    seconds: Floats = runs * cost.fixed_s + longer + cost.serial_fraction * shorter
    return seconds


def full_step_tokens(*, weight_bytes: int, kv_bytes: int, used_fraction: float = 1.0) -> float:
    """Return from how many tokens on each one more makes a step longer.

    Below, a step takes as long as reading the weights and a full cache: tokens that are computed
    again cost nothing there, and a row that waits is a step more.

    Args:
        weight_bytes: that a step reads.
        kv_bytes: of a full cache.
        used_fraction: of the weights that one token is multiplied with; of experts a few.

    Example:
        >>> full_step_tokens(weight_bytes=16, kv_bytes=4)
        225.0
    """
    return WEIGHT_READ_TOKENS * (1 + kv_bytes / weight_bytes) / used_fraction
