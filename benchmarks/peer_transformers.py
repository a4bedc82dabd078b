"""Peer: transformers on a CPU; variants "static", "continuous" and the oracle "reference".

"static" is `generate` on padded batches of prompts of similar length. "continuous" is continuous
batching like `generate_batch` (paged KV, sorted inputs, shared blocks). "reference" is `generate`
one prompt at a time, unpadded: slow, and the reference that outputs are compared with.
"""

import time
from collections.abc import Callable, Sequence

import torch
from peer_loop import Answer, PeerConfig, serve
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput
from workloads_e2e import TokenRequest

# batch sizes that the warm-up tries in this order, until a larger one is slower because lengths
# differ and padding costs more than the larger batch gains
STATIC_BATCH_SIZES = (8, 32, 64)
# cost of a decode step of one row in tokens of prefill; used only to order the static batches
DECODE_WEIGHT = 4

_SORT_KEYS: tuple[Callable[[TokenRequest], tuple[int, int]], ...] = (
    lambda request: (request.output_len, len(request.prompt_ids)),
    lambda request: (len(request.prompt_ids), request.output_len),
)


class TransformersEngine:
    """Generates with a loaded model in the form that the variant names."""

    def __init__(self, config: PeerConfig) -> None:
        torch.set_num_threads(config.settings.num_threads)
        self._settings = config.settings
        self._variant = config.variant
        self._static_batch = 1
        self._model = AutoModelForCausalLM.from_pretrained(
            config.model, attn_implementation="sdpa", dtype=torch.float32
        ).eval()
        # outputs must not end at the end token, and a run's config inherits fields that are None
        self._model.generation_config.eos_token_id = None

    def reset(self) -> None:
        """Do nothing: both forms start with an empty cache."""

    def warm_up(self, requests: Sequence[TokenRequest]) -> Answer:
        """Run once; the static form also finds the batch size that suits these lengths best."""
        if self._variant != "static":
            return self.generate(requests)
        best_s = None
        for size in STATIC_BATCH_SIZES:
            began = time.process_time()
            with torch.inference_mode():
                answer = self._generate_static(requests, size)
            cpu_s = time.process_time() - began
            if best_s is not None and cpu_s > best_s:
                break
            self._static_batch, best_s = size, cpu_s
        return answer

    def generate(self, requests: Sequence[TokenRequest]) -> Answer:
        if self._variant == "continuous":
            return self._generate_continuous(requests)
        with torch.inference_mode():
            return self._generate_static(requests, self._static_batch)

    def _generate_static(self, requests: Sequence[TokenRequest], size: int) -> Answer:
        token_ids: list[list[int]] = [[] for _ in requests]
        for batch in static_batches(requests, size):
            outputs = self._generate_padded([requests[i] for i in batch])
            for i, tokens in zip(batch, outputs, strict=True):
                token_ids[i] = tokens[: requests[i].output_len]
        return Answer(token_ids=token_ids, counters={"static_batch": size})

    def _generate_padded(self, batch: Sequence[TokenRequest]) -> list[list[int]]:
        width = max(len(request.prompt_ids) for request in batch)
        pads = [width - len(request.prompt_ids) for request in batch]
        prompts = [request.prompt_ids for request in batch]
        rows = [[0] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in pads]
        generated = self._model.generate(
            torch.tensor(rows),
            attention_mask=torch.tensor(mask),
            generation_config=GenerationConfig(
                max_new_tokens=max(request.output_len for request in batch),
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            ),
        )
        rows_out: list[list[int]] = generated[:, width:].tolist()
        return rows_out

    def _generate_continuous(self, requests: Sequence[TokenRequest]) -> Answer:
        settings = self._settings
        batching = ContinuousBatchingConfig(
            page_size=settings.block_size,
            num_blocks=settings.kv_tokens // settings.block_size,
            max_batch_tokens=settings.max_batched_tokens,
            max_requests_per_batch=settings.max_num_seqs,
            allow_block_sharing=True,
        )
        # None would fall back to the model's end token
        config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        # blocks are shared only by adjacent requests; generate_batch sorts in the same way
        order = sorted(range(len(requests)), key=lambda i: requests[i].prompt_ids, reverse=True)
        token_ids: list[list[int]] = [[] for _ in requests]
        with self._model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, timeout=5
        ) as manager:
            for i in order:
                prompt, length = list(requests[i].prompt_ids), requests[i].output_len
                manager.add_request(prompt, request_id=str(i), max_new_tokens=length)
            for _ in requests:
                output = _next_result(manager)
                token_ids[int(output.request_id)] = output.generated_tokens
        return Answer(token_ids=token_ids)


def _next_result(manager: ContinuousBatchingManager) -> GenerationOutput:
    while manager.is_running():
        output = manager.get_result(timeout=1)
        if output is not None and output.is_finished():
            return output
    raise RuntimeError("continuous batching stopped before all requests were done")


def static_batches(requests: Sequence[TokenRequest], size: int) -> list[list[int]]:
    """Cut the requests, sorted by length, into batches with the least padded work."""
    candidates = []
    for key in _SORT_KEYS:
        order = sorted(range(len(requests)), key=lambda i: key(requests[i]))
        candidates.append([order[i : i + size] for i in range(0, len(order), size)])
    return min(candidates, key=lambda batches: _padded_work(requests, batches))


def _padded_work(requests: Sequence[TokenRequest], batches: Sequence[Sequence[int]]) -> int:
    work = 0
    for batch in batches:
        prompt_len = max(len(requests[i].prompt_ids) for i in batch)
        output_len = max(requests[i].output_len for i in batch)
        work += len(batch) * (prompt_len + DECODE_WEIGHT * output_len)
    return work


if __name__ == "__main__":
    serve(TransformersEngine, ("transformers", "torch", "numpy"))
