"""What the options of a row are called in vLLM, and which rows may go on from their tokens."""

import json
from typing import Any

from raybatch.engine.sampling.draw import sequence_key
from raybatch.records.media import images_of
from raybatch.records.payload import IMAGES
from raybatch.records.types import Request, Sampling


def sampling_params(request: Request, sample_idx: int, *, num_done: int = 0) -> dict[str, Any]:
    """Return the options of vLLM's `SamplingParams` for one sample of a row, and its images.

    Args:
        request: what was asked.
        sample_idx: 0..n-1; each sample has a seed of its own.
        num_done: generated tokens that are part of the prompt now.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "max_tokens": sampling.max_tokens - num_done,
        "min_tokens": max(0, sampling.min_tokens - num_done),
        "logprobs": sampling.logprobs,
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "include_stop_str_in_output": sampling.include_stop_str_in_output,
        "skip_special_tokens": sampling.skip_special_tokens,
    }
    if isinstance(sampling.structured_outputs, str):
        params["structured_outputs"] = json.loads(sampling.structured_outputs)
    if images := images_of(request.payload):
        params[IMAGES] = images
    if sampling.temperature > 0:
        # 63 bits: torch takes signed numbers, and vLLM takes -1 for no seed
        params["seed"] = sequence_key(request.seed, sample_idx) >> 1
    return params


def can_resume(sampling: Sampling) -> bool:
    """Return whether vLLM goes on from tokens as if it had never stopped.

    It cannot where the tokens so far take part other than as context: the state of a random
    generator, counts of generated tokens, text in which a stop string may have begun, the place in
    a grammar. A repetition penalty is no such case, because it looks at prompt and output alike.
    """
    return (
        sampling.temperature == 0
        and sampling.structured_outputs is None
        and not sampling.stop
        and not sampling.presence_penalty
        and not sampling.frequency_penalty
    )
