"""The models and hosts of SiDP's evaluation, as published; nothing is measured on them.

Sizes of models are those of their config.json. Figures of GPUs are those of data sheets and of
SiDP's table 1 (memory, as printed there: 144 GB for H20 and H200, 180 GB for B200). NVLink 4 reads
450 GB/s one way, NVLink 5 900 GB/s. Copies reach these rates in full, as in SiDP's figure 9; other
rates are multiplied by the shares of `sharing.decode_times`. A module takes 10 us in addition to
its bytes and products, which no graph hides. Its sum over the GPUs of a replica takes 10 us in
addition to the bytes that it moves, and a step takes 1 ms on the host. A further shard of a
feed-forward block takes 6 us, three kernels of a graph; narrow shards have no other cost.

`fitted` takes the share of products from figure 9's text instead: a pass of Llama-3.1-70B at TP=2
and 1K takes 5 times as long as reading all feed-forward weights at 512 rows on H20, 1.8 times as
long on H200, and as long at 256 rows on B200. Those passes are about three times longer than
kernels need; the text does not explain the rest.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from raybatch.models.config import ModelSpec, MoeSpec, RopeSpec
from raybatch.policy.cost.layers import ModelShape
from raybatch_extensions.sharing.decode_times import COMPUTE_SHARE, MEMORY_SHARE, GpuRates
from raybatch_lab.sharing.memory_plan import GpuBudget, ModelBytes
from raybatch_lab.sharing.pass_costs import PassCosts

# seconds of a module in a layer, of its sum, of a further shard, and of a step outside its layers
MODULE_S, REDUCE_S, SHARD_S, STEP_S = 10e-6, 10e-6, 6e-6, 1e-3
UTILISATION, RESERVE_BYTES = 0.9, 6_000_000_000
ELEMENT_BYTES = 2


def _spec(**sizes: Any) -> ModelSpec:  # noqa: ANN401 - of many types
    usual = {
        "architecture": "LlamaForCausalLM",
        "rms_eps": 1e-5,
        "has_qkv_bias": False,
        "has_o_bias": False,
        "has_mlp_bias": False,
        "has_qk_norm": False,
        "is_tied": False,
        "rope": RopeSpec(),
        "windows": (None,) * sizes["num_layers"],
        "moe": None,
        "eos_token_ids": (2,),
        "max_model_len": 32_768,
        "dtype": "bfloat16",
        "num_kv_heads": 8,
        "num_heads": 64,
        "head_dim": 128,
    }
    return ModelSpec(**{**usual, **sizes})


QWEN3_32B = _spec(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    model_dim=5120,
    num_layers=64,
    ffn_dim=25_600,
    has_qk_norm=True,
)
QWEN2_5_72B = _spec(
    architecture="Qwen2ForCausalLM",
    vocab_size=152_064,
    model_dim=8192,
    num_layers=80,
    ffn_dim=29_568,
    has_qkv_bias=True,
)
LLAMA_3_1_70B = _spec(vocab_size=128_256, model_dim=8192, num_layers=80, ffn_dim=28_672)
QWEN3_30B_A3B = _spec(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=151_936,
    model_dim=2048,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    ffn_dim=6144,
    has_qk_norm=True,
    moe=MoeSpec(num_experts=128, top_k=8, ffn_dim=768, norm_topk_prob=True, is_sparse=(True,) * 48),
)
QWEN3_235B_A22B = _spec(
    architecture="Qwen3MoeForCausalLM",
    vocab_size=151_936,
    model_dim=4096,
    num_layers=94,
    num_kv_heads=4,
    ffn_dim=12_288,
    has_qk_norm=True,
    moe=MoeSpec(
        num_experts=128, top_k=8, ffn_dim=1536, norm_topk_prob=True, is_sparse=(True,) * 94
    ),
)
# models that are not in the paper
SPARSE = {"Qwen3-30B-A3B": QWEN3_30B_A3B, "Qwen3-235B-A22B": QWEN3_235B_A22B}
MODELS = {"Qwen3-32B": QWEN3_32B, "Qwen2.5-72B": QWEN2_5_72B, "Llama-3.1-70B": LLAMA_3_1_70B}
ALL = {**MODELS, **SPARSE}


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One GPU of a host of eight; operations are dense, of bfloat16."""

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops: float
    link_bytes_per_s: float
    compute_share: float = COMPUTE_SHARE

    @property
    def rates(self) -> GpuRates:
        return GpuRates(
            bytes_per_s=MEMORY_SHARE * self.bytes_per_s,
            flops=self.compute_share * self.flops,
            link_bytes_per_s=self.link_bytes_per_s,
        )

    def budget(
        self, utilisation: float = UTILISATION, reserve_bytes: int = RESERVE_BYTES
    ) -> GpuBudget:
        return GpuBudget(
            gpu_bytes=self.memory_bytes, utilisation=utilisation, reserve_bytes=reserve_bytes
        )


HOSTS = {
    host.name: host
    for host in (
        Host(
            name="H20",
            memory_bytes=144 * 10**9,
            bytes_per_s=4.0e12,
            flops=148e12,
            link_bytes_per_s=450e9,
        ),
        Host(
            name="H200",
            memory_bytes=144 * 10**9,
            bytes_per_s=4.8e12,
            flops=989e12,
            link_bytes_per_s=450e9,
        ),
        Host(
            name="B200",
            memory_bytes=180 * 10**9,
            bytes_per_s=8.0e12,
            flops=2250e12,
            link_bytes_per_s=900e9,
        ),
    )
}


@cache
def bytes_of(model: str) -> ModelBytes:
    return ModelBytes.of(ALL[model], element_bytes=ELEMENT_BYTES)


def costs_of(model: str, host: Host, *, tp: int, cached_tokens: int) -> PassCosts:
    return PassCosts.of(
        ModelShape.of(ALL[model], element_bytes=ELEMENT_BYTES),
        host.rates,
        tp=tp,
        cached_tokens=cached_tokens,
        module_s=MODULE_S,
        reduce_s=REDUCE_S,
        step_s=STEP_S,
        # routing, sorting and summing rows is done again for each shard of experts
        shard_s=SHARD_S if ALL[model].moe is None else 5 * SHARD_S,
    )


# rows, and the time of their pass as a multiple of reading all feed-forward weights
_FIGURE_9 = {"H20": (512, 5.0), "H200": (512, 1.8), "B200": (256, 1.0)}


@cache
def fitted(host: Host) -> Host:
    """Return the host with the share of products that gives the pass times of figure 9."""
    rows, times = _FIGURE_9[host.name]
    wanted_s = times * sum(bytes_of("Llama-3.1-70B").ffn_bytes) / 2 / host.link_bytes_per_s
    low, high = 0.01, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        tried = replace(host, compute_share=middle)
        pass_s = costs_of("Llama-3.1-70B", tried, tp=2, cached_tokens=1024).pass_s(rows)
        low, high = (middle, high) if pass_s > wanted_s else (low, middle)
    return replace(host, compute_share=round(high, 4))
