"""Computes costs of DeepSeek-R1 engines from published rates; no engine is measured.

The time of a step is a fixed time, plus the longer of reading weights and multiplying with them,
plus attention. Operations are counted as in BatchGen's section 5.5, attention and its projections
in bfloat16 and the rest in 8 bits: a prompt of 2,048 tokens takes 108 ms at an H100's full rates,
and 112 ms in the paper. The shares of rates that kernels and links reach are those of
`gpu_forecast.py`. Experts are drawn evenly, so few tokens read few experts. The model leaves out
collectives between the GPUs of an engine, their waits, and the lower efficiency of small batches.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from gpu_forecast import COMPUTE_SHARE, LINK_SHARE, LINKS, MEMORY_SHARE
from step_simulator import FREE

from raybatch.policy.cost.cost_model import EngineLimits
from raybatch_lab.simulator.engine import EngineSpec
from raybatch_lab.simulator.links import LinkSpec

# share of device memory for weights and KV
MEMORY_FRACTION = 0.9
GPUS_PER_HOST, HOST_BYTES = 8, 2e12
# 200 Gb/s of InfiniBand per host
NETWORK_BYTES_S = 25e9
# launches of two modules of 61 layers, 20 us each, and 1 ms on the host
STEP_S = 3.4e-3
# tokens of a step with which experts are saturated, according to BatchGen
STEP_TOKENS, MAX_NUM_SEQS, BLOCK_SIZE = 16_384, 2048, 64
# tokens between which the bytes of experts that a step reads are interpolated linearly
_COVERAGE_KNOTS = (4.0, 16.0, 32.0, 64.0, 128.0, 256.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """Published figures; operations are dense."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    bf16_flops: float
    fp8_flops: float


H20 = Gpu(
    name="H20", memory_bytes=96 * 2**30, bytes_per_s=4.0e12, bf16_flops=148e12, fp8_flops=296e12
)
H200 = Gpu(
    name="H200", memory_bytes=141 * 2**30, bytes_per_s=4.8e12, bf16_flops=989e12, fp8_flops=1979e12
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentMoE:
    """Sizes of a mixture of experts with latent attention; the defaults are DeepSeek-R1's."""

    hidden_size: int = 7168
    num_layers: int = 61
    num_dense_layers: int = 3
    num_heads: int = 128
    query_rank: int = 1536
    kv_rank: int = 512
    head_dim: int = 128
    rope_dim: int = 64
    num_experts: int = 256
    experts_per_token: int = 8
    expert_size: int = 2048
    dense_size: int = 18_432
    vocab_size: int = 129_280

    @property
    def attention_params(self) -> float:
        heads, hidden = self.num_heads, self.hidden_size
        query = self.query_rank * (hidden + heads * (self.head_dim + self.rope_dim))
        kv = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * 2 * self.head_dim
        return self.num_layers * (query + kv + heads * self.head_dim * hidden)

    @property
    def expert_params(self) -> float:
        """Return the parameters of one expert of every layer that has experts."""
        return (self.num_layers - self.num_dense_layers) * 3 * self.hidden_size * self.expert_size

    @property
    def shared_params(self) -> float:
        """Return the feed-forward parameters that every token is multiplied with."""
        dense = 3 * self.hidden_size * self.dense_size * self.num_dense_layers
        return dense + self.expert_params

    @property
    def head_params(self) -> float:
        return self.hidden_size * self.vocab_size

    @property
    def weight_bytes(self) -> float:
        """Return bytes of 8-bit weights, with embedding and head in bfloat16."""
        ffn = self.shared_params + self.num_experts * self.expert_params
        return self.attention_params + ffn + 4 * self.head_params

    @property
    def kv_bytes(self) -> float:
        """Return bytes of a token in bfloat16."""
        return self.num_layers * 2 * (self.kv_rank + self.rope_dim)

    @property
    def prompt_pair_flops(self) -> float:
        """Return operations of a prompt's token per token that it attends to."""
        return self.num_layers * self.num_heads * 2 * (2 * self.head_dim + self.rope_dim)

    @property
    def context_flops(self) -> float:
        """Return operations of a decoding token per token that it attends to, on latent KV."""
        return self.num_layers * self.num_heads * 2 * (2 * self.kv_rank + self.rope_dim)

    def token_s(self, fp8_flops: float, bf16_flops: float) -> float:
        """Return the seconds of a token's linear layers at these rates, without the head."""
        ffn = self.shared_params + self.experts_per_token * self.expert_params
        return 2 * ffn / fp8_flops + 2 * self.attention_params / bf16_flops

    def prompt_s(self, num_tokens: int, fp8_flops: float, bf16_flops: float) -> float:
        """Return the seconds of a prompt at these rates, if nothing else limits it."""
        pairs = num_tokens * (num_tokens + 1) / 2
        linear = num_tokens * self.token_s(fp8_flops, bf16_flops)
        return linear + pairs * self.prompt_pair_flops / bf16_flops

    def read_bytes(self, tokens: float, num_gpus: int, *, copies_attention: bool) -> float:
        """Return weight bytes that each GPU reads in a step of `tokens` tokens."""
        drawn = 1 - (1 - self.experts_per_token / self.num_experts) ** tokens
        ffn = self.shared_params + drawn * self.num_experts * self.expert_params
        attention = self.attention_params * (num_gpus if copies_attention else 1)
        return (ffn + attention + 2 * self.head_params) / num_gpus


R1 = LatentMoE()


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One engine of a model over several GPUs, with experts spread over all of them.

    Args:
        kv: `spread` has each row's attention and KV on one GPU, and copies attention weights to
            all GPUs; `copied` spreads heads, and has the latent KV of every row on every GPU;
            `host` is `spread` with KV in host memory, which each step copies over PCIe.
    """

    gpu: Gpu
    num_gpus: int
    kv: Literal["spread", "copied", "host"] = "spread"
    model: LatentMoE = R1

    def __str__(self) -> str:
        return f"{self.num_gpus} x {self.gpu.name}, KV {self.kv}"

    @property
    def num_hosts(self) -> int:
        return -(-self.num_gpus // GPUS_PER_HOST)

    @property
    def kv_tokens(self) -> int:
        """Return the tokens whose KV fits into memory, in whole blocks."""
        model = self.model
        if self.kv == "host":
            room = HOST_BYTES * self.num_hosts - model.weight_bytes
        else:
            room = MEMORY_FRACTION * self.num_gpus * self.gpu.memory_bytes - model.weight_bytes
            if self.kv == "copied":
                room /= self.num_gpus
            else:
                room -= (self.num_gpus - 1) * model.attention_params
        return int(room / model.kv_bytes) // BLOCK_SIZE * BLOCK_SIZE

    @property
    def context_s(self) -> float:
        """Return the seconds of a KV token that a decoding row attends to."""
        computing = self.model.context_flops * self._bf16_s
        rate = LINK_SHARE * LINKS["PCIe gen 5"] if self.kv == "host" else self._bytes_per_s
        num_readers = 1 if self.kv == "copied" else self.num_gpus
        return max(computing, self.model.kv_bytes / (rate * num_readers))

    @property
    def network(self) -> LinkSpec:
        return LinkSpec(bytes_per_s=LINK_SHARE * NETWORK_BYTES_S * self.num_hosts)

    def spec(self) -> EngineSpec:
        """Return the engine's spec for the simulator."""
        model, gpu = self.model, self.gpu
        token_s = model.token_s(COMPUTE_SHARE * self.num_gpus * gpu.fp8_flops, 1 / self._bf16_s)
        full = self._read_s(1e9) / token_s
        points = [*(knot for knot in _COVERAGE_KNOTS if knot < full), full]
        seconds = [max(self._read_s(tokens), tokens * token_s) for tokens in (0.0, *points)]
        slopes = np.diff(seconds) / np.diff([0.0, *points])
        cost = replace(
            FREE,
            step_s=STEP_S + seconds[0],
            knots=tuple(points),
            token_s=(*slopes.tolist(), token_s),
            row_s=2 * model.head_params * self._bf16_s,
            pair_s=model.prompt_pair_flops * self._bf16_s,
            past_pair_s=model.prompt_pair_flops * self._bf16_s,
            context_s=self.context_s,
            limits=EngineLimits(
                kv_tokens=self.kv_tokens,
                max_num_seqs=MAX_NUM_SEQS,
                block_size=BLOCK_SIZE,
                max_batched_tokens=STEP_TOKENS,
            ),
        )
        return EngineSpec(
            cost=cost,
            full_step_tokens=full,
            # rows share nothing
            enable_prefix_caching=False,
            kv_bytes_per_token=model.kv_bytes,
        )

    @property
    def _bytes_per_s(self) -> float:
        return MEMORY_SHARE * self.gpu.bytes_per_s

    @property
    def _bf16_s(self) -> float:
        """Return the seconds of an operation, over all GPUs."""
        return 1 / (COMPUTE_SHARE * self.num_gpus * self.gpu.bf16_flops)

    def _read_s(self, tokens: float) -> float:
        copies = self.kv != "copied"
        read = self.model.read_bytes(tokens, self.num_gpus, copies_attention=copies)
        return read / self._bytes_per_s
