"""What each option of vLLM's engine means here: one table for its backend and for ray.data.llm's.

Names that are not in the table are passed on to vLLM, count as ones that decide answers, and mean
nothing to the native engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# in place of a value: an option that the native engine reads, and changes nothing by
IGNORED = object()
UNKNOWN = object()


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What one option of vLLM's `EngineArgs` means."""

    ours: str | None = None  # the option of `EngineConfig` that means the same
    # it is set under our name, and refused under vLLM's; otherwise vLLM has defaults for each
    # device, and ours counts only where it was changed
    is_ours_alone: bool = False
    values: Mapping[str, str] = field(default_factory=dict)  # of vLLM, to our names for them
    only: tuple[Any, ...] = ()  # others ask vLLM for an engine that a replica cannot drive
    elsewhere: str = ""  # what says it in raybatch, for the message that refuses it
    is_speed: bool = False  # it changes speed, memory or logs of a run, and no answer
    multiplies_gpus: bool = False
    native: Any = UNKNOWN  # the one value that the native engine runs with, or `IGNORED`


def _each(names: str, **meaning: Any) -> dict[str, Meaning]:  # noqa: ANN401
    return {name: Meaning(**meaning) for name in names.split()}


_FOLDER = "take a folder with model and tokenizer as the model of the stage"

_DTYPES = {"half": "float16", "float": "float32"}
# the native engine has a scale for each token and KV head; the last name of a value is the one
# that vLLM is given
_KV_DTYPES = {"fp8_e4m3": "fp8", "fp8_per_token_head": "fp8", "int8_per_token_head": "int8"}
_OVER_HOSTS = "set distributed_executor_backend='ray' for an engine over several hosts"
_ONE_HOST = "all ranks of an engine are on one host; take pool.replicas for more hosts"

MEANINGS: Mapping[str, Meaning] = {
    # of both engines
    "dtype": Meaning(ours="dtype", is_ours_alone=True, values=_DTYPES),
    "max_model_len": Meaning(ours="max_model_len", is_ours_alone=True),
    "kv_cache_memory_bytes": Meaning(ours="kv_cache_bytes", is_ours_alone=True),
    "enable_prefix_caching": Meaning(ours="enable_prefix_caching", is_ours_alone=True),
    "block_size": Meaning(ours="block_size_tokens", is_speed=True),
    "max_num_seqs": Meaning(ours="max_num_seqs", is_speed=True),
    "max_num_batched_tokens": Meaning(ours="max_batched_tokens", is_speed=True),
    "kv_cache_dtype": Meaning(ours="kv_cache_dtype", values=_KV_DTYPES),
    # said by other options of raybatch
    **_each("model model_weights hf_config_path", elsewhere="take the model of the stage"),
    **_each("revision", elsewhere="write it behind the model of the stage: org/name@revision"),
    **_each("tokenizer", elsewhere=_FOLDER),
    **_each(
        """
            data_parallel_address data_parallel_rank data_parallel_rpc_port data_parallel_size_local
            data_parallel_start_rank
            """,
        only=(None,),
        elsewhere=_ONE_HOST,
    ),
    **_each(
        """
            data_parallel_external_lb data_parallel_hybrid_lb data_parallel_multi_port_external_lb
            """,
        only=(False,),
        elsewhere=_ONE_HOST,
    ),
    "data_parallel_backend": Meaning(only=("mp",), elsewhere=_ONE_HOST),
    "nnodes": Meaning(only=(1,), elsewhere=_OVER_HOSTS),
    "stream_interval": Meaning(only=(1,)),
    "distributed_executor_backend": Meaning(
        only=(None, "mp", "uni", "ray"), is_speed=True, native=IGNORED
    ),
    # GPUs of one engine
    **_each(
        "tensor_parallel_size pipeline_parallel_size data_parallel_size",
        multiplies_gpus=True,
        native=1,
    ),
    **_each("prefill_context_parallel_size", multiplies_gpus=True),
    # what is not built in the native engine
    **_each("enable_lora trust_remote_code", native=False),
    **_each("speculative_config", native=None),
    # what the native engine decides by itself, or what only changes logs and loading
    **_each(
        """
            async_scheduling compilation_config disable_log_stats enable_chunked_prefill
            enable_log_requests gpu_memory_utilization hf_token load_format num_gpu_blocks_override
            scheduling_policy seed swap_space
            """,
        is_speed=True,
        native=IGNORED,
    ),
    **_each(
        """
            disable_log_requests max_logprobs max_num_partial_prefills max_seq_len_to_capture task
            task_type tokenizer_mode
            """,
        native=IGNORED,
    ),
    # of vLLM alone
    **_each(
        """
            aggregate_engine_logging all2all_backend collect_detailed_traces cpu_offload_gb
            cudagraph_capture_sizes cudagraph_metrics download_dir enable_eplb
            enable_expert_parallel enforce_eager eplb_config expert_placement_strategy
            kv_offloading_backend kv_offloading_size log_config_file log_level
            long_prefill_token_threshold max_cudagraph_capture_size max_parallel_loading_workers
            otlp_traces_endpoint safetensors_load_strategy scheduler_reserve_full_isl
            show_hidden_metrics_for_version use_tqdm_on_load watermark
            """,
        is_speed=True,
    ),
}

# options of the native engine alone, and what there is with vLLM instead; those that a config
# refuses without one of these are not among them
NATIVE_ONLY = (
    (
        ("host_kv_bytes", "host_kv_dtype", "kv_offload"),
        "vLLM has other options for KV in host memory, which go into engine_kwargs "
        "(kv_offloading_size)",
    ),
    (
        ("device_weight_bytes", "weight_buffers"),
        "vLLM has another one, which goes into engine_kwargs (cpu_offload_gb)",
    ),
    (("quantization",), "vLLM has other methods, see engine_kwargs.quantization"),
    (("speculative_tokens",), "vLLM has engine_kwargs.speculative_config"),
    (("cuda_graphs",), "vLLM has engine_kwargs.enforce_eager"),
)

# options that cannot be beside engine.weights='shared', and why; an option that is off, or the only
# value that is named, may be there
_OTHER_PLACES = "keeps weights elsewhere"
_SIZES = tuple(name for name, meaning in MEANINGS.items() if meaning.multiplies_gpus)
NOT_SHARED: Mapping[str, str] = {
    **dict.fromkeys(
        _SIZES, "spreads an engine over several devices, and one that shares weights has one"
    ),
    "distributed_executor_backend": "runs workers in separate processes, which have no link to "
    "the other replicas",
    "enforce_eager": "captures steps with the places of weights, which change from step to step",
    **dict.fromkeys(
        ("cpu_offload_gb", "offload_backend", "offload_group_size", "enable_sleep_mode"),
        _OTHER_PLACES,
    ),
    **dict.fromkeys(("enable_dbo", "ubatch_size"), "computes two halves of a step at once"),
    "enable_eplb": "moves experts",
    "enable_lora": "puts adapters around the modules whose weights are shared",
    "quantization": "changes the layout of loaded weights",
    "speculative_config": "has a second model, whose layers would be taken for those of the first",
    "load_format": "loads weights its own way",
}
# values other than those that are off
MAY_BE_SHARED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_SIZES, (1,)),
    "distributed_executor_backend": ("uni",),
    "enforce_eager": (True,),
    "load_format": ("auto", "hf", "safetensors"),
    "offload_backend": ("auto",),
}
