"""vLLM's engine with its scheduler in this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raybatch.backends.base import ScoreForm
from raybatch.backends.vllm.adapter import Adapter
from raybatch.backends.vllm.frontend import Frontend
from raybatch.backends.vllm.patches import leave_room
from raybatch.backends.vllm.requests import Answer, Progress, RequestRefused
from raybatch.engine.weights.weight_buffers import WeightCounters
from raybatch.records.types import Task

if TYPE_CHECKING:
    from raybatch.backends.vllm.sharing import VllmShare


class VllmEngine:
    """Runs an `LLMEngine` of vLLM with its scheduler in this process; used by one thread.

    With `check_logits`, requests with NaN logits end as errors; vLLM must have been started with
    VLLM_COMPUTE_NANS_IN_LOGITS. `share` holds the weights that this engine shares with other
    replicas; None if it loaded its own.
    """

    def __init__(
        self,
        engine: Any,  # noqa: ANN401 - `LLMEngine`
        adapter: Adapter,
        *,
        check_logits: bool,
        share: VllmShare | None = None,
    ) -> None:
        adapter.check(engine, adapter.read_here, "its engine")
        self._engine = engine
        self._adapter = adapter
        self.share = share
        self._client = engine.engine_core
        self._scheduler = self._client.engine_core.scheduler
        self._frontend = Frontend(engine, adapter, engine.add_lora)
        self.capacity = self._frontend.capacity
        self.vocab_size = self._frontend.vocab_size
        self.eos_token_ids = self._frontend.eos_token_ids
        self.output_parser = self._frontend.output_parser
        # by key: the id inside vLLM, and its scheduler's record of the request
        self._requests: dict[str, tuple[str, Any]] = {}
        self._is_checked = False
        self._num_preemptions = self._num_steps = 0
        leave_room(self._scheduler, self.capacity().block_size)
        self._watch_outputs(checks_logits=check_logits)

    def pool_for(self, task: Task, form: ScoreForm) -> None:
        """Switch to requests of a pooling task; raise ConfigError if the model does not support it.

        `form` says how the model gets query and document of a score, see `ScoreForm`.
        """
        self._frontend.pool_for(task, form, self._engine.get_supported_tasks())

    def add(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> None:
        """Queue a request behind all others; raise RequestRefused if vLLM refuses it.

        `key` is a new name for it; tokens and options are those of `Frontend.make`.
        """
        try:
            try:
                inner_id = self._queue(key, prompt_token_ids, params)
            except self._frontend.images_gone as error:
                self._engine.abort_request([key])
                self._frontend.forget_images(error)
                inner_id = self._queue(key, prompt_token_ids, params)
        except self._frontend.refusals as error:
            # it may have come half of the way
            self._engine.abort_request([key])
            raise RequestRefused(str(error)) from error
        request = self._scheduler.requests[inner_id]
        self._requests[key] = inner_id, request
        if not self._is_checked:
            self._frontend.check_request(inner_id)
            self._adapter.check(request, self._adapter.read_of_request, "its scheduler's request")
            self._is_checked = True

    def _queue(self, key: str, prompt_token_ids: list[int], params: Mapping[str, Any]) -> str:
        """Queue a request and return its id inside vLLM."""
        made = self._frontend.make(prompt_token_ids, params)
        inner_id = self._engine.add_request(
            key, made.prompt, made.params, lora_request=made.adapter
        )
        return str(inner_id)

    def step(self) -> list[Answer]:
        """Run one step and return the requests that ended in it.

        If vLLM raises, the engine cannot be used any more.
        """
        answers = []
        outputs = self._engine.step()
        self._num_steps += 1
        for output in outputs:
            _, request = self._requests.pop(output.request_id)
            self._num_preemptions += request.num_preemptions
            answers.append(self._frontend.answer(output))
        # those whose logits are not numbers, and that would go on
        bad = [key for key in self._frontend.not_finite if key in self._requests]
        taken = self.take(bad) if bad else {}
        answers += [Answer(key, taken[key], "error", None, is_finite=False) for key in bad]
        self._frontend.not_finite.clear()
        return answers

    def take(self, keys: Sequence[str]) -> dict[str, Progress]:
        """Abort requests, and return what each has generated, by key."""
        taken = {key: self.progress(key) for key in keys}
        self._engine.abort_request(list(keys))
        for key in keys:
            _, request = self._requests.pop(key)
            self._num_preemptions += request.num_preemptions
        return taken

    def progress(self, key: str) -> Progress:
        """Return the tokens that a request has generated so far."""
        return self._frontend.progress(self._requests[key][0])

    def num_tokens(self, key: str) -> int:
        """Return the number of tokens that a request has generated so far."""
        return self._frontend.num_tokens(self._requests[key][0])

    def has_started(self, key: str) -> bool:
        """Return whether a request was ever scheduled."""
        _, request = self._requests[key]
        return bool(request.status.name == "RUNNING" or request.num_preemptions)

    def generated_tokens(self) -> int:
        """Return the number of tokens that all requests have generated, finished ones included."""
        return self._frontend.generated_tokens

    def num_running(self) -> int:
        """Return the number of requests that vLLM's scheduler runs."""
        return len(self._scheduler.running)

    def num_steps(self) -> int:
        """Return the number of finished steps."""
        return self._num_steps

    def num_preemptions(self) -> int:
        """Return the number of preemptions, counted when their request ends or is aborted."""
        return self._num_preemptions

    def kv_used_fraction(self) -> float:
        """Return the fraction of the KV cache that running requests hold, from 0 to 1."""
        return float(self._scheduler.kv_cache_manager.usage)

    def weight_counters(self) -> WeightCounters:
        """Return the counters of weight copies; all 0 if weights are not shared."""
        return WeightCounters() if self.share is None else self.share.counters

    def reset(self) -> None:
        """Drop all requests and cached prefixes, and set `generated_tokens` to 0."""
        self.take(list(self._requests))
        self._engine.reset_prefix_cache()
        self._frontend.generated_tokens = 0

    def close(self) -> None:
        """Stop the engine and its processes."""
        self._client.shutdown()
        if self.share is not None:
            self.share.close()

    def _watch_outputs(self, *, checks_logits: bool) -> None:
        get_output = self._client.get_output

        def watched() -> Any:  # noqa: ANN401 - vLLM's own type
            outputs = get_output()
            self._frontend.count_tokens(outputs)
            if checks_logits:
                self._frontend.note_not_finite(outputs)
            return outputs

        self._client.get_output = watched
