"""Sizes of a model and its layers, what a layer computes and moves, and what its modules cost."""

from dataclasses import dataclass, replace
from typing import Self

from raybatch.errors import ConfigError
from raybatch.models.config import ModelSpec
from raybatch.policy.cost.roofline import Roofline, Work
from raybatch.policy.shared_reads import UNTIMED, SharedReads

# sub-batches whose KV is on the device while the rest is on the host
KV_SLOTS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the sequences of a forward pass are like; they are taken to be alike.

    Decoding is one token per sequence over a long context, prefill is many tokens over none.
    """

    tokens_per_sequence: int = 1
    cached_tokens: int = 0

    def __post_init__(self) -> None:
        _check_counts(self, 1, "tokens_per_sequence")
        _check_counts(self, 0, "cached_tokens")

    def num_sequences(self, tokens: int) -> int:
        """Return how many sequences a batch of so many tokens has; a chunk of one counts."""
        return -(-tokens // self.tokens_per_sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Sizes of one layer; a dense layer has one expert, which every token visits."""

    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    num_experts: int = 1
    top_k: int = 1
    element_bytes: int = 4
    # of one weight of a linear or an expert; None for `element_bytes`
    weight_bytes: int | None = None
    # of keys or values of a token and KV head; None for their elements
    kv_row_bytes: int | None = None

    def __post_init__(self) -> None:
        known = [n for n in self.__dataclass_fields__ if getattr(self, n) is not None]
        _check_counts(self, 1, *known)
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k is {self.top_k}; it must be within 1..{self.num_experts}")

    @property
    def projected_dim(self) -> int:
        """Return the width of queries, keys and values of one token together."""
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
        """Return the work of one run of attention, with the linears before and after it."""
        linear = 2 * tokens * self._num_attention_weights
        seen = workload.cached_tokens + (workload.tokens_per_sequence + 1) / 2
        scores = 4 * tokens * seen * self.num_heads * self.head_dim
        num_sequences = workload.num_sequences(tokens)
        read_kv = num_sequences * workload.cached_tokens + tokens
        activations = tokens * (2 * self.model_dim + 2 * self.projected_dim) * self.element_bytes
        moved = self.attention_bytes + read_kv * self.kv_bytes_per_token + activations
        return Work(operations=linear + scores, moved_bytes=moved)

    def ffn_work(self, tokens: int) -> Work:
        """Return the work of one run of the experts over so many tokens at the gate.

        Every set of `top_k` experts is taken to be equally likely, so a batch reads
        E * (1 - (1 - K / E)^T) of them on average.
        """
        rows = tokens * self.top_k
        share = 1.0 - (1.0 - self.top_k / self.num_experts) ** tokens
        activations = (2 * tokens + 2 * rows) * self.model_dim + 2 * rows * self.ffn_dim
        return Work(
            operations=6 * rows * self.ffn_dim * self.model_dim,
            moved_bytes=share * self.ffn_bytes + activations * self.element_bytes,
        )


def _check_counts(record: Workload | LayerShape, least: int, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if value < least:
            raise ConfigError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model as layers that are all alike."""

    layer: LayerShape
    num_layers: int
    other_bytes: int = 0
    head_bytes: int = 0  # of `other_bytes`, those of the matrix behind the last layer

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.other_bytes < 0:
            raise ConfigError(
                f"a model has {self.num_layers} layers and {self.other_bytes} other bytes; it "
                "needs at least 1 and 0"
            )

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        *,
        element_bytes: int,
        weight_bytes: int | None = None,
        kv_row_bytes: int | None = None,
    ) -> Self:
        """Return a model as plans see it: layers like its sparse ones, or all dense.

        A model that has layers of both kinds is planned as if all were sparse, which is on the
        safe side of its memory. The scales of weights that are bytes are not counted.
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
    """Measured costs of the parts of a layer; `ffn` is a run of the experts, or of the dense block.

    `attention` is that of rows that decode, and of `prompts` where these were not measured.

    Copies overlap where they run during computation, in either direction; where they take the
    processor that computes, as on a CPU with one thread, they do not. `shared_reads` tells what
    rows save that decode and read a run together. Steps overlap where the host plans one while the
    device computes the one before.
    """

    attention: Roofline
    ffn: Roofline
    to_device: Roofline
    to_host: Roofline
    copies_overlap: bool = True
    steps_overlap: bool = False
    prompts: Roofline | None = None
    shared_reads: SharedReads = UNTIMED

    def without_links(self) -> "ModuleCosts":
        """Return the costs where copies take no time."""
        return replace(self, to_device=self.to_device.times(0.0), to_host=self.to_host.times(0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowShape:
    """What the rows of a job are like, on average; prompt tokens are those to compute."""

    prompt_tokens: int = 512
    output_tokens: int = 128

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a row is {getattr(self, name)}; it must be >= 1")

    @classmethod
    def within(cls, max_model_len: int) -> "RowShape":
        """Return the default, shortened to what a model of so many tokens takes."""
        usual = cls()
        output_tokens = max(1, min(usual.output_tokens, max_model_len // 5))
        prompt_tokens = max(1, min(usual.prompt_tokens, max_model_len - output_tokens))
        return cls(prompt_tokens=prompt_tokens, output_tokens=output_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsAhead:
    """Rows that are to come: what they are like, and how many; None where there are always more.

    `output_lengths` stand for all of them where they differ; `longest_tokens` are those that a row
    has to hold at once. A prompt is what is computed of it, and a token of it attends to
    `prompt_reads` positions on average; 0 is for prompts of one length. A row reads `shared_tokens`
    more than it computes, in groups of `group_rows` that compute them once.
    """

    shape: RowShape
    num_rows: int | None = None
    output_lengths: tuple[float, ...] = ()
    longest_tokens: int = 0
    prompt_reads: float = 0.0
    shared_tokens: float = 0.0
    group_rows: float = 1.0

    @property
    def prefix_tokens(self) -> float:
        """Return the tokens that a group has in common."""
        if self.group_rows <= 1:
            return self.shared_tokens
        prefix_tokens = self.shared_tokens / (1 - 1 / self.group_rows)
        return min(prefix_tokens, self.shared_tokens + self.shape.prompt_tokens)

    @property
    def own_tokens(self) -> float:
        """Return the tokens of a prompt that no other row has."""
        return max(0.0, self.shape.prompt_tokens + self.shared_tokens - self.prefix_tokens)
