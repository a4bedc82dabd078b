"""What the two modules of a layer compute and move, counted from the layer's shape."""

from dataclasses import dataclass

from raybatch.errors import ConfigError
from raybatch.policy.cost.roofline import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the sequences of a forward pass are like; they are taken to be alike.

    Decoding is one token per sequence over a long context, prefill is many tokens over none.

    Args:
        tokens_per_sequence: of one sequence in one forward pass.
        cached_tokens: of one sequence, with KV from before.
        reserved_tokens: of KV kept free for what one sequence will generate next.
        waiting_sequences: that can be batched at all; None where there are always more.

    Raises:
        ConfigError: a count is too small.
    """

    tokens_per_sequence: int = 1
    cached_tokens: int = 0
    reserved_tokens: int = 0
    waiting_sequences: int | None = None

    def __post_init__(self) -> None:
        _check_counts(self, at_least_one=("tokens_per_sequence",))
        _check_counts(self, at_least_zero=("cached_tokens", "reserved_tokens"))
        if self.waiting_sequences is not None and self.waiting_sequences < 1:
            raise ConfigError(f"waiting_sequences is {self.waiting_sequences}; it must be >= 1")

    def num_sequences(self, tokens: int) -> int:
        """Return how many sequences a batch of so many tokens has; a chunk of one counts."""
        return -(-tokens // self.tokens_per_sequence)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Sizes of one layer; a dense layer has one expert, which every token visits.

    Args:
        model_dim: of the hidden states.
        num_heads: of queries.
        num_kv_heads: of keys and values.
        head_dim: of one head.
        ffn_dim: hidden size of one expert, or of the dense block.
        num_experts: of the layer.
        top_k: experts that one token visits.
        element_bytes: of weights and hidden states.
        weight_bytes: of one weight of a linear or an expert; None for `element_bytes`.
        kv_row_bytes: of the keys or values of one token and KV head; None for `head_dim` elements.

    Raises:
        ConfigError: a size is below 1, or `top_k` above `num_experts`.
    """

    model_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_dim: int
    num_experts: int = 1
    top_k: int = 1
    element_bytes: int = 4
    weight_bytes: int | None = None
    kv_row_bytes: int | None = None

    def __post_init__(self) -> None:
        given = [n for n in self.__dataclass_fields__ if getattr(self, n) is not None]
        _check_counts(self, at_least_one=tuple(given))
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
        """Return the bytes of the weights of attention."""
        return self._num_attention_weights * (self.weight_bytes or self.element_bytes)

    @property
    def ffn_bytes(self) -> int:
        """Return the bytes of the weights of all experts."""
        num_weights = 3 * self.num_experts * self.ffn_dim * self.model_dim
        return num_weights * (self.weight_bytes or self.element_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Return the bytes of KV that one token has in this layer."""
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


def _check_counts(
    record: Workload | LayerShape,
    *,
    at_least_one: tuple[str, ...] = (),
    at_least_zero: tuple[str, ...] = (),
) -> None:
    for least, names in ((1, at_least_one), (0, at_least_zero)):
        for name in names:
            value = getattr(record, name)
            if value < least:
                raise ConfigError(f"{name} is {value}; it must be at least {least}")
