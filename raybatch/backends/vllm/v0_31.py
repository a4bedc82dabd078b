"""What raybatch uses of vLLM 0.31: that of 0.32, but for what has moved since."""

from dataclasses import replace

from raybatch.backends.vllm import v0_32

_PARSERS = {
    **v0_32.ADAPTER.names["parsers"],
    "get_tool_call_id_type": "vllm.entrypoints.chat_utils:get_tool_call_id_type",
}

ADAPTER = replace(v0_32.ADAPTER, module="v0_31", names={**v0_32.ADAPTER.names, "parsers": _PARSERS})
