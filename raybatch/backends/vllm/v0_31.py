"""What raybatch uses of vLLM 0.31: that of 0.32, but for what has changed since."""

from dataclasses import replace

from raybatch.backends.vllm import v0_32

_SAME = v0_32.ADAPTER
_PARSERS = {
    **_SAME.names["parsers"],
    "get_tool_call_id_type": "vllm.entrypoints.chat_utils:get_tool_call_id_type",
}

ADAPTER = replace(
    _SAME,
    module="v0_31",
    names={**_SAME.names, "parsers": _PARSERS},
    # they see answers alone
    read_of_parser="adjust_request parse",
)
