"""What raybatch uses of vLLM 0.32, as data; `adapter.py` says what becomes of it.

vLLM's public interface is what `vllm/__init__.py` exports; the rest may change with any minor
version. A name stands where it is defined, since some are not exported.
"""

from collections.abc import Mapping

from raybatch.backends.vllm.adapter import Adapter

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

ADAPTER = Adapter(
    module="v0_32",
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
